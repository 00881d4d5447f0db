"""Clients of one store: what they see of each other, and what is left when one is killed."""

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_core.spec import GetRequest
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually

WAIT_S = 60.0
IDS = ["a", "b", "c", "d"]
ROWS = [[1, 2, 3], [], [4], [5, 6]]


@pytest.fixture(scope="module")
def config():
    """That of the store that all tests share."""
    return {"backend": "shm_store", "options": {"namespace": f"t-{uuid.uuid4().hex[:8]}", "capacity_bytes": 64 << 20}}


@pytest.fixture(scope="module")
def first_client(config):
    with connect(config) as client:
        yield client


@pytest.fixture
def owner(first_client):
    """The client that started the store, with an empty partition ``p``. At the end, nobody holds anything."""
    first_client.register_partition("p", ["x", "y"], None, ["train"])
    yield first_client
    gc.collect()
    first_client.clear_samples(None, "p")
    eventually(lambda: statistics(first_client).num_sessions == 1, WAIT_S)
    assert statistics(first_client).held_bytes == 0


def put(client, ids=IDS):
    client.put_samples(ids, "p", {"x": ROWS, "y": torch.arange(4.0)})


def with_views(config):
    return {**config, "options": {**config["options"], "views": True}}


def viewing(config):
    return connect(with_views(config), bootstrap=False)


def statistics(client):
    return backend_of(client).statistics(time.monotonic() + WAIT_S)


