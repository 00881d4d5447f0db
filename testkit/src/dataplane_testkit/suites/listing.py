"""What a store tells: its samples, partitions, clients and storage units."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from msgspec.structs import replace

from dataplane_core.spec import CallInfo, ClientInfo, PhaseInfo, WorkInfo
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._store import Store
from dataplane_testkit._timing import eventually

_LONG_S = 600.0


def _client(**about: Any) -> ClientInfo:
    made = ClientInfo(client_id=uuid.uuid4().hex, host="a host", pid=7, role="a role", open_s=1.5)
    return replace(made, metrics_address="a host:8000", **about)


def _announce(store: Store, client: ClientInfo, ttl_s: float) -> Any:
    return store.hooks.ask("announce", client=client, ttl_s=ttl_s)


def _close(store: Store, *clients: ClientInfo) -> None:
    """The clients are closed. Otherwise other tests count them for minutes."""
    for each in clients:
        _announce(store, each, 0.0)


class ListingSuite(Suite, chapter="listing"):
    """Lists of samples, partitions, clients and units."""

    # --- describe -----------------------------------------------------------------------------------------------------

    def test_describe_counts_the_bytes_that_are_held(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ids(64), x=torch.zeros(64, 100, dtype=torch.float64))
        held_bytes = store.client.describe(partition).held_bytes
        assert 64 * 800 <= held_bytes <= 2 * 64 * 800
        for cleared in (48, 64):
            store.client.clear_samples(ids(cleared), partition)
            assert store.client.describe(partition).held_bytes == held_bytes * (64 - cleared) // 64

    # --- clients ------------------------------------------------------------------------------------------------------

    def test_announced_clients_are_listed(self, store: Store) -> None:
        calls = [CallInfo(operation="claim_meta", partition_id="schritt 1 \u2192 \u2713", running_s=3.25)]
        phases = [PhaseInfo(name="generate \u2713", running_s=2.5, partition_id="p", groups=("q1", "q\u00e9"))]
        mine, other = _client(role="rollout: 1 \u00e9\n\x00", calls=calls, num_calls=1, phases=phases), _client()
        for each in (replace(mine, calls=[], num_calls=0), other, mine):
            told = _announce(store, each, _LONG_S)
        assert told >= 2, "announce does not say how many clients there are"
        for hooks in (store.hooks, Hooks(backend_of(store.same_store_client()))):
            listed = {each.client_id: each for each in hooks.ask("list_clients", ended=False)}
            assert other.client_id in listed
            found = listed[mine.client_id]
            assert 0.0 <= found.heard_s < _LONG_S
            assert list(found.calls) == calls
            assert [replace(each, groups=tuple(each.groups)) for each in found.phases] == phases
            assert replace(found, heard_s=0.0, calls=calls, work=(), phases=phases) == mine
        _close(store, mine, other)

    def test_clients_that_ended_are_listed_if_asked_for(self, store: Store) -> None:
        claim = WorkInfo(operation="claim_meta", partition_id="p", fields=("x",), tag_filter={"v": (">=", 7)})
        closed, silent, back, other = _client(), _client(work=[claim]), _client(), _client()
        for each in (closed, back, other):
            _announce(store, each, _LONG_S)
        _close(store, closed, closed, back, _client())
        _announce(store, silent, 0.3)
        _announce(store, back, _LONG_S)
        made = {each.client_id for each in (closed, silent, back, other)}

        def listed(ended: bool) -> Any:
            return store.hooks.ask("list_clients", ended=ended)

        def states(ended: bool) -> dict[str, str]:
            return {each.client_id: each.state for each in listed(ended) if each.client_id in made}

        is_open = {back.client_id: "open", other.client_id: "open"}
        eventually(lambda: states(False) == is_open, what="that a silent client is not listed, and others are")
        assert states(True) == {closed.client_id: "closed", silent.client_id: "silent", **is_open}
        (found,) = (each for each in listed(True) if each.client_id == silent.client_id)
        assert [replace(each, fields=tuple(each.fields)) for each in found.work] == [claim]
        _close(store, back, other)

    # --- units --------------------------------------------------------------------------------------------------------

    def test_units_are_listed_with_the_rows_that_they_hold(self, store: Store) -> None:
        partition = store.register("x")

        def held(client: Any) -> tuple[int, int]:
            units = client.list_units()
            assert {each.state for each in units} == {"serving"}
            assert len({each.name for each in units}) == len(units)
            return sum(each.num_rows for each in units), sum(each.size_bytes for each in units)

        before = held(store.client)
        store.put(partition, ids(64), x=torch.zeros(64, 100, dtype=torch.float64))
        rows, size_bytes = held(store.client)
        assert (rows - before[0], size_bytes - before[1]) == (64, 64 * 800)
        assert held(store.same_store_client()) == (rows, size_bytes)
        store.client.clear_samples(None, partition)
        assert held(store.client) == before
