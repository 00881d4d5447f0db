"""`dataplane doctor shm_store`: every fault here is a real one, except for what the kernel offers."""

import os
import re
import resource
import signal
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import torch

from dataplane_core import connect
from dataplane_core.backends import Level
from dataplane_core.cli import main
from dataplane_core.errors import BackendUnavailableError, CorruptDataError
from dataplane_core.host_memory import MemoryLimit, memory_limit
from dataplane_shm import ShmBackend
from dataplane_shm._diagnosis import huge_pages
from dataplane_shm.config import ShmConfig

CAPACITY = 64 << 20


@pytest.fixture(autouse=True)
def home(monkeypatch):
    """Where the folders of stores lie: of these tests only. Its path is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder, f"dataplane-shm-{os.getuid()}")


@pytest.fixture
def namespace():
    return f"doctor-{uuid.uuid4().hex[:8]}"


def findings(level, **options):
    """The findings of a level: what and hint of each."""
    found = ShmBackend.diagnose(ShmConfig(**options), deadline=time.monotonic() + 20)
    return [(each.what, each.hint) for each in found if each.level is level]


def test_a_machine_that_can_run_it_has_only_ok_and_nothing_is_started(namespace, home):
    system, _, memory = findings(Level.OK, namespace=namespace)
    assert system == ("This system has memfd_create.", None)
    numbers = re.fullmatch(r"(\d+) MiB of memory .* capacity_bytes is by default half of it, (\d+) MiB.", memory[0])
    assert numbers is not None
    available, capacity = map(int, numbers.groups())
    assert available // 2 == capacity > 0
    assert findings(Level.WARNING, namespace=namespace) == findings(Level.ERROR, namespace=namespace) == []
    assert not home.exists()


def test_a_system_without_memfd_is_an_error_and_nothing_else_is_checked(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert findings(Level.ERROR) == [("This system has no memfd_create, which shm_store needs.", "Use it on Linux.")]
    assert findings(Level.OK) == findings(Level.WARNING) == []


def test_a_capacity_that_fits_is_ok_and_one_beyond_the_memory_is_a_warning_with_both_numbers(namespace):
    *_, (what, _) = findings(Level.OK, namespace=namespace, capacity_bytes=CAPACITY)
    assert what.endswith("capacity_bytes is 64 MiB.")
    most_bytes = memory_limit().most_bytes
    ((what, hint),) = findings(Level.WARNING, namespace=namespace, capacity_bytes=most_bytes)
    assert " MiB of memory are available, limited by th" in what
    assert f"capacity_bytes is {most_bytes >> 20} MiB. The system kills processes" in what
    assert hint == "Lower capacity_bytes."
    ((what, hint),) = findings(Level.ERROR, namespace=namespace, capacity_bytes=1 << 50)
    assert what.endswith(f"capacity_bytes is {1 << 30} MiB. connect refuses more than there is in all.")


def test_a_machine_without_memory_is_an_error_and_no_store_is_started(namespace, monkeypatch):
    for module in ("_backend", "_diagnosis"):
        monkeypatch.setattr(f"dataplane_shm.{module}.memory_limit", lambda: MemoryLimit(0, "the container's limit"))
    ((what, hint),) = findings(Level.ERROR, namespace=namespace)
    assert "limited by the container's limit" in what
    assert "set capacity_bytes" in hint
    with pytest.raises(BackendUnavailableError, match="no memory is available for a store, limited by the container's"):
        connect({"backend": "shm_store", "options": {"namespace": namespace}})
    connect({"backend": "shm_store", "options": {"namespace": namespace, "capacity_bytes": CAPACITY}}).close()


def test_a_limit_of_files_below_the_arena_is_an_error(namespace):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, hard))
    try:
        ((what, hint),) = findings(Level.ERROR, namespace=namespace, capacity_bytes=CAPACITY)
        assert findings(Level.ERROR, namespace=namespace, capacity_bytes=1 << 20) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert what == "ulimit -f allows files of 100 MiB. The store's memory counts as a file, of 144 MiB."
    assert hint.startswith("Run: ulimit -f unlimited.")


def test_a_limit_of_files_below_the_arena_in_a_folder_is_an_error(namespace, tmp_path):
    """It is four times as long as what it may hold: the store says the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    options = {"namespace": namespace, "capacity_bytes": CAPACITY, "durable": tmp_path / "store"}
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 20, hard))
    try:
        ((what, _),) = findings(Level.ERROR, **options)
        with pytest.raises(BackendUnavailableError, match="File too large"):
            connect({"backend": "shm_store", "options": options | {"durable": str(tmp_path / "store")}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert what == "ulimit -f allows files of 200 MiB. The store's memory counts as a file, of 576 MiB."


@pytest.fixture
def left(namespace, tmp_path):
    """The options of a store that was closed, with two rows in its folder."""
    options = {"namespace": namespace, "capacity_bytes": CAPACITY, "durable": str(tmp_path / "store")}
    with connect({"backend": "shm_store", "options": options}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.arange(1 << 20).view(2, -1).float()})
    return options


@pytest.mark.parametrize("lock", [None, b"", b"\0{"])
def test_a_folder_whose_lock_is_lost_or_damaged_still_says_what_it_holds(left, lock):
    file = Path(left["durable"], "lock")
    file.unlink() if lock is None else file.write_bytes(lock)
    assert (
        f"The durable folder {left['durable']} is open in no process. Its file 'lock' does not say who had it last. It "
        "holds 2 samples in 'p': 4 MiB of rows.",
        None,
    ) in findings(Level.OK, **left)
    assert findings(Level.ERROR, **left) == []


def test_a_folder_that_is_open_and_whose_lock_is_damaged_is_not_read(left):
    with connect({"backend": "shm_store", "options": left}):
        Path(left["durable"], "lock").write_bytes(b"")
        said = [what for what, _ in findings(Level.OK, **left)]
    assert f"The durable folder {left['durable']} is open in another process." in said


@pytest.mark.parametrize("size", [None, 4096])
def test_an_arena_that_was_removed_or_cut_is_an_error_as_for_connect(left, size):
    arena = Path(left["durable"], "arena")
    before = arena.stat().st_size
    arena.unlink() if size is None else os.truncate(arena, size)
    ((what, hint),) = findings(Level.ERROR, **left)
    wrong = f"the file {arena} has {size or 0} bytes. Expected {before}: it was cut or removed."
    assert what == f"The durable folder {left['durable']} cannot be read: {wrong}"
    assert hint == "Restore a whole copy of the folder."
    with pytest.raises(CorruptDataError, match=wrong):
        connect({"backend": "shm_store", "options": left})


def test_a_damaged_journal_is_an_error_that_names_the_folder_itself(left):
    (journal,) = Path(left["durable"]).glob("journal/*/journal")
    data = journal.read_bytes()
    journal.write_bytes(data[:100] + b"x" + data[101:])
    ((what, _),) = findings(Level.ERROR, **left)
    assert f"cannot be read: the journal in {left['durable']}/journal" in what


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_that_holds_no_store_is_an_error_as_for_connect(namespace, tmp_path, is_file):
    durable = tmp_path / "store"
    if is_file:
        durable.touch()
    else:
        durable.mkdir()
        (durable / "notes.txt").touch()
    ((what, _),) = findings(Level.ERROR, namespace=namespace, durable=durable)
    assert ("Not a directory" if is_file else "holds 'notes.txt', and no store") in what
    with pytest.raises(BackendUnavailableError):
        connect({"backend": "shm_store", "options": {"namespace": namespace, "durable": str(durable)}})


def test_a_file_system_without_room_for_the_capacity_is_a_warning(namespace, tmp_path, monkeypatch):
    durable = tmp_path / "not" / "there"
    free = os.statvfs(tmp_path)
    free_bytes = free.f_bavail * free.f_frsize
    monkeypatch.setattr("dataplane_shm._diagnosis.memory_limit", lambda: MemoryLimit(1 << 50, "nothing", 1 << 50))
    ((what, hint),) = findings(Level.WARNING, namespace=namespace, durable=durable, capacity_bytes=2 * free_bytes)
    assert f" MiB are free on the file system of the durable folder {durable}" in what
    assert f"capacity_bytes is {2 * free_bytes >> 20} MiB." in what
    assert hint.startswith("Make room")
    assert findings(Level.WARNING, namespace=namespace, durable=durable, capacity_bytes=1) == []
    assert not durable.parent.exists()


@pytest.mark.parametrize(("setting", "hints"), [("never", 1), ("deny", 1), ("advise", 0), ("always", 0)])
def test_the_setting_of_huge_pages_is_named_and_only_one_without_them_has_a_hint(tmp_path, setting, hints):
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    file.parent.mkdir(parents=True)
    words = ["always", "within_size", "advise", "never", "deny", "force"]
    file.write_text(" ".join(f"[{word}]" if word == setting else word for word in words) + "\n")
    (found,) = huge_pages(tmp_path)
    assert (found.level, found.what) == (Level.OK, f"Huge pages for shared memory are set to '{setting}'.")
    assert hints == (found.hint is not None)
    assert not hints or "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in found.hint


def test_a_kernel_without_huge_pages_is_ok(tmp_path):
    (found,) = huge_pages(tmp_path)
    assert (found.level, found.hint) == (Level.OK, None)


def test_a_running_store_says_what_it_holds_and_what_is_pinned(namespace):
    options = {"namespace": namespace, "capacity_bytes": CAPACITY, "views": True}
    config = {"backend": "shm_store", "options": options}
    with connect(config) as client, connect(config, bootstrap=False) as other:
        client.register_partition("train", fields=["rows"], num_samples=None, consumer_tasks=["trainer"])
        client.put_samples(["a", "b"], "train", {"rows": torch.arange(2 << 20).float().view(2, -1)})
        client.put_samples(["c"], "train", {"rows": torch.zeros(1, 1 << 20)})
        view = other.get_samples(["a", "b"], "train", ["rows"])
        # a capacity beyond the memory is of no concern: this store has one
        *_, (what, _) = findings(Level.OK, namespace=namespace, capacity_bytes=1 << 50)
        assert findings(Level.WARNING, namespace=namespace) == findings(Level.ERROR, namespace=namespace) == []
        del view
    assert what.startswith(
        f"The store of namespace '{namespace}' runs, with 2 clients. Of its 64 MiB, 12 MiB are held."
    )
    assert "8 MiB are pinned by reads, views and puts." in what
    assert what.endswith(" of at most 144 MiB of the system.")


def test_a_store_whose_ledger_is_dead_is_an_error_that_says_what_to_do(namespace):
    store = ShmBackend(ShmConfig(namespace=namespace, capacity_bytes=CAPACITY))
    store.start(bootstrap=True, deadline=time.monotonic() + 30)
    try:
        os.kill(store._process.pid, signal.SIGKILL)
        give_up = time.monotonic() + 20
        while not store._process.ended:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        ((what, hint),) = findings(Level.ERROR, namespace=namespace)
    finally:
        store.stop()
    assert what.startswith(f"The store of namespace '{namespace}' does not answer: ")
    assert "Close the owner's client and bootstrap anew." in hint


def test_a_folder_that_a_killed_owner_left_is_a_warning_until_the_next_owner_removes_it(namespace, home):
    left = home / namespace
    left.mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    (left / "ledger.sock").touch()
    (home / f".{namespace}.lock").touch()
    ((what, hint),) = findings(Level.WARNING, namespace="another")
    assert what == f"The folder {left} is left from an owner that was killed. It holds no data."
    assert hint.endswith(f"rm -r {left}")
    with connect({"backend": "shm_store", "options": {"namespace": namespace, "capacity_bytes": CAPACITY}}):
        assert findings(Level.WARNING, namespace="another") == []
    assert not left.exists()


def test_the_command_prints_the_findings(capsys):
    assert main(["doctor", "shm_store"]) == 0
    out = capsys.readouterr().out
    assert "  ok       This system has memfd_create.\n" in out
    assert "0 errors, " in out
