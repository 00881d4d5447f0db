"""`examples/grpo.py`: its task, and the loss against values made by hand."""

import math

import pytest
import torch
from grpo import CLIP_RATIO, KL_WEIGHT, group_advantages, policy_loss, reward
from torch.testing import assert_close

from dataplane_core.batch import BatchedDataDict


@pytest.mark.parametrize(
    ("answer", "expected"), [("345.", 1.0), ("345", 0.75), ("349.", 0.75), ("3456.", 0.6), ("345345", 0.5), (".", 0.0)]
)
def test_the_reward_is_the_share_that_is_right(answer, expected):
    assert reward("234=", answer) == expected


def columns(**values):
    return BatchedDataDict({name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()})


def test_the_loss_is_that_computed_by_hand():
    data = columns(
        prev_logprobs=[[0.0, -1.0, -2.0, -9.0]],
        reference_policy_logprobs=[[0.0, -1.5, -1.0, -9.0]],
        generation_logprobs=[[0.0, -1.25, -2.0, -9.0]],
        advantages=[[1.0, 1.0, 1.0, 1.0]],
        token_mask=[[0.0, 1.0, 1.0, 0.0]],
    )
    # Ratios: 1.5 is clipped, since its advantage is positive; 0.5 is not, since it lowers the objective.
    logprobs = torch.tensor([[0.0, -1.0 + math.log(1.5), -2.0 + math.log(0.5), 5.0]])
    loss, metrics = policy_loss(logprobs, data, torch.tensor(4.0))
    away = [-1.5 - (-1.0 + math.log(1.5)), -1.0 - (-2.0 + math.log(0.5))]
    kl = sum(math.exp(d) - d - 1.0 for d in away) / 4
    assert loss.item() == pytest.approx(-(1.0 + CLIP_RATIO + 0.5) / 4 + KL_WEIGHT * kl, rel=1e-5)
    assert metrics["kl"].item() == pytest.approx(kl, rel=1e-5)
    assert metrics["clipped_fraction"].item() == pytest.approx(2 / 4)
    assert metrics["generation_logprob_error"].item() == pytest.approx(0.25 / 4)


def test_advantages_are_relative_to_the_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    expected = [0.75 / math.sqrt(3 / 16)] + [-0.25 / math.sqrt(3 / 16)] * 3 + [0.0] * 4
    assert_close(group_advantages(rewards, 4), torch.tensor(expected), rtol=1e-5, atol=1e-5)
