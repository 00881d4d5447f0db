"""`examples/grpo.py`: its task, generation against a plain forward, and the loss against values made by hand."""

import math
from pathlib import Path

import grpo
import pytest
import torch
from grpo import CHARACTERS, CLIP_RATIO, KL_WEIGHT, MAX_NEW_TOKENS, Transformer, group_advantages, policy_loss, reward
from torch.testing import assert_close

from dataplane_core.batch import BatchedDataDict

PROMPTS = ["12=", "345678=", "1234=", "910="] * 3


@pytest.mark.parametrize(
    ("answer", "expected"), [("345.", 1.0), ("345", 0.75), ("349.", 0.75), ("3456.", 0.6), ("345345", 0.5), (".", 0.0)]
)
def test_the_reward_is_the_share_that_is_right(answer, expected):
    assert reward("234=", answer) == expected


def test_the_shipped_prompts_are_distinct_and_vary_in_length():
    prompts = Path(grpo.__file__).with_name("prompts.txt").read_text().split()
    assert len(set(prompts)) == len(prompts) == 1500
    assert {len(prompt) for prompt in prompts} == {2, 3, 4, 5}
    assert all(prompt[:-1].isdigit() and prompt.endswith("=") for prompt in prompts)


def test_answers_keep_prompts_end_rows_and_have_the_logprobs_of_a_plain_forward():
    model = Transformer(seed=3)
    rows, answers = model.answer(PROMPTS, seed=0)
    for prompt, answer, ids, mask, length in zip(
        PROMPTS, answers, rows["input_ids"], rows["token_mask"], rows["input_lengths"].tolist(), strict=True
    ):
        assert grpo.decode(ids[:length].tolist()) == prompt + answer
        assert mask.nonzero().flatten().tolist() == list(range(len(prompt), length))
        assert 1 <= len(answer) <= MAX_NEW_TOKENS
        assert "." not in answer[:-1]
        assert answer.endswith(".") or len(answer) == MAX_NEW_TOKENS
        assert set(ids[length:].tolist()) <= {CHARACTERS.index("_")}
    assert any(answer.endswith(".") for answer in answers)
    with torch.no_grad():
        plain = torch.where(rows["token_mask"] == 1, model.token_logprobs(rows), 0.0)
    assert_close(rows["generation_logprobs"], plain, rtol=1e-4, atol=1e-5)
    assert Transformer(seed=3).answer(PROMPTS, seed=0)[1] == answers
    assert model.answer(PROMPTS, seed=1)[1] != answers


def test_a_greedy_answer_takes_the_likeliest_tokens():
    model = Transformer(seed=3)
    (answer,) = model.answer(["27="], seed=0, greedy=True)[1]
    text = "27="
    for char in answer:
        with torch.no_grad():
            logits = model(torch.tensor([[CHARACTERS.index(c) for c in text]]))
        assert char == CHARACTERS[int(logits[0, -1].argmax())]
        text += char


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


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_the_policy_gradient():
    ratios = torch.tensor([[1.0, 1.5, 1.5, 0.5]])
    logprobs = (ratios.log() - 1.0).requires_grad_()
    data = columns(
        prev_logprobs=[[-1.0] * 4],
        generation_logprobs=[[-1.0] * 4],
        advantages=[[2.0, 2.0, -2.0, -2.0]],
        token_mask=[[1.0] * 4],
    )
    data["reference_policy_logprobs"] = logprobs.detach()  # where the penalty has no gradient
    loss, _ = policy_loss(logprobs, data, torch.tensor(4.0))
    loss.backward()
    assert_close(logprobs.grad, torch.tensor([[-2.0 / 4, 0.0, 2.0 * 1.5 / 4, 0.0]]))


def test_parts_of_a_batch_add_up_to_the_loss_of_the_whole():
    torch.manual_seed(0)
    names = ("prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages")
    whole = BatchedDataDict({name: torch.randn(6, 5) for name in names})
    whole["token_mask"] = (torch.rand(6, 5) < 0.6).float()
    logprobs, tokens = torch.randn(6, 5), whole["token_mask"].sum()
    parts = [
        policy_loss(logprobs[cut], BatchedDataDict({name: column[cut] for name, column in whole.items()}), tokens)[0]
        for cut in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert_close(torch.stack(parts).sum(), policy_loss(logprobs, whole, tokens)[0])


def test_advantages_are_relative_to_the_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    expected = [0.75 / math.sqrt(3 / 16)] + [-0.25 / math.sqrt(3 / 16)] * 3 + [0.0] * 4
    assert_close(group_advantages(rewards, 4), torch.tensor(expected), rtol=1e-5, atol=1e-5)
