"""The GRPO example on a durable store: all its processes are killed, again and again, and the same command goes on."""

import contextlib
import json
import random
import signal
import time
import uuid
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
from grpo.config import load_config
from grpo.errors import UserError
from grpo.model import build_model
from grpo.plane_path import DataPlanePath, PlaneRolloutWorker
from grpo.weights import pack_weights
from grpo_runs import run, start, without_ray_agents, write_config
from tiers import in_long

from dataplane_core import connect
from dataplane_core.errors import AlreadyRunningError
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.rollout import FoundRollouts
from dataplane_integrations.trainer.groups import InProcessWorkerGroup
from dataplane_observe import Recording, is_recording
from dataplane_testkit._timing import eventually

ROWS = 32  # of a step
#: A busy machine may take minutes for a start.
PATIENCE = {"start_timeout_s": 400, "step_timeout_s": 400}
GOES_ON = {"every": 2, "resume": True}

# --- a start of a run, in this process --------------------------------------------------------------------------------


class Start:
    """A start of a run, without its training: a path with its rollout worker, in this process."""

    def __init__(self, client, config, found):
        sizes = config.model
        worker = PlaneRolloutWorker(sizes, max_new_tokens=6, temperature=1.0, seed=config.seed, prompts_per_put=2)
        worker.setup_data_plane(client)
        worker.load_weights(pack_weights(build_model(sizes, seed=1)))
        self.generated: list[int] = []
        generate_portion = worker.generate_portion

        def noted(step, prompts, answers, first):
            self.generated.append(first)
            return generate_portion(step, prompts, answers, first)

        worker.generate_portion = noted  # type: ignore[method-assign]
        self.path = DataPlanePath(config, found=FoundRollouts(found))
        self.path._policy = DataPlanePolicy(InProcessWorkerGroup([SimpleNamespace(setup_data_plane=id)]), client)
        self.path._refuse_other_runs()
        self.path._on_rollout = lambda name, *given, doing: getattr(worker, name)(*given)  # type: ignore[method-assign]

    def answers(self):
        return self.path.generate(3, ["1=", "22=", "333=", "4444=", "5="]).answers


def rows_of(client):
    ids = sorted(client.list_sample_ids("train-3"))
    rows = client.get_samples(ids, "train-3", ["input_ids", "generation_logprobs"])
    return {
        each: [row["input_ids"].tolist(), row["generation_logprobs"].tolist()]
        for each, row in zip(ids, rows, strict=True)
    }


def test_a_step_that_is_begun_again_generates_what_is_missing_and_the_same_and_other_runs_are_refused(tmp_path):
    file, found = write_config(tmp_path, saving=GOES_ON, data_plane={"backend": "noop"}), tmp_path / "found.jsonl"
    config = load_config(file, {})
    with connect({"backend": "noop"}) as client:
        first, late = Start(client, config, found), Start(client, load_config(file, {"seed": 6}), found)
        answers, rows = first.answers(), rows_of(client)
        assert first.generated == [0, 2, 4]
        assert len(rows) == 5 * 4
        with pytest.raises(UserError, match="holds rows of another run"):  # it found the store empty, too
            late.answers()
        for other in ({"seed": 6}, {"grpo.learning_rate": 0.5}, {"model.width": 16}):
            with pytest.raises(UserError, match=r"holds rows of another run in 'train-3'.* Start it again with"):
                Start(client, load_config(file, other), found)
        assert rows_of(client) == rows
        Start(client, load_config(file, {"grpo.steps": 50, "data_plane.backend": "redis_store"}), found)  # the same run

        client.clear_samples([f"s3_p{prompt}_g{answer}" for prompt in (2, 3) for answer in range(4)], "train-3")
        again = Start(client, config, found)
        assert again.answers() == answers
        assert again.generated == [2]
        assert rows_of(client) == rows
        assert str(FoundRollouts(found)).startswith("12 of 20 ")
        again.path.saved(2)
        again.path.restore(tmp_path, 2)
        assert client.list_partitions() == ["train-3"]
        again.path.restore(tmp_path, 3)  # the start before was killed between this save and `saved`
        assert client.list_partitions() == []


