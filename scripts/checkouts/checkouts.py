"""Runs Python with a checkout of another project, and that project's own tests: nothing runs these but you.

``python -m pytest scripts/checkouts/FILE``; the pages of each project say what else it needs.

The variable ``PROJECT_CHECKOUT`` names the checkout (`scripts/checkout.sh` gets one), and ``PROJECT_PYTHON`` a Python
that can import both the project and dataplane; without it, this one.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
#: The tests that need no checkout.
COMPAT_TESTS = HERE.parents[1] / "compat/tests"


def needs_checkout(project):
    """The mark of a test."""
    return pytest.mark.skipif(f"{project}_CHECKOUT" not in os.environ, reason=f"{project}_CHECKOUT names no checkout")


def run(project, *arguments, cwd=None, paths=None, timeout_s=280, **environment):
    """Runs Python with the arguments, in the checkout. On its path are this folder, and the checkout or ``paths``."""
    checkout = os.environ[f"{project}_CHECKOUT"]
    paths = [*([checkout] if paths is None else paths), HERE, os.environ.get("PYTHONPATH")]
    return subprocess.run(
        [os.environ.get(f"{project}_PYTHON", sys.executable), *map(str, arguments)],
        cwd=cwd or checkout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def check_output(done, last_line):
    """Fails unless the program ended as expected."""
    assert done.stdout.splitlines()[-1:] == [last_line], done.stdout[-3000:] + done.stderr[-3000:]


def run_tests(project, folder, *arguments, expected, timeout_s=880, **how):
    """Runs pytest. Fails unless as many tests pass as expected, and none fails. The report is written to the folder."""
    report = folder / "report.xml"
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = run(project, "-m", "pytest", *options, *arguments, timeout_s=timeout_s, **how)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(results.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    print(project, *arguments, counts, done.stdout.splitlines()[-1])
    assert counts["failures"] == counts["errors"] == 0, done.stdout[-6000:]
    assert counts["tests"] - counts["skipped"] >= expected


def leaving_out(reasons):
    """The hook that deselects tests. ``reasons``: part of a test's name -> why it is left out."""

    def pytest_collection_modifyitems(config, items):
        out = [item for item in items if any(part in item.nodeid for part in reasons)]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]

    return pytest_collection_modifyitems
