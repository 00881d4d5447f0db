"""Masters of our own: on free ports, awaited, ended by process id, with their owner at the latest."""

import os
import signal
import socket
import time

import pytest

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_mooncake import _master, machine
from dataplane_mooncake._master import Master, MasterWatch
from dataplane_testkit._timing import eventually


def in_60_s():
    return time.monotonic() + 60


def test_masters_run_beside_each_other_and_each_is_ended_alone(runs):
    one, two = Master("127.0.0.1"), Master("127.0.0.1")
    try:
        one.start(in_60_s())
        two.start(in_60_s())
        assert one.address != two.address
        pids = one.pid, two.pid
        one.stop()
        one.stop()
        assert [runs(pid) for pid in pids] == [False, True]
        host, port = two.address.split(":")
        socket.create_connection((host, int(port)), timeout=10).close()
    finally:
        one.stop()
        two.stop()
    assert not runs(pids[1])


def test_a_port_that_was_taken_meanwhile_is_not_taken_for_ours(monkeypatch):
    find = _master._free_port
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = [taken]
        monkeypatch.setattr(_master, "_free_port", lambda ip: ports.pop() if ports else find(ip))
        master = Master("127.0.0.1")
        try:
            master.start(in_60_s())
            assert master.address != f"127.0.0.1:{taken}"
            assert ports == []
        finally:
            master.stop()


@pytest.mark.parametrize(
    ("script", "within_s", "error", "said"),
    [
        ("echo no such flag >&2; exit 1", 60.0, BackendUnavailableError, "ended at each of 3 starts.* no such flag"),
        ("exec sleep 300", 5.0, OperationTimeoutError, "does not answer"),
    ],
    ids=["it_ends", "it_is_silent"],
)
def test_a_master_that_does_not_come_up_leaves_nothing(tmp_path, monkeypatch, script, within_s, error, said, runs):
    path = tmp_path / "mooncake_master"
    path.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n{script}\n")
    path.chmod(0o755)
    for module in (_master, machine):
        monkeypatch.setattr(module, "master_path", lambda: path)
    master = Master("127.0.0.1")
    with pytest.raises(error, match=said):
        master.start(time.monotonic() + within_s)
    assert not any(runs(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_watch_tells_a_dead_master_from_one_that_stands_still(stopped):
    master = Master("127.0.0.1")
    try:
        master.start(in_60_s())
        watch = MasterWatch("run", master.address, in_60_s())
        with stopped(master.pid):
            watch.check()
        assert not master.ended
        os.kill(master.pid, signal.SIGKILL)
        eventually(lambda: master.ended, 60.0)
        for look in (watch.check, watch.check, lambda: MasterWatch("run", master.address, in_60_s())):
            with pytest.raises(BackendUnavailableError, match=f"{master.address} of instance 'run' is dead") as dead:
                look()
            assert not dead.value.retryable
            assert "bootstrap the instance again" in dead.value.hint
        watch.close()
        watch.check()  # of a thread that calls while another one closes the client
    finally:
        master.stop()
