"""The GRPO example as a program: whole runs in processes of their own, shortened, and how it ends when things break."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpo.task import Problem, decode, reward as task_reward
from grpo.train import main
from grpo_runs import Finished, Running, assert_gone, finish, read_metrics, results, running_past, start, write_config

from dataplane_core import connect

#: Up to two whole runs, of which the first is the one that tests share.
pytestmark = pytest.mark.timeout(540)


@pytest.fixture
def path() -> str:
    """What the run goes over; tests parametrize it."""
    return "in-memory"


@pytest.fixture
def step_timeout_s() -> int:
    """The run's deadline for its start and for a step. Only the test of the deadline shortens it: a busy machine may
    take minutes."""
    return 400


@pytest.fixture
def running(tmp_path: Path, path: str, step_timeout_s: int) -> Iterator[Running]:
    config = write_config(tmp_path, grpo={"steps": 100_000}, ray={"step_timeout_s": step_timeout_s})
    with running_past(3, start(config, tmp_path / "out", path=path)) as run:
        yield run


def test_a_run_trains_reports_and_evaluates(in_memory: Finished) -> None:
    records = read_metrics(in_memory.folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record["path"] == "in-memory"
        assert 0.0 <= record["reward"] <= 1.0
        assert record["answers"] == 32
        assert 32 <= record["tokens"] <= 32 * 6
        assert record["bytes_put"] > 0
        assert record["bytes_get"] > 0
        assert record["grad_norm"] > 0
        assert record["generation_logprob_error"] < 1e-5  # the rollout worker had the newest weights
        assert set(record["seconds"]) == {"weights", "generate", "advantages", "prev", "reference", "train"}
    assert records[0]["kl"] == 0.0  # the policy still is the reference
    assert records[-1]["kl"] > 0.0
    assert len({record["advantages_sha256"] for record in records}) == 4
    assert (in_memory.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((in_memory.folder / "summary.json").read_text())
    assert set(summary["evaluation"]) == {"before", "after"}
    out = in_memory.printed
    assert out.count("\nstep ") == 4
    assert "before GRPO" in out
    assert "after GRPO" in out


def test_a_recorded_run_over_shm_store_equals_the_run_in_memory_bit_for_bit(
    in_memory: Finished, recorded: Finished
) -> None:
    assert_like(in_memory, recorded, "shm_store")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm_store", "tq_simple", "redis_store", "tq_mooncake"])
def test_a_run_over_a_backend_equals_the_run_in_memory_bit_for_bit(
    tmp_path: Path, in_memory: Finished, ray_server: str, backend: str
) -> None:
    config = write_config(tmp_path, ray={"address": ray_server})
    code, out, err = finish(start(config, tmp_path / "out", path=backend))
    assert (code, err) == (0, "")
    assert_like(in_memory, Finished(tmp_path / "out", out), backend)


def assert_like(in_memory: Finished, run: Finished, backend: str) -> None:
    """The run over a backend has the results of that in memory, and wrote its pages and the rows of its last step."""
    assert f"running over {backend}: " in run.printed
    records = read_metrics(run.folder)
    assert {record["path"] for record in records} == {backend}
    assert all(record["bytes_put"] > 0 and record["bytes_get"] > 0 for record in records)
    assert results(records) == results(read_metrics(in_memory.folder))
    flow = (run.folder / "flow.html").read_text()
    assert flow.count(" 4 steps.") == 1
    assert "put advantages" in flow  # of the driver
    assert "put input_ids +4" in flow  # of the rollout worker
    assert "put prev_logprobs" in flow  # of the policy workers
    assert not (in_memory.folder / "flow.html").exists()
    evaluations = [json.loads((each.folder / "summary.json").read_text())["evaluation"] for each in (in_memory, run)]
    assert evaluations[0] == evaluations[1]
    assert_kept(run.folder / "last_step", records[-1]["reward"])
    assert "<title>train: 32 samples" in (run.folder / "answers.html").read_text()
    assert not (in_memory.folder / "last_step").exists()


def assert_kept(save: Path, reward: float) -> None:
    """The save has all rows of a step, with prompts, answers and rewards for people to read."""
    with connect({"backend": "noop"}) as client:
        client.load(save)
        rows = client.get_samples(client.list_sample_ids("train"), "train", ["input_ids", "token_mask", "reward"])
    assert rows["reward"].mean().item() == reward
    answers_of = {}
    for ids, mask, score in zip(rows["input_ids"], rows["token_mask"], rows["reward"].tolist(), strict=True):
        prompt, answer = decode(ids[mask == 0].tolist()), decode(ids[mask == 1].tolist())
        answers_of.setdefault(prompt, []).append(answer)
        right = "".join(str((int(digit) + 1) % 10) for digit in prompt.removesuffix("="))
        assert task_reward(Problem(prompt, right), answer) == pytest.approx(score)
    assert [len(answers) for answers in answers_of.values()] == [4] * 8


@pytest.mark.long
def test_a_run_repeats_bit_for_bit(tmp_path: Path, in_memory: Finished) -> None:
    assert finish(start(write_config(tmp_path), tmp_path / "out"))[0] == 0
    assert results(read_metrics(tmp_path / "out")) == results(read_metrics(in_memory.folder))


@pytest.mark.long
@pytest.mark.parametrize("path", ["tq_simple", "in-memory"])
def test_a_worker_that_dies_ends_the_run_with_its_name(running: Running, tmp_path: Path) -> None:
    os.kill(running.pids["policy worker 1"], signal.SIGKILL)
    code, _, err = finish(running.process, timeout_s=30)
    assert code == 1
    assert re.search(r"error: .*policy worker 1 died while ", err)
    assert "Traceback" not in err
    assert (tmp_path / "out" / "failure.txt").stat().st_size > 0
    assert_gone(running.family)


@pytest.mark.long
@pytest.mark.parametrize("step_timeout_s", [5])
def test_a_worker_that_stops_answering_ends_the_run_at_the_deadline(running: Running, step_timeout_s: int) -> None:
    os.kill(running.pids["rollout worker"], signal.SIGSTOP)
    code, _, err = finish(running.process, timeout_s=40)
    assert code == 1
    assert re.search(rf"error: no answer from rollout worker within {step_timeout_s} s while .* in step \d+\.", err)
    assert_gone(running.family)


@pytest.mark.long
@pytest.mark.parametrize("path", ["shm_store", "tq_simple", "in-memory"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_leaves_no_process(running: Running, signum: signal.Signals) -> None:
    running.process.send_signal(signum)
    code, _, err = finish(running.process)
    assert (code, err) == (130, "interrupted\n")
    assert_gone(running.family)


@pytest.mark.parametrize(
    ("sections", "arguments", "message"),
    [
        ({"ray": {"num_cpus": 1}}, [], "Ray has too few CPUs: the run's actors ask for 1.5, ray.num_cpus is 1."),
        ({"ray": {"address": "127.0.0.1:1"}}, [], "no Ray cluster answers at ray.address 127.0.0.1:1"),
        ({"grpo": {"stepz": 4}}, [], "unknown key 'grpo.stepz'; did you mean 'steps'?"),
        ({}, ["--data", "gone.jsonl"], "gone.jsonl does not exist. Give a JSONL file with --data FILE.\n"),
        ({}, ["--steps", "0"], "key 'grpo.steps': Input should be greater than or equal to 1"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    arguments: list[str],
    message: str,
) -> None:
    config = write_config(tmp_path, **sections)
    assert main(["--config", str(config), "--in-memory", "--out", str(tmp_path / "out"), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert message in captured.err
    assert captured.out == ""
