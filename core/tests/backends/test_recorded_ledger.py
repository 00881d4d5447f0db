"""A ledger whose process ends is where it was when it is opened again, and does no call twice."""

import errno
import os
import random
import shutil
import threading

import pytest
from tiers import in_long

from dataplane_core.errors import (
    BackendUnavailableError,
    CorruptDataError,
    DataPlaneError,
    LeaseExpiredError,
    OperationTimeoutError,
    StalePartitionError,
)
from dataplane_core.hosting import CallId
from dataplane_core.journal import RecordedLedger, TakenError, file as journal_file
from dataplane_core.ledger import commands, to_state
from dataplane_core.spec import FieldSpec

X = {"x": FieldSpec("tensor", "int64", 1)}


def put_of(ledger, *ids, size=8):
    """The begin of a put of cells of this size."""
    writes, write_id = [commands.Write(list(X), [size] * len(ids))], ledger.take_ids(len(ids))
    return commands.BeginPut("p", ids, X, writes, write_id=write_id, ttl_s=60.0)


class Client:
    """Calls a ledger as a client does, each call with an id."""

    def __init__(self, folder, name="client"):
        self.folder, self.name, self.serial = folder, name, 0
        self.ledger = RecordedLedger(folder)

    def again(self):
        """The process was killed: a new one opens the journal."""
        self.ledger = RecordedLedger(self.folder, must_exist=True)

    def call(self, command, *, again=False):
        """Calls, or repeats the newest call."""
        self.serial += not again
        call = CallId(self.name, 0, self.serial, 600.0)
        found = self.ledger.once(call, lambda: self.ledger.call(command))
        self.ledger.file.commit()
        return found

    @property
    def file(self):
        """The journal of the newest process."""
        return max(self.folder.glob("*/journal"), key=lambda path: int(path.parent.name))

    def register(self):
        return self.call(commands.RegisterRequest("p", ["x"], None, ["train"], None, {}, "e"))

    def begin(self, *ids):
        return int(self.call(put_of(self.ledger, *ids)))

    def put(self, *ids):
        write_id = self.begin(*ids)
        self.call(commands.CommitPut(write_id))
        return write_id

    def claim(self, token, *, lease_s=60.0, count=2, again=False):
        made = commands.ClaimRequest(
            "p", "train", ["x"], count, all_or_nothing=False, lease_s=lease_s, token=token, holder="me"
        )
        return self.call(made, again=again).sample_ids

    def state(self):
        """Everything that the ledger knows, but for the times."""
        return _without_times(list(to_state(self.ledger._journal.service.ledger, 0.0)))


def finish_snapshots(ledger):
    """Waits until the thread has written those that are due."""
    done = threading.Event()
    ledger._aside.put(done.set)
    assert done.wait(60.0)


def _without_times(value):
    if isinstance(value, dict):
        return {name: _without_times(each) for name, each in value.items() if name not in ("ages_s", "left_s")}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


@pytest.fixture
def client(tmp_path):
    made = Client(tmp_path / "journal")
    made.register()
    return made


def test_it_is_where_it_was(client):
    client.put("a", "b", "c", "d")
    pending = client.begin("e")
    assert client.claim("t1") == ["a", "b"]
    client.call(commands.AckRequest("p", "train", ["a"], ["t1"]))
    client.call(commands.ClearRequest("p", ["d"]))
    before, payload, number = client.state(), client.ledger.payload(), client.ledger.next_number
    client.ledger.file.note("units", b"three")
    client.ledger.file.note("dropped", b"1")
    client.ledger.file.note("dropped", None)

    client.again()

    assert client.state() == before
    assert client.ledger.payload() == payload
    assert {write: rows for write, (_, rows) in payload.items()} == {min(payload): [0, 1, 2, 3], pending: [0]}
    assert client.ledger.next_number == number
    assert client.ledger.file.notes == {"units": b"three"}
    client.call(commands.CommitPut(pending))
    assert client.claim("t2", count=9) == ["c", "e"], "what was given is not given again"


