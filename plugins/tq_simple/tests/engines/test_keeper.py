"""What the keeper of units does with their answers."""

import pytest
import ray
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction

from dataplane_core.ledger import LedgerService
from dataplane_testkit._timing import eventually
from dataplane_tq_simple import TQSimpleConfig, _keeper
from dataplane_tq_simple._actors import nodes_for_units, on_nodes
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._host import ControllerHost
from dataplane_tq_simple._keeper import Keeper
from dataplane_tq_simple._kept import places_in
from dataplane_tq_simple._units import SimpleStorageInstance


class Unit:
    """Fails to drop rows, and does it when it is told again."""

    def __init__(self):
        self.told = []

    def retain(self, live, garbage):
        self.told.append((live, garbage))
        if len(self.told) == 1:
            raise OSError("no room for notes")

    def get(self):
        return self.told


def test_a_unit_that_fails_to_drop_rows_is_told_again(ray_cluster, monkeypatch):
    monkeypatch.setattr(_keeper, "_RETAIN_AGAIN_S", 0.0)
    host = ControllerHost(LedgerService())
    started = Started("token", "10.0.0.1", 1, "node", size_bytes=1 << 20, place="place")
    units = [("unit-0", "actor", started)]
    host.book.begin("actor-", units)
    keeper = Keeper(host, "actor-", lambda *_: None, None, wait_s=0.0)
    unit = keeper._handles["actor"] = ray.remote(Unit).options(num_cpus=0).remote()
    keeper._begin_to_retain(units)

    def is_done():
        keeper._retain()
        return not keeper._to_retain

    eventually(is_done, 60.0, "it goes on")
    assert ray.get(unit.get.remote()) == [({}, [])] * 2


def test_nodes_are_asked_by_one_remote_function_and_units_are_created_by_one_remote_class(
    ray_cluster, tmp_path, monkeypatch
):
    """Ray exports each new one to all workers, and keeps it. A unit that fails is created again every second."""
    used, options = [], RemoteFunction.options

    def refuse(self, **own):
        used.append(self)
        raise ValueError("the name is taken")

    monkeypatch.setattr(RemoteFunction, "options", lambda self, **own: used.append(self) or options(self, **own))
    monkeypatch.setattr(ActorClass, "options", refuse)
    for _ in range(2):
        assert ray.get(list(on_nodes(nodes_for_units(), places_in, tmp_path).values())) == [[]]
        with pytest.raises(ValueError, match="taken"):
            SimpleStorageInstance.create_unit(TQSimpleConfig(), "unit", nodes_for_units()[0])
    assert len(set(used)) == 2 < len(used)
