"""Which process owns a folder, whatever happens to its files."""

import os
import socket
import stat
import tempfile
import time

import pytest

from dataplane_core import ownership
from dataplane_core.errors import AlreadyRunningError
from dataplane_core.ownership import PrivateFolder, lock_folder


def soon():
    return time.monotonic() + 60.0


@pytest.fixture
def folders(monkeypatch):
    """Two clients of the same store; the first one owns it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # a short path, as that of a socket must be
        monkeypatch.setattr("tempfile.tempdir", home)
        first, second = (PrivateFolder("test", "store", "s") for _ in range(2))
        first.claim(soon())
        yield first, second
        for each in (first, second):
            each.release()


def test_a_folder_has_one_owner_until_that_releases_it(folders):
    first, second = folders
    assert second.is_owned
    with pytest.raises(AlreadyRunningError, match="another client runs the store"):
        second.claim(soon())
    first.release()
    assert not second.is_owned
    assert not first.path.exists()
    second.claim(soon())
    assert first.is_owned


def test_a_store_whose_lock_file_was_deleted_is_owned_as_long_as_its_server_listens(folders):
    """Systems delete files of the temporary folder that are old."""
    first, second = folders
    (first.path / "data").touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(first.socket))
        server.listen(1)
        first.lock_path.unlink()
        assert second.is_owned
        with pytest.raises(AlreadyRunningError):
            second.claim(soon())
        assert second.is_owned
        assert (first.path / "data").exists()
    assert not second.is_owned
    second.claim(soon())
    assert not (first.path / "data").exists()
    (second.path / "data").touch()
    first.release()
    assert (second.path / "data").exists(), "the folder is another owner's by now"
    assert first.is_owned


def test_only_the_folder_itself_is_its_owners_alone(tmp_path):
    """Its parents may be shared: those that are missing are made as other programs make them."""
    before = os.umask(0o022)
    try:
        os.close(lock_folder(tmp_path / "volume" / "runs" / "own", "notes", 0.0))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / each).stat().st_mode) for each in ("volume", "volume/runs", "volume/runs/own")]
    assert modes == [0o755, 0o755, 0o700]


def test_a_folder_is_made_where_the_parent_may_not_be_read(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(ownership, "sync_path", refuse)  # root may read it
    for _ in range(2):
        os.close(lock_folder(tmp_path / "own", "notes", 0.0))