@pytest.mark.parametrize("killed", [False, True])
def test_a_call_that_is_repeated_is_not_done_again(client, killed):
    """Whether its answer was lost on the way or with the process."""

    def repeat(command):
        if killed:
            client.again()
        return client.call(command, again=True)

    begin = put_of(client.ledger, "a")
    write_id = client.call(begin)
    assert repeat(begin) == begin.write_id == write_id
    commit = commands.CommitPut(write_id)
    assert client.call(commit) == repeat(commit) == []
    replaced = client.begin("a")
    assert client.call(commands.CommitPut(replaced)) == repeat(commands.CommitPut(replaced)) == [(write_id, 0)]
    client.put("b", "c")
    assert client.claim("t1") == ["a", "b"]
    if killed:
        client.again()
    assert client.claim("t1", again=True) == ["a", "b"]
    nack = commands.NackRequest("p", "train", ["a"], ["t1"], request_id=None)
    assert client.call(nack) is repeat(nack) is None
    with pytest.raises(LeaseExpiredError) as first:
        client.call(nack)
    with pytest.raises(LeaseExpiredError) as second:
        repeat(nack)
    assert str(first.value) == str(second.value)
    assert first.value.sample_ids == second.value.sample_ids
    clear = commands.ClearRequest("p", ["c"])
    count, garbage = client.call(clear)
    assert repeat(clear) == (count, garbage) == (1, garbage)
    stale = CallId(client.name, 0, client.serial - 1, 600.0)
    with pytest.raises(OperationTimeoutError):
        client.ledger.once(stale, lambda: client.ledger.call(clear))


def test_a_snapshot_keeps_all_of_it(client, monkeypatch):
    """A random history, opened again at any moment, is the history that was never interrupted."""
    monkeypatch.setattr("dataplane_core.journal.recorded_ledger._TAIL_BYTES", 2000)
    client.again()
    chance = random.Random(7)
    whole = Client(client.folder.parent / "whole")
    whole.register()
    held = []
    for turn in range(150):
        first, second = client.put(f"s{turn}", f"r{turn}"), whole.put(f"s{turn}", f"r{turn}")
        assert first == second
        token = f"t{turn}"
        given = whole.claim(token, count=3)
        assert client.claim(token, count=3) == given
        held += given
        for sample_id in chance.sample(given, min(1, len(given))):
            for each in (client, whole):
                each.call(commands.AckRequest("p", "train", [sample_id], [token], request_id=None))
        if turn % 9 == 0:
            gone = chance.sample(held, min(3, len(held)))
            held = [each for each in held if each not in gone]
            mine, its = (each.call(commands.ClearRequest("p", gone, request_id=f"c{turn}")) for each in (client, whole))
            assert (mine[0], sorted(mine[1])) == (its[0], sorted(its[1]))
            if chance.random() < 0.5:
                client.again()
                assert client.call(commands.ClearRequest("p", gone, request_id=f"c{turn}"), again=True)[0] == len(gone)
        if chance.random() < 0.1:
            finish_snapshots(client.ledger)
            client.again()
    for each in (client, whole):
        finish_snapshots(each.ledger)
    client.again()
    assert client.state() == whole.state()
    assert client.ledger.payload() == whole.ledger.payload()
    assert client.ledger.next_number == whole.ledger.next_number
    blobs = [path.name for path in client.folder.glob("*/snap*")]
    assert blobs, "no snapshot was written"
    assert len(blobs) <= 2, "earlier snapshots are deleted"


def test_an_outcome_outlives_the_record_that_it_is_of(client, monkeypatch):
    monkeypatch.setattr("dataplane_core.journal.recorded_ledger._TAIL_BYTES", 100)
    client.again()
    client.put("a", "b")
    assert client.claim("t1") == ["a", "b"]
    other = Client.__new__(Client)
    other.folder, other.name, other.serial, other.ledger = client.folder, "other", 0, client.ledger
    for turn in range(50):
        other.put(f"s{turn}")
        finish_snapshots(client.ledger)
    assert sum(1 for _ in client.ledger.file.read(0)) < 20
    client.again()
    assert client.claim("t1", again=True) == ["a", "b"]


