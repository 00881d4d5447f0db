"""`dataplane why`: incidents of a run, each with real processes. Each must name its culprit, however slow that is."""

import signal
import subprocess
import time
from contextlib import ExitStack

import pytest
import torch
from contents import config_in

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.config import load_config
from dataplane_testkit._timing import eventually

#: However busy the machine is.
SOON_S = 120.0

TRAINER = """
while True:
    meta = client.claim_meta("step", "trainer", ["x", "reward"], 4, timeout_s=600.0, lease_s=600.0)
    client.ack(meta)
"""

REWARD = """
while True:
    meta = client.claim_meta("step", "reward", ["x"], 1, timeout_s=600.0, lease_s=600.0)
    client.put_samples(meta.sample_ids, "step", {"reward": [1.0] * meta.size})
    client.ack(meta)
"""


def rollout(count, then="time.sleep(1000)"):
    """Puts so many samples, each with its reward."""
    return f"""
for place in range({count}):
    client.put_samples([f"s{{place}}"], "step", {{"x": [1.0], "reward": [1.0]}}, tags=[{{"weight_version": place}}])
{then}
"""


class Run:
    """A store, and the processes that use it."""

    def __init__(self, python, path, client):
        self.python, self.path, self.client, self.processes = python, path, client, []

    def start(self, role, code):
        words = (
            "import time; from dataplane_core import connect; from dataplane_core.config import load_config\n"
            f"config = load_config({self.path!r}).model_copy(update={{'role': {role!r}}})\n"
            f"client = connect(config, bootstrap=False)\nprint('ready', flush=True)\n{code}"
        )
        process = self.python.start("-c", words, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    def end(self):
        for process in self.processes:
            process.kill()
            process.send_signal(signal.SIGCONT)
            process.wait()
            process.stdout.close()

    def is_announced(self, process, operation, waits=False):
        """Waits until the store knows that a process has put samples, or was given some; or that its claim waits."""

        def done():
            work = [each for client in self.client.list_clients() if client.pid == process.pid for each in client.work]
            done = [each for each in work if each.operation == operation]
            return any(each.ended_s is None if waits else each.served_s is not None for each in done)

        eventually(done, SOON_S, f"{operation} of process {process.pid}")

    def names(self, cause, *texts):
        """Waits until the trainer is starved, for this cause, and says these texts. Returns the verdict."""
        seen = []

        def named():
            (verdict,) = self.client.why("step", "trainer")
            seen[:] = [str(verdict)]
            return verdict.state == "starved" and verdict.cause == cause and all(each in verdict.text for each in texts)

        try:
            eventually(named, SOON_S, "a verdict")
        except BaseException as error:
            raise AssertionError(f"the verdict is: {seen}") from error
        return self.client.why("step", "trainer")[0]


@pytest.fixture
def start_run(tmp_path, python):
    """``start_run(backend, capacity)``: a store of its own."""
    with ExitStack() as stack:

        def start(backend="shm_store", capacity="50MB"):
            options = {"capacity_bytes": capacity} if backend == "shm_store" else {}
            path = config_in(tmp_path, backend=backend, announce_s=0.2, warn_after_s=2.0, options=options)
            client = stack.enter_context(connect(load_config(path).model_copy(update={"role": "driver"})))
            run = Run(python, path, client)
            stack.callback(run.end)
            return run

        yield start


def test_a_producer_that_is_stopped(start_run):
    run = start_run()
    run.client.register_partition("step", ["x", "reward"], None, ["trainer"])
    run.start("trainer", TRAINER)
    producer = run.start("rollout", rollout(2))
    run.is_announced(producer, "put_samples")
    producer.send_signal(signal.SIGSTOP)
    run.names("stopped", f"process {producer.pid} on ", "(rollout) is stopped")


@pytest.mark.parametrize("backend", ["shm_store", "redis_store"])
def test_a_producer_that_was_killed(start_run, backend, capsys):
    run = start_run(backend)
    run.client.register_partition("step", ["x", "reward"], None, ["trainer"])
    trainer = run.start("trainer", TRAINER)
    producer = run.start("rollout", rollout(6))
    run.is_announced(producer, "put_samples")
    run.is_announced(trainer, "claim_meta", waits=True)
    eventually(lambda: run.client.why("step")[0].state == "waits", SOON_S, "a task that waits")
    producer.kill()
    verdict = run.names("gone", f"process {producer.pid} on ", "(rollout) is gone; it was last heard of ")
    assert verdict.culprit.startswith(f"process {producer.pid} ")
    assert main(["why", run.path]) == 1
    said = capsys.readouterr().out
    assert "step / trainer: starved for " in said
    assert f"process {producer.pid} on " in said


def test_a_store_that_is_full_of_what_a_task_has_not_consumed(start_run):
    run = start_run(capacity="100kB")
    for name, task in (("step", "trainer"), ("eval", "judge")):
        run.client.register_partition(name, ["x", "reward"], None, [task])
    judge = run.start("judge", TRAINER.replace('"step", "trainer"', '"eval", "judge"'))
    trainer = run.start("trainer", TRAINER)
    for process in (judge, trainer):
        run.is_announced(process, "claim_meta", waits=True)
    judge.kill()
    run.client.put_samples(["e0", "e1"], "eval", {"x": torch.zeros(2, 11_800)})
    producer = run.start("rollout", "client.put_samples(['s0'], 'step', {'x': [[1.0] * 10_000]})")
    run.names(
        *("full", "The store is full (94400 of 100000 bytes).", f"process {producer.pid} on ", "waits for room"),
        *("samples that the task 'judge' has not consumed", f"process {judge.pid} on ", "is gone"),
    )


def test_a_run_that_is_merely_slow_is_never_called_starved(start_run):
    run = start_run()
    run.client.register_partition("step", ["x", "reward"], 16, ["trainer", "reward"])
    # no announcement is missed, however busy this machine is
    listed = "from dataplane_core.client import announcing\nannouncing._TIMEOUT_S = 600.0\n"
    code = 'for place in range(16):\n    client.put_samples([f"s{place}"], "step", {"x": [1.0]})\n    time.sleep(0.4)'
    producer = run.start("rollout", f"{listed}{code}\ntime.sleep(1000)")
    reward = run.start("reward", listed + REWARD.replace("client.put", "time.sleep(0.3)\n    client.put"))
    run.start("trainer", listed + TRAINER.replace("while True:", "for _ in range(4):") + "\ntime.sleep(1000)")
    states = set()
    give_up = time.monotonic() + SOON_S
    while states != {"done"} and time.monotonic() < give_up:
        verdicts = run.client.why("step")
        states = {each.state for each in verdicts}
        assert "starved" not in states, [str(each) for each in verdicts]
        time.sleep(0.1)
    assert states == {"done"}
    assert None in {producer.poll(), reward.poll()}


def test_a_timeout_and_the_log_say_the_same(start_run, caplog):
    run = start_run()
    run.client.register_partition("step", ["x", "reward"], None, ["trainer"])
    producer = run.start("rollout", rollout(3, then="client.close()\ntime.sleep(1000)"))

    def is_closed():
        clients = run.client.list_clients(ended=True)
        return any(each.pid == producer.pid and each.state == "closed" for each in clients)

    eventually(is_closed, SOON_S, "its end")
    caplog.set_level("INFO")
    with pytest.raises(TimeoutError, match=f"process {producer.pid} on .* closed its client") as caught:
        run.client.claim_meta("step", "trainer", ["x"], 4, timeout_s=8.0)
    assert caught.value.verdict.cause == "short"
    assert any(f"process {producer.pid} on " in each.getMessage() for each in caplog.records)
