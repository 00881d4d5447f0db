"""The GRPO example's options: tensor parallelism, sequence packing, dynamic sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.config import load_config
from grpo.errors import UserError
from grpo.model import ModelConfig, build_model, token_logprobs
from grpo.packing import packed_token_logprobs
from grpo.parallel import SplitLinear, pack_parallel_weights
from grpo.train import main
from grpo.weights import pack_weights
from grpo_runs import finish, read_metrics, results, start, write_config

MODEL = ModelConfig(width=32, layers=2, heads=4)


def _run(folder: Path, *arguments: str, path: str = "in-memory") -> list[dict[str, Any]]:
    config = write_config(folder, grpo={"steps": 2})
    code, _, err = finish(start(config, folder / "out", *arguments, path=path))
    assert (code, err) == (0, "")
    return read_metrics(folder / "out")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a run without options."""
    return results(_run(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("tq_simple", ["--tp", "2", "--packing"]),
        pytest.param("tq_simple", ["--tp", "2"], marks=pytest.mark.long),
        pytest.param("in-memory", ["--tp", "2", "--packing"], marks=pytest.mark.long),
        pytest.param("in-memory", ["--packing"], marks=pytest.mark.long),
    ],
)
def test_tensor_parallel_and_packed_runs_train_as_the_plain_run_does(
    plain: list[dict[str, Any]], tmp_path: Path, path: str, arguments: list[str]
) -> None:
    for expected, record in zip(plain, results(_run(tmp_path, *arguments, path=path)), strict=True):
        for what in ("reward", "advantages_sha256", "tokens", "mean_length"):
            assert record[what] == expected[what]
        for what in ("loss", "grad_norm", "kl"):
            assert record[what] == pytest.approx(expected[what], abs=1e-5), what
        assert record["generation_logprob_error"] < 1e-5, "the rollout worker had the newest weights, whole"


def test_dynamic_sampling_trains_on_groups_with_right_and_wrong_answers(tmp_path: Path) -> None:
    group_size = 4
    records = _run(tmp_path, "--dynamic-sampling", path="tq_simple")
    for record in records:
        assert 1 <= record["generations"] <= 4
        assert record["answers"] == record["groups"] * group_size <= 32
        drawn = 8 * record["generations"]
        assert record["groups"] + record["groups_dropped"] + record["groups_overflow"] == drawn
        assert 1 / group_size <= record["reward"] <= 1 - 1 / group_size
        assert 0.0 <= record["reward_generated"] <= 1.0
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
    assert (pack_parallel_weights(model) == whole).all()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel 3 must divide num_workers 2 and model.heads 2"),
        ({"tensor_parallel": 4, "num_workers": 4}, "tensor_parallel 4 must divide num_workers 4 and model.heads 2"),
        (
            {"dynamic_sampling": {"enabled": True}, "grpo": {"answers_per_prompt": 5, "prompts_per_step": 8}},
            "answers_per_prompt 5 must be a multiple of the 2 data-parallel ranks",
        ),
        ({"sequence_packing": {"algorithm": "best_fit"}}, "sequence_packing.algorithm: Input should be"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(write_config(tmp_path, **sections), {})


def test_dynamic_sampling_needs_a_data_plane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(write_config(tmp_path)), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--in-memory", "--dynamic-sampling"]) == 2
    assert "dynamic sampling filters rows in the data plane. Leave out --in-memory" in capsys.readouterr().err