def test_a_lease_has_what_was_left_of_it(client, monkeypatch):
    """The time in which no process runs is not counted, whatever the clock of the next one says."""
    now = 1000.0

    class Clock:
        monotonic = staticmethod(lambda: now)

    monkeypatch.setattr(journal_file, "time", Clock)
    client.again()
    client.put("a", "b")
    client.claim("t1", lease_s=10.0, count=1)
    now += 6.0
    client.put("c")
    now = 5.0  # another machine, which started just now
    client.again()
    now += 3.0
    client.call(commands.RenewRequest("p", "train", ["a"], ["t1"], 4.0))
    now += 3.0
    client.again()
    now += 3.0
    client.call(commands.AckRequest("p", "train", ["a"], ["t1"]))
    client.claim("t2", lease_s=10.0, count=1)
    now += 11.0
    client.again()
    assert client.claim("t3", count=1) == ["c"], "the time since the last record is not counted"
    now += 11.0
    assert client.call(commands.InspectRequest("p")).tasks["train"].num_leased == 1  # not the one that has ended
    assert client.claim("t4", count=1) == ["b"]
    with pytest.raises(LeaseExpiredError):
        client.call(commands.AckRequest("p", "train", ["b"], ["t2"]))


def test_a_frame_that_is_not_whole_was_never_answered(client):
    client.put("a")
    data = client.file.read_bytes()
    client.put("b")
    more = client.file.read_bytes()
    for cut in (len(data) + 1, len(data) + 20, len(more) - 1):
        client.file.write_bytes(more[:cut])
        client.again()
        left = client.call(commands.ListRequest("p")).sample_ids
        assert left == ["a"]
        client.put(f"c{cut}")
        client.again()
        assert client.call(commands.ListRequest("p")).sample_ids == ["a", f"c{cut}"]
    client.file.write_bytes(more + bytes(100))
    client.again()
    assert client.call(commands.ListRequest("p")).sample_ids == ["a", "b"]


@pytest.mark.parametrize("step", [7, *in_long(1)])
def test_a_damaged_byte_is_refused_wherever_it_lies(client, step):
    """Also in the length of a frame: the frames after it would be lost in silence. The last frame may be unfinished."""
    client.put("a")
    answered = client.file.read_bytes()
    client.put("b")
    data, path = client.file.read_bytes(), client.file
    for at in range(0, len(answered), step):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        with pytest.raises(CorruptDataError, match="damaged at byte"):
            RecordedLedger(client.folder, must_exist=True)
        for later in client.folder.glob("*"):
            if later != path.parent:
                shutil.rmtree(later)


def test_a_process_that_ends_while_it_opens_the_journal_loses_nothing(client):
    client.put("a")
    (client.folder / "2").mkdir()
    (client.folder / "2" / "journal.new").write_bytes(b"half")
    client.again()
    assert client.file.parent.name == "3"
    assert client.call(commands.ListRequest("p")).sample_ids == ["a"]


def test_a_process_whose_journal_was_taken_answers_nothing_and_destroys_nothing(client):
    """As one that still runs on a node that was cut off. It may shorten its file after it saw that it still has it."""
    client.put("a")
    late = client.ledger

    def look():
        client.again()
        client.put("b")

    late.file._refuse_if_taken = look
    late.file.trim(2)
    del late.file._refuse_if_taken
    late.call(commands.ClearRequest("p", None))
    with pytest.raises(TakenError):
        late.file.commit()
    for _ in range(2):
        assert client.call(commands.ListRequest("p")).sample_ids == ["a", "b"]
        client.again()


def test_a_journal_that_is_shortened_while_it_is_taken_is_taken_whole(client, monkeypatch):
    """The process that had it deletes a snapshot after the new one has read that the journal names it."""
    monkeypatch.setattr("dataplane_core.journal.recorded_ledger._TAIL_BYTES", 500)
    client.again()
    late, listdir = client.ledger, os.listdir

    for turn in range(6):
        client.put(f"s{turn}")
        finish_snapshots(late)
    monkeypatch.setattr(late.file, "_refuse_if_taken", lambda: None)
    turns = iter(range(6, 12))

    def list_late(path):
        """What the new process does after it has read the journal, and before it copies the snapshot."""
        if path == late.file._folder:
            for turn in turns:
                late.call(put_of(late, f"s{turn}"))
                finish_snapshots(late)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", list_late)
    client.again()
    assert client.call(commands.ListRequest("p")).sample_ids == [f"s{turn}" for turn in range(6)]


