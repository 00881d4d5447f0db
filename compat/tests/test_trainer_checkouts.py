"""AReaL's and SkyRL's own tests, over their adapters and over what they have themselves.

``AREAL_CHECKOUT`` and ``SKYRL_CHECKOUT`` name checkouts (`scripts/checkout.sh` gets them), ``AREAL_PYTHON`` and
``SKYRL_PYTHON`` Pythons that can import both them and dataplane; without it, this one. See docs/trainers.md.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = "tests/backends/skyrl_train/distributed"
#: Trainer -> the folder whose conftest and those above it are left out, test files, and how many tests there are.
SUITES = {
    "areal": ("tests", ["tests/test_rtensor.py"], 45),
    "skyrl": (FOLDER, [f"{FOLDER}/test_dispatch.py", f"{FOLDER}/test_worker_dispatch.py"], 14),
}

pytestmark = pytest.mark.long


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["themselves", "shm_store", "redis_store", "tq_simple"])
@pytest.mark.parametrize("trainer", SUITES)
def test_their_own_tests_pass(trainer, backend, tmp_path):
    checkout = os.environ.get(f"{trainer.upper()}_CHECKOUT")
    if checkout is None:
        pytest.skip(f"{trainer.upper()}_CHECKOUT names no checkout")
    if (trainer, backend) == ("areal", "tq_simple"):
        pytest.skip("needs Ray in all processes, and these workers are started without it")
    python = os.environ.get(f"{trainer.upper()}_PYTHON", sys.executable)
    top, files, expected = SUITES[trainer]
    options = {"instance" if backend == "tq_simple" else "namespace": f"{trainer}-suite"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"backend": backend, "options": options}))
    paths = [checkout, str(ROOT / "compat/tests"), str(ROOT / "tests" / trainer), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--confcutdir={top}"]
        + ([] if backend == "themselves" else ["-p", f"{trainer}_suite"])
        + [*files, f"--junitxml={tmp_path / 'report.xml'}"],
        cwd=checkout,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DATAPLANE_CONFIG": str(tmp_path / "config.yaml")},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert (tmp_path / "report.xml").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = ElementTree.parse(tmp_path / "report.xml").getroot().iter("testsuite")
    counts = {name: int(results.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    print(trainer, backend, counts)
    assert counts["failures"] == counts["errors"] == 0, done.stdout[-6000:]
    assert counts["tests"] - counts["skipped"] >= expected
