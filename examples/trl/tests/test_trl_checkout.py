"""TRL's own tests of AsyncGRPOTrainer, with our two classes in place of their stubs.

``TRL_CHECKOUT`` names a checkout (`scripts/checkout.sh` gets one), whose code is tested: not the installed TRL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CHECKOUT = os.environ.get("TRL_CHECKOUT", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CHECKOUT, reason="TRL_CHECKOUT names no checkout of TRL"),
]


def test_trls_own_tests_of_the_trainer_pass_with_our_classes(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    suite = ["-m", "pytest", "-o", "addopts=", "-p", "trl_suite", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # the trainer of this commit reads its `args` in this one before it has them
    names = "(TestAsyncGRPOTrainer or TestEpochStop) and not environment_owned"
    chosen = ["tests/experimental/test_async_grpo_trainer.py", "-k", names]
    # the rewards of these tests are hashes; with some, all of a group are equal, and its advantages are not numbers
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, *suite, *chosen], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=580
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(results.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    print(counts, done.stdout.splitlines()[-1])
    assert counts["failures"] == counts["errors"] == counts["skipped"] == 0, done.stdout[-6000:]
    assert counts["tests"] >= 5
