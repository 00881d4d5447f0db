"""The example as a program: short runs with TRL, over several backends, and with a rollout process that is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from dataplane_core import connect

pytestmark = pytest.mark.timeout(540)

EXAMPLE = Path(__file__).resolve().parents[1]
#: A busy machine may take minutes for a start.
PATIENCE_S = 400

STEPS, PROMPTS, ANSWERS = 30, 16, 8
KILLS = int(os.environ.get("DATAPLANE_KILLS", "20"))


def start(program, *arguments):
    command = [sys.executable, str(program), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(config, out, program="train.py"):
    return start(EXAMPLE / program, "--config", config, "--out", out)


def finish(process):
    """Waits for a process that must end well; what it printed."""
    try:
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, said[-4000:]
    return said


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_of(out):
    """What the trainer logged, without times."""
    return [{key: line[key] for key in line if "time" not in key} for line in read_lines(out / "metrics.jsonl")]


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


def write_config(folder, processes=2, lease_s=3, **data_plane):
    """The example's configuration with fewer steps, which are larger, and a short lease."""
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config |= {"steps": STEPS, "learning_rate": 2.0e-3}
    config["rollouts"] |= {"processes": processes, "lease_s": lease_s, "timeout_s": PATIENCE_S}
    config["data_plane"] |= {"attach_wait_s": PATIENCE_S, **data_plane}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def check_counts(out):
    """Every prompt was answered in time and trained on once. The spans of its generation."""
    assert summary_of(out)["answers_trained_on"] == STEPS * PROMPTS * ANSWERS
    made = [span for span in read_lines(out / "timeline.jsonl") if span["what"] == "generate"]
    assert sorted(int(span["prompt"][1:]) for span in made) == list(range(STEPS * PROMPTS))
    assert {span["batch"] - span["weight_version"] for span in made} <= {0, 1}
    return made


@pytest.mark.parametrize("backend", ["shm_store", "redis_store", "tq_simple"])
def test_a_run_learns_while_other_processes_generate(tmp_path, request, backend):
    options = {"namespace": f"trl-{os.getpid()}"}
    if backend == "tq_simple":
        options = {"instance": f"trl-{os.getpid()}", "ray_address": request.getfixturevalue("ray_server")}
    out = tmp_path / "out"
    config = write_config(tmp_path, backend=backend, options=options)
    assert "step   30/30" in finish(train(config, out))
    made = check_counts(out)
    assert set(Counter(span["worker"] for span in made)) == {"rollout-0", "rollout-1"}

    evaluation = summary_of(out)["evaluation"]
    assert evaluation["after"]["sampled"] > evaluation["before"]["sampled"] + 0.1
    rewards = [line["reward"] for line in read_lines(out / "metrics.jsonl")]
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")

    trained = [span for span in read_lines(out / "timeline.jsonl") if span["what"] == "train"]
    assert [span["batch"] for span in trained] == list(range(STEPS))
    for span in made:  # no batch is trained on before its answers are there
        assert span["began"] < span["ended"] <= trained[span["batch"]]["began"]
    ahead = [(span, trained[span["batch"] - 1]) for span in made if span["batch"]]
    assert any(span["began"] < training["ended"] and training["began"] < span["ended"] for span, training in ahead), (
        "answers are generated while the trainer trains on the batch before"
    )


def test_a_recorded_run_gives_the_same_losses_again_without_rollout_processes(tmp_path):
    recording = str(tmp_path / "recording")
    recorder = {"recorder": {"folder": recording, "payload": "all"}}
    planes = {
        "run": {"options": {"namespace": f"recorded-{os.getpid()}"}, "middleware": [recorder]},
        "replay": {"backend": "recording", "options": {"folder": recording}},
    }
    logs = []
    for name, plane in planes.items():
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(folder, processes=2 if name == "run" else 0, **plane)
        finish(train(config, folder))
        check_counts(folder)
        logs.append(log_of(folder))
    assert len(logs[0]) == STEPS
    assert logs[0] == logs[1]


def test_an_asynchronous_run_learns_from_what_other_processes_generate(tmp_path):
    out = tmp_path / "out"
    # nothing is killed, and a busy machine must not make the trainer lose what it holds
    config = write_config(tmp_path, lease_s=PATIENCE_S, options={"namespace": f"asynchronous-{os.getpid()}"})
    finish(train(config, out, "train_async.py"))
    summary = summary_of(out)
    assert summary["evaluation"]["after"]["sampled"] > summary["evaluation"]["before"]["sampled"] + 0.1
    assert summary["answers_acked"] >= (STEPS - 1) * PROMPTS * ANSWERS
    lines = read_lines(out / "metrics.jsonl")
    assert len(lines) == STEPS
    assert sum(line["reward"] for line in lines[-5:]) / 5 > sum(line["reward"] for line in lines[:5]) / 5 + 0.1
    assert {line["batch/samples_per_step"] for line in lines} == {PROMPTS * ANSWERS}
    assert 0 < summary["staleness"] <= 4
    assert all(line["rollout/samples_total"] > 0 for line in lines)


