"""Units that wait for their folder, without Ray: what clients and the keeper do meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dataplane_core.errors import BackendUnavailableError
from dataplane_core.ledger import LedgerService, commands
from dataplane_core.spec import ClearRequest, FieldSpec, RegisterRequest
from dataplane_testkit._timing import eventually
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig, _keeper, _units
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._engine import Engine
from dataplane_tq_simple._host import ControllerHost, make_ledger
from dataplane_tq_simple._keeper import Keeper
from dataplane_tq_simple._kept import Place
from dataplane_tq_simple._messages import BeginNear
from dataplane_tq_simple._places import Places

ROW_BYTES = 8


def started(index: int, **changes: Any) -> Started:
    own = Started(f"t of {'XY'[index]}", f"10.0.0.{index}", 1, f"node{index}", size_bytes=1 << 30, place="XY"[index])
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
    write_id = int(host.answer(BeginNear(begin, None, []), client))
    host.answer(commands.CommitPut(write_id), client)
    return write_id


def ids(kind: str) -> list[str]:
    return [f"{kind}-{row}" for row in range(4)]


class Client:
    """A client of both units, which count what they drop."""

    def __init__(self, host: ControllerHost) -> None:
        session = host.begin_session()
        self.dropped = [0, 0]
        engine: Any = object.__new__(Engine)
        engine.call = lambda request, deadline: host.answer(request, session)
        engine._places = Places(lambda version, deadline: host.book.view(version), engine._forget)
        engine._units, engine._units_lock, engine._closed = {}, threading.RLock(), False
        engine._connect = self._connect
        engine._current = threading.local()
        self._backend = TQSimpleBackend(TQSimpleConfig())
        self._backend._engine = engine

    def _connect(self, number: int, life: Any, deadline: float) -> Any:
        session = SimpleNamespace(finish=lambda: None, close=lambda: None)
        return SimpleNamespace(drop=self._drop(number), session=session)

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


def test_a_clear_of_a_client_that_does_not_know_that_a_unit_waits(host: ControllerHost) -> None:
    """It knows where the first rows are, and learns of the unit with where the second ones are."""
    put(host, "p", ids("before"))
    book, client = host.book, Client(host)
    client._backend._engine._places.refresh(0.0)
    book.ended("unit-1", started(1))
    book.waits("unit-1", "its disk is full")
    put(host, "q", ids("meanwhile"))
    cleared = ClearRequest("p", ids("before"), deadline=time.monotonic() + 60.0)
    host.answer(cleared, host.begin_session())  # by another client, which ended before it deleted the rows
    assert client.clear("q", ids("meanwhile")) == 4
    assert client.dropped == [6, 0]


# --- the keeper -------------------------------------------------------------------------------------------------------


class Ref:
    """A Ray reference to what is known already."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Actor:
    """A unit on a node, whose process answers with what was started there, or with its place."""

    def __init__(self, cluster: Cluster, node: str, place: str) -> None:
        self._cluster, self.node, self._place = cluster, node, place
        self._serves: Started | None = None
        self.describe = SimpleNamespace(remote=self._describe)
        self.retain = SimpleNamespace(remote=self._retain)
        self.dropped: list[tuple[int, int]] = []

    def _retain(self, live: Any, garbage: list[tuple[int, int]]) -> Ref:
        self.dropped += garbage
        return Ref(None)

    def _describe(self, *, place: str = "", anew: bool = True) -> Ref:
        if self.node in self._cluster.give_up:
            return Ref(self._cluster.why)
        if self.node in self._cluster.refuse:
            return Ref(ray.exceptions.RayTaskError("describe", "", BackendUnavailableError("full", retryable=False)))
        name = place or self._place
        if self._serves is None:
            if name not in self._cluster.disks[self.node]:
                if not anew:
                    return Ref(Place("/folder", name, "identity", found=True))
                name = f"new on {self.node}"
                self._cluster.disks[self.node].append(name)
            self._serves = Started(f"t of {name}", "10.0.0.9", 2, self.node, size_bytes=1 << 30, place=name)
        return Ref(self._serves)


