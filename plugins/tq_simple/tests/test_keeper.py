"""The keeper of storage units, and what clients do while a unit is away, on nodes that are not there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_core.ledger import LedgerService, commands
from dataplane_core.spec import ClearRequest, FieldSpec, RegisterRequest
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig, _controller
from dataplane_tq_simple._controller import Keeper
from dataplane_tq_simple._host import ControllerHost, make_ledger
from dataplane_tq_simple._messages import LIFE_BITS, BeginNear, Started, UnitsGoneError

ROW_BYTES = 8


def ids(kind: str) -> list[str]:
    return [f"{kind}-{row}" for row in range(4)]


class Ref:
    """A Ray reference: of an answer, or of the end of a process."""

    def __init__(self, unit: Unit, value: Any) -> None:
        self.unit, self.value = unit, value

    @property
    def is_known(self) -> bool:
        return self.value is not None or self.unit.is_dead

    def get(self) -> Any:
        value = ray.exceptions.ActorDiedError() if self.unit.is_dead else self.value
        if isinstance(value, ray.exceptions.RayError):
            raise value
        return value


class Unit:
    """The actor of a unit on a node."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster, self.node, self.alive = cluster, node, True
        self.serves: Started | None = None
        self.told: list[list[Any]] = []
        self.start = SimpleNamespace(remote=self._start)
        self.end = SimpleNamespace(remote=lambda: Ref(self, None))
        self.port = next(cluster.ports)

    @property
    def is_dead(self) -> bool:
        return not self.alive or self.node not in self.cluster.nodes

    def _start(self) -> Ref:
        cluster = self.cluster
        if self.node in cluster.refuses:
            return Ref(self, ray.exceptions.RayTaskError("start", "", cluster.refuses[self.node]))
        if self.serves is None and not self.is_dead:
            if not (cluster.kept and cluster.nodes[self.node]):
                cluster.nodes[self.node] = f"token {next(cluster.ports)}"
            token = cluster.nodes[self.node]
            self.serves = Started(token, "10.0.0.1", self.port, self.node, size_bytes=1 << 30, kept=cluster.kept)
        return Ref(self, self.serves)

    def call_all(self, what: str, deadline: float, requests: list[Any]) -> None:
        self.told.append(requests[1].refs)
        if len(self.told) <= self.cluster.retain_fails:
            raise BackendUnavailableError("no room for notes")


