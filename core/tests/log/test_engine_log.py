"""The log in an engine: who is its owner, and what the owner does when the engine loses, refuses or damages records."""

import copy
from functools import partial

import pytest
from ledgers import begin, register

from dataplane_core import log as room
from dataplane_core.backends import owner as election
from dataplane_core.backends.owner import EngineLog, newest_record
from dataplane_core.errors import BackendUnavailableError, CorruptDataError, OperationTimeoutError
from dataplane_core.ledger import commands
from dataplane_core.log import LoggedLedger, TakenError

PLACE = ("127.0.0.1", 1, b"token", "")


class Engine:
    """Records in a dict. ``faults``: name of a method -> what its next calls do with the right call."""

    def __init__(self):
        self.records, self.newest = {}, 0
        self.faults = {"append": [], "read_log": [], "trim": []}

    def _call(self, name, right):
        return self.faults[name].pop(0)(right) if self.faults[name] else right()

    def append(self, number, record, deadline):
        return self._call("append", partial(self._append, number, record))

    def _append(self, number, record):
        if number != self.newest + 1:
            return False
        self.records[number], self.newest = record, number
        return True

    def read_log(self, first, deadline):
        first = self.newest if first is None else first
        return self._call("read_log", lambda: [pair for pair in self.records.items() if pair[0] >= max(first, 1)])

    def trim(self, before, deadline):
        return self._call("trim", lambda: [self.records.pop(number) for number in [*self.records] if number < before])

    def replica(self):
        """What a replica has now that is behind later on."""
        return copy.deepcopy((self.records, self.newest))

    def go_back(self, replica):
        """The replica takes the engine's place."""
        self.records, self.newest = copy.deepcopy(replica)


def lost(right):
    """The call is done, and its reply is lost."""
    right()
    raise OperationTimeoutError("no answer")


def away(right):
    raise BackendUnavailableError("nobody is there")


def loading(right):
    raise OperationTimeoutError("it reads its files, and does nothing else", outcome="not_done")


def full(right):
    raise BackendUnavailableError("the disk is full", outcome="not_done")


def unforeseen(right):
    raise ValueError("the engine's author did not foresee it")


class Owner:
    """An owner. The one before is known to be dead."""

    def __init__(self, engine, name):
        self.log = EngineLog(engine, name, PLACE, dead=engine.newest)
        self.begin()

    def begin(self):
        self.ledger = LoggedLedger(self.log, first_write=self.log.generation << 32)

    def call(self, command):
        reply = self.ledger.call(command)
        self.log.commit()
        return reply

    def put(self, *ids):
        write_id = self.call(begin(ids))
        self.call(commands.CommitPut(write_id))
        return write_id

    def ids(self):
        return self.call(commands.ListRequest("p")).sample_ids


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(election, "_AGAIN_S", 0.0)
    monkeypatch.setattr(election, "_REFUSED_S", 0.0)
    return Engine()


@pytest.fixture
def owner(engine):
    owner = Owner(engine, "first")
    owner.call(register())
    return owner


# --- who is the owner -------------------------------------------------------------------------------------------------


def test_of_two_that_start_at_once_one_is_the_owner(engine, owner):
    owner.put("a")
    one, two = (EngineLog(engine, name, PLACE, dead=engine.newest) for name in ("one", "two"))
    kept = LoggedLedger(one)
    with pytest.raises(TakenError):
        LoggedLedger(two)
    kept.call(commands.ClearRequest("p", ["a"]))
    one.commit()
    assert Owner(engine, "three").ids() == []


def test_none_starts_beside_an_owner_that_is_alive(engine, owner):
    engine.faults["read_log"] = [lambda right: right(), lambda right: owner.put("a") and right()]
    with pytest.raises(TakenError):
        EngineLog(engine, "second", PLACE)
    assert owner.ids() == ["a"]


@pytest.mark.parametrize("says", ["a put", "nothing"])
def test_an_owner_that_is_late_answers_nothing_and_ends(engine, owner, monkeypatch, says):
    owner.put("a")
    again = Owner(engine, "second")
    records = dict(engine.records)
    owner.log._is_dirty = True
    with pytest.raises(TakenError):
        owner.put("b") if says == "a put" else owner.log.commit()
    ended = []
    monkeypatch.setattr(room.os, "_exit", ended.append)
    owner.log.commit_or_end()
    assert ended == [room.EXIT_STATUS]
    assert engine.records == records
    assert again.ids() == ["a"]


# --- an engine that loses what it had ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["the newest records", "all of this owner"])
@pytest.mark.parametrize("then", ["nothing", "more is pending", "the owner ends"])
def test_an_engine_that_went_back_gets_the_state_anew(engine, owner, lost, then):
    owner.put("before")
    replica = engine.replica()
    second = Owner(engine, "second")
    second.put("a")
    if lost == "the newest records":
        replica = engine.replica()
    second.put("b")
    if then == "more is pending":
        write_id = second.ledger.call(begin(["c"]))
        second.ledger.call(commands.CommitPut(write_id))
    engine.go_back(replica)
    if then == "the owner ends":
        second.log.end()
        assert newest_record(engine, 0.0)[1].address is None
    else:
        second.log._is_dirty = True
        second.log.commit()
        second.put("d")
    expected = {"nothing": ["d"], "more is pending": ["c", "d"], "the owner ends": []}[then]
    assert second.ids() == Owner(engine, "third").ids() == ["before", "a", "b", *expected]


