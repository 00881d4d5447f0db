"""A leader that fails fails its siblings, with the cause and without a wait for the group's timeout."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataplane_core.batch import BatchedDataDict
from dataplane_core.errors import DataPlaneError, MissingDataError
from dataplane_integrations.errors import ReplicaLeaderError
from dataplane_integrations.trainer.broadcast import broadcast_from_leader


def _run(rank: int, produce: Any) -> Any:
    start = time.monotonic()
    try:
        broadcast_from_leader(produce, group=dist.group.WORLD)
    except Exception as error:
        return type(error), str(error), type(error.__cause__), str(error.__cause__), time.monotonic() - start
    return None


def test_siblings_raise_with_the_leaders_error_as_cause(ranks: Any) -> None:
    def produce() -> BatchedDataDict:
        raise MissingDataError("get_samples: 'a_g0' lacks 'advantages'.", backend="noop", partition_id="train")

    leader, *siblings = ranks(3, _run, produce)
    assert leader[0] is MissingDataError
    for kind, message, cause, cause_message, seconds in siblings:
        assert kind is ReplicaLeaderError
        assert "rank 0" in message
        assert "'a_g0' lacks 'advantages'" in message
        assert cause is MissingDataError
        assert "'a_g0' lacks 'advantages'" in cause_message
        assert seconds < 60, "a wait for the whole time of the group"


def test_an_error_that_cannot_be_pickled_is_described(ranks: Any) -> None:
    def produce() -> BatchedDataDict:
        class LocalError(Exception):
            def __init__(self, code: int, why: str) -> None:
                super().__init__(f"{why} ({code})")

        raise LocalError(3, "the socket is gone")

    leader, sibling = ranks(2, _run, produce)
    assert leader[0].__name__ == "LocalError"
    assert sibling[0] is ReplicaLeaderError
    assert sibling[2] is DataPlaneError
    assert "LocalError: the socket is gone (3)" in sibling[3]


def test_a_column_that_cannot_be_pickled_fails_both_sides(ranks: Any) -> None:
    def produce() -> BatchedDataDict:
        return BatchedDataDict({"bad": [lambda: None]})

    leader, sibling = ranks(2, _run, produce)
    assert "pickle" in leader[1]
    assert sibling[0] is ReplicaLeaderError


def test_the_group_works_on_after_a_failure(ranks: Any) -> None:
    def send(rank: int) -> int:
        def fail() -> BatchedDataDict:
            raise MissingDataError("gone")

        with contextlib.suppress(MissingDataError, ReplicaLeaderError):
            broadcast_from_leader(fail, group=dist.group.WORLD)
        size: int = broadcast_from_leader(lambda: BatchedDataDict({"a": [1, 2]}), group=dist.group.WORLD).size
        return size

    assert ranks(2, send) == [2, 2]


def test_siblings_of_a_leader_that_dies_raise_instead_of_hanging(ranks: Any) -> None:
    def produce() -> BatchedDataDict:
        os._exit(1)

    leader, sibling = ranks.outcomes(2, _run, produce)
    assert isinstance(leader, (EOFError, ConnectionResetError))
    assert sibling[0] is ReplicaLeaderError
    assert "its replica group broke" in sibling[1]


@pytest.mark.long
def test_a_sibling_that_runs_out_of_memory_says_so_and_does_not_blame_the_leader(ranks: Any) -> None:
    def run(rank: int) -> Any:
        if rank == 0:
            return _run(rank, lambda: BatchedDataDict({"large": torch.ones(1 << 28, dtype=torch.uint8)}))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        room = 3 << 26  # too little for the column, enough for threads that start meanwhile
        resource.setrlimit(resource.RLIMIT_AS, (mapped + room, before[1]))
        try:
            return _run(rank, None)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    _, sibling = ranks(2, run, timeout_s=10)  # on a busy machine the sibling takes seconds
    assert sibling[0] is RuntimeError
    assert "allocate memory" in sibling[1]