class Cluster:
    """Nodes, each with what it keeps, and the keeper of their units.

    Attributes:
        nodes: What identifies the rows that a node keeps; ``""``: it has none.
        kept: Whether units keep their rows in folders.
        refuses: Nodes whose units cannot open their folders, and why.
        retain_fails: How often a unit fails to drop rows.
        units: The unit of each node.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: ControllerHost, *, kept: bool, wait_s: float) -> None:
        self.host, self.book, self.kept = host, host.book, kept
        self.nodes: dict[str, str] = {"node0": "", "node1": ""}
        self.refuses: dict[str, Exception] = {}
        self.retain_fails = 0
        self.units: dict[str, Unit] = {}
        self.ports = itertools.count(1)
        self.killed: list[Unit] = []
        self.num_created = 0
        fake = SimpleNamespace(
            exceptions=ray.exceptions,
            wait=lambda refs, num_returns, timeout: ([ref for ref in refs if ref.is_known], []),
            get=lambda ref, timeout: ref.get(),
            kill=lambda unit, no_restart: self.killed.append(unit),
        )
        monkeypatch.setattr(_controller, "ray", fake)
        monkeypatch.setattr(_controller, "alive_nodes", lambda: set(self.nodes))
        monkeypatch.setattr(_controller, "nodes_for_units", lambda: list(self.nodes))
        monkeypatch.setattr(_controller, "named_actors", lambda prefix: [f"a/{node}" for node in self.book.nodes()])
        monkeypatch.setattr(_controller, "lookup", self._lookup)
        monkeypatch.setattr(_controller, "Session", self._session)
        for name in ("_NODES_S", "_ASK_S", "_CREATE_AGAIN_S", "_RETAIN_AGAIN_S"):
            monkeypatch.setattr(_controller, name, 0.0)
        self.keeper = Keeper(host, "a/", self._create, wait_s)
        client = host.begin_session()
        for partition in "pq":
            host.answer(RegisterRequest(partition, ["x"], None, ["t"], None, {}, f"epoch of {partition}"), client)

    def _lookup(self, actor: str) -> Unit | None:
        unit = self.units.get(actor.removeprefix("a/"))
        return unit if unit is not None and unit.alive else None

    def _session(self, address: Any, messages: Any, deadline: float, failure: Any) -> Any:
        unit = next(unit for unit in self.units.values() if unit.port == address.port)
        return SimpleNamespace(call_all=unit.call_all, close=lambda: None)

    def _create(self, actor: str, node: str) -> Unit:
        self.num_created += 1
        self.units[node] = Unit(self, node)
        return self.units[node]

    def look(self, count: int = 6) -> None:
        for _ in range(count):
            self.keeper._look()

    def dies(self, node: str) -> str:
        """A node dies. Returns what it had."""
        return self.nodes.pop(node)

    def served(self) -> dict[str, str]:
        """Node -> the token of the life that its unit serves."""
        lives = self.book.view().lives.values()
        return {each.started.node: each.started.token for each in lives if each.served}

    def lost(self) -> int:
        return sum(each.num_lost for each in self.book.records())

    def put(self, partition: str, ids: list[str], node: str = "node1") -> int:
        client = self.host.begin_session()
        write = commands.Write(["x"], [ROW_BYTES] * len(ids))
        begin = commands.BeginPut(partition, ids, {"x": FieldSpec("tensor", "uint8", 1)}, [write], ttl_s=60.0)
        write_id = int(self.host.answer(BeginNear(begin, node, []), client))
        self.host.answer(commands.CommitPut(write_id), client)
        return write_id


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    def make(host: ControllerHost | None = None, *, kept: bool = True, wait_s: float = 120.0) -> Cluster:
        cluster = Cluster(monkeypatch, host or ControllerHost(LedgerService()), kept=kept, wait_s=wait_s)
        cluster.look()
        return cluster

    return make


@pytest.fixture
def cluster(make: Callable[..., Cluster]) -> Cluster:
    """One whose units keep their rows."""
    return make()


@pytest.mark.parametrize("kept", [False, True])
def test_each_node_has_a_unit_also_one_that_comes_later(make: Callable[..., Cluster], kept: bool) -> None:
    cluster = make(kept=kept)
    assert set(cluster.served()) == {"node0", "node1"}
    cluster.nodes["node2"] = ""
    cluster.look()
    assert set(cluster.served()) == {"node0", "node1", "node2"}
    assert [each.name for each in cluster.book.records()] == ["unit-0", "unit-1", "unit-2"]
    cluster.dies("node0")
    cluster.look()
    cluster.nodes["node3"] = ""
    cluster.look()
    assert set(cluster.served()) == {"node1", "node2", "node3"}, "no name is given twice"


def test_what_a_node_had_in_memory_is_lost_with_it_and_only_that(make: Callable[..., Cluster]) -> None:
    cluster = make(kept=False)
    for node in ("node0", "node1"):
        cluster.put("p", ids(node), node)
    cluster.dies("node1")
    cluster.look()
    assert (cluster.lost(), set(cluster.served())) == (4, {"node0"})
    states = {each.node: (each.state, each.num_rows) for each in cluster.book.records()}
    assert states == {"node0": ("serving", 4), "": ("removed", 0)}


def test_a_unit_that_dies_brings_its_folder_back(cluster: Cluster) -> None:
    before = cluster.served()
    cluster.put("p", ids("before"))
    cluster.units["node1"].alive = False
    cluster.look()
    assert cluster.served() == before
    assert (cluster.lost(), cluster.num_created, len(cluster.killed)) == (0, 3, 1), "Ray is to free its name"
    assert [each.num_starts for each in cluster.book.records()] == [1, 2]


@pytest.mark.parametrize("error", [ray.exceptions.ActorUnavailableError("", None), ray.exceptions.GetTimeoutError()])
def test_what_says_nothing_about_a_process_is_no_death(make: Callable[..., Cluster], error: Exception) -> None:
    cluster = make(kept=False)
    cluster.put("p", ids("before"))
    for process in cluster.keeper._processes.values():
        process.asked.value = error
    cluster.look()
    assert not any(process.asked.is_known for process in cluster.keeper._processes.values()), "it is asked again"
    assert (cluster.lost(), cluster.num_created) == (0, 2)


def test_a_node_that_comes_back_under_another_id_brings_its_rows(cluster: Cluster) -> None:
    cluster.put("p", ids("before"))
    folder = cluster.dies("node1")
    cluster.look()
    assert set(cluster.served()) == {"node0"}
    assert (cluster.lost(), [each.state for each in cluster.book.records()]) == (0, ["serving", "starting"])
    cluster.nodes["node7"] = folder
    cluster.look()
    assert cluster.served()["node7"] == folder
    assert cluster.lost() == 0


def test_a_node_that_does_not_come_back_in_time_has_lost_its_rows(make: Callable[..., Cluster]) -> None:
    cluster = make(wait_s=0.0)
    write_id = cluster.put("p", ids("before"))
    cluster.dies("node0")
    cluster.look()
    assert [each.name for each in cluster.book.records()] == ["unit-1"], "a unit that had no rows is forgotten"
    cluster.nodes["node0"] = ""
    folder = cluster.dies("node1")
    cluster.look()
    assert cluster.lost() == 4
    cluster.nodes["node2"] = ""
    cluster.look()
    assert set(cluster.served()) == {"node0", "node2"}
    cluster.nodes["node3"] = folder
    cluster.look()
    assert cluster.book.view().lives[write_id >> LIFE_BITS].served, "who comes later is welcome"


def test_a_unit_that_finds_no_folder_begins_another(cluster: Cluster) -> None:
    cluster.put("p", ids("before"))
    folder, cluster.nodes["node1"] = cluster.nodes["node1"], ""
    cluster.units["node1"].alive = False
    cluster.look()
    assert cluster.lost() == 4
    assert cluster.served()["node1"] != folder


def test_a_disk_that_is_full_is_waited_for_and_named(make: Callable[..., Cluster]) -> None:
    cluster = make(wait_s=0.0)
    write_id = cluster.put("p", ids("before"))
    cluster.refuses["node1"] = BackendUnavailableError("its disk is full", retryable=False)
    cluster.units["node1"].alive = False
    cluster.look()
    assert "its disk is full" in cluster.book.view().lives[write_id >> LIFE_BITS].why
    assert cluster.lost() == 0
    cluster.refuses.clear()
    cluster.look()
    assert set(cluster.served()) == {"node0", "node1"}
    assert cluster.lost() == 0


def test_a_bootstrap_says_which_unit_cannot_start(cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.setattr(Keeper, "start", lambda self: self._look())
    assert {each.node for each in cluster.keeper.begin(time.monotonic() + 60.0)} == {"node0", "node1"}
    cluster.nodes["node2"] = ""
    with pytest.raises(OperationTimeoutError, match="storage units of nodes 'node2' did not start in time"):
        cluster.keeper.begin(time.monotonic() + 0.1)
    cluster.refuses["node2"] = BackendUnavailableError("its disk is full", retryable=False)
    cluster.look()
    with pytest.raises(BackendUnavailableError, match="its disk is full"):
        cluster.keeper.begin(time.monotonic() + 60.0)


def test_a_bootstrap_says_on_which_node_no_unit_starts(cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.setattr(Keeper, "start", lambda self: self._look())
    cluster.nodes["node2"] = ""
    cluster.keeper._look()
    cluster.units["node2"].alive = False
    cluster.look()
    with pytest.raises(BackendUnavailableError, match="of node node2 did not start") as caught:
        cluster.keeper.begin(time.monotonic() + 60.0)
    assert "must be installed" in str(caught.value.hint)


def test_what_was_cleared_or_overwritten_while_a_unit_was_away_is_deleted_when_it_is_back(cluster: Cluster) -> None:
    cluster.retain_fails = 2
    host, client = cluster.host, Client(cluster.host)
    cluster.put("p", ids("before"))
    first = cluster.put("q", ids("before"))
    cluster.units["node1"].alive = False
    cluster.keeper._create_actor = lambda *_: None  # it does not come yet
    cluster.look()
    cluster.put("q", ids("before"))
    assert client.clear("p", ids("before")[:2]) == 2
    assert len(host.garbage()) == 6, "two rows that were cleared, four that were overwritten"
    cluster.keeper._create_actor = cluster._create
    cluster.look(12)
    told = cluster.units["node1"].told
    assert len(told) == 3, "it is told again until it can"
    assert len(told[-1]) == 6
    assert sorted(position for write_id, position in told[-1] if write_id == first) == [0, 1, 2, 3]
    assert host.garbage() == []
    assert [each.num_rows for each in cluster.book.records()] == [4, 2]


def test_a_controller_that_comes_back_finds_the_units_and_notices_who_died_meanwhile(
    make: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keeper, "start", lambda self: None)
    cluster = make(ControllerHost(*make_ledger(tmp_path / "journal", None, False)), kept=False)
    for node in ("node0", "node1"):
        cluster.put("p", ids(node), node)
    before = cluster.served()
    cluster.host.note("something", None)
    cluster.units["node1"].alive = False
    cluster.host = ControllerHost(*make_ledger(tmp_path / "journal", None, False, must_exist=True))
    cluster.book = cluster.host.book
    cluster.keeper = Keeper(cluster.host, "a/", cluster._create, 120.0)
    cluster.keeper.come_back()
    cluster.look()
    assert cluster.lost() == 4
    assert cluster.served()["node0"] == before["node0"]
    assert cluster.num_created == 3
    assert [each.num_starts for each in cluster.book.records()] == [1, 2]


# --- clients ----------------------------------------------------------------------------------------------------------


class Client:
    """A client whose units count what they get and what they drop."""

    def __init__(self, host: ControllerHost) -> None:
        self._host = host
        session = host.begin_session()
        self.dropped: dict[int, set[Any]] = {}
        self.stored: dict[int, list[int]] = {}
        backend: Any = TQSimpleBackend(TQSimpleConfig())
        backend.call = lambda request, deadline, wake=None: host.answer(request, session)
        backend._connect = self._connect
        self.backend = backend

    def _connect(self, number: int, life: Any, deadline: float) -> Any:
        def drop(refs: list[Any], deadline: float) -> None:
            if not self._host.book.view().lives[number].served:
                raise UnitsGoneError("it ended")
            self.dropped.setdefault(number, set()).update(refs)

        def put(stored: dict[int, Any], deadline: float, copy_threads: int) -> None:
            self.stored.setdefault(number, []).extend(stored)

        session = SimpleNamespace(finish=lambda: None, close=lambda: None)
        return SimpleNamespace(drop=drop, put=put, session=session, path="")

    def clear(self, partition: str, ids: list[str]) -> int:
        request = ClearRequest(partition, ids, deadline=time.monotonic() + 60.0)
        return self.backend.clear_samples(request)


def test_rows_go_to_the_unit_that_their_put_was_given(cluster: Cluster) -> None:
    client = Client(cluster.host)
    for node in cluster.nodes:
        write_id = cluster.put("p", ids(node), node)
        client.backend.store_writes({write_id: commands.Write(["x"], [ROW_BYTES] * 4)}, {"x": None}, 0.0)
        assert client.stored.pop(write_id >> LIFE_BITS) == [write_id]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("why", ["", "its disk is full"])
def test_a_clear_deletes_what_is_served_and_leaves_the_rest_to_a_later_one(
    cluster: Cluster, why: str, knows: bool
) -> None:
    kept, away = (cluster.put("p", ids(node), node) >> LIFE_BITS for node in ("node0", "node1"))
    book, client = cluster.book, Client(cluster.host)
    if not knows:
        client.backend.refresh(0.0)
    started = book.view().lives[away].started
    book.ended("node1")
    book.waits("node1", why)
    assert client.clear("p", [*ids("node0"), *ids("node1")]) == 8
    assert {number: len(refs) for number, refs in client.dropped.items()} == {kept: 4}
    assert [each.num_rows for each in book.records()] == [0, 4]
    book.started(started._replace(port=99))
    assert client.clear("p", ids("node1")) == 0
    assert {number: len(refs) for number, refs in client.dropped.items()} == {kept: 4, away: 4}
    assert [each.num_rows for each in book.records()] == [0, 0]
