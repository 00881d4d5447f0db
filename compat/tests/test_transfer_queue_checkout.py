"""TransferQueue's own end-to-end tests and tutorials, over the module, with one line changed: the import.

``TRANSFER_QUEUE_CHECKOUT`` names a checkout (`scripts/checkout.sh` gets one). They also run over the installed
TransferQueue, for comparison. See docs/verl.md.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CHECKOUT = os.environ.get("TRANSFER_QUEUE_CHECKOUT")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHECKOUT is None, reason="TRANSFER_QUEUE_CHECKOUT names no checkout of TransferQueue"),
    pytest.mark.timeout(400),
]

#: Stands for TransferQueue itself.
ITSELF = "TransferQueue"
BACKENDS = [ITSELF, "noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"]
#: File -> how many of its tests pass over TransferQueue itself, and how many of these cannot run over the module.
TESTS = {
    "tests/e2e/test_kv_interface_e2e.py": (54, 0),
    "tests/e2e/test_e2e_lifecycle_consistency.py": (8, 0),
    "tests/e2e/test_checkpoint_e2e.py": (14, 5),
    "tests/test_metadata.py": (50, 0),
    "tests/test_streaming_dataset.py": (3, 0),
}
TUTORIALS = [
    "01_core_components.py",
    "02_kv_interface.py",
    "03_metadata_concepts.py",
    "04_understanding_controller.py",
    "05_custom_sampler.py",
    "06_streaming_dataloader.py",
]
#: The program that a tutorial is run by.
TUTORIAL = "import runpy, sys, transfer_queue_suite; runpy.run_path(sys.argv[1], run_name='__main__')"


def moved(source, folder, backend):
    """A copy that imports our module in the place of TransferQueue."""
    text = (Path(CHECKOUT) / source).read_text()
    if backend != ITSELF:
        ours = "dataplane_compat.transfer_queue"
        text = re.sub(r"^( *)import transfer_queue( as|$)", rf"\1import {ours} as transfer_queue\2", text, flags=re.M)
        text = text.replace("as transfer_queue as", "as")
        text = re.sub(r"^( *)import transfer_queue\.", rf"\1import {ours}.", text, flags=re.M)
        text = text.replace(".streaming_dataset import chunk_batch_fn", " import micro_batches as chunk_batch_fn")
        text = re.sub(r"^from transfer_queue", f"from {ours}", text, flags=re.M)
        assert ours in text
    path = folder / Path(source).name
    path.write_text(text)
    return path


def run(*arguments, folder, backend):
    """Python in the folder, with this one on its path and the backend in its environment."""
    paths = [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_DEDUP_LOGS": "0"}
    environment.pop("DATAPLANE_CONFIG", None)
    if backend != ITSELF:
        config = folder / "config.yaml"
        config.write_text(f"backend: {backend}\nop_timeout_s: 120\n")
        environment["DATAPLANE_CONFIG"] = str(config)
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TESTS)
def test_their_tests_pass(tmp_path, name, backend):
    report = tmp_path / "report.xml"
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "transfer_queue_suite", f"--junitxml={report}"]
    done = run("-m", "pytest", *options, moved(name, tmp_path, backend), folder=tmp_path, backend=backend)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {key: int(results.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    print(name, backend, counts, done.stdout.splitlines()[-1])
    assert counts["failures"] == counts["errors"] == 0, done.stdout[-6000:]
    everywhere, not_here = TESTS[name]
    assert counts["tests"] - counts["skipped"] >= everywhere - (not_here if backend != ITSELF else 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TUTORIALS)
def test_their_tutorials_run(tmp_path, name, backend):
    if backend == "noop" and name.startswith("06"):
        pytest.skip("the workers of this tutorial are processes of their own")
    done = run("-c", TUTORIAL, moved(f"tutorial/{name}", tmp_path, backend), folder=tmp_path, backend=backend)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    got = {}
    for worker, rank, ids in re.findall(r"Worker@(\d)\]: dp_rank (\d) retrieved samples: (\[.*?\])", done.stdout):
        got.setdefault(rank, {}).setdefault(worker, []).append(ids)
    for workers in got.values():  # those of the streaming tutorial: processes of a rank got the same rows
        first, second = (sorted(ids) for ids in workers.values())
        assert first == second
