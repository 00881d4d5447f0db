"""The GRPO example's options: tensor parallelism, sequence packing, dynamic sampling, Megatron workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.config import ModelConfig, load_config
from grpo.model import build_model, token_logprobs
from grpo.packing import packed_token_logprobs
from grpo.parallel import SplitLinear
from grpo.train import main
from grpo.weights import pack_weights
from grpo_runs import finish, read_metrics, results, start, write_config

from dataplane_core.errors import ConfigError

MODEL = ModelConfig(width=32, layers=2, heads=4)


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("tq_simple", ["--tp", "2", "--packing"]),
        ("tq_simple", ["--tp", "2"]),
        ("in-memory", ["--tp", "2", "--packing"]),
        ("in-memory", ["--packing"]),
    ],
)
def test_tensor_parallel_and_packed_runs_train_as_the_plain_run_does(
    plain: list[dict[str, Any]], tmp_path: Path, path: str, arguments: list[str]
) -> None:
    _assert_like(plain, results(_run(tmp_path, *arguments, path=path)))


@pytest.mark.long
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


def test_portions_without_a_data_plane_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, portions={"per_step": 2})
    assert main(["--config", str(config), "--in-memory", "--out", str(tmp_path / "out")]) == 2
    assert "portions are read from the data plane" in capsys.readouterr().err


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
        pytest.param("redis_store", ["--tp", "2", "--packing"], marks=pytest.mark.long),
        pytest.param("tq_mooncake", ["--tp", "2"], marks=pytest.mark.long),
        pytest.param("tq_simple", ["--tp", "2"], marks=pytest.mark.long),
        pytest.param("tq_simple", [], marks=pytest.mark.long),
        pytest.param("in-memory", [], marks=pytest.mark.long),
    ],
)
def test_runs_on_megatron_train_as_the_run_on_fsdp2_does(
    plain: list[dict[str, Any]], tmp_path: Path, path: str, arguments: list[str]
) -> None:
    records = _run(tmp_path, "--workers", "megatron", *arguments, path=path)
    assert {record["path"] for record in records} == {path}
    _assert_like(plain, results(records))


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


def test_packed_rows_have_the_logprobs_and_gradients_of_padded_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 1, 7])
    ids = torch.randint(1, 10, (4, 12), generator=generator)
    outcomes = []
    for packed in (False, True):
        model = build_model(MODEL, seed=1)
        logprobs = packed_token_logprobs(model, ids, lengths) if packed else token_logprobs(model(ids), ids, lengths)
        logprobs.square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        outcomes.append((logprobs.detach(), gradients))
    (padded, padded_gradients), (one, gradients) = outcomes
    torch.testing.assert_close(one, padded, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradients, padded_gradients, atol=1e-4, rtol=1e-4)
    assert torch.equal(one == 0, padded == 0)


def test_weights_of_cut_layers_are_packed_in_the_order_of_whole_ones() -> None:
    model = build_model(MODEL, seed=2)
    whole = pack_weights(model)
    hidden = torch.randn(2, 3, MODEL.width)
    for block in model.blocks:
        cut = SplitLinear(block.qkv)
        torch.testing.assert_close(cut(hidden), block.qkv(hidden))
        block.qkv = cut
    assert (pack_weights(model) == whole).all()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel 3 must divide num_workers 2 and model.heads 2"),
        ({"tensor_parallel": 4, "num_workers": 4}, "tensor_parallel 4 must divide num_workers 4 and model.heads 2"),
        (
            {"dynamic_sampling": {"enabled": True}, "grpo": {"answers_per_prompt": 5, "prompts_per_step": 8}},
            "answers_per_prompt 5 must be a multiple of the 2 data-parallel ranks",
        ),
        ({"sequence_packing": {"algorithm": "best_fit"}}, "'sequence_packing.algorithm': Input should be"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write_config(tmp_path, **sections), {})


def test_dynamic_sampling_needs_a_data_plane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(write_config(tmp_path)), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--in-memory", "--dynamic-sampling"]) == 2
    assert "dynamic sampling filters rows in the data plane. Leave out --in-memory" in capsys.readouterr().err
