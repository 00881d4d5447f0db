"""Units that wait for their folder, without Ray: what clients and the keeper do meanwhile."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane_core.ledger import LedgerService, commands
from dataplane_core.spec import ClearRequest, FieldSpec, RegisterRequest
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._engine import Engine
from dataplane_tq_simple._host import ControllerHost
from dataplane_tq_simple._places import Places

ROW_BYTES = 8


def started(index: int, **changes: Any) -> Started:
    own = Started(f"t{index}", f"10.0.0.{index}", 1, f"node{index}", size_bytes=1 << 30, kept=True)
    return own._replace(**changes)


@pytest.fixture
def host() -> ControllerHost:
    """Of an instance with two units that keep their rows."""
    host = ControllerHost(LedgerService())
    host.book.begin("a-", [(f"unit-{index}", f"a-unit-{index}", started(index)) for index in range(2)])
    client = host.begin_session()
    for partition in "pq":
        host.answer(RegisterRequest(partition, ["x"], None, ["t"], None, {}, f"epoch of {partition}"), client)
    return host


def put(host: ControllerHost, partition: str, ids: list[str]) -> int:
    client = host.begin_session()
    write = commands.Write(["x"], [ROW_BYTES] * len(ids))
    begin = commands.BeginPut(partition, ids, {"x": FieldSpec("tensor", "uint8", 1)}, [write], ttl_s=60.0)
    write_id = int(host.answer(begin, client))
    host.answer(commands.CommitPut(write_id), client)
    return write_id


def ids(kind: str) -> list[str]:
    return [f"{kind}-{row}" for row in range(4)]


class Client:
    """A client of both units, which count what they drop."""

    def __init__(self, host: ControllerHost) -> None:
        session = host.begin_session()
        self.dropped = [0, 0]
        engine = object.__new__(Engine)
        engine.call = lambda request, deadline: host.answer(request, session)  # type: ignore[method-assign]
        engine._places = Places(lambda version, deadline: host.book.view(version), lambda numbers: None)
        engine._units = {number: SimpleNamespace(drop=self._drop(number)) for number in range(2)}  # type: ignore[misc]
        engine._current = threading.local()
        self._backend = TQSimpleBackend(TQSimpleConfig())
        self._backend._engine = engine

    def _drop(self, number: int) -> Any:
        def drop(refs: list[Any], deadline: float) -> None:
            self.dropped[number] += len(refs)

        return drop

    def clear(self, partition: str, ids: list[str]) -> int:
        request = ClearRequest(partition, ids, deadline=time.monotonic() + 1.0)
        return self._backend.clear_samples(request).num_samples


@pytest.mark.parametrize("why", ["", "its disk is full"])
def test_a_clear_deletes_what_is_served_and_leaves_the_rest_to_a_later_one(host: ControllerHost, why: str) -> None:
    put(host, "p", ids("before"))
    book, client = host.book, Client(host)
    book.ended("unit-1", started(1))
    book.waits("unit-1", why)
    put(host, "q", ids("meanwhile"))
    assert client.clear("q", ids("meanwhile")[:1]) == 1
    assert client.clear("p", ids("before")) == 4
    assert client.clear("q", ids("meanwhile")[1:]) == 3
    assert client.dropped == [6, 0]
    assert [each.num_rows for each in book.records()[0]] == [0, 2]
    book.started("unit-1", started(1, port=2))
    assert client.clear("q", ids("meanwhile")) == 0
    assert client.dropped == [6, 2]
    assert [each.num_rows for each in book.records()[0]] == [0, 0]
