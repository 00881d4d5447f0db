"""A job that handled a timeout ends with an exit status of its own, however it ends, and soon."""

import contextlib
import os
import signal
import subprocess
from collections import defaultdict

import pytest
import ray
import torch
from tiers import in_long

from dataplane_core import connect

#: Small; and a busy machine may need long to start the master.
SMALL = {"local_buffer_size_bytes": 4 << 20, "master_start_s": 85}

#: Makes a job of each ending, again and again: forks of a process that has imported what takes long, but not Mooncake's
#: library, whose threads a fork would not have. A job ends as any script does, at its last line; then its status is
#: printed. Each line begins with the ending.
_JOBS = """
import os, sys, time
import ray, torch
from tensordict import TensorDict
from dataplane_core import connect
from dataplane_core.client.connection import LATEST_END
from dataplane_core.errors import OperationTimeoutError
from dataplane_core.connecting import load_backend

def say(ending, word):  # in one piece, however Python buffers: several jobs have this pipe
    sys.stdout.write(f"{ending} {word}\\n")
    sys.stdout.flush()

address, times, *endings = sys.argv[1:]
load_backend("tq_mooncake")
assert "mooncake.store" not in sys.modules
for _ in range(int(times)):
    jobs = {}
    for ending in endings:
        job = os.fork()
        if not job:
            break
        jobs[job] = ending
    else:
        while jobs:
            job, status = os.wait()
            say(jobs.pop(job), os.waitstatus_to_exitcode(status))
        continue
    break  # this is a job
else:
    sys.exit()

options = {"instance": "exit", "ray_address": address, "local_buffer_size_bytes": 4 << 20}
config = {"backend": "tq_mooncake", "options": options, "op_timeout_s": 120}
client = connect(config, bootstrap=False)
assert client.get_samples(["s0"], "p", ["x"])["x"].sum() == 0
say(ending, "ready")
os.read(0, 1)
before = LATEST_END.set(time.monotonic() + 1.5)
try:
    if ending == "after_a_put":
        client.put_samples(["t"], "p", {"x": torch.ones(1, 400_000)})
    else:
        client.get_samples(["s0", "s1"], "p", ["x"])
except OperationTimeoutError:
    say(ending, "handled")
LATEST_END.reset(before)
if ending == "after_close":
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


@pytest.fixture(scope="module")
def unit(ray_address):
    """The process of the one storage unit of an instance with two rows."""
    options = {"instance": "exit", "ray_address": ray_address, "segment_size_bytes": 64 << 20, **SMALL}
    with connect({"backend": "tq_mooncake", "options": options, "op_timeout_s": 90}) as client:
        client.register_partition("p", ["x"], None, ["train"])
        client.put_samples(["s0", "s1"], "p", {"x": torch.zeros(2, 400_000)})
        unit = ray.get_actor("tqm-exit/unit-0", namespace="dataplane")
        yield ray.get(unit.__ray_call__.remote(lambda _: os.getpid()), timeout=60)


@pytest.fixture
def start_jobs(ray_address, tmp_path, python):
    """Starts the process that makes jobs of these endings, and a file for what they say to standard error."""
    with contextlib.ExitStack() as stack:

        def start(endings, times):
            errors = stack.enter_context((tmp_path / "errors").open("w+"))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            command = ["-c", _JOBS, ray_address, times, *endings]
            jobs = stack.enter_context(python.start(*command, **pipes, text=True, start_new_session=True))
            stack.callback(end, jobs)
            return jobs

        def end(jobs):
            if jobs.poll() is None:
                os.killpg(jobs.pid, signal.SIGKILL)  # with the jobs that it waits for

        yield start


@pytest.mark.timeout(580)
@pytest.mark.parametrize(("times", "num_endings"), [(1, 2), *in_long((20, 6))])
def test_a_job_that_gave_up_a_call_ends_with_its_own_status(unit, stopped, start_jobs, tmp_path, times, num_endings):
    endings = dict(list(_ENDINGS.items())[:num_endings])
    jobs = start_jobs(endings, times)

    def read(num_lines):
        """The words of the next lines of each ending."""
        said = defaultdict(list)
        for _ in range(num_lines * len(endings)):
            ending, word = jobs.stdout.readline().split() or ("nothing", (tmp_path / "errors").read_text()[-2000:])
            said[ending].append(word)
        return said

    for _ in range(times):
        assert read(1) == {ending: ["ready"] for ending in endings}
        with stopped(unit):
            jobs.stdin.write("\n" * len(endings))
            jobs.stdin.flush()
            assert read(2) == {ending: ["handled", str(status)] for ending, status in endings.items()}


@pytest.mark.timeout(580)
@pytest.mark.parametrize("times", [1, *in_long(6)])
def test_a_job_whose_threads_are_in_puts_when_it_ends_ends_with_its_own_status(unit, start_jobs, tmp_path, times):
    ending = "with_threads_that_put"
    jobs = start_jobs([ending], times)
    for _ in range(times):
        assert jobs.stdout.readline() == f"{ending} ready\n"
        jobs.stdin.write("\n")
        jobs.stdin.flush()
        assert jobs.stdout.readline() == f"{ending} 0\n", (tmp_path / "errors").read_text()[-2000:]
