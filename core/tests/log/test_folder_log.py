"""What a folder's log holds when it is opened again: all that was answered, or it is refused."""

import errno
import os

import pytest
from tiers import in_long

from dataplane_core import log as room
from dataplane_core.errors import BackendUnavailableError, CorruptDataError
from dataplane_core.log import FolderLog, TakenError


def notes_in(folder, **options):
    log = FolderLog(folder, **options)
    log.begin()
    return log


def failing(number):
    """A call of the system that fails."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


class Logs:
    """A folder, and the process that has its log."""

    def __init__(self, folder):
        self.folder = folder
        self.again()

    def again(self):
        """The process was killed: a new one opens the log. Returns what it finds."""
        self.log = FolderLog(self.folder)
        found = [record for _, record in self.log.records]
        self.log.begin()
        for each in found:
            self.log.append(each, self.log.now())
        self.log.commit()
        return found

    def add(self, *records):
        for each in records:
            self.log.append(each, self.log.now())
            self.log.commit()

    @property
    def file(self):
        """That of the newest process that began."""
        return max(self.folder.glob("*/journal"), key=lambda path: int(path.parent.name))


@pytest.fixture
def logs(tmp_path):
    return Logs(tmp_path / "log")


def test_a_frame_that_is_not_whole_was_never_answered(logs):
    logs.add(b"a" * 50)
    data = logs.file.read_bytes()
    logs.add(b"b" * 50)
    more = logs.file.read_bytes()
    for cut in (len(data) + 1, len(data) + 20, len(more) - 1):
        logs.file.write_bytes(more[:cut])
        assert logs.again() == [b"a" * 50]
        logs.add(b"c")
        assert logs.again() == [b"a" * 50, b"c"]
    logs.file.write_bytes(more + bytes(100))
    assert logs.again() == [b"a" * 50, b"b" * 50]


@pytest.mark.parametrize("step", [7, *in_long(1)])
def test_a_damaged_byte_is_refused_wherever_it_lies(logs, step):
    """Also in the length of a frame: the frames after it would be lost in silence. The last frame may be unfinished."""
    logs.add(b"a" * 50)
    logs.log.note("n", b"value")
    logs.log.commit()
    answered = logs.file.stat().st_size
    logs.add(b"b")
    data, path = logs.file.read_bytes(), logs.file
    for at in range(0, answered, step):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        with pytest.raises(CorruptDataError, match="damaged at byte"):
            FolderLog(logs.folder)
    path.write_bytes(data)
    assert logs.again() == [b"a" * 50, b"b"]


def test_after_a_power_cut_the_disk_may_have_a_later_frame_and_not_an_earlier_one(logs):
    logs.add(b"a")
    start = logs.file.stat().st_size
    for each in (b"b" * 50, b"c"):
        logs.log.append(each, logs.log.now())
    data = logs.file.read_bytes()
    logs.file.write_bytes(data[:start] + bytes(50) + data[start + 50 :])
    assert logs.again() == [b"a"]


def test_a_process_that_ends_while_it_opens_the_log_loses_nothing(logs):
    logs.add(b"a")
    (logs.folder / "2").mkdir()
    (logs.folder / "2" / "journal.new").write_bytes(b"half")
    assert logs.again() == [b"a"]
    assert logs.file.parent.name == "3"
    FolderLog(logs.folder)  # it read the log, and ended before it began its own
    assert logs.again() == [b"a"]


def test_a_process_whose_log_was_taken_answers_nothing_and_destroys_nothing(logs):
    """As one that still runs on a node that was cut off. It may shorten its file after it saw that it still has it."""
    logs.add(b"a")
    late, taken = logs.log, []
    late._refuse_if_taken = lambda: taken.append(FolderLog(logs.folder))
    late.begin()
    del late._refuse_if_taken
    late.append(b"c", late.now())
    (logs.log,) = taken
    assert [record for _, record in logs.log.records] == [b"a"]
    logs.log.begin()
    logs.add(b"a", b"b")
    late.finish()
    with pytest.raises(TakenError):
        late.commit()
    with pytest.raises(TakenError):
        late.begin()
    for _ in range(2):
        assert logs.again() == [b"a", b"b"]


def test_a_log_of_another_version_is_refused(logs):
    beginning = room._Beginning(2, 0.0, {}, b"")
    for data, reason in ((room._packed(beginning), "of version 2. Expected 4"), (b"", "damaged at byte 0 of 0")):
        logs.file.write_bytes(data)
        with pytest.raises(CorruptDataError, match=reason):
            FolderLog(logs.folder)


def test_a_folder_without_a_log_is_not_an_empty_log(tmp_path):
    with pytest.raises(BackendUnavailableError, match="there is no log"):
        FolderLog(tmp_path / "not here", must_exist=True)
    assert not (tmp_path / "not here").exists()


def test_what_a_full_disk_has_no_room_for_is_not_there(logs, monkeypatch):
    """Half a frame is on the disk, and cannot even be cut off."""
    pwrite = os.pwrite

    def full(fd, data, offset):
        pwrite(fd, data[: len(data) - 3], offset)
        failing(errno.ENOSPC)()

    with monkeypatch.context() as patch:
        patch.setattr(room.os, "pwrite", full)
        with pytest.raises(BackendUnavailableError, match="No space left") as caught:
            logs.add(b"a" * 50)
        assert (caught.value.outcome, caught.value.retryable) == ("not_done", True)
        patch.setattr(room.os, "ftruncate", failing(errno.EIO))
        with pytest.raises(BackendUnavailableError, match="Input/output"):
            logs.add(b"a" * 50)
    logs.add(b"b")
    assert logs.again() == [b"b"]


def test_a_full_disk_has_room_for_what_makes_room(logs, monkeypatch):
    """There is room for the log only while nothing is set aside."""
    reserve, pwrite = logs.log._reserve, os.pwrite
    logs.log.note("n", b"value")

    def full(fd, data, offset):
        if os.fstat(reserve).st_blocks:
            failing(errno.ENOSPC)()
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(room.os, "pwrite", full)
        for freeing in (
            lambda: logs.log.append(b"clear", logs.log.now(), frees=True),
            lambda: logs.log.note("n", None),
        ):
            with pytest.raises(BackendUnavailableError, match="No space left"):
                logs.add(b"put")
            freeing()
    assert logs.again() == [b"clear"]
    assert logs.log.notes == {}


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.ENOSPC, "Make room on the disk"), (errno.EDQUOT, "Make room"), (errno.EACCES, "Every node .* must see")],
)
def test_a_log_that_cannot_be_opened_says_what_to_do(logs, monkeypatch, number, hint):
    with monkeypatch.context() as patch:
        patch.setattr(room.os, "open", failing(number))
        for _ in range(2):
            with pytest.raises(BackendUnavailableError, match=hint):
                FolderLog(logs.folder).begin()
            patch.undo()
            patch.setattr(room, "write_file", failing(number))


@pytest.mark.parametrize("cut_bytes", [1, 100])
def test_a_log_that_was_closed_and_is_shorter_now_is_refused(tmp_path, cut_bytes):
    log = notes_in(tmp_path, sync=False)
    log.note("n", b"value" * 20)
    log.finish()
    log.close()
    (file,) = tmp_path.glob("*/journal")
    whole = file.read_bytes()
    os.truncate(file, len(whole) - cut_bytes)
    for _ in range(2):  # what was refused changes nothing
        with pytest.raises(CorruptDataError, match="damaged at byte 0"):
            notes_in(tmp_path)
    file.write_bytes(whole)
    assert notes_in(tmp_path).notes == {"n": b"value" * 20}


def test_a_log_is_opened_again_whose_end_found_a_full_disk(tmp_path, monkeypatch):
    log = notes_in(tmp_path)
    log.note("n", b"value")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(errno.ENOSPC))
        log.finish()
    log.close()
    assert notes_in(tmp_path).notes == {"n": b"value"}
