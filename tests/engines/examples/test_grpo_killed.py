"""A GRPO run on a durable store: all its processes are killed, again and again, and the same command goes on."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from pathlib import Path

import psutil
import pytest
import resuming_grpo
from grpo_runs import EXAMPLES
from tiers import in_long

from dataplane_core import connect
from dataplane_core.errors import AlreadyRunningError
from dataplane_observe import Recording, is_recording
from dataplane_testkit._timing import eventually

PROGRAM = Path(resuming_grpo.__file__)
ROWS, PUT = 256, 32  # of a step, and of a put


class Runs:
    """Starts of one run in a folder."""

    def __init__(self, folder, python, ray_server, steps):
        self.folder, self._python = folder, python
        folder.mkdir()
        options = {"namespace": f"killed-{uuid.uuid4().hex[:8]}", "capacity_bytes": 64 << 20, "touch_ahead_bytes": 0}
        recorder = {"recorder": {"folder": str(folder / "events"), "payload": "none"}}
        self.plane = {"backend": "shm_store", "options": {**options, "durable": str(folder / "store")}}
        self.job = folder / "job.json"
        job = {"folder": str(folder), "plane": {**self.plane, "middleware": [recorder]}, "ray": ray_server}
        self.job.write_text(json.dumps({**job, "steps": steps, "every": 2}))

    def start(self):
        env = {**os.environ, "PYTHONPATH": f"{EXAMPLES}:{PROGRAM.parent}"}
        return self._python.start(PROGRAM, self.job, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def finish(self):
        process = self.start()
        try:
            printed, err = process.communicate(timeout=500)
        finally:
            process.kill()
        assert process.returncode == 0, err
        return printed, json.loads((resuming_grpo.newest_save(self.folder) / "records.json").read_text())

    def rows_put(self):
        """How many rows rollout workers have put, by partition. What a worker tries after the kill is an error."""
        rows, events = Counter(), self.folder / "events"
        for record in Recording(events).records() if is_recording(events) else ():
            if record.op == "put_samples" and record.status == "ok" and "input_ids" in record.fields:
                rows[record.partition] += record.rows
        return rows

    def committed(self):
        """How many rollouts of each step are in the store. Nobody has it open, but for what still ends of a run."""

        def opened():
            with contextlib.suppress(AlreadyRunningError):
                return connect(self.plane)
            return None

        with eventually(opened, 60.0) as client:
            names = client.list_partitions()
            return {int(name.removeprefix("train-")): client.list_samples(name).size for name in names}


def kill_all(run):
    """Kills a run with all its processes, its Ray's too where it has one, in any order."""
    run.send_signal(signal.SIGSTOP)  # meanwhile it can start no others
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    for process in random.sample(family, len(family)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.communicate()
    _, alive = psutil.wait_procs(family, timeout=150)
    assert not alive


def wait_for_rows(runs, count, run):
    def are_there():
        if run.poll() is not None:
            pytest.fail(f"the run ended: {run.communicate()}")
        return sum(runs.rows_put().values()) >= count

    eventually(are_there, 400.0)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [1, *in_long(20)])
def test_a_killed_run_gives_the_losses_of_one_that_was_not(tmp_path, python, ray_server, kills):
    """Where it is killed twenty times, its own Ray is too."""
    ray, steps = ray_server if kills == 1 else "local", 2 * kills + 2
    cut, uncut = (Runs(tmp_path / name, python, ray, steps) for name in ("cut", "uncut"))
    left = []
    for number in range(kills):
        killed = cut.start()
        try:
            if number and random.random() < 0.2:
                time.sleep(random.uniform(0, 10))  # while it starts
            else:  # the first time in the fourth step; the first two are saved
                more = random.randint(1, 2 * ROWS) if number else 3 * ROWS + PUT
                wait_for_rows(cut, sum(cut.rows_put().values()) + more, killed)
                time.sleep(random.uniform(0, 1) if number else 0)
            kill_all(killed)
        finally:
            killed.kill()
        left.append(cut.committed())
    printed, records = cut.finish()
    found = [json.loads(line) for line in (cut.folder / "found.jsonl").read_text().splitlines()]
    assert sum(left[0].values()) >= ROWS + PUT
    assert found
    for line in found:  # each step that a start began again found what was there after the kill before
        assert line["wanted"] == ROWS
        assert line["found"] in [rows[line["step"]] for rows in left if line["step"] in rows]
    total = sum(line["found"] for line in found)
    assert f"{total:,} of {ROWS * len(found):,} rollouts of interrupted steps were found committed" in printed
    assert max(cut.rows_put().values()) <= ROWS, "no row was generated twice"
    assert cut.committed() == {}
    assert records == uncut.finish()[1]
    assert len(records) == steps