@pytest.fixture
def other_process(python):
    """Runs code with an attached ``client`` in another process, once it printed a line; kills it at the end."""

    @contextlib.contextmanager
    def run(config, code):
        code = (
            "import sys, time, torch; from dataplane_core import connect\n"
            f"client = connect({config!r}, bootstrap=False)\n{code}\nprint('ready', flush=True)\ntime.sleep(1000)"
        )
        process = python.start("-c", code, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    return run


# --- views ------------------------------------------------------------------------------------------------------------


def test_a_view_is_the_shared_memory_until_its_last_tensor_is_gone_also_after_close(owner, config):
    with viewing(config) as client:
        put(owner)
        assert statistics(owner).pinned_bytes == 0
        read = client.get_samples(IDS, "p", ["x", "y"])
        assert [row.tolist() for row in read["x"].unbind()] == ROWS
        some = client.get_samples(IDS[1:3], "p", ["y"])["y"]
        arena = backend_of(client)._extents._seen
        places = [tensor.data_ptr() for tensor in (read["x"].values(), read["y"], some)]
        assert all(arena.address <= place < arena.address + arena.size_bytes for place in places)
        view = read["x"].values()[2:]
        del read, some
    owner.clear_samples(None, "p")
    owner.register_partition("p", ["x", "y"], None, ["train"])
    put(owner)
    gc.collect()
    assert view.tolist() == [3, 4, 5, 6]
    assert (statistics(owner).num_sessions, statistics(owner).pinned_bytes > 0) == (2, True)
    del view
    gc.collect()
    eventually(lambda: statistics(owner).num_sessions == 1, WAIT_S)
    assert statistics(owner).pinned_bytes == 0


def test_rows_that_do_not_lie_side_by_side_are_copied(owner, config):
    with viewing(config) as client:
        put(owner)
        assert client.get_samples(["d", "a"], "p", ["y"])["y"].tolist() == [3.0, 0.0]
        put(owner, ["e", "f", "g", "h"])
        both = client.get_samples(["d", "e"], "p", ["x", "y"])
        assert [row.tolist() for row in both["x"].unbind()] == [[5, 6], [1, 2, 3]]
        both["y"].add_(1)
        assert client.get_samples(["d", "e"], "p", ["y"])["y"].tolist() == [3.0, 0.0]
        del both
        assert statistics(owner).pinned_bytes == 0


def test_a_write_into_a_view_changes_nothing_for_others(owner, config, other_process):
    put(owner)
    with other_process(
        with_views(config), "y = client.get_samples(['a', 'b'], 'p', ['y'])['y']\nprint('ready', flush=True)\ny[0] = 9"
    ) as it:
        assert it.wait(WAIT_S) == -signal.SIGSEGV
    assert owner.get_samples(IDS, "p", ["y"])["y"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_killed_client_leaves_neither_pins_nor_rows_nor_bytes(owner, config, other_process):
    """It has a view, and is in the middle of a put."""
    put(owner)
    code = """
from dataplane_core.backends import extent_client
view = client.get_samples(["a", "b"], "p", ["x"])
def stop(*_, **__):
    print("ready", flush=True)
    time.sleep(1000)
extent_client.copy_arrays = stop
client.put_samples(["w"], "p", {"x": torch.ones(1, 100_000, dtype=torch.int64)})
"""
    before = statistics(owner).held_bytes
    with other_process(with_views(config), code) as killed:
        assert statistics(owner).pinned_bytes > 0
        assert statistics(owner).held_bytes >= before + 100_000
        killed.send_signal(signal.SIGKILL)
        eventually(lambda: (statistics(owner).pinned_bytes, statistics(owner).held_bytes) == (0, before), WAIT_S)
    assert owner.list_samples("p").sample_ids == IDS


# --- who may connect --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="not run: only root can become another user")
def test_another_user_is_refused_also_where_the_file_system_lets_it_in(owner):
    socket = backend_of(owner)._folder.socket
    assert [path.stat().st_mode & 0o777 for path in (socket.parent, socket)] == [0o700, 0o600]
    socket.parent.chmod(0o755)
    socket.chmod(0o666)
    code = f"""
import os, socket
folder = os.open({str(socket.parent)!r}, os.O_PATH)  # the folders above it let nobody in
os.setuid(65534)
channel = socket.socket(socket.AF_UNIX)
channel.connect(f"/proc/self/fd/{{folder}}/{socket.name}")
try:
    channel.sendall(bytes([3, 0, 0, 0, 0x92, 1, 0xC0]))
    print(channel.recv(10) == b"")
except ConnectionError:
    print(True)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    socket.chmod(0o600)
    socket.parent.chmod(0o700)
    assert done.stdout == "True\n", done.stderr


# --- several at once --------------------------------------------------------------------------------------------------


def test_a_closed_client_has_no_session_though_its_errors_are_kept(owner, config):
    put(owner)
    errors = []
    for _ in range(3):
        with connect(config, bootstrap=False) as client:
            views = client.get_samples(IDS, "p", ["y"])
            with pytest.raises(KeyError) as caught:
                client.get_samples(["absent"], "p", ["y"])
            errors.append(caught.value)
    eventually(lambda: statistics(owner).num_sessions == 1, WAIT_S)
    assert views["y"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(errors) == 3


def test_a_read_that_gave_up_holds_nothing_though_the_ledgers_process_gets_to_it_later(owner, stopped):
    put(owner)
    connection = backend_of(owner)._extents.session
    other = connection._take("the test's", time.monotonic() + WAIT_S)
    request = GetRequest(partition_id="p", sample_ids=IDS, fields=["y"], deadline=time.monotonic() + 0.2)
    with stopped(backend_of(owner)._process.pid):
        with pytest.raises(OperationTimeoutError):
            backend_of(owner).get_samples(request)
        connection._idle.append(other)
        gc.collect()
        connection._send_releases()
    assert owner.get_samples(IDS, "p", ["y"])["y"].tolist() == [0.0, 1.0, 2.0, 3.0]
    eventually(lambda: statistics(owner).pinned_bytes == 0, WAIT_S)


def test_a_pin_that_ends_while_nothing_can_be_sent_ends_with_a_later_request(owner, config, monkeypatch):
    put(owner)
    with viewing(config) as client:
        connection = backend_of(client)._extents.session
        view = client.get_samples(IDS, "p", ["y"])
        connection._idle.pop().close()
        monkeypatch.setattr(connection, "_address", replace(connection._address, path=Path("/nowhere")))
        del view
        gc.collect()  # old versions of tensordict refer to a column in circles
        with pytest.raises(BackendUnavailableError):
            client.list_samples("p")
        monkeypatch.undo()
        assert statistics(owner).pinned_bytes > 0
        client.list_samples("p")
        assert statistics(owner).pinned_bytes == 0


def test_the_memory_is_not_inherited_and_the_ledgers_process_imports_no_torch(owner, config):
    """So it starts in a fraction of the time, and stays small. Who attaches has the owner's limits."""
    assert not os.get_inheritable(backend_of(owner)._extents.arena.fd)
    maps = Path(f"/proc/{backend_of(owner)._process.pid}/maps").read_text()
    assert ("msgspec" in maps, "libtorch" in maps) == (True, False)
    with connect({**config, "options": {"namespace": config["options"]["namespace"]}}, bootstrap=False) as client:
        assert backend_of(client).config.capacity_bytes == 64 << 20


def test_a_ledgers_process_without_file_descriptors_serves_on_rests_and_accepts_later(owner, config):
    pid = backend_of(owner)._process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    with ThreadPoolExecutor(1) as pool:
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(1000)) - used), hard))
            attaching = pool.submit(connect, config, bootstrap=False)
            log = backend_of(owner)._folder.path / "ledger.log"
            eventually(
                lambda: "no client is accepted for 1.0 s: [Errno 24] Too many open files" in log.read_text(), WAIT_S
            )
            put(owner)
            stat = Path(f"/proc/{pid}/stat")
            eventually(lambda: {stat.read_text().rpartition(")")[2].split()[0] for _ in range(20)} == {"S"}, WAIT_S)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        with attaching.result() as client:
            assert client.list_samples("p").sample_ids == IDS


def test_a_client_without_file_descriptors_says_so_loses_nothing_and_goes_on(owner):
    connection = backend_of(owner)._extents.session
    put(owner)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    idle = [connection._idle.pop() for _ in range(len(connection._idle))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(BackendUnavailableError, match="this process can open no further socket") as caught:
            owner.list_samples("p")
        assert caught.value.retryable
        connection.stop_waiting("a claim that cannot be told")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection._idle.extend(idle)
    assert owner.list_samples("p").sample_ids == IDS
