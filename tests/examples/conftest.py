"""Makes the examples' packages and this folder importable; one torch thread, as the programs use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

for folder in (EXAMPLES, Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from grpo_runs import Finished, finish, start, write_config  # noqa: E402  # found through the entries just made


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def in_memory(tmp_path_factory: pytest.TempPathFactory, worker_id: str, ray_server: str) -> Finished:
    """A run that nothing disturbed: what others are compared with. Processes that run tests side by side share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "in-memory"
    printed = folder / "printed.txt"
    with FileLock(f"{folder}.lock"):
        if not printed.exists():
            folder.mkdir(exist_ok=True)
            code, out, err = finish(start(write_config(folder, ray={"address": ray_server}), folder / "out"))
            assert (code, err) == (0, "")
            printed.write_text(out)
    return Finished(folder / "out", printed.read_text())
