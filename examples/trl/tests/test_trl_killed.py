"""The example on a durable store: all its processes are killed, again and again, and the same command goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from trl_runs import EXAMPLE, finish, log_of, read_lines, start

from dataplane_core import connect
from dataplane_integrations.replay import group_of

pytestmark = pytest.mark.timeout(7200)

KILLS = int(os.environ.get("DATAPLANE_KILLS", "20"))
STEPS, PROMPTS, ANSWERS = 2 * KILLS, 8, 4
#: A busy machine may take minutes for a start.
PATIENCE_S = 900


def write_config(folder: Path, **plane: Any) -> Path:
    """A synchronous run that can be started again, with a listener that shows how far it is."""
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config |= {"steps": STEPS, "learning_rate": 2.0e-3, "save_steps": 1}
    config |= {"prompts_per_step": PROMPTS, "answers_per_prompt": ANSWERS}
    config["rollouts"] |= {"ahead": 0, "prompts_per_claim": 1, "timeout_s": PATIENCE_S}
    options = {"namespace": f"trl-{folder.name[-20:]}", "capacity_bytes": 64 << 20, "touch_ahead_bytes": 0}
    config["data_plane"] |= {"attach_wait_s": PATIENCE_S, "options": {**options, **plane}}
    config["data_plane"]["middleware"] = [{"metrics": {"events_file": str(folder / "events.jsonl")}}]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start_run(config: Path) -> subprocess.Popen[str]:
    return start(EXAMPLE / "train.py", "--config", config, "--out", config.parent / "out")


def count_events(folder: Path) -> int:
    events = folder / "events.jsonl"
    return events.read_bytes().count(b"\n") if events.exists() else 0


def wait_for_events(folder: Path, count: int, run: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while count_events(folder) < count:
        assert time.monotonic() < give_up
        if run.poll() is not None:
            pytest.fail(f"the run ended: {run.communicate()[0][-4000:]}")
        time.sleep(0.02)


def kill_all(run: subprocess.Popen[str]) -> None:
    """Kills the trainer, the rollout processes and the ledger's process, in any order."""
    run.send_signal(signal.SIGSTOP)
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    for process in random.sample(family, len(family)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.communicate()
    assert not psutil.wait_procs(family[1:], timeout=60)[1]


def committed(config: Path) -> dict[int, dict[str, float]]:
    """Batch -> prompt -> when its answers that are in the store were begun. Nobody has the store open."""
    plane = yaml.safe_load(config.read_text())["data_plane"]
    found: dict[int, dict[str, float]] = {}
    with connect({**plane, "middleware": []}) as client:
        for name in client.list_partitions():
            if name.startswith("answers-"):
                meta = client.list_samples(name)
                rows = zip(meta.sample_ids, meta.tags or [], strict=True)
                found[int(name.rpartition("-")[2])] = {group_of(each): tags["began"] for each, tags in rows}
    return found


def test_a_run_that_is_killed_at_random_moments_gives_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    killed, uncut = tmp_path / "killed", tmp_path / "uncut"
    for folder in (killed, uncut):
        folder.mkdir()
    config = write_config(killed, durable=str(killed / "store"))
    left: list[dict[int, dict[str, float]]] = []
    for _ in range(KILLS):
        run = start_run(config)
        try:
            wait_for_events(killed, count_events(killed) + random.randint(1, 80), run)
            kill_all(run)
        finally:
            run.kill()
        left.append(committed(config))
    said = finish(start_run(config), 2 * PATIENCE_S)
    out = killed / "out"
    (path,) = out.glob("found-*.jsonl")
    found = read_lines(path)
    print(said[said.index("after:") :], found)
    for line in found:  # each batch that a start began again found what was there after the kill before
        assert line["wanted"] == PROMPTS * ANSWERS
        assert line["found"] in [len(each[line["step"]]) * ANSWERS for each in left if line["step"] in each]

    made = {span["prompt"]: span["began"] for span in read_lines(out / "timeline.jsonl") if span["what"] == "generate"}
    assert sorted(int(prompt[1:]) for prompt in made) == list(range(STEPS * PROMPTS))
    for batches in left:
        for prompts in batches.values():
            assert prompts.items() <= made.items(), "committed answers were generated again"
    assert json.loads((out / "summary.json").read_text())["answers_trained_on"] == STEPS * PROMPTS * ANSWERS
    assert committed(config) == {}

    finish(start_run(write_config(uncut)), 2 * PATIENCE_S)
    assert len(log_of(uncut / "out")) == STEPS
    assert log_of(out) == log_of(uncut / "out")
    evaluations = [
        json.loads((folder / "out" / "summary.json").read_text())["evaluation"] for folder in (killed, uncut)
    ]
    assert evaluations[0] == evaluations[1]
