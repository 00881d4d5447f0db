"""`dataplane doctor shm_store`: every fault here is a real one, except for what the kernel offers."""

import os
import re
import resource
import shutil
import signal
import tempfile
import time
import uuid
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from doctors import findings as findings_of

from dataplane_core import connect
from dataplane_core.backends import Level
from dataplane_core.cli import main
from dataplane_core.errors import BackendUnavailableError, CorruptDataError
from dataplane_core.host_memory import MemoryLimit, memory_limit
from dataplane_shm import ShmBackend
from dataplane_shm._diagnosis import huge_pages
from dataplane_shm.config import ShmConfig
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually

CAPACITY = 64 << 20
findings = partial(findings_of, ShmBackend)


@pytest.fixture(autouse=True)
def home(monkeypatch):
    """Where the folders of stores lie: of these tests only. Its path is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder, f"dataplane-shm-{os.getuid()}")


@pytest.fixture
def options():
    return {"namespace": f"doctor-{uuid.uuid4().hex[:8]}", "capacity_bytes": CAPACITY}


@pytest.fixture
def durable(options, tmp_path):
    """The options of a store in a folder that is not there yet."""
    return {**options, "durable": str(tmp_path / "store")}


@pytest.fixture
def left(durable):
    """The options of a store that was closed, with two rows in its folder."""
    with opened(durable) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.arange(1 << 20).view(2, -1).float()})
    return durable


def opened(options, **more):
    return connect({"backend": "shm_store", "options": options}, **more)


def error(**options):
    """The only error."""
    ((what, hint),) = findings(Level.ERROR, **options)
    return what if hint is None else f"{what} {hint}"


def of_folder(options):
    """What is said of the durable folder, which is as it should be."""
    assert findings(Level.ERROR, **options) == []
    (said,) = (what for what, _ in findings(Level.OK, **options) if "durable folder" in what)
    return said


@contextmanager
def files_of_at_most(size_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_machine_that_can_run_it_has_only_ok_and_nothing_is_started(home, capsys):
    system, _, (memory, _) = findings(Level.OK)
    assert system == ("This system has memfd_create.", None)
    available, capacity = map(int, re.findall(r"(\d+) MiB", memory))
    assert available // 2 == capacity > 0
    assert findings(Level.WARNING) == findings(Level.ERROR) == []
    assert not home.exists()
    assert main(["doctor", "shm_store"]) == 0
    assert "  ok       This system has memfd_create.\n" in capsys.readouterr().out


def test_a_system_without_memfd_is_an_error_and_nothing_else_is_checked(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert "memfd_create" in error()
    assert findings(Level.OK) == findings(Level.WARNING) == []


def test_a_capacity_that_fits_is_ok_one_beyond_the_free_memory_a_warning_and_one_beyond_all_an_error(options):
    assert "capacity_bytes is 64 MiB." in findings(Level.OK, **options)[-1][0]
    most_bytes = memory_limit().most_bytes
    ((what, hint),) = findings(Level.WARNING, **{**options, "capacity_bytes": most_bytes})
    assert f"capacity_bytes is {most_bytes >> 20} MiB." in what
    assert hint == "Lower capacity_bytes."
    assert f"capacity_bytes is {1 << 30} MiB." in error(**{**options, "capacity_bytes": 1 << 50})


def test_a_machine_without_memory_is_an_error_and_no_store_is_started(options, monkeypatch):
    for module in ("_backend", "_diagnosis"):
        monkeypatch.setattr(f"dataplane_shm.{module}.memory_limit", lambda: MemoryLimit(0, "the container's limit"))
    opened(options).close()
    del options["capacity_bytes"]
    assert re.search(r"limited by the container's limit.*set capacity_bytes", error(**options))
    with pytest.raises(BackendUnavailableError, match="limited by the container's limit"):
        opened(options)


def test_a_limit_of_files_below_the_arena_is_an_error(options, durable):
    """In a folder it is four times as long as what it may hold: the store says the same."""
    with files_of_at_most(100 << 20):
        assert "files of 100 MiB. The store's memory counts as a file, of 144 MiB." in error(**options)
        assert findings(Level.ERROR, **{**options, "capacity_bytes": 1 << 20}) == []
    with files_of_at_most(200 << 20):
        assert "a file, of 576 MiB." in error(**durable)
        with pytest.raises(BackendUnavailableError, match="File too large"):
            opened(durable)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_it_says_what_is_in_a_folder_and_who_has_it(durable):
    assert "does not exist yet" in of_folder(durable)
    with opened(durable) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.arange(1 << 20).view(2, -1).float()})
        owner = f"process {backend_of(client)._process.pid} of host {os.uname().nodename}, since 20"
        assert f"is open in {owner}" in of_folder(durable)
        Path(durable["durable"], "lock").write_bytes(b"")
        assert "is open in another process." in of_folder(durable)
    with opened(durable) as client:
        owner = f"process {backend_of(client)._process.pid} of host"
    assert re.search(rf"is open in no process\. It was last in {owner}.* 2 samples in 'p': 4 MiB", of_folder(durable))


@pytest.mark.parametrize("lock", [None, b"", b"\0{"])
def test_a_folder_whose_lock_is_lost_or_damaged_still_says_what_it_holds(left, lock):
    file = Path(left["durable"], "lock")
    file.unlink() if lock is None else file.write_bytes(lock)
    assert re.search(r"is open in no process\..*does not say who.* 2 samples in 'p': 4 MiB", of_folder(left))


def journal_of(folder):
    (journal,) = folder.glob("journal/*/journal")
    return journal


def change_a_byte(path):
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"x" + data[101:])


def hold_only(folder, name):
    """A file of others in the place of the store; or a file instead of the folder."""
    shutil.rmtree(folder)
    if name:
        folder.mkdir()
    (folder / name).touch()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "arena").unlink(), r"/arena has 0 bytes"),
        (lambda folder: os.truncate(folder / "arena", 4096), r"/arena has 4096 bytes"),
        (lambda folder: journal_of(folder).unlink(), "its journal was removed"),
        (lambda folder: change_a_byte(journal_of(folder)), r"cannot be read: the log in {}/journal"),
        (lambda folder: hold_only(folder, ""), "Not a directory"),
        (lambda folder: hold_only(folder, "notes.txt"), "holds 'notes.txt', and no store"),
    ],
)
def test_a_folder_that_is_damaged_or_holds_no_store_is_an_error_as_for_connect(left, damage, said):
    folder = Path(left["durable"])
    damage(folder)
    before = sorted(folder.glob("*"))
    assert re.search(said.format(left["durable"]), error(**left))
    with pytest.raises((CorruptDataError, BackendUnavailableError)):
        opened(left)
    assert sorted(folder.glob("*")) == before


def test_a_file_system_without_room_for_the_capacity_is_a_warning(durable, tmp_path, monkeypatch):
    free = os.statvfs(tmp_path)
    free_bytes = free.f_bavail * free.f_frsize
    monkeypatch.setattr("dataplane_shm._diagnosis.memory_limit", lambda: MemoryLimit(1 << 50, "nothing", 1 << 50))
    ((what, _),) = findings(Level.WARNING, **{**durable, "capacity_bytes": 2 * free_bytes})
    assert f"free on the file system of the durable folder {durable['durable']}" in what
    assert f"capacity_bytes is {2 * free_bytes >> 20} MiB." in what
    assert findings(Level.WARNING, **{**durable, "capacity_bytes": 1}) == []
    assert not Path(durable["durable"]).exists()


# --- the kernel and what runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "hints"), [("never", True), ("deny", True), ("advise", False), ("always", False), (None, False)]
)
def test_the_setting_of_huge_pages_is_named_and_only_one_without_them_has_a_hint(tmp_path, setting, hints):
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    if setting is not None:
        file.parent.mkdir(parents=True)
        words = ["always", "within_size", "advise", "never", "deny", "force"]
        file.write_text(" ".join(f"[{word}]" if word == setting else word for word in words) + "\n")
    (found,) = huge_pages(tmp_path)
    assert found.level is Level.OK
    assert setting is None or f"'{setting}'" in found.what
    assert hints == (found.hint is not None)


def test_a_running_store_says_what_it_holds_and_what_is_pinned(options):
    with opened(options) as client, opened({**options, "views": True}, bootstrap=False) as other:
        client.register_partition("train", fields=["rows"], num_samples=None, consumer_tasks=["trainer"])
        client.put_samples(["a", "b"], "train", {"rows": torch.arange(2 << 20).float().view(2, -1)})
        client.put_samples(["c"], "train", {"rows": torch.zeros(1, 1 << 20)})
        view = other.get_samples(["a", "b"], "train", ["rows"])
        # a capacity beyond the memory is of no concern: this store has one
        asked = {**options, "capacity_bytes": 1 << 50}
        *_, (what, _) = findings(Level.OK, **asked)
        assert findings(Level.WARNING, **asked) == findings(Level.ERROR, **asked) == []
        del view
    said = r"2 clients\. Of its 64 MiB, 12 MiB are held\. 8 MiB are pinned .* of at most 144 MiB of the system\."
    assert re.search(said, what)


def test_a_store_whose_ledger_is_dead_is_an_error_that_says_what_to_do(options):
    store = ShmBackend(ShmConfig(**options))
    store.start(bootstrap=True, deadline=time.monotonic() + 30)
    try:
        os.kill(store._process.pid, signal.SIGKILL)
        eventually(lambda: store._process.ended, 20.0)
        assert re.search(r"does not answer: .*Close the owner's client and bootstrap anew", error(**options))
    finally:
        store.stop()


def test_a_folder_that_a_killed_owner_left_is_a_warning_until_the_next_owner_removes_it(options, home):
    left = home / options["namespace"]
    left.mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    (left / "ledger.sock").touch()
    (home / f".{options['namespace']}.lock").touch()
    ((what, hint),) = findings(Level.WARNING, namespace="another")
    assert f"The folder {left} is left from an owner that was killed." in what
    assert hint.endswith(f"rm -r {left}")
    with opened(options):
        assert findings(Level.WARNING, namespace="another") == []
    assert not left.exists()
