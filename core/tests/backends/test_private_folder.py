"""Which process owns a folder of a server, whatever happens to its files."""

import socket
import tempfile
import time

import pytest

from dataplane_core.backends import PrivateFolder
from dataplane_core.errors import AlreadyRunningError


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
