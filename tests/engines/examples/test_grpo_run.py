"""The GRPO example as a program: whole runs in processes of their own, shortened, and how it ends when things break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grpo.train import main
from grpo_runs import Finished, assert_like, read_metrics, write_config

#: Up to two whole runs, of which the first is the one that tests share.
pytestmark = pytest.mark.timeout(540)

IN_MEMORY = "--in-memory"


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


#: Sections of the configuration, arguments, and what the refusal says.
REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"ray": {"num_cpus": 1}}, [IN_MEMORY], "the run's actors ask for 1.5, ray.num_cpus is 1"),
    ({"ray": {"address": "127.0.0.1:1"}}, [IN_MEMORY], "no Ray cluster answers at ray.address 127.0.0.1:1"),
    ({"grpo": {"stepz": 4}}, [IN_MEMORY], "unknown key 'grpo.stepz'; did you mean 'steps'?"),
    ({}, [IN_MEMORY, "--data", "gone.jsonl"], "gone.jsonl does not exist"),
    ({}, [IN_MEMORY, "--steps", "0"], "key 'grpo.steps': Input should be greater than or equal to 1"),
    ({}, [IN_MEMORY, "--mode", "async"], "Leave out --in-memory or --mode async"),
    ({}, [IN_MEMORY, "--dynamic-sampling"], "dynamic sampling filters rows in the data plane"),
    ({}, [IN_MEMORY, "--record"], "a recording is made, and replayed, by the data plane"),
    ({"portions": {"per_step": 2}}, [IN_MEMORY], "portions are read from the data plane"),
    ({}, ["--staleness", "2"], "--staleness: rollouts run ahead with --mode async only"),
    ({}, ["--mode", "async", "--staleness", "-1"], "key 'rollouts.staleness'"),
    ({}, ["--mode", "async", "--dynamic-sampling"], "dynamic_sampling finds out while it generates"),
    ({}, ["--mode", "async", "--replay", "gone"], "--replay is for synchronous runs from their start"),
]


@pytest.mark.parametrize(("sections", "arguments", "message"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    arguments: list[str],
    message: str,
) -> None:
    config = write_config(tmp_path, **sections)
    assert main(["--config", str(config), "--out", str(tmp_path / "out"), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert message in captured.err
    assert captured.out == ""
