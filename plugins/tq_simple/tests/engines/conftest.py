"""A Ray, and what is left in a ledger that tells who has been there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
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
        engine.call(commands.RegisterRequest(name, ["x"], None, [], None, {}, name), deadline)
        return list(engine.call(commands.ListPartitionsRequest(), deadline).partition_ids)

    return leave