def test_an_owner_whose_engine_was_emptied_ends(engine, owner):
    """The rows are gone as well. What comes next is another store, which must not get this state."""
    owner.put("a")
    engine.go_back(({}, 0))
    with pytest.raises(TakenError, match="was emptied"):
        owner.put("b")
    assert not engine.records


@pytest.mark.parametrize("when", ["before an append", "while an append gets no answer"])
def test_an_owner_ends_if_another_one_goes_on_from_where_the_engine_went_back(engine, owner, monkeypatch, when):
    """Also if that one has come to the same number."""
    owner.put("a")
    replica = engine.replica()
    owner.put("b")
    others = []

    def another(right):
        engine.go_back(replica)
        others.append(Owner(engine, "second"))
        away(right)

    monkeypatch.setattr(election, "_SURE_S", -1.0)  # it says nothing for so long before another one can be the owner
    if when == "before an append":
        with pytest.raises(BackendUnavailableError):
            another(None)
    else:
        engine.faults["append"] = [another]
    with pytest.raises(TakenError):
        owner.put("c")
    assert others[0].ids() == ["a"]


def test_ids_of_writes_are_never_used_twice(engine):
    """Also where the engine loses all that an owner wrote, and nobody knows any more which ids it gave out."""
    given = []
    owner = Owner(engine, "0")
    owner.call(register())
    for number in range(1, 9):
        replica = engine.replica()
        owner = Owner(engine, str(number))
        given += [owner.put(f"{number}-{each}") for each in range(3)]
        if number % 2:
            engine.go_back(replica)
    assert len(set(given)) == len(given)
    assert max(given) < 1 << 62


# --- an engine that does not do what it is asked ----------------------------------------------------------------------


@pytest.mark.parametrize("fault", [lost, away, loading])
def test_a_record_whose_append_was_not_answered_is_in_the_log_once(engine, owner, fault):
    newest = engine.newest
    engine.faults["append"] = [fault, fault]
    owner.put("a")
    assert engine.newest == newest + 2
    engine.faults["append"] = [fault]
    again = Owner(engine, "second")
    assert again.put("b")
    assert Owner(engine, "third").ids() == ["a", "b"]


def test_a_log_that_cannot_be_trimmed_is_read_as_well_and_trimmed_later(engine, owner):
    owner.put("a")
    kept = len(engine.records)
    engine.faults["trim"] = [full]
    again = Owner(engine, "second")
    assert len(engine.records) > kept
    again.put("b")
    assert Owner(engine, "third").ids() == ["a", "b"]
    assert len(engine.records) == 2


def test_what_the_engine_has_no_room_for_is_not_answered(engine, owner):
    engine.faults["append"] = [full] * 9
    with pytest.raises(BackendUnavailableError, match="full"):
        owner.put("a")
    engine.faults["append"] = []
    assert Owner(engine, "second").ids() == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda records, middle: records.pop(middle), r"is missing, and \d+ is there"),
        (lambda records, middle: records.pop(min(records)), r"is missing, and \d+ is there"),
        (lambda records, middle: records.update({middle: records[middle][:-3]}), "cannot be read"),
        (lambda records, middle: records.update({middle: b""}), "cannot be read"),
        (lambda records, middle: records.update({middle: records[middle][:1] + b"\x63" + records[middle][2:]}), "99"),
    ],
)
def test_a_record_that_is_missing_or_damaged_is_named(engine, owner, damage, says):
    for each in "abc":
        owner.put(each)
    damage(engine.records, engine.newest - 2)
    with pytest.raises(CorruptDataError, match=says):
        Owner(engine, "second")


# --- a log that is long -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["puts", "beats"])
def test_a_log_stays_short(engine, owner, monkeypatch, what):
    monkeypatch.setattr(room, "TAIL_BYTES", 2000)
    monkeypatch.setattr(election, "_BEAT_S", 0.0)
    owner.log.begin()
    owner.put("a")
    for number in range(200):
        if what == "puts":
            owner.put(f"s{number}")
            owner.call(commands.ClearRequest("p", [f"s{number}"]))
        else:
            owner.log.beat()
    assert len(engine.records) < 100
    assert Owner(engine, "second").ids() == ["a"]


@pytest.mark.parametrize("fault", [full, unforeseen])
def test_a_log_that_cannot_be_shortened_keeps_all_and_goes_on(engine, owner, monkeypatch, fault):
    monkeypatch.setattr(room, "TAIL_BYTES", 0)
    owner.log.begin()
    right = engine._append

    def refuses_states(number, record):
        if election._decode(record).state is not None:
            fault(None)
        return right(number, record)

    engine._append = refuses_states
    for number in range(5):
        owner.put(f"s{number}")
        owner.log.beat()
    engine._append = right
    assert Owner(engine, "second").ids() == [f"s{number}" for number in range(5)]
