"""Runs Python with a checkout of another project, and that project's own tests: nothing runs these but you.

``python -m pytest scripts/checkouts/FILE``; the pages of each project say what else it needs.

The variable ``PROJECT_CHECKOUT`` names the checkout (`scripts/checkout.sh` gets one), and ``PROJECT_PYTHON`` a Python
that can import both the project and dataplane; without it, this one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

HERE = Path(__file__).parent
#: The tests that need no checkout.
COMPAT_TESTS = HERE.parents[1] / "compat/tests"
#: Stands for what a project has itself.
ITSELF = "itself"
BACKENDS = ["noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"]


def needs_checkout(project):
    """The mark of a test."""
    return pytest.mark.skipif(f"{project}_CHECKOUT" not in os.environ, reason=f"{project}_CHECKOUT names no checkout")


def config_file(folder, backend, name):
    """The file of the config of a store, whose name nobody else on the host has."""
    own = f"{name}-{os.getpid()}"
    options = {} if backend == "noop" else {"instance" if backend.startswith("tq_") else "namespace": own}
    if backend == "tq_mooncake":
        options["segment_size_bytes"] = 256 * 2**20
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"backend": backend, "op_timeout_s": 120, "options": options}))
    return str(path)


def over_our_module(source):
    """Source code that imports our module in the place of TransferQueue."""
    ours = "dataplane_compat.transfer_queue"
    source = re.sub(r"^( *)import transfer_queue( as|$)", rf"\1import {ours} as transfer_queue\2", source, flags=re.M)
    source = source.replace("as transfer_queue as", "as")
    source = re.sub(r"^( *)import transfer_queue\.", rf"\1import {ours}.", source, flags=re.M)
    source = source.replace(".streaming_dataset import chunk_batch_fn", " import micro_batches as chunk_batch_fn")
    source = re.sub(r"^from transfer_queue", f"from {ours}", source, flags=re.M)
    assert ours in source
    return source


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


def run_program(project, *arguments, **how):
    """Runs a program, such as ``-c CODE``, which must end well. What it printed."""
    done = run(project, *arguments, **how)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


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
