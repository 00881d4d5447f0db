"""Other projects' own tests, over our adapters; AReaL's and SkyRL's also over what they have themselves.

See docs/trainers.md and `checkouts.py`.
"""

import pytest
from checkouts import BACKENDS, ITSELF, config_file, needs_checkout, run_tests

DISPATCH = "tests/backends/skyrl_train/distributed"
GYM = [f"tests/unit_tests/{name}.py" for name in ("test_token_id_capture", "test_trajectory_builder")]
# the trainer of this commit reads its `args` in the test of environments before it has them
TRL = "(TestAsyncGRPOTrainer or TestEpochStop) and not environment_owned"
#: Project -> how many tests pass, the folder above which no conftest is taken, test files, and backends.
SUITES = {
    # not tq_simple, which needs Ray in all processes: these workers are started without it
    "areal": (45, "tests", ["tests/test_rtensor.py"], [ITSELF, "shm_store", "redis_store"]),
    "skyrl": (
        14,
        DISPATCH,
        [f"{DISPATCH}/test_dispatch.py", f"{DISPATCH}/test_worker_dispatch.py"],
        [ITSELF, "shm_store", "redis_store", "tq_simple"],
    ),
    "nemo_gym": (97, "tests/unit_tests", GYM, BACKENDS),
    # above this folder is a conftest that needs GPU monitoring and a logger of the whole trainer
    "nemo_rl": (156, "tests/unit/data_plane", ["tests/unit/data_plane"], BACKENDS),
    # the checkout's code is tested, not the installed TRL: the tests of AsyncGRPOTrainer
    "trl": (5, ".", ["tests/experimental/test_async_grpo_trainer.py", "-k", TRL], ["shm_store"]),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("project", "backend"),
    [
        pytest.param(project, backend, marks=needs_checkout(project.upper()))
        for project, (*_, backends) in SUITES.items()
        for backend in backends
    ],
)
def test_their_own_tests_pass(project, backend, tmp_path):
    expected, top, files, _ = SUITES[project]
    plugin = [] if backend == ITSELF else ["-p", f"{project}_suite"]
    # hashes repeat: the rewards of TRL's tests are hashes, and if all of a group are equal, advantages are no numbers
    environment = {"DATAPLANE_CONFIG": config_file(tmp_path, backend, f"{project}-suite"), "PYTHONHASHSEED": "0"}
    arguments = [*plugin, f"--confcutdir={top}", *files]
    run_tests(project.upper(), tmp_path, *arguments, expected=expected, **environment)