def test_a_journal_of_another_version_is_refused(client):
    data = client.file.read_bytes()
    for version in (0, 1):
        client.file.write_bytes(journal_file._pack({"at": 0.0, "v": version, "head": {"notes": {}}}) + data)
        with pytest.raises(CorruptDataError, match=f"of version {version}. Expected 2"):
            client.again()
        client.file.write_bytes(data)
    client.file.write_bytes(b"")
    with pytest.raises(CorruptDataError, match="is empty"):
        client.again()


def test_a_folder_without_a_journal_is_not_a_ledger_without_samples(tmp_path):
    with pytest.raises(BackendUnavailableError, match="there is no journal"):
        RecordedLedger(tmp_path / "not here", must_exist=True)


def test_a_full_disk_refuses_the_command(client, monkeypatch):
    """Half a frame is on the disk, and cannot even be cut off."""
    before, pwrite = client.state(), os.pwrite

    def full(fd, data, offset):
        pwrite(fd, data[: len(data) - 3], offset)
        raise OSError(28, "No space left on device")

    def refuse(fd, size):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(journal_file.os, "pwrite", full)
        with pytest.raises(BackendUnavailableError, match="No space left") as caught:
            client.put("a")
        assert (caught.value.outcome, caught.value.retryable) == ("not_done", True)
        assert client.state() == before, "a read does not meet the half frame"
        patch.setattr(journal_file.os, "ftruncate", refuse)
        with pytest.raises(BackendUnavailableError, match="Input/output"):
            client.put("a")
    assert client.state() == before
    client.put("a")
    client.again()
    assert client.call(commands.ListRequest("p")).sample_ids == ["a"]


def test_on_a_full_disk_samples_can_be_cleared(client, monkeypatch):
    """There is room for the journal only while nothing is set aside."""
    client.put("a", "b", "c")
    client.claim("t1", lease_s=0.001)
    reserve, pwrite = client.ledger.file._reserve, os.pwrite

    def full(fd, data, offset):
        if os.fstat(reserve).st_blocks:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(journal_file.os, "pwrite", full)
        for sample_id in ("a", "b"):
            with pytest.raises(BackendUnavailableError, match="No space left"):
                client.put("d")
            client.call(commands.ClearRequest("p", [sample_id]))
        client.ledger.call(commands.Collected(client.ledger.garbage()))
    assert client.call(commands.ListRequest("p")).sample_ids == ["c"]
    client.again()
    assert client.call(commands.ListRequest("p")).sample_ids == ["c"]


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.ENOSPC, "Make room on the disk"), (errno.EDQUOT, "Make room"), (errno.EACCES, "Every node .* must see")],
)
def test_a_journal_that_cannot_be_opened_says_what_to_do(client, monkeypatch, number, hint):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(journal_file.os, "rename", refuse)
    with pytest.raises(BackendUnavailableError, match=hint):
        client.again()


def test_a_note_that_is_the_work_of_a_call_is_made_once_however_soon_the_journal_is_shortened(client, monkeypatch):
    note, made = client.ledger.file.note, []

    def work():
        made.append("unit-3")
        client.ledger.note_outcome("units", b"four", ["unit-3"])
        return ["unit-3"]

    def note_and_shorten(*words):
        note(*words)
        client.ledger.file.trim(0)  # as the thread that shortens may at any moment

    monkeypatch.setattr(client.ledger.file, "note", note_and_shorten)
    call = CallId(client.name, 1, 1, 600.0)
    assert client.ledger.once(call, work) == ["unit-3"]
    client.ledger.file.commit()
    client.again()
    assert client.ledger.once(call, work) == ["unit-3"]
    assert made == ["unit-3"]
    assert client.ledger.file.notes["units"] == b"four"


def test_capacity_and_abandoned_puts_are_as_without_a_journal(tmp_path, monkeypatch):
    ledger = RecordedLedger(tmp_path, 20)
    now = ledger.file.now()
    monkeypatch.setattr(ledger.file, "now", lambda: now)
    ledger.call(commands.RegisterRequest("p", ["x"], None, ["train"], None, {}, "e"))
    first = ledger.call(put_of(ledger, "a", size=16))
    with pytest.raises(DataPlaneError, match="16 of 20 bytes are held"):
        ledger.call(put_of(ledger, "b", size=16))
    now += 61.0
    ledger.call(put_of(ledger, "b", size=16))
    with pytest.raises(StalePartitionError):
        ledger.call(commands.CommitPut(first))