class Cluster:
    """Nodes with their places, the units that run there, and the keeper of these.

    Attributes:
        disks: The places of each node that runs.
        starts_at: Where Ray starts the next unit, if not on the node that was asked for.
        refuse: Nodes on which no place can be opened.
        give_up: Nodes on which the actors of units end for good, as when their constructor fails.
        why: What Ray says then.
        created: The nodes for which units were created, and their places.
    """

    def __init__(self, host: ControllerHost, monkeypatch: pytest.MonkeyPatch, *, wait_s: float = 120.0) -> None:
        self.disks: dict[str, list[str]] = {"node0": ["X"], "node1": ["Y"]}
        self.starts_at: str | None = None
        self.refuse: list[str] = []
        self.give_up: list[str] = []
        self.why: BaseException = ray.exceptions.ActorDiedError()
        self.created: list[tuple[str, str]] = []
        get = SimpleNamespace(
            exceptions=ray.exceptions,
            wait=lambda refs, timeout=0: (refs, []),
            get=self._get,
            kill=lambda handle, no_restart=True: None,
        )
        monkeypatch.setattr(_keeper, "ray", get)
        monkeypatch.setattr(_keeper, "nodes_for_units", lambda: list(self.disks))
        monkeypatch.setattr(_keeper, "_ASK_S", 0.0)
        session = SimpleNamespace(close=lambda: None, check=lambda _: None)
        monkeypatch.setattr(_keeper, "_session_with", lambda _: session)
        self.reachable = True
        monkeypatch.setattr(_keeper, "refuses", lambda *_: self.reachable)
        self.host, self.book = host, host.book
        self.keeper = Keeper(host, "a-", self._create, self._places, wait_s=wait_s)
        self.keeper._handles = {f"a-unit-{each}": Actor(self, f"node{each}", "XY"[each]) for each in range(2)}

    def _get(self, ref: Ref, timeout: float = 0.0) -> Any:
        if isinstance(ref.value, BaseException):
            raise ref.value
        return ref.value

    def _places(self, nodes: Any) -> dict[str, Ref]:
        return {node: Ref(self.disks[node]) for node in nodes}

    def _create(self, actor: str, node: str, *, place: str) -> Actor:
        self.created.append((node, place))
        return Actor(self, self.starts_at or node, place)

    def dies(self, node: str, *, starts_at: str) -> list[str]:
        """A node dies, and Ray starts unit-1 on another one, with the arguments of its first start."""
        self.restarts(starts_at)
        self.ends()
        return self.disks.pop(node)

    def ends(self) -> None:
        """The process of unit-1 is found to have ended."""
        self.book.ended("unit-1", next(each for name, _, each in self.book.live() if name == "unit-1"))

    def restarts(self, node: str) -> None:
        self.keeper._handles["a-unit-1"] = Actor(self, node, "Y")

    def turn(self) -> None:
        """One look at everything."""
        self.keeper._listen()
        self.keeper._judge()
        self.keeper._ask()
        self.keeper._search()
        self.keeper._retain()

    def until(self, holds: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            self.turn()
            return holds()

        eventually(look, 60.0, what)

    def serves(self) -> str | None:
        """The place that unit-1 serves."""
        return next((each.place for name, _, each in self.book.live() if name == "unit-1"), None)

    def lost(self) -> int:
        return sum(each.num_lost for each in self.book.records()[0])


@pytest.fixture
def make_cluster(host: ControllerHost, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:

    def make(host: ControllerHost = host, **options: Any) -> Cluster:
        return Cluster(host, monkeypatch, **options)

    return make


def began_anew(cluster: Cluster) -> list[str]:
    """The node with the place Y dies, and unit-1 begins on node2, where rows are put then. Returns the places of the
    dead node."""
    cluster.disks["node2"] = []
    gone = cluster.dies("node1", starts_at="node2")
    cluster.until(cluster.serves, "it does not begin")
    assert cluster.serves() == "new on node2"
    cluster.keeper._wait_s = 120.0
    for row in range(4):
        put(cluster.host, "p", ids(f"since {row}"))
    assert {each.num_rows for each in cluster.book.records()[0]} == {8}
    return gone


def test_a_unit_that_began_anew_is_started_again_where_its_new_rows_are(make_cluster: Callable[..., Cluster]) -> None:
    """Though the node with its first place is back."""
    cluster = make_cluster(wait_s=0.0)
    cluster.disks["node1"] = began_anew(cluster)
    cluster.restarts("node2")
    cluster.ends()
    cluster.until(cluster.serves, "it does not serve")
    assert cluster.serves() == "new on node2"
    assert cluster.created == []
    assert cluster.lost() == 0


def test_the_place_of_a_unit_that_began_anew_is_looked_for(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(wait_s=0.0)
    cluster.disks["node1"] = began_anew(cluster)
    gone = cluster.dies("node2", starts_at="node1")
    cluster.disks["node4"] = ["Y"]
    for _ in range(3):
        cluster.turn()
    assert cluster.serves() is None, "it is on no node now"
    cluster.disks["node3"] = gone
    cluster.until(cluster.serves, "it does not serve")
    assert cluster.serves() == "new on node2"
    assert cluster.created == [("node3", "new on node2")]
    assert cluster.lost() == 0


@pytest.mark.parametrize("answer", ["its place", "an error"])
def test_a_unit_whose_new_process_does_not_serve_serves_no_more(
    make_cluster: Callable[..., Cluster], answer: str
) -> None:
    """Its node was powered off, and says nothing."""
    cluster = make_cluster()
    cluster.turn()
    put(cluster.host, "p", ids("before"))
    cluster.disks["node2"] = []
    cluster.reachable = False
    cluster.restarts("node2")
    gone = cluster.disks.pop("node1")
    cluster.refuse += ["node2"] if answer == "an error" else []
    cluster.keeper._ears["unit-1"].suspect = True
    cluster.keeper._begin_to_retain(cluster.book.live())
    cluster.until(lambda: cluster.serves() is None, "puts go to the dead node")
    put(cluster.host, "p", ids("meanwhile"))
    assert [(each.state, each.num_rows) for each in cluster.book.records()[0]] == [("serving", 6), ("starting", 2)]
    cluster.refuse.clear()
    cluster.disks["node3"] = gone
    cluster.until(cluster.serves, "it does not serve")
    assert cluster.serves() == "Y"
    assert cluster.lost() == 0


def test_the_controller_dies_while_it_moves_a_unit(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit was killed, and not created again."""
    first = ControllerHost(make_ledger(tmp_path / "journal", None, False))
    first.book.begin("a-", [(f"unit-{each}", f"a-unit-{each}", started(each)) for each in range(2)])
    client = first.begin_session()
    first.answer(RegisterRequest("p", ["x"], None, ["t"], None, {}, "epoch"), client)
    put(first, "p", ids("before"))
    first.note("something", None)
    host = ControllerHost(make_ledger(tmp_path / "journal", None, False, must_exist=True))
    cluster = make_cluster(host)
    monkeypatch.setattr(_keeper, "named_actors", lambda prefix: ["a-unit-0"])
    monkeypatch.setattr(_keeper, "lookup", cluster.keeper._handles.get)
    monkeypatch.setattr(Keeper, "_start", lambda self: None)
    cluster.keeper.come_back()
    assert cluster.lost() == 0
    assert [each.state for each in cluster.book.records()[0]] == ["serving", "starting"]
    cluster.until(lambda: cluster.serves() == "Y", "it is not created")
    assert cluster.created == [("node1", "Y")]
    assert cluster.lost() == 0


def test_a_unit_that_no_controller_moved_begins_when_its_place_does_not_come(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(wait_s=0.0)
    put(cluster.host, "p", ids("before"))
    cluster.dies("node1", starts_at="node0")
    del cluster.keeper._handles["a-unit-1"]
    cluster.until(cluster.serves, "it does not begin")
    assert cluster.serves() == "new on node0"
    assert cluster.lost() == 2


def test_a_unit_that_never_gets_to_its_node_begins_elsewhere(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts it elsewhere each time, as when its node has no CPUs left. It is tried again, and not for ever."""
    monkeypatch.setattr(_keeper, "_SEARCH_S", 0.2)
    cluster = make_cluster(wait_s=1.0)
    put(cluster.host, "p", ids("before"))
    cluster.disks["node2"] = []
    gone = cluster.dies("node1", starts_at="node2")
    cluster.disks["node3"], cluster.starts_at = gone, "node2"
    cluster.until(cluster.serves, "it does not give up")
    assert cluster.serves() == "new on node2"
    assert len(cluster.created) <= 6
    assert cluster.lost() == 2


def test_a_unit_whose_disk_was_full_for_longer_than_the_wait_waits_anew_when_its_node_ends(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_keeper, "_SEARCH_S", 0.1)
    cluster = make_cluster()
    put(cluster.host, "p", ids("before"))
    cluster.disks["node2"] = []
    gone = cluster.dies("node1", starts_at="node2")
    cluster.disks["node3"], cluster.refuse = gone, ["node3"]
    cluster.until(lambda: cluster.book.view().lives[1].why, "it says nothing of its disk")
    for search in cluster.keeper._searches.values():
        search.give_up = 0.0  # the wait is over
    for _ in range(20):
        cluster.turn()
    assert cluster.created == [("node3", "Y")]
    del cluster.disks["node3"]
    cluster.restarts("node2")
    for _ in range(5):
        cluster.turn()
    assert (cluster.serves(), cluster.lost()) == (None, 0)


@pytest.mark.parametrize(
    "why", [ray.exceptions.ActorDiedError(), ray.exceptions.RuntimeEnvSetupError("full")], ids=type
)
def test_a_unit_that_ray_gives_up_is_created_again_where_its_rows_are(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, why: BaseException
) -> None:
    monkeypatch.setattr(_keeper, "_SEARCH_S", 600.0)
    cluster = make_cluster()
    cluster.why = why
    put(cluster.host, "p", ids("before"))
    cluster.disks["node2"] = []
    cluster.give_up.append("node1")
    cluster.ends()
    for turn in range(1, 4):
        cluster.until(lambda turn=turn: len(cluster.created) == turn, "it is not created again")
        for _ in range(20):
            cluster.turn()
        assert len(cluster.created) == turn, "there is no pause"
        cluster.keeper._searches["unit-1"].ask_at = 0.0  # the pause is over
    assert (cluster.serves(), cluster.lost()) == (None, 0)
    cluster.give_up.clear()
    cluster.keeper._searches["unit-1"].ask_at = 0.0
    cluster.until(cluster.serves, "it does not serve")
    assert cluster.serves() == "Y"
    assert set(cluster.created) == {("node1", "Y")}
    assert cluster.lost() == 0
    assert not cluster.keeper._searches


def test_a_unit_that_ray_gives_up_begins_where_it_can_when_its_wait_is_over(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, where there is no wait; on another node, where it failed; and with a pause before each try."""
    monkeypatch.setattr(_keeper, "_SEARCH_S", 600.0)
    cluster = make_cluster(wait_s=0.0)
    put(cluster.host, "p", ids("before"))
    cluster.disks["node2"] = []
    cluster.give_up += ["node1"]
    cluster.ends()
    for _ in range(20):
        cluster.turn()
    assert [node for node, _ in cluster.created] == ["node1"]
    assert cluster.lost() == 0
    cluster.keeper._searches["unit-1"].ask_at = 0.0  # the pause is over
    cluster.until(cluster.serves, "it does not begin")
    assert [node for node, _ in cluster.created] == ["node1", "node2"]
    assert cluster.serves() == "new on node2"
    assert cluster.lost() == 2


def test_a_unit_without_rows_that_ray_gives_up_is_removed(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    (name,) = cluster.book.add_units(1)
    assert cluster.book.new_unit() == (name, f"a-{name}")
    cluster.give_up.append("node2")
    cluster.keeper._handles[f"a-{name}"] = Actor(cluster, "node2", "Z")
    cluster.until(lambda: cluster.book.records()[1], "nobody is told")
    assert len(cluster.book.records()[0]) == 2
    assert f"a-{name}" not in cluster.keeper._handles


def test_what_was_cleared_or_overwritten_while_a_unit_was_away_is_deleted_when_it_is_back(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster()
    host, client = cluster.host, Client(cluster.host)
    put(host, "p", ids("before"))
    first = put(host, "q", ids("before"))
    cluster.ends()
    put(host, "q", ids("before"))
    assert client.clear("p", ids("before")[:2]) == 2
    assert len(host.garbage()) == 3, "one row that was cleared, two that were overwritten"
    cluster.restarts("node1")
    unit = cluster.keeper._handles["a-unit-1"]
    cluster.until(lambda: cluster.serves() and not cluster.keeper._to_retain, "it does not come back")
    assert len(unit.dropped) == 3
    assert sorted(position for write_id, position in unit.dropped if write_id == first) == [0, 1]
    assert host.garbage() == []
    assert [each.num_rows for each in cluster.book.records()[0]] == [5, 1]


class FakeContext:
    def get_node_id(self) -> str:
        return "node"


def test_a_process_of_a_unit_opens_the_place_of_its_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives it the arguments of its first start."""
    monkeypatch.setattr(_units, "ray", SimpleNamespace(get_runtime_context=FakeContext))
    monkeypatch.setattr(_units, "was_started_before", lambda: True)

    def serve(place: Place) -> Started:
        Path(place.folder, place.name).mkdir(exist_ok=True)
        return started(1, place=place.name)

    def process() -> Any:
        unit: Any = object.__new__(_units.StorageUnit)
        unit._place, unit._started, unit._serve = Place(str(tmp_path), "Y", "identity"), None, serve
        return unit

    assert process().describe(anew=False).name == "Y"
    first, second = (process().describe(anew=True).place for _ in range(2))
    assert first != second, "an empty place of a process that was killed is not taken for that of the life"
    assert process().describe(place=first, anew=False).place == first
    assert process().describe(place="of another node", anew=False).name == "of another node"

    def fail(place: Place) -> Started:
        serve(place)
        raise OSError("full")

    unit, there = process(), sorted(tmp_path.iterdir())
    unit._serve = fail
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            unit.describe(anew=True)
    assert sorted(tmp_path.iterdir()) == there, "the next bootstrap would make a unit of what was left"
