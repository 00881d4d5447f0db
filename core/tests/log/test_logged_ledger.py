"""A ledger whose process ends is where it was when another one opens its log."""

import random
from types import SimpleNamespace

import pytest
from ledgers import History, answer, begin, claim, contents, is_alike, register, state_of
from msgspec.structs import replace

from dataplane_core import log as room
from dataplane_core.errors import (
    AlreadyDoneError,
    BackendUnavailableError,
    CapacityExceededError,
    CorruptDataError,
    StalePartitionError,
)
from dataplane_core.ledger import Ledger, commands
from dataplane_core.log import FolderLog, LoggedLedger
from dataplane_core.spec import Claim
from dataplane_testkit._profiles import by_profile


@pytest.fixture
def clock(monkeypatch):
    """That of a machine. Another machine shows another time."""
    made = SimpleNamespace(now=1000.0, monotonic=lambda: made.now)
    monkeypatch.setattr(room, "time", made)
    return made


class Logged:
    """A ledger in a folder, asked as one without a log."""

    def __init__(self, folder, *, sync=False, **options):
        self.folder, self.sync, self.options = folder, sync, options
        self.log = None
        self.again()

    def again(self, **options):
        """The process was killed: a new one opens the log."""
        if self.log is not None:
            self.log.close()  # as the end of its process does
        self.log = FolderLog(self.folder, sync=self.sync)
        self.logged = LoggedLedger(self.log, **(self.options | options))
        self.held_bytes = 0

    def call(self, command):
        reply = self.logged.call(command)
        self.log.commit()
        return reply

    def apply(self, command, now):
        try:
            reply = self.logged.call(command)
        finally:
            self.held_bytes = self.logged.ledger.held_bytes
        return replace(reply, ask_again_s=0.0) if isinstance(reply, Claim) else reply

    def put(self, *ids, **more):
        write_id = self.call(begin(ids, **more))
        self.call(commands.CommitPut(write_id))
        return write_id

    def claim(self, token, count=9, lease_s=60.0):
        return self.call(claim(count, token=token, lease_s=lease_s, all_or_nothing=False)).sample_ids

    def ids(self):
        return self.call(commands.ListRequest("p")).sample_ids


@pytest.fixture
def made(tmp_path):
    made = Logged(tmp_path)
    made.call(register())
    return made


@pytest.mark.timeout(by_profile(600, 600, 3600))
def test_opened_again_at_any_moment_it_is_the_one_that_was_never_interrupted(tmp_path, clock, monkeypatch):
    """Whether its process was killed or ended well, and however short its log is: also its times are the same."""
    monkeypatch.setattr(room, "TAIL_BYTES", 1000)
    begun, begin_log = [], FolderLog.begin
    monkeypatch.setattr(FolderLog, "begin", lambda log: begun.append(log) or begin_log(log))
    for seed in range(by_profile(4, 20, 1_000)):
        history, dice, ahead_s = History(seed), random.Random(seed), clock.now
        capacity = history.options["capacity_bytes"]
        whole = Ledger(capacity_bytes=capacity)
        logged = Logged(tmp_path / str(seed), capacity_bytes=capacity)  # its clock begins at 0 as well
        for step in range(300):
            for command in history.commands(whole):
                while command is not None:
                    clock.now = history.now + ahead_s
                    reply = answer(whole, command, history.now)
                    assert answer(logged, command, history.now) == reply, (seed, step, command)
                    last, last_at, command = (command, reply), history.now, history.heard(command, reply)
            if dice.random() < 0.1:
                clock.now = history.now + ahead_s
                if dice.random() < 0.5:
                    logged.log.finish()
                else:
                    logged.log.note("now", b"")  # no time passes that the log does not know of
                ahead_s = dice.randrange(1 << 20) / 8
                clock.now = history.now + ahead_s
                logged.again()
                if last_at == history.now:  # else it may have another answer by now
                    assert is_alike(*last, answer(logged, last[0], history.now)), (seed, step, last)  # it was lost
                assert contents(logged, history.now) == contents(whole, history.now), (seed, step)
                assert state_of(logged.logged.ledger) == state_of(whole), (seed, step)
                assert logged.logged.ledger.payload() == whole.payload()
    assert len(begun) > by_profile(4, 10, 10) + len(set(map(id, begun)))  # also those that were shortened


def test_a_put_that_fills_the_store_may_be_begun_again_and_one_that_was_done_is_done(tmp_path):
    made = Logged(tmp_path, capacity_bytes=16)
    made.call(register())
    put = begin(["a"], size=16, request_id="r1")
    assert [made.call(put), made.call(put)] == [1, 1]
    made.call(commands.AbortPut(1))
    for write_id in (10, 20):  # the client was told of no reply to the first, and began anew
        made.call(begin(["a"], request_id="r2", write_id=write_id))
    made.call(commands.CommitPut(10))
    with pytest.raises(AlreadyDoneError):
        made.call(commands.CommitPut(20))
    assert made.call(commands.CommitPut(20)) == []


