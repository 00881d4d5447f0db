"""Whole runs of the GRPO example with its options: tensor parallelism, packing, Megatron, portions and others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grpo.train import main
from grpo_runs import finish, read_metrics, results, start, write_config


def _run(
    folder: Path, *arguments: str, path: str = "in-memory", portions: dict[str, int] | None = None
) -> list[dict[str, Any]]:
    config = write_config(folder, grpo={"steps": 2}, portions=portions or {})
    code, _, err = finish(start(config, folder / "out", *arguments, path=path))
    assert (code, err) == (0, "")
    return read_metrics(folder / "out")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a run without options."""
    return results(_run(tmp_path_factory.mktemp("plain")))


def _assert_like(plain: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    for expected, record in zip(plain, records, strict=True):
        for what in ("reward", "advantages_sha256", "tokens", "mean_length"):
            assert record[what] == expected[what]
        for what in ("loss", "grad_norm", "kl"):
            assert record[what] == pytest.approx(expected[what], abs=1e-5), what
        assert record["generation_logprob_error"] < 1e-5, "the rollout worker had the newest weights, whole"


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("tq_simple", ["--tp", "2", "--packing"]),
        ("tq_simple", ["--tp", "2"]),
        ("in-memory", ["--tp", "2", "--packing"]),
        ("in-memory", ["--packing"]),
        ("redis_store", ["--workers", "megatron", "--tp", "2", "--packing"]),
        ("tq_mooncake", ["--workers", "megatron", "--tp", "2"]),
        ("tq_simple", ["--workers", "megatron", "--tp", "2"]),
        ("in-memory", ["--workers", "megatron"]),
    ],
)
def test_a_run_with_options_trains_as_the_plain_run_does(
    plain: list[dict[str, Any]], tmp_path: Path, path: str, arguments: list[str]
) -> None:
    records = _run(tmp_path, *arguments, path=path)
    assert {record["path"] for record in records} == {path}
    _assert_like(plain, results(records))


@pytest.mark.parametrize("arguments", [["--tp", "2"], [], ["--workers", "megatron"]], ids=" ".join)
def test_portions_train_as_the_plain_run_does_and_reading_ahead_changes_no_bit(
    plain: list[dict[str, Any]], tmp_path: Path, arguments: list[str]
) -> None:
    runs = []
    for depth in (0, 2):
        folder = tmp_path / str(depth)
        folder.mkdir()
        portions = {"per_step": 3, "read_ahead": depth}
        runs.append(results(_run(folder, *arguments, path="shm_store", portions=portions)))
    assert runs[0] == runs[1]
    _assert_like(plain, runs[0])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--backend", "shm_store"],
        ["--backend", "tq_simple", "--workers", "megatron"],
        ["--backend", "redis_store", "--workers", "megatron", "--tp", "2"],
        ["--backend", "tq_mooncake", "--workers", "megatron", "--tp", "2"],
    ],
    ids=" ".join,
)
def test_a_whole_run_learns(tmp_path: Path, arguments: list[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), *arguments]) == 0
    evaluation = json.loads((tmp_path / "out" / "summary.json").read_text())["evaluation"]
    for kind in ("sampled", "greedy"):
        assert evaluation["before"][kind] < 0.1
        assert evaluation["after"][kind] > 0.8


def test_dynamic_sampling_trains_on_groups_whose_rewards_differ(tmp_path: Path) -> None:
    group_size = 4
    records = _run(tmp_path, "--dynamic-sampling", path="tq_simple")
    for record in records:
        assert 1 <= record["generations"] <= 4
        assert record["answers"] == record["groups"] * group_size <= 32
        drawn = 8 * record["generations"]
        assert record["groups"] + record["groups_dropped"] + record["groups_overflow"] == drawn
        assert 0.0 < record["reward_generated"] <= record["reward"] < 1.0  # dropped: groups with nothing right as yet
        assert record["grad_norm"] > 0
    assert sum(record["groups_dropped"] for record in records) > 0


def test_weights_reach_a_megatron_model_and_come_back_as_they_were() -> None:
    """In a process of a group of one; two ranks cut them in the runs above, where the rollout worker gets them back."""
    program = """
import torch, torch.distributed as dist
from grpo.config import ModelConfig
from grpo.megatron_model import build_megatron_model, load_state, megatron_token_logprobs, whole_state
from grpo.model import build_model, token_logprobs
from megatron.core import parallel_state

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel(1)
sizes = ModelConfig(width=32, layers=2, heads=4)
whole = build_model(sizes, seed=3)
state = dict(whole.named_parameters())
model = build_megatron_model(sizes, 1)
load_state(model, state, sizes.heads)
back = whole_state(model, list(state), sizes.heads)
assert list(back) == list(state)
assert all(torch.equal(back[name], state[name]) for name in state)
lengths = torch.tensor([7, 2, 5])
ids = torch.randint(1, 14, (3, 8)) * (torch.arange(8) < lengths.unsqueeze(1))
expected = token_logprobs(whole(ids), ids, lengths)
for packed in (False, True):
    torch.testing.assert_close(megatron_token_logprobs(model, ids, lengths, packed), expected, rtol=0, atol=1e-5)
dist.destroy_process_group()
"""
    examples = str(Path(__file__).resolve().parents[3] / "examples")
    environment = {**os.environ, "PYTHONPATH": examples}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
