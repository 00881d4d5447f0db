"""The checker finds the known races of a store written by hand, each in a fixed order of requests."""

import pytest
import redis
from in_turn import Race, claim, put, read

from dataplane_testkit.chaos.shim import load_shim
from dataplane_testkit.chaos.worker import TASKS

FIELDS = {task: fields for task, (fields, _) in TASKS.items()}


@pytest.fixture
def race(redis_url, shims, tmp_path, monkeypatch):
    """Makes races of clients "A", "B" and "audit" of the store written by hand."""
    right, made = redis.connection.AbstractConnection.send_packed_command, []

    def send(self, command, check_health=True):
        if made:
            made[-1].turns.take()
        return right(self, command, check_health)

    monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", send)

    def make(shim="redis_hash.py:RedisHash", **options):
        folder = tmp_path / f"race{len(made)}"
        folder.mkdir()
        cls = load_shim(f"{shims}/{shim}")
        opened = {name: cls(FIELDS, url=redis_url, **options) for name in ("audit", "A", "B")}
        made.append(Race(folder, **opened))
        return made[-1]

    yield make
    for each in made:
        each.close()


def torn(race, order="AAB"):
    """B reads a sample while A replaces it."""
    put("s")(race["B"])
    race.together(order, A=put("s"), B=read("s"))


def claimed_at_once(race, order="ABAB"):
    """A and B claim two of four samples each, then the rest is claimed."""
    put("s0", "s1", "s2", "s3")(race["A"])
    race.together(order, A=claim(2), B=claim(2))
    race.audit("once")


def put_at_once(race, order="AB"):
    """A and B put the same new sample, then all is claimed."""
    race.together(order, A=put("s"), B=put("s"))
    race.audit("once")


def killed_in_a_put(race, order="AAAAA"):
    """A is killed before it says that a sample is ready, B reads it, then all is claimed."""
    race.together(order, cut="A", A=put("s"))
    read("s")(race["B"])
    race.audit("once")


RACES = {
    torn: {"mixed"},
    claimed_at_once: {"given once", "at most one claim", "ready"},
    put_at_once: {"given once"},
    killed_in_a_put: {"at most one claim"},
}


@pytest.mark.parametrize("act", RACES, ids=lambda act: act.__name__)
def test_a_race_of_a_store_written_by_hand_is_found_each_time(act, race):
    for _ in range(3):
        mine = race()
        act(mine)
        broken, seen = mine.rules()
        assert not broken, "Redis keeps what it promises"
        assert RACES[act] <= seen


def test_the_same_calls_one_after_the_other_break_nothing(race):
    for act in (torn, claimed_at_once, put_at_once):
        ours = {"shim": "dataplane_client.py:Dataplane", "backend": "redis_store", "namespace": act.__name__}
        for options in ({}, ours):
            mine = race(**options)
            act(mine, order="A" * 40)
            assert mine.rules() == (set(), set())