# --- whole runs -------------------------------------------------------------------------------------------------------


def committed(plane):
    """How many rollouts of each step are in the store. Nobody has it open, but for what still ends of a killed run."""

    def opened():
        with contextlib.suppress(AlreadyRunningError):
            return connect(plane)
        return None

    with eventually(opened, 60.0) as client:
        names = client.list_partitions()
        return {int(name.removeprefix("train-")): client.list_samples(name).size for name in names}


def rows_put(out):
    """How many rows rollout workers have put, by partition. What a worker tries after the kill is an error."""
    rows = Counter()
    for record in Recording(out / "events").records() if is_recording(out / "events") else ():
        if record.op == "put_samples" and record.status == "ok" and "input_ids" in record.fields:
            rows[record.partition] += record.rows
    return rows


def wait_for_rows(out, count, run):
    def are_there():
        if run.poll() is not None:
            pytest.fail(f"the run ended: {run.communicate()}")
        return sum(rows_put(out).values()) >= count

    eventually(are_there, 400.0)


def kill_all(run):
    """Kills a run with all its processes, those of its Ray too, in any order. Meanwhile it can start no others."""
    run.send_signal(signal.SIGSTOP)
    family = psutil.Process(run.pid).children(recursive=True)
    lasting = without_ray_agents(family)
    for process in random.sample([psutil.Process(run.pid), *family], len(family) + 1):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.communicate()
    _, alive = psutil.wait_procs(lasting, timeout=150)
    assert not alive


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [1, *in_long(20)])
def test_a_run_that_is_killed_at_random_moments_gives_the_losses_of_one_that_was_not(
    tmp_path, ray_server, python, kills
):
    """Where it is killed twenty times, its own Ray is too."""
    options = {"namespace": f"killed-{uuid.uuid4().hex[:8]}", "capacity_bytes": 64 << 20, "touch_ahead_bytes": 0}
    plane = {"backend": "shm_store", "options": {**options, "durable": str(tmp_path / "store")}}
    ray = PATIENCE | ({"address": ray_server} if kills == 1 else {})
    sections = {"grpo": {"steps": 2 * kills + 2}, "ray": ray}
    config, out = write_config(tmp_path, saving=GOES_ON, data_plane=plane, **sections), tmp_path / "out"
    left = []
    for number in range(kills):
        killed = start(config, out, path="shm_store", python=python)
        try:
            if number and random.random() < 0.2:
                time.sleep(random.uniform(0, 10))  # while it starts
            else:  # the first time in the second step, of which nothing is saved
                wait_for_rows(
                    out, sum(rows_put(out).values()) + (random.randint(1, 64) if number else ROWS + 8), killed
                )
                time.sleep(random.uniform(0, 1) if number else 0)
            kill_all(killed)
        finally:
            killed.kill()
        left.append(committed(plane))
    whole = run(config, out, path="shm_store", python=python)
    found = [json.loads(line) for line in (out / "found.jsonl").read_text().splitlines()]
    print(whole.printed[whole.printed.index("after GRPO") :], left, found)
    assert sum(left[0].values()) >= ROWS + 8
    assert found
    for line in found:  # each step that a start began again found what was there after the kill before
        assert line["wanted"] == ROWS
        assert line["found"] in [steps[line["step"]] for steps in left if line["step"] in steps]
    total = sum(line["found"] for line in found)
    assert f"{total} of {ROWS * len(found)} rollouts of interrupted steps were found committed" in whole.printed
    assert max(rows_put(out).values()) <= ROWS, "no row was generated twice"
    assert committed(plane) == {}
    uncut = run(write_config(tmp_path, **sections), tmp_path / "uncut", python=python)
    assert whole.results == uncut.results
