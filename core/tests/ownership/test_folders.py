"""Who owns what a process left: folders and processes."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dataplane_core import ownership
from dataplane_core.errors import AlreadyRunningError
from dataplane_core.ownership import OwnedProcess, PrivateFolder, last_words, lock_folder
from dataplane_testkit._timing import eventually


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


# --- processes --------------------------------------------------------------------------------------------------------

_OWNER = """
import json, sys, time
from pathlib import Path
from dataplane_core.ownership import OwnedProcess
made = OwnedProcess(["sleep", "1000"], folder=Path(sys.argv[1]))
print(json.dumps([made.pid, made._watcher.pid]), flush=True)
time.sleep(1000)
"""


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_owner_takes_it_along(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    words = [sys.executable, "-c", _OWNER, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as owner:
        server, watcher = json.loads(owner.stdout.readline())
        ran = runs(server)
        os.killpg(owner.pid, signal.SIGKILL)
    assert ran
    eventually(lambda: not runs(server) and not runs(watcher) and not folder.exists())  # the watcher tidies up


_KILLED = """
import os, signal, subprocess
from dataplane_core.ownership import OwnedProcess
subprocess.Popen = lambda words, **options: print(words[4], flush=True) or os.kill(os.getpid(), signal.SIGKILL)
OwnedProcess(["sleep", "1000"])
"""


def test_an_owner_that_is_killed_before_its_watcher_runs_takes_it_along():
    server = int(subprocess.run([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, check=False).stdout)
    eventually(lambda: not runs(server))


def test_ending_it_leaves_no_process(tmp_path):
    for end_s in (0.0, 5.0):
        process = OwnedProcess(["sleep", "1000"], end_s=end_s)
        eventually(lambda process=process: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        assert not process.ended
        process.end()
        process.end()
        assert process.ended
        assert not runs(process.pid)


def test_a_fork_does_not_hold_what_tells_that_its_owner_is_gone():
    owned = OwnedProcess(["sleep", "1000"])
    child = os.fork()
    if not child:
        os._exit(0 if owned._watcher.stdin.closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    owned.end()


def test_its_output_goes_to_the_log(tmp_path):
    log = tmp_path / "log"
    process = OwnedProcess(["sh", "-c", "echo one; echo two >&2; exit 3"], log=log)
    eventually(lambda: process.ended)
    process.end()
    assert last_words(log) == "one / two"


def test_what_cannot_be_started_is_an_error_at_once():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        OwnedProcess(["no-such-program"])
