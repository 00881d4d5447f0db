"""The folder of what outlives its processes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from dataplane_core.errors import CorruptDataError
from dataplane_core.hosting import durable, lock_folder
from dataplane_core.journal.file import JournalFile


def test_only_the_folder_itself_is_its_owners_alone(tmp_path: Path) -> None:
    """Its parents may be shared: those that are missing are made as other programs make them."""
    before = os.umask(0o022)
    try:
        os.close(lock_folder(tmp_path / "volume" / "runs" / "own", "notes", 0.0))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / each).stat().st_mode) for each in ("volume", "volume/runs", "volume/runs/own")]
    assert modes == [0o755, 0o755, 0o700]


def test_a_folder_is_made_where_the_parent_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(durable, "sync_path", refuse)  # root may read it
    for _ in range(2):
        os.close(lock_folder(tmp_path / "own", "notes", 0.0))


@pytest.mark.parametrize("cut_bytes", [1, 20, 100, 300])
def test_a_journal_that_was_closed_and_is_shorter_now_is_refused(tmp_path: Path, cut_bytes: int) -> None:
    def opened(finish: bool = True) -> list[str]:
        file = JournalFile(tmp_path, sync=False)
        names = sorted(file.notes)
        file.note(f"n{len(names)}", b"value" * 20)
        if finish:
            file.finish()
        file.close()
        return names

    def journal() -> Path:
        (path,) = tmp_path.glob("*/journal")
        return path

    assert [opened(), opened()] == [[], ["n0"]]
    os.truncate(journal(), journal().stat().st_size - cut_bytes)
    for _ in range(2):  # what was refused changes nothing
        with pytest.raises(CorruptDataError, match=r"lacks \d+ of the \d+ bytes that it had when it was closed"):
            opened()
    (journal().parent / "ended").unlink()
    opened(finish=False)
    os.truncate(journal(), journal().stat().st_size - 1)
    opened()  # its process was killed, so that its last frame may be torn


def test_a_journal_is_opened_again_whose_end_found_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = JournalFile(tmp_path)
    file.note("n", b"value")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)  # of the note how long the journal is
        file.finish()
    file.close()
    file = JournalFile(tmp_path)
    assert file.notes == {"n": b"value"}
    file.finish()
    (ended,) = tmp_path.glob("*/ended")
    assert file._synced == int(ended.read_text()), "the disk had less than the note says"
    file.close()
