"""Other projects' own tests, over our adapters; AReaL's and SkyRL's also over what they have themselves.

See docs/trainers.md and `checkouts.py`.
"""

from pathlib import Path

import pytest
import yaml
from checkouts import needs_checkout, run_tests

DISPATCH = "tests/backends/skyrl_train/distributed"
GYM = [f"tests/unit_tests/{name}.py" for name in ("test_token_id_capture", "test_trajectory_builder")]
ALL = ["noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"]
#: Project -> how many tests pass, the folder whose conftest and those above it are left out, test files, and backends.
SUITES = {
    # not tq_simple, which needs Ray in all processes: these workers are started without it
    "areal": (45, "tests", ["tests/test_rtensor.py"], ["themselves", "shm_store", "redis_store"]),
    "skyrl": (
        14,
        DISPATCH,
        [f"{DISPATCH}/test_dispatch.py", f"{DISPATCH}/test_worker_dispatch.py"],
        ["themselves", "shm_store", "redis_store", "tq_simple"],
    ),
    "nemo_gym": (97, "tests/unit_tests", GYM, ALL),
    # above this folder is a conftest that needs GPU monitoring and a logger of the whole trainer
    "nemo_rl": (156, "tests/unit/data_plane", ["tests/unit/data_plane"], ALL),
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
    name = "instance" if backend.startswith("tq_") else "namespace"
    options = {} if backend == "noop" else {name: f"{project}-suite"}
    if backend == "tq_mooncake":
        options["segment_size_bytes"] = 256 * 2**20
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"backend": backend, "options": options}))
    plugin = [] if backend == "themselves" else ["-p", f"{project}_suite"]
    arguments = [*plugin, f"--confcutdir={top}", *files]
    run_tests(project.upper(), tmp_path, *arguments, expected=expected, DATAPLANE_CONFIG=str(config))


@pytest.mark.timeout(600)
@needs_checkout("TRL")
def test_trls_own_tests_of_the_trainer_pass_with_our_classes(tmp_path):
    """Those of AsyncGRPOTrainer. The checkout's code is tested, not the installed TRL."""
    # the trainer of this commit reads its `args` in this one before it has them
    names = "(TestAsyncGRPOTrainer or TestEpochStop) and not environment_owned"
    arguments = ["-p", "trl_suite", "tests/experimental/test_async_grpo_trainer.py", "-k", names]
    # the rewards of these tests are hashes; with some, all of a group are equal, and its advantages are not numbers
    how = {"paths": [Path(__file__).parent], "PYTHONHASHSEED": "0", "timeout_s": 580}
    run_tests("TRL", tmp_path, *arguments, expected=5, **how)
