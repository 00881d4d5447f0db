"""Recordings that processes write beside each other, also if one is killed or a disk is full."""

import signal
import subprocess

import pytest

from dataplane_observe import Recording, is_recording

WRITES = """
import sys, torch
from dataplane_core import connect
recorder = {"folder": sys.argv[1], "payload": "all", "max_bytes": int(sys.argv[3])}
with connect({"backend": "noop", "role": sys.argv[2], "middleware": [{"recorder": recorder}]}) as client:
    client.register_partition("p", ["x"], None, ["t"])
    print("ready", flush=True)
    for number in range(int(sys.argv[4])):
        ids = [f"{sys.argv[2]}{number}_{row}" for row in range(20)]
        client.put_samples(ids, "p", {"x": torch.full((20, 8), float(number))})
        client.clear_samples(ids, "p")
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "recording"


def test_processes_that_share_a_recording_and_one_that_is_killed(folder, python):
    killed = python.start("-c", WRITES, folder, "killed", 10**9, 10**9, stdout=subprocess.PIPE)
    assert killed.stdout.readline()
    a, b = (python.start("-c", WRITES, folder, name, 10**9, 30) for name in "ab")
    assert [a.wait(timeout=300), b.wait(timeout=300)] == [0, 0]
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=300)
    killed.stdout.close()
    recording = Recording(folder)
    puts = [each for each in recording.records() if each.op == "put_samples"]
    by_role = {name: [each for each in puts if each.client.role == name] for name in ("a", "b", "killed")}
    assert [each.ids[0] for each in by_role["a"]] == [f"a{number}_0" for number in range(30)]
    assert [each.ids[0] for each in by_role["b"]] == [f"b{number}_0" for number in range(30)]
    for each in (*by_role["killed"][:20], *by_role["killed"][-20:]):
        ids, columns = recording.rows(each)
        assert columns["x"][0, 0] == float(ids[0].split("_")[0].removeprefix("killed"))
    assert len({each.run for each in recording.writers}) == 1


def test_a_recording_is_read_while_its_segments_are_deleted(folder, python):
    writing = python.start("-c", WRITES, folder, "a", 1 << 16, 120)
    while writing.poll() is None:
        if is_recording(folder):
            numbers = [int(each.segment[-6:]) for each in Recording(folder).records()]
            assert numbers == sorted(numbers)
    assert writing.wait(timeout=300) == 0


@pytest.mark.parametrize("more", [["last"], []])
def test_a_full_disk_ends_no_operation_and_what_a_recording_lost_is_counted(folder, python, more):
    code = """
import resource, signal, sys, torch
from dataplane_core import connect
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with connect({"backend": "noop", "middleware": [{"recorder": {"folder": sys.argv[1]}}]}) as client:
    client.register_partition("p", ["x"], None, ["t"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
    for number in range(10):
        client.put_samples([str(number)], "p", {"x": torch.ones(1)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for name in sys.argv[2:]:
        client.put_samples([name], "p", {"x": torch.ones(1)})
"""
    done = python.run("-c", code, folder, *more)
    assert done.returncode == 0
    assert done.stderr.count("the recorder cannot write") == 1
    recording = Recording(folder)
    found = list(recording.records())
    puts = [each.ids[0] for each in found if each.op == "put_samples"]
    num_lost = sum(each.lines for each in found if each.op == "lost")
    assert num_lost > 0
    assert puts == [*map(str, range(10 - num_lost)), *more]
    assert all("could not write" in remark for remark in recording.remarks)
