"""The GRPO loss against values computed by hand, and its independence of how a batch is cut."""

import math

import pytest
import torch
from grpo.loss import ClippedPolicyLoss, group_advantages
from torch.testing import assert_close

from dataplane_core.batch import BatchedDataDict


def columns(**values):
    return BatchedDataDict({name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()})


def test_loss_equals_the_hand_computed_value():
    data = columns(
        prev_logprobs=[[0.0, -1.0, -2.0, -9.0]],
        reference_policy_logprobs=[[0.0, -1.5, -1.0, -9.0]],
        generation_logprobs=[[0.0, -1.25, -2.0, -9.0]],
        advantages=[[1.0, 1.0, 1.0, 1.0]],
        token_mask=[[0.0, 1.0, 1.0, 0.0]],
        sample_mask=[1.0],
    )
    # Ratios: 1.5 is clipped to 1.2, since its advantage is positive; 0.5 is not, since it lowers the objective.
    logprobs = torch.tensor([[0.0, -1.0 + math.log(1.5), -2.0 + math.log(0.5), 5.0]])
    loss, metrics = ClippedPolicyLoss(clip_ratio=0.2, kl_weight=0.1)(logprobs, data, torch.tensor(4.0))

    away = [-1.5 - (-1.0 + math.log(1.5)), -1.0 - (-2.0 + math.log(0.5))]
    kl = sum(math.exp(d) - d - 1.0 for d in away) / 4
    assert loss.item() == pytest.approx(-(1.2 + 0.5) / 4 + 0.1 * kl, rel=1e-5)
    assert metrics["kl"].item() == pytest.approx(kl, rel=1e-5)
    assert metrics["clipped_fraction"].item() == pytest.approx(2 / 4)
    assert metrics["generation_logprob_error"].item() == pytest.approx(0.25 / 4)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_the_policy_gradient():
    data = columns(
        prev_logprobs=[[-1.0] * 4],
        reference_policy_logprobs=[[0.0] * 4],
        generation_logprobs=[[-1.0] * 4],
        advantages=[[2.0, 2.0, -2.0, -2.0]],
        token_mask=[[1.0] * 4],
        sample_mask=[1.0],
    )
    ratios = torch.tensor([[1.0, 1.5, 1.5, 0.5]])
    logprobs = (ratios.log() - 1.0).requires_grad_()
    loss, _ = ClippedPolicyLoss(clip_ratio=0.2, kl_weight=0.0)(logprobs, data, torch.tensor(4.0))
    assert loss.item() == pytest.approx(-(2.0 + 2.0 * 1.2 - 2.0 * 1.5 - 2.0 * 0.8) / 4, rel=1e-5)
    loss.backward()
    assert logprobs.grad is not None
    assert_close(logprobs.grad, torch.tensor([[-2.0 / 4, 0.0, 2.0 * 1.5 / 4, 0.0]]))


def test_parts_of_a_batch_add_up_to_the_loss_of_the_whole_and_masked_samples_count_for_nothing():
    torch.manual_seed(0)
    names = ("prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages")
    whole = BatchedDataDict({name: torch.randn(6, 5) for name in names})
    whole["token_mask"] = (torch.rand(6, 5) < 0.6).float()
    whole["sample_mask"] = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    logprobs = torch.randn(6, 5, requires_grad=True)
    tokens = whole["token_mask"].sum()
    loss_fn = ClippedPolicyLoss()
    parts = [
        loss_fn(logprobs[cut], BatchedDataDict({name: column[cut] for name, column in whole.items()}), tokens)[0]
        for cut in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    loss, _ = loss_fn(logprobs, whole, tokens)
    assert_close(torch.stack(parts).sum(), loss)
    loss.backward()
    assert logprobs.grad is not None
    counted = whole["token_mask"].bool() & (whole["sample_mask"] == 1).unsqueeze(1)
    assert not logprobs.grad[~counted].any()
    assert bool(logprobs.grad[counted].any())


def test_advantages_are_relative_to_the_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    expected = [0.75 / math.sqrt(3 / 16)] + [-0.25 / math.sqrt(3 / 16)] * 3 + [0.0] * 4
    assert_close(group_advantages(rewards, 4), torch.tensor(expected), rtol=1e-5, atol=1e-5)
