"""The example as a program: short runs with TRL, over several backends, and with a rollout process that is killed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl_runs import EXAMPLE, PATIENCE_S, finish, log_of, read_lines, start

pytestmark = pytest.mark.timeout(540)

STEPS, PROMPTS, ANSWERS = 30, 16, 8


def write_config(folder: Path, processes: int = 2, **data_plane: Any) -> Path:
    """The example's configuration with fewer steps, which are larger, and a short lease."""
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config |= {"steps": STEPS, "learning_rate": 2.0e-3}
    config["rollouts"] |= {"processes": processes, "lease_s": 3, "timeout_s": PATIENCE_S}
    config["data_plane"] |= {"attach_wait_s": PATIENCE_S, **data_plane}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def check_counts(out: Path) -> list[dict[str, Any]]:
    """Every prompt was answered in time and trained on once. The spans of its generation."""
    summary = json.loads((out / "summary.json").read_text())
    assert summary["answers_trained_on"] == STEPS * PROMPTS * ANSWERS
    made = [span for span in read_lines(out / "timeline.jsonl") if span["what"] == "generate"]
    assert sorted(int(span["prompt"][1:]) for span in made) == list(range(STEPS * PROMPTS))
    assert {span["batch"] - span["weight_version"] for span in made} <= {0, 1}
    return made


@pytest.mark.parametrize("backend", ["shm_store", "redis_store", "tq_simple"])
def test_a_run_learns_while_other_processes_generate(
    tmp_path: Path, request: pytest.FixtureRequest, backend: str
) -> None:
    options: dict[str, Any] = {"namespace": f"trl-{os.getpid()}"}
    if backend == "tq_simple":
        options = {"instance": f"trl-{os.getpid()}", "ray_address": request.getfixturevalue("ray_server")}
    out = tmp_path / "out"
    config = write_config(tmp_path, backend=backend, options=options)
    said = finish(start(EXAMPLE / "train.py", "--config", config, "--out", out))
    assert "step   30/30" in said
    made = check_counts(out)
    assert set(Counter(span["worker"] for span in made)) == {"rollout-0", "rollout-1"}

    evaluation = json.loads((out / "summary.json").read_text())["evaluation"]
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


@pytest.mark.parametrize("point", ["generating", "written"])
def test_a_rollout_process_that_is_killed_loses_no_sample(tmp_path: Path, point: str) -> None:
    config = write_config(tmp_path, processes=0, options={"namespace": f"killed-{os.getpid()}"})
    out = tmp_path / "out"
    with (
        start(EXAMPLE / "train.py", "--config", config, "--out", out) as run,
        start(EXAMPLE / "tests" / "hangs.py", config, point, 7) as victim,  # each batch takes four claims
    ):
        try:
            assert victim.stdout is not None
            held = victim.stdout.readline().split()
            assert len(held) == 4, held
            assert run.poll() is None
            victim.send_signal(signal.SIGKILL)  # it holds its claim
            with start(EXAMPLE / "rollout_process.py", "--config", config, "--name", "other") as other:
                try:
                    finish(run)
                    finish(other)
                finally:
                    other.kill()
        finally:
            victim.kill()
            run.kill()
    made = check_counts(out)
    by_worker = Counter(span["worker"] for span in made)
    assert by_worker == {"killed": 24, "other": STEPS * PROMPTS - 24}


def test_a_recorded_run_gives_the_same_losses_again_without_rollout_processes(tmp_path: Path) -> None:
    recording = str(tmp_path / "recording")
    recorder = {"recorder": {"folder": recording, "payload": "all"}}
    planes: dict[str, dict[str, Any]] = {
        "run": {"options": {"namespace": f"recorded-{os.getpid()}"}, "middleware": [recorder]},
        "replay": {"backend": "recording", "options": {"folder": recording}},
    }
    logs = []
    for name, plane in planes.items():
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(folder, processes=2 if name == "run" else 0, **plane)
        finish(start(EXAMPLE / "train.py", "--config", config, "--out", folder))
        check_counts(folder)
        logs.append(log_of(folder))
    assert len(logs[0]) == STEPS
    assert logs[0] == logs[1]


def test_an_asynchronous_run_learns_from_what_other_processes_generate(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = write_config(tmp_path, options={"namespace": f"asynchronous-{os.getpid()}"})
    finish(start(EXAMPLE / "train_async.py", "--config", config, "--out", out))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["evaluation"]["after"]["sampled"] > summary["evaluation"]["before"]["sampled"] + 0.1
    assert summary["answers_acked"] >= (STEPS - 1) * PROMPTS * ANSWERS
    lines = read_lines(out / "metrics.jsonl")
    assert len(lines) == STEPS
    assert sum(line["reward"] for line in lines[-5:]) / 5 > sum(line["reward"] for line in lines[:5]) / 5 + 0.1
    assert {line["batch/samples_per_step"] for line in lines} == {PROMPTS * ANSWERS}
    assert 0 < summary["staleness"] <= 4
    assert all(line["rollout/samples_total"] > 0 for line in lines)


def test_without_save_steps_a_run_begins_anew_beside_checkpoints_of_an_earlier_one(tmp_path: Path) -> None:
    path = write_config(tmp_path, options={"namespace": f"trl-anew-{os.getpid()}"})
    config = yaml.safe_load(path.read_text())
    config |= {"steps": 2, "prompts_per_step": 4}
    config["rollouts"]["prompts_per_claim"] = 1
    for save_steps in (1, 0):
        path.write_text(yaml.safe_dump({**config, "save_steps": save_steps}))
        finish(start(EXAMPLE / "train.py", "--config", path, "--out", tmp_path))
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["answers_trained_on"] == 2 * 4 * ANSWERS
