"""TransferQueue's own end-to-end tests and tutorials, over the module, with one line changed: the import.

They also run over the installed TransferQueue, for comparison. See docs/trainers.md and `checkouts.py`.
"""

import os
import re
from pathlib import Path

import pytest
from checkouts import needs_checkout, run, run_tests

CHECKOUT = os.environ.get("TRANSFER_QUEUE_CHECKOUT")

pytestmark = [pytest.mark.timeout(400), needs_checkout("TRANSFER_QUEUE")]

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


def how(folder, backend):
    """In the folder, without the checkout on the path, and with the backend in the environment."""
    found = {"cwd": folder, "paths": [], "timeout_s": 380, "RAY_DEDUP_LOGS": "0"}
    if backend == ITSELF:
        return found
    config = folder / "config.yaml"
    config.write_text(f"backend: {backend}\nop_timeout_s: 120\n")
    return {**found, "DATAPLANE_CONFIG": str(config)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TESTS)
def test_their_tests_pass(tmp_path, name, backend):
    everywhere, not_here = TESTS[name]
    arguments = ["-W", "ignore", "-p", "transfer_queue_suite", moved(name, tmp_path, backend)]
    expected = everywhere - (not_here if backend != ITSELF else 0)
    run_tests("TRANSFER_QUEUE", tmp_path, *arguments, expected=expected, **how(tmp_path, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TUTORIALS)
def test_their_tutorials_run(tmp_path, name, backend):
    if backend == "noop" and name.startswith("06"):
        pytest.skip("the workers of this tutorial are processes of their own")
    arguments = ["-W", "ignore", "-c", TUTORIAL, moved(f"tutorial/{name}", tmp_path, backend)]
    done = run("TRANSFER_QUEUE", *arguments, **how(tmp_path, backend))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    got = {}
    for worker, rank, ids in re.findall(r"Worker@(\d)\]: dp_rank (\d) retrieved samples: (\[.*?\])", done.stdout):
        got.setdefault(rank, {}).setdefault(worker, []).append(ids)
    for workers in got.values():  # those of the streaming tutorial: processes of a rank got the same rows
        first, second = (sorted(ids) for ids in workers.values())
        assert first == second
