"""Clients announce themselves, and are listed."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable
from dataclasses import replace

import pytest

from dataplane_core.client import DataPlaneClient
from dataplane_core.spec import CallInfo, ClientInfo, PhaseInfo, Scope, WorkInfo
from dataplane_testkit._base import Suite
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._store import Store
from dataplane_testkit._timing import STARTS_S, Background, eventually


def _client(role: str = "a role", calls: Iterable[CallInfo] = ()) -> ClientInfo:
    calls = list(calls)
    return ClientInfo(
        client_id=uuid.uuid4().hex,
        host="a host",
        pid=7,
        role=role,
        open_s=1.5,
        num_calls=len(calls),
        calls=calls,
        metrics_address="a host:8000",
    )


def _end(store: Store, *clients: ClientInfo) -> None:
    """The clients are closed. Otherwise other tests count them for minutes."""
    for each in clients:
        store.hooks.announce(each, 0.0)


class ClientSuite(Suite, chapter="clients"):
    """`list_clients`."""

    def test_announced_clients_are_listed(self, store: Store) -> None:
        calls = [
            CallInfo(operation="claim_meta", partition_id="schritt 1 \u2192 \u2713", running_s=3.25),
            CallInfo(operation="ping", partition_id="", running_s=0.5),
        ]
        phases = [PhaseInfo(name="generate \u2713", running_s=2.5, partition_id="p", groups=["q1", "q\u00e9"])]
        mine, other = replace(_client("rollout: 1 \u00e9\n\x00", calls), phases=phases), _client()
        for each in (replace(mine, calls=[], num_calls=0), other, mine):
            store.hooks.announce(each, 600.0)
        for hooks in (store.hooks, Hooks(backend_of(store.same_store_client()))):
            listed = [each for each in hooks.clients() if each.client_id in (mine.client_id, other.client_id)]
            assert len(listed) == 2
            (found,) = (each for each in listed if each.client_id == mine.client_id)
            assert 0.0 <= found.heard_s < 600.0
            assert list(found.calls) == calls
            assert [replace(each, groups=list(each.groups)) for each in found.phases] == phases
            assert replace(found, heard_s=0.0, calls=calls, work=(), phases=phases) == mine
        _end(store, mine, other)

    def test_the_number_of_clients_is_replied(self, store: Store) -> None:
        made = [_client() for _ in range(50)]
        for place, each in enumerate(made, start=1):
            assert store.hooks.announce(each, 600.0).num_clients >= place

        def replied_as_listed(count: int) -> bool:
            num_clients: int = store.hooks.announce(made[0], 600.0).num_clients
            listed = {each.client_id for each in store.hooks.clients()}
            assert [each.client_id in listed for each in made] == [place < count for place in range(50)]
            return num_clients == len(listed)  # unless another client came or went meanwhile

        eventually(lambda: replied_as_listed(50), STARTS_S, "the number of clients that are listed")
        _end(store, *made[1:])
        eventually(lambda: replied_as_listed(1), STARTS_S, "the number of clients that are listed")
        _end(store, made[0])

    def test_a_client_that_closed_is_not_listed(self, store: Store) -> None:
        client, other = _client(), _client()
        store.hooks.announce(client, 600.0)
        store.hooks.announce(other, 600.0)
        for each in (client, client, _client()):
            store.hooks.announce(each, 0.0)
        listed = {each.client_id for each in store.hooks.clients()}
        assert client.client_id not in listed
        assert other.client_id in listed
        _end(store, other)

    def test_a_client_that_is_silent_is_not_listed_for_long(self, store: Store) -> None:
        silent, other = _client(), _client()
        store.hooks.announce(other, 600.0)
        store.hooks.announce(silent, 0.3)

        def listed() -> set[str]:
            return {each.client_id for each in store.hooks.clients()}

        eventually(lambda: silent.client_id not in listed(), what="the end of a silent client")
        assert other.client_id in listed()
        _end(store, other)

    def test_clients_that_ended_are_listed_if_asked_for(self, store: Store) -> None:
        work = [
            WorkInfo(operation="put_samples", partition_id="p", fields=["x", "y"], num_samples=8, ended_s=0.5),
            WorkInfo(
                operation="claim_meta", partition_id="p", task_name="t", tag_filter={"v": (">=", 7)}, waits_s=1.25
            ),
        ]
        closed, silent, back, other = _client(), replace(_client(), work=work), _client(), _client()
        for each, ttl_s in ((closed, 600.0), (closed, 0.0), (silent, 0.3), (back, 0.0), (other, 600.0), (back, 600.0)):
            store.hooks.announce(each, ttl_s)
        made = {each.client_id for each in (closed, silent, back, other)}

        def states() -> dict[str, str]:
            return {each.client_id: each.state for each in store.hooks.clients(ended=True) if each.client_id in made}

        expected = {
            closed.client_id: "closed",
            silent.client_id: "silent",
            back.client_id: "open",
            other.client_id: "open",
        }
        eventually(lambda: states() == expected, what="a client that is silent")
        (found,) = (each for each in store.hooks.clients(ended=True) if each.client_id == silent.client_id)
        assert [replace(each, fields=list(each.fields)) for each in found.work] == [
            replace(each, fields=list(each.fields)) for each in work
        ]
        assert made.intersection(each.client_id for each in store.hooks.clients()) == {back.client_id, other.client_id}
        _end(store, back, other)

    def test_a_client_announces_itself(self, store: Store) -> None:
        client, other = _announcing(store)
        partition = store.new_id()
        client.register_partition(partition, ["x"], None, ["train"])
        waiting = Background(lambda: client.claim_meta(partition, "train", ["x"], 1, timeout_s=600.0))

        def listed() -> list[ClientInfo]:
            return [each for each in other.list_clients() if each.role == "kit"]

        def telling_the_claim() -> list[ClientInfo]:
            found = listed()
            return found if any(call.partition_id == partition for each in found for call in each.calls) else []

        (found,) = eventually(telling_the_claim, what="a client that announces a claim that waits")
        assert (found.host, found.pid, found.num_calls) == (socket.gethostname(), os.getpid(), len(found.calls))
        assert [each.operation for each in found.calls if each.partition_id == partition] == ["claim_meta"]
        client.clear_samples(None, partition)
        with pytest.raises(KeyError):
            waiting.result()
        client.close()
        if other is not client:
            assert listed() == []


def _announcing(store: Store) -> tuple[DataPlaneClient, DataPlaneClient]:
    """A client that announces itself often, and one of the same store that lists it."""
    if store.scope is Scope.PROCESS:
        client = store.another_client(announce_s=0.2, role="kit")
        return client, client
    return store.attached_client(announce_s=0.2, role="kit"), store.client
