"""TransferQueue's own end-to-end tests and tutorials, over the module, with one line changed: the import.

They also run over the installed TransferQueue, for comparison. See docs/trainers.md and `checkouts.py`.
"""

import os
import re
from pathlib import Path

import pytest
from checkouts import BACKENDS, ITSELF, config_file, needs_checkout, over_our_module, run_program, run_tests

CHECKOUT = os.environ.get("TRANSFER_QUEUE_CHECKOUT")

pytestmark = [pytest.mark.timeout(400), needs_checkout("TRANSFER_QUEUE")]

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


def copied(source, folder, backend):
    """A copy of a file that imports our module, and how it is run: without the checkout on the path."""
    text, path = (Path(CHECKOUT) / source).read_text(), folder / Path(source).name
    how = {"cwd": folder, "paths": [], "timeout_s": 380, "RAY_DEDUP_LOGS": "0"}
    if backend != ITSELF:
        text, how["DATAPLANE_CONFIG"] = over_our_module(text), config_file(folder, backend, "transfer-queue-suite")
    path.write_text(text)
    return path, how


@pytest.mark.parametrize("backend", [ITSELF, *BACKENDS])
@pytest.mark.parametrize("name", TESTS)
def test_their_tests_pass(tmp_path, name, backend):
    everywhere, not_here = TESTS[name]
    path, how = copied(name, tmp_path, backend)
    expected = everywhere - (not_here if backend != ITSELF else 0)
    run_tests("TRANSFER_QUEUE", tmp_path, "-W", "ignore", "-p", "transfer_queue_suite", path, expected=expected, **how)


@pytest.mark.parametrize("backend", [ITSELF, *BACKENDS])
@pytest.mark.parametrize("name", TUTORIALS)
def test_their_tutorials_run(tmp_path, name, backend):
    if backend == "noop" and name.startswith("06"):
        pytest.skip("the workers of this tutorial are processes of their own")
    path, how = copied(f"tutorial/{name}", tmp_path, backend)
    printed = run_program("TRANSFER_QUEUE", "-W", "ignore", "-c", TUTORIAL, path, **how)
    got = {}
    for worker, rank, ids in re.findall(r"Worker@(\d)\]: dp_rank (\d) retrieved samples: (\[.*?\])", printed):
        got.setdefault(rank, {}).setdefault(worker, []).append(ids)
    for workers in got.values():  # those of the streaming tutorial: processes of a rank got the same rows
        first, second = (sorted(ids) for ids in workers.values())
        assert first == second
