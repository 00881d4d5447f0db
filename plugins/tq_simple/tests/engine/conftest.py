"""A Ray, and what is left in a ledger that tells who has been there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane_core.ledger import commands


@pytest.fixture(scope="module")
def ray_cluster(ray_address: str) -> Iterator[str]:
    """The address of a Ray that this process is connected to."""
    import ray

    # Worker processes cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield ray_address
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="session")
def note() -> Callable[[Any, str], list[str]]:
    """Registers a partition of that name, and lists all: ``note(engine, name)``."""

    def leave(engine: Any, name: str, timeout_s: float = 60.0) -> list[str]:
        deadline = time.monotonic() + timeout_s
        engine.call(commands.Register(name, ["x"], None, [], None, {}, name), deadline)
        return list(engine.call(commands.ListPartitions(), deadline).partition_ids)

    return leave


@pytest.fixture(scope="session")
def unit_pid() -> Callable[[str, int], int]:
    """The process id of a storage unit: ``unit_pid(instance, index)``."""

    def ask(instance: str, index: int) -> int:
        import ray

        unit = ray.get_actor(f"tq-{instance}/unit-{index}", namespace="dataplane")
        return int(ray.get(unit.__ray_call__.remote(_own_pid), timeout=30))

    return ask


def _own_pid(_: Any) -> int:
    return os.getpid()


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a process of its own, to its end."""

    def run(source: str, *args: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        script = tmp_path / f"script_{time.monotonic_ns()}.py"
        script.write_text(source)
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.run(
            [sys.executable, "-W", "error", str(script), *args],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=env,
        )

    return run


@pytest.fixture(scope="session")
def wait_until_gone() -> Callable[..., None]:
    """Waits for processes to end: ``wait_until_gone(pid, ..., timeout_s=30)``."""

    def wait(*pids: int, timeout_s: float = 30.0) -> None:
        import psutil

        deadline = time.monotonic() + timeout_s
        while left := [pid for pid in pids if _runs(psutil, pid)]:
            assert time.monotonic() < deadline, f"processes {left} still run"
            time.sleep(0.05)

    return wait


def _runs(psutil: Any, pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
