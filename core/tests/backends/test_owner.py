"""An owner that a backend starts: its service, its end, and what a client is told when it does not answer."""

import ctypes
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from dataplane_sqlite_example import SQLiteStore

from dataplane_core import DataPlaneConfig
from dataplane_core.backends import RefsGoneError, missing_library
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, OperationTimeoutError, PluginImportError
from dataplane_core.hosting import HostGoneError, Session
from dataplane_core.ledger import commands
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store.sqlite")


def open_client(path, bootstrap=True, cls=SQLiteStore, **options):
    config = DataPlaneConfig(backend="sqlite_example", options={"path": path, **options})
    return connect_backend(cls, config, bootstrap=bootstrap)


def pid_of(client):
    return backend_of(client).owner_pid(time.monotonic() + 60)


def test_clients_share_an_owner_that_ends_with_the_last_of_them_and_the_next_goes_on(path):
    with open_client(path) as client:
        client.register_partition("p", ["x"], None, ["t"])
        with open_client(path, bootstrap=False) as other:
            pid = pid_of(client)
            assert pid_of(other) == pid != os.getpid()
            other.put_samples(["a"], "p", {"x": torch.tensor([1])})
            held = other.claim_meta("p", "t", ["x"], 1, lease_s=600)
        assert psutil.pid_exists(pid)
        assert client.get_samples(["a"], "p", ["x"])["x"].tolist() == [1]
    eventually(lambda: not psutil.pid_exists(pid), what="the end of an owner without clients")
    with open_client(path, bootstrap=False) as late:
        assert pid_of(late) != pid
        assert late.claim_meta("p", "t", ["x"], 1, blocking=False).size == 0
        late.ack(held)


def test_rows_of_a_put_that_no_owner_knows_are_deleted_when_it_is_repeated(path, monkeypatch):
    """The log of an owner has the begin of a put only within a second."""
    unknown = 7 << 40
    with open_client(path) as client:
        backend = backend_of(client)
        owner, call = backend._owner, backend._owner.call

        def killed(deadline, command, wake=None):
            if isinstance(command, commands.BeginPut) and not begun:
                begun.append(command)
                return unknown
            owner.num_sessions += command == commands.CommitPut(unknown)  # the next one answers
            return call(deadline, command, wake)

        begun = []
        monkeypatch.setattr(owner, "call", killed)
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.tensor([1, 2])})
        assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [1, 2]
        for handle in (unknown, unknown + 1):
            with pytest.raises(RefsGoneError):
                backend.get_rows([handle], time.monotonic() + 60)


def test_a_put_whose_owner_is_gone_in_the_middle_begins_again(path, monkeypatch):
    call, sent = Session.call, []

    def lose(self, what, deadline, request, *rest):
        sent.append(type(request))
        if sent.count(commands.CommitPut) == 1 and sent[-1] is commands.CommitPut:
            raise HostGoneError("it was killed.")
        return call(self, what, deadline, request, *rest)

    with open_client(path) as client:
        client.register_partition("p", ["x"], None, ["t"])
        with monkeypatch.context() as patch:
            patch.setattr(Session, "call", lose)
            client.put_samples(["a"], "p", {"x": [1]})
        assert sent.count(commands.BeginPut) == 2
        assert backend_of(client)._owner.num_sessions == 2
        assert client.list_sample_ids("p") == ["a"]


def test_the_capacity_is_that_of_the_owner(path):
    with open_client(path, capacity_bytes=1000):
        with pytest.raises(AlreadyRunningError, match="1000"):
            open_client(path, capacity_bytes=2000)
        with open_client(path, bootstrap=False) as other:
            pid = pid_of(other)
            other.register_partition("p", ["x"], None, ["t"])
            with pytest.raises(RuntimeError, match="1000"):
                other.put_samples(["a"], "p", {"x": torch.zeros(1, 2000)})
    eventually(lambda: not psutil.pid_exists(pid), what="the end of an owner without clients")
    with open_client(path, bootstrap=False) as late, pytest.raises(RuntimeError, match="1000"):
        late.put_samples(["a"], "p", {"x": torch.zeros(1, 2000)})


def test_a_call_does_not_wait_beyond_its_deadline_for_another_that_looks_for_the_owner(path, monkeypatch):
    with open_client(path) as client, ThreadPoolExecutor(2) as pool:
        owner = backend_of(client)._owner
        session, both, looks, go_on = owner._session, threading.Barrier(2), threading.Event(), threading.Event()

        def look(deadline):
            looks.set()
            assert go_on.wait(60)
            return session

        def gone(op, deadline, command, wake):
            both.wait(60)
            if deadline < soon:
                assert looks.wait(60)
            raise HostGoneError("the owner is gone")

        soon = time.monotonic() + 30
        with monkeypatch.context() as patch:
            patch.setattr(owner, "connect", look)
            patch.setattr(session, "call", gone)
            patch.setattr(session, "finish", lambda: None)
            long = pool.submit(owner.call, soon + 60, commands.ListPartitionsRequest())
            short = pool.submit(owner.call, time.monotonic() + 1, commands.ListPartitionsRequest())
            assert isinstance(short.exception(60), OperationTimeoutError)
        go_on.set()
        assert long.result() == []


def test_a_call_that_is_interrupted_leaves_the_way_to_the_owner_open(path):
    class Interrupted:
        """A lock that is acquired, and then an interrupt comes."""

        def __init__(self, lock):
            self.lock, self.release = lock, lock.release

        def acquire(self, timeout):
            assert self.lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

    with open_client(path) as client:
        owner = backend_of(client)._owner
        owner._session, session = None, owner._session
        owner._lock, lock = Interrupted(owner._lock), owner._lock
        with pytest.raises(KeyboardInterrupt):
            client.list_partitions()
        owner._lock = lock
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(client.list_partitions).result() == []
        session.close()


def test_a_start_of_an_owner_that_is_interrupted_is_made_again(path, monkeypatch):
    made = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            made.append(self)
            pipe, self.stdin = self.stdin, MagicMock()
            self.stdin.write.side_effect = KeyboardInterrupt
            self.stdin.__exit__.side_effect = lambda *_: pipe.close()

    with open_client(path) as client:
        owner = backend_of(client)._owner
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                owner._start(0)
        assert owner._start(0)
        assert made[0].wait(60)


def test_an_owner_imports_nothing_from_the_working_folder(path, tmp_path, monkeypatch):
    (tmp_path / "msgspec.py").write_text("raise AssertionError('anybody may have written this')")
    monkeypatch.chdir(tmp_path)
    with open_client(path) as client:
        assert client.list_partitions() == []


def test_an_owner_that_cannot_start_says_why(path):
    class Local(SQLiteStore):
        """No other process can import it."""

        __module__ = "no_such_module"

    with pytest.raises(BackendUnavailableError, match=r"could not be started: .*no_such_module"):
        open_client(path, cls=Local)


# --- why it does not answer -------------------------------------------------------------------------------------------


def test_a_missing_shared_library_is_named_from_the_cause_of_an_import_that_failed():
    with pytest.raises(OSError) as caught:
        ctypes.CDLL("libacme_fabric.so.7")
    error = PluginImportError("backend 'acme' cannot be imported.")
    error.__cause__ = caught.value
    assert missing_library(error) == "libacme_fabric.so.7"
    assert missing_library(ImportError("cannot import name 'Store' from 'acme.store'")) is None