# --- runs that are started again --------------------------------------------------------------------------------------


def write_short_config(folder, **plane):
    """A synchronous run of small steps that can be started again."""
    path = write_config(folder)
    config = yaml.safe_load(path.read_text())
    config |= {"steps": 2 * KILLS, "prompts_per_step": 8, "answers_per_prompt": 4, "save_steps": 1}
    config["rollouts"] |= {"ahead": 0, "prompts_per_claim": 1}
    config["data_plane"]["options"] = {"namespace": f"trl-{folder.name[-20:]}", "capacity_bytes": 64 << 20, **plane}
    config["data_plane"]["middleware"] = [{"recorder": {"folder": str(folder / "events"), "payload": "none"}}]
    path.write_text(yaml.safe_dump(config))
    return path


def wait_for_events(folder, more, run):
    def count():
        return sum(path.read_bytes().count(b"\n") for path in (folder / "events").glob("*.jsonl"))

    give_up, first = time.monotonic() + PATIENCE_S, count()
    while count() < first + more:
        assert time.monotonic() < give_up
        if run.poll() is not None:
            pytest.fail(f"the run ended: {run.communicate()[0][-4000:]}")
        time.sleep(0.02)


def kill_all(run):
    """Kills the trainer, the rollout processes and the ledger's process, in any order."""
    run.send_signal(signal.SIGSTOP)
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    for process in random.sample(family, len(family)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.communicate()
    assert not psutil.wait_procs(family[1:], timeout=60)[1]


def committed(config):
    """Batch -> prompt -> when its answers that are in the store were begun. Nobody has the store open."""
    plane = yaml.safe_load(config.read_text())["data_plane"]
    found = {}
    with connect({**plane, "middleware": []}) as client:
        for name in client.list_partitions():
            if name.startswith("answers-"):
                meta = client.list_samples(name)
                rows = zip(meta.sample_ids, meta.tags or [], strict=True)
                found[int(name.rpartition("-")[2])] = {each.rpartition("_g")[0]: tags["began"] for each, tags in rows}
    return found


@pytest.mark.timeout(7200)
def test_a_run_that_is_killed_at_random_moments_gives_the_losses_of_one_that_was_not(tmp_path):
    killed, uncut = tmp_path / "killed", tmp_path / "uncut"
    for folder in (killed, uncut):
        folder.mkdir()
    config, out = write_short_config(killed, durable=str(killed / "store")), killed / "out"
    left = []
    for _ in range(KILLS):
        run = train(config, out)
        try:
            wait_for_events(killed, random.randint(1, 80), run)
            kill_all(run)
        finally:
            run.kill()
        left.append(committed(config))
    said = finish(train(config, out))
    (path,) = out.glob("found-*.jsonl")
    found = read_lines(path)
    print(said[said.index("after:") :], found)
    for line in found:  # each batch that a start began again found what was there after the kill before
        assert line["wanted"] == 8 * 4
        assert line["found"] in [len(each[line["step"]]) * 4 for each in left if line["step"] in each]
    made = {span["prompt"]: span["began"] for span in read_lines(out / "timeline.jsonl") if span["what"] == "generate"}
    assert sorted(int(prompt[1:]) for prompt in made) == list(range(2 * KILLS * 8))
    for prompts in [prompts for batches in left for prompts in batches.values()]:
        assert prompts.items() <= made.items(), "committed answers were generated again"
    assert summary_of(out)["answers_trained_on"] == 2 * KILLS * 8 * 4
    assert committed(config) == {}
    finish(train(write_short_config(uncut), uncut / "out"))
    assert len(log_of(uncut / "out")) == 2 * KILLS
    assert log_of(out) == log_of(uncut / "out")
    assert summary_of(out)["evaluation"] == summary_of(uncut / "out")["evaluation"]


def test_without_save_steps_a_run_begins_anew_beside_checkpoints_of_an_earlier_one(tmp_path):
    path = write_short_config(tmp_path)
    config = yaml.safe_load(path.read_text()) | {"steps": 2}
    for save_steps in (1, 0):
        path.write_text(yaml.safe_dump({**config, "save_steps": save_steps}))
        finish(train(path, tmp_path / "out"))
        assert summary_of(tmp_path / "out")["answers_trained_on"] == 2 * 8 * 4
