"""A job that handled a timeout ends with an exit status of its own, however it ends, and soon."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import ray
import torch
from tensordict import TensorDict

#: Makes one job after the other: forks of a process that has imported what takes long, but not Mooncake's library,
#: whose threads a fork would not have. A job ends as any script does, at its last line; then its status is printed.
_JOBS = """
import os, sys
import ray, torch
from tensordict import TensorDict
from dataplane_core import connect
from dataplane_core.errors import OperationTimeoutError
from dataplane_core.plugins import load_backend

address, ending, times = sys.argv[1:]
load_backend("tq_mooncake")
assert "mooncake.store" not in sys.modules
for _ in range(int(times)):
    job = os.fork()
    if not job:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]), flush=True)
else:
    sys.exit()

options = {"instance": "exit", "ray_address": address, "local_buffer_size_bytes": 4 << 20}
config = {"backend": "tq_mooncake", "options": options, "op_timeout_s": 120}
client = connect(config, bootstrap=False)
hasty = connect({**config, "op_timeout_s": 1.5}, bootstrap=False)
assert client.get_samples(["s0"], "p", ["x"])["x"].sum() == 0
print("ready", flush=True)
os.read(0, 1)
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
elif ending == "with_threads_that_put":
    import threading
    def put_on(sample_id, begun):
        while True:
            client.put_samples([sample_id], "p", {"x": torch.ones(1, 400_000)})
            begun.set()
    for number in range(8):
        begun = threading.Event()
        threading.Thread(target=put_on, args=(f"t{number}", begun), daemon=True).start()
        begun.wait()
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


@pytest.fixture
def start_jobs(ray_address, tmp_path):
    """Starts the process that makes jobs of one ending, with a file for what they say to standard error."""
    with contextlib.ExitStack() as stack:

        def start(ending, times):
            errors = stack.enter_context((tmp_path / ending).open("w+"))
            command = [sys.executable, "-c", _JOBS, ray_address, ending, str(times)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            jobs = stack.enter_context(subprocess.Popen(command, **pipes, text=True, start_new_session=True))
            stack.callback(end, jobs)
            return jobs

        def end(jobs):
            if jobs.poll() is None:
                os.killpg(jobs.pid, signal.SIGKILL)  # with the job that it waits for

        yield start


_LONG = [pytest.mark.long, pytest.mark.timeout(580)]


@pytest.mark.parametrize(("times", "num_endings"), [(1, 3), pytest.param(20, 6, marks=_LONG)])
def test_a_job_that_gave_up_a_call_ends_with_its_own_status(unit_pid, start_jobs, tmp_path, times, num_endings):
    endings = dict(list(_ENDINGS.items())[:num_endings])
    all_jobs = {ending: start_jobs(ending, times) for ending in endings}

    def read():
        """The next line of each."""
        return {ending: jobs.stdout.readline().strip() for ending, jobs in all_jobs.items()}

    def errors():
        return {ending: (tmp_path / ending).read_text()[-2000:] for ending in endings}

    for _ in range(times):
        assert read() == dict.fromkeys(endings, "ready"), errors()
        os.kill(unit_pid, signal.SIGSTOP)
        started = time.monotonic()
        for jobs in all_jobs.values():
            jobs.stdin.write("\n")
            jobs.stdin.flush()
        handled, ended = read(), read()
        assert time.monotonic() - started < 45, "the engine's own limit of a minute, not ours"
        assert handled == dict.fromkeys(endings, "handled"), errors()
        assert ended == {ending: str(status) for ending, status in endings.items()}, errors()
        os.kill(unit_pid, signal.SIGCONT)


def test_a_job_whose_threads_are_in_puts_when_it_ends_ends_with_its_own_status(unit_pid, start_jobs, tmp_path):
    ending = "with_threads_that_put"
    jobs = start_jobs(ending, 6)
    for _ in range(6):
        assert jobs.stdout.readline() == "ready\n"
        jobs.stdin.write("\n")
        jobs.stdin.flush()
        assert jobs.stdout.readline() == "0\n", (tmp_path / ending).read_text()[-2000:]
