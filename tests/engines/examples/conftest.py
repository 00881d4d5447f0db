"""Makes the examples' packages and this folder importable; one torch thread, as the programs use."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

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


def _shared_run(
    factory: pytest.TempPathFactory, worker_id: str, ray_server: str, python: Any, *arguments: str, path: str
) -> Finished:
    """A run that nothing disturbed. Processes that run tests side by side share it."""
    base = factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / path
    printed = folder / "printed.txt"
    with FileLock(f"{folder}.lock"):
        if not printed.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that failed in another process
            folder.mkdir()
            config = write_config(folder, ray={"address": ray_server})
            code, out, err = finish(start(config, folder / "out", *arguments, path=path, python=python))
            assert (code, err) == (0, "")
            printed.write_text(out)
    return Finished(folder / "out", printed.read_text())


@pytest.fixture(scope="session")
def in_memory(tmp_path_factory: pytest.TempPathFactory, worker_id: str, ray_server: str, python: Any) -> Finished:
    """A run without a data plane: what others are compared with."""
    return _shared_run(tmp_path_factory, worker_id, ray_server, python, path="in-memory")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, worker_id: str, ray_server: str, python: Any) -> Finished:
    """A run over shm_store, with a recording."""
    return _shared_run(tmp_path_factory, worker_id, ray_server, python, "--record", path="shm_store")