def test_a_ledger_that_numbers_writes_never_gives_a_number_twice(made):
    given = [made.put("a", "b"), made.put("c")]
    made.call(register(epoch="other"))
    made.again()
    given += [made.put("a")]
    assert given == [1, 3, 4]
    made.again(first_write=1000)
    assert made.put("b") == 1000
    made.again()
    assert made.put("c") == 1001


def test_a_put_that_is_refused_takes_no_number_that_another_ledger_would_not_take(tmp_path, clock):
    """What is checked before a put is recorded holds when it runs, whatever ends in between."""
    made = Logged(tmp_path, capacity_bytes=20)
    made.call(register())
    first = made.call(begin(["a"], size=16, ttl_s=60.0))
    for _ in range(2):
        with pytest.raises(CapacityExceededError, match="16 of 20 bytes are held"):
            made.call(begin(["b"], size=16))
    made.call(commands.WaitForRoom("large", 20, 100.0))
    clock.now += 25.0
    made.call(commands.WaitForRoom("large", 20, 100.0))
    clock.now += 25.0
    made.call(commands.WaitForRoom("large", 20, 100.0))
    clock.now += 11.0
    for _ in range(2):  # what the first put left became free just now, and another one waits for it
        with pytest.raises(CapacityExceededError, match="1 put waits"):
            made.call(begin(["b"], size=8))
    clock.now += 2.0
    number = made.put("b")
    with pytest.raises(StalePartitionError):
        made.call(commands.CommitPut(first))
    made.again()
    assert number == first + 1
    assert made.put("c", size=1) == number + 1


def test_those_who_held_something_may_be_gone(made):
    made.put("a", "b")
    made.claim("t1", count=1)
    pending = made.call(begin(["c"]))
    made.again(ends_holds=True)
    assert made.claim("t2") == ["a", "b"]
    assert made.logged.garbage() == [(pending, 0)]
    made.again()
    with pytest.raises(StalePartitionError):
        made.call(commands.CommitPut(pending))


def test_a_begin_may_be_lazy(tmp_path, monkeypatch):
    synced = []
    made = Logged(tmp_path, sync=True, lazy=(commands.BeginPut,))
    made.call(register())
    monkeypatch.setattr(room.os, "fdatasync", synced.append)
    write_id = made.call(begin(["a"]))
    assert not synced
    made.call(commands.CommitPut(write_id))
    assert len(synced) == 1


def test_a_ledger_of_another_version_is_refused(made, monkeypatch):
    made.put("a")
    with monkeypatch.context() as patch:
        patch.setattr(room, "_VERSIONS", (0, 12))
        with pytest.raises(CorruptDataError, match=r"is of versions \(5, \d+\). Expected \(0, 12\)"):
            made.again()
    made.again()
    assert made.ids() == ["a"]
    for unreadable in (b"", b"\xff", b"\x10\x80"):
        made.log.append(unreadable, made.log.now())
        with pytest.raises(CorruptDataError, match="cannot be read"):
            made.again()
        made.folder = made.folder / "next"
        made.again()


def test_a_state_that_is_no_ledger_is_refused(made):
    made.log.make_state = lambda: made.logged._state() + b"\x01"
    made.log.begin()
    with pytest.raises(CorruptDataError):
        made.again()


def test_a_full_disk_refuses_a_command_and_lets_samples_be_cleared(made, monkeypatch):
    made.put("a", "b")
    append = made.log.append

    def full(record, at, *, is_lazy, frees):
        if not frees:
            raise BackendUnavailableError("full", outcome="not_done")
        append(record, at, frees=frees)

    with monkeypatch.context() as patch:
        patch.setattr(made.log, "append", full)
        for each in (begin(["c"]), claim()):
            with pytest.raises(BackendUnavailableError):
                made.call(each)
        made.call(commands.ClearRequest("p", ["a"]))
        made.call(commands.Collected(made.logged.garbage()))
    assert made.claim("t1") == ["b"]
    made.again()
    assert made.ids() == ["b"]
    assert made.logged.garbage() == []


def test_a_log_stays_short(made, monkeypatch, clock):
    monkeypatch.setattr(room, "TAIL_BYTES", 3000)
    made.again()
    for turn in range(100):
        clock.now += 30.0  # requests are known for a while
        made.put("a", "b")
        made.call(commands.ClearRequest("p", ["a"]))
        made.call(commands.Collected(made.logged.garbage()))
        assert sum(path.stat().st_size for path in made.folder.rglob("journal")) < 8000, turn
    made.again()
    assert made.ids() == ["b"]
