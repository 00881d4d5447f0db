"""The GRPO example's options: sequence packing, layers cut for tensor parallelism, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.config import ModelConfig, load_config
from grpo.model import build_model, token_logprobs
from grpo.packing import packed_token_logprobs
from grpo.parallel import SplitLinear
from grpo.weights import pack_weights
from grpo_runs import write_config

from dataplane_core.errors import ConfigError

MODEL = ModelConfig(width=32, layers=2, heads=4)


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
