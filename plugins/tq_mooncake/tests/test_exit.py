"""A job that handled a timeout ends with an exit status of its own, however it ends, and soon."""

import os
import signal
import subprocess
import sys
import time

import pytest
import ray
import torch
from tensordict import TensorDict

_JOB = """
import sys
import torch
from tensordict import TensorDict
from dataplane_core import connect
from dataplane_core.errors import OperationTimeoutError

address, ending = sys.argv[1:]
options = {"instance": "exit", "ray_address": address, "local_buffer_size_bytes": 4 << 20}
config = {"backend": "tq_mooncake", "options": options, "op_timeout_s": 120}
client = connect(config, bootstrap=False)
hasty = connect({**config, "op_timeout_s": 1.5}, bootstrap=False)
assert client.get_samples(["s0"], "p", ["x"])["x"].sum() == 0
print("ready", flush=True)
sys.stdin.readline()
try:
    if ending == "after_a_put":
        hasty.put_samples(["t"], "p", TensorDict({"x": torch.ones(1, 400_000)}, batch_size=[1]))
    else:
        hasty.get_samples(["s0", "s1"], "p", ["x"])
except OperationTimeoutError:
    print("handled", flush=True)
if ending == "after_close":
    hasty.close()
    client.close()
    sys.exit(3)
elif ending == "with_an_error":
    raise RuntimeError("the job's own")
elif ending == "with_exit":
    sys.exit(3)
elif ending == "with_a_call_running":
    import threading, time
    threading.Thread(target=client.get_samples, args=(["s0"], "p", ["x"]), daemon=True).start()
    time.sleep(0.5)  # in the engine, most likely
"""

#: The exit status of a job by its ending; the first ones stand for the others.
_ENDINGS = {
    "after_close": 3,
    "with_an_error": 1,
    "after_a_put": 0,
    "with_exit": 3,
    "plainly": 0,
    "with_a_call_running": 0,
}


@pytest.fixture
def unit_pid(ray_address, connect):
    """The process of the one storage unit of an instance with two rows; it runs again at the end."""
    client = connect(instance="exit", ray_address=ray_address, segment_size_bytes=64 << 20)
    client.register_partition("p", ["x"], None, ["train"])
    client.put_samples(["s0", "s1"], "p", TensorDict({"x": torch.zeros(2, 400_000)}, batch_size=[2]))
    unit = ray.get_actor("tqm-exit/unit-0", namespace="dataplane")
    pid = ray.get(unit.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    yield pid
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(("times", "num_endings"), [(1, 3), pytest.param(20, 6, marks=pytest.mark.long)])
def test_a_job_that_gave_up_a_call_ends_with_its_own_status(unit_pid, ray_address, times, num_endings):
    endings = dict(list(_ENDINGS.items())[:num_endings])
    for _ in range(times):
        os.kill(unit_pid, signal.SIGCONT)
        jobs = {}
        try:
            for ending in endings:
                command = [sys.executable, "-c", _JOB, ray_address, ending]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                jobs[ending] = subprocess.Popen(command, **pipes, text=True)
            for job in jobs.values():
                assert job.stdout.readline() == "ready\n", job.communicate()[1]
            os.kill(unit_pid, signal.SIGSTOP)
            started = time.monotonic()
            for job in jobs.values():
                job.stdin.write("\n")
                job.stdin.flush()
            said = {ending: job.communicate(timeout=120) for ending, job in jobs.items()}
            assert time.monotonic() - started < 45, "the engine's own limit of a minute, not ours"
        finally:
            for job in jobs.values():
                job.kill()
                job.communicate()
        assert {ending: out for ending, (out, _) in said.items()} == dict.fromkeys(endings, "handled\n")
        assert {ending: job.returncode for ending, job in jobs.items()} == endings, said
