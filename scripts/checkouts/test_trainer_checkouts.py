"""AReaL's and SkyRL's own tests, over their adapters and over what they have themselves.

See docs/trainers.md and `checkouts.py`.
"""

import pytest
import yaml
from checkouts import needs_checkout, run_tests

FOLDER = "tests/backends/skyrl_train/distributed"
#: Trainer -> the folder whose conftest and those above it are left out, test files, and how many tests there are.
SUITES = {
    "areal": ("tests", ["tests/test_rtensor.py"], 45),
    "skyrl": (FOLDER, [f"{FOLDER}/test_dispatch.py", f"{FOLDER}/test_worker_dispatch.py"], 14),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["themselves", "shm_store", "redis_store", "tq_simple"])
@pytest.mark.parametrize("trainer", [pytest.param(name, marks=needs_checkout(name.upper())) for name in SUITES])
def test_their_own_tests_pass(trainer, backend, tmp_path):
    if (trainer, backend) == ("areal", "tq_simple"):
        pytest.skip("needs Ray in all processes, and these workers are started without it")
    project, (top, files, expected) = trainer.upper(), SUITES[trainer]
    options = {"instance" if backend == "tq_simple" else "namespace": f"{trainer}-suite"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"backend": backend, "options": options}))
    plugin = [] if backend == "themselves" else ["-p", f"{trainer}_suite"]
    arguments = [*plugin, f"--confcutdir={top}", *files]
    run_tests(project, tmp_path, *arguments, expected=expected, DATAPLANE_CONFIG=str(config))
