"""Generation of the GRPO example against a plain forward, and the weights' way between processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from grpo.config import ModelConfig
from grpo.generate import generate
from grpo.model import Transformer, build_model, token_logprobs
from grpo.rollout import RolloutWorker
from grpo.task import EOS_ID, PAD_ID, encode
from grpo.weights import load_packed_weights, pack_weights
from torch.testing import assert_close

CONFIG = ModelConfig(width=32, layers=2, heads=2, context=24)
PROMPTS = ["1+2=", "345+678=", "12+34=", "9+10="] * 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A rollout worker sets torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> Transformer:
    return build_model(CONFIG, seed=3)


def sample(model: Transformer, temperature: float = 1.0, seed: int = 0, new_tokens: int = 6):
    return generate(
        model,
        [encode(prompt) for prompt in PROMPTS],
        max_new_tokens=new_tokens,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )


def test_generation_keeps_prompts_and_ends_rows_at_end_of_sequence_or_the_limit(model: Transformer) -> None:
    done = sample(model)
    finished = 0
    for row, prompt in enumerate(PROMPTS):
        start, end = int(done.prompt_lengths[row]), int(done.input_lengths[row])
        ids = done.input_ids[row].tolist()
        assert ids[:start] == encode(prompt)
        assert 1 <= end - start <= 6
        assert EOS_ID not in ids[start : end - 1]
        assert ids[end - 1] == EOS_ID or end - start == 6
        assert set(ids[end:]) <= {PAD_ID}
        finished += ids[end - 1] == EOS_ID
    assert finished > 0
    assert done.input_ids.shape[1] == int(done.input_lengths.max())


def test_generation_logprobs_equal_those_of_a_plain_forward(model: Transformer) -> None:
    done = sample(model)
    with torch.no_grad():
        plain = token_logprobs(model(done.input_ids), done.input_ids, done.input_lengths)
    position = torch.arange(done.input_ids.shape[1])
    is_answer = (position >= done.prompt_lengths.unsqueeze(1)) & (position < done.input_lengths.unsqueeze(1))
    assert_close(done.logprobs, torch.where(is_answer, plain, 0.0), rtol=1e-4, atol=1e-5)


def test_token_logprobs_do_not_see_the_padding(model: Transformer) -> None:
    ids = torch.tensor([[*encode("1+2="), EOS_ID]])
    wide = torch.nn.functional.pad(ids, (0, 3))
    with torch.no_grad():
        narrow_logprobs = token_logprobs(model(ids), ids, torch.tensor([5]))
        wide_logprobs = token_logprobs(model(wide), wide, torch.tensor([5]))
    assert narrow_logprobs[0, 0] == 0.0
    assert bool((narrow_logprobs[0, 1:] < 0).all())
    assert_close(wide_logprobs[:, :5], narrow_logprobs)
    assert torch.equal(wide_logprobs[:, 5:], torch.zeros(1, 3))


def test_packed_weights_rebuild_the_model(model: Transformer) -> None:
    packed = pack_weights(model)
    packed.flags.writeable = False  # as Ray hands them out
    other = Transformer(CONFIG)
    load_packed_weights(other, packed)
    for (name, parameter), (_, expected) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    with pytest.raises(ValueError, match="weights for a model of"):
        load_packed_weights(Transformer(ModelConfig(width=16, layers=1, heads=1)), packed)


def test_a_rollout_worker_returns_the_first_columns_of_a_step(model: Transformer) -> None:
    worker = RolloutWorker(CONFIG, max_new_tokens=6, temperature=1.0, seed=0)
    worker.load_weights(pack_weights(model))
    batch, carry = worker.generate(7, ["1+2=", "34+56="], 4)
    lengths = batch["input_lengths"]
    assert batch["input_ids"].shape == batch["token_mask"].shape == batch["generation_logprobs"].shape
    assert batch["input_ids"].dtype == lengths.dtype == torch.int64
    assert lengths.tolist() == carry.input_lengths
    assert batch["token_mask"].sum(dim=1).tolist() == (lengths - torch.tensor([4] * 4 + [6] * 4)).tolist()
    assert bool((batch["generation_logprobs"][batch["token_mask"] == 1] < 0).all())
    assert not batch["generation_logprobs"][batch["token_mask"] == 0].any()
    assert len(carry.answers) == 8
    assert len(set(carry.answers[:4])) > 1  # the answers of a group are drawn apart
    repeated, _ = worker.generate(7, ["1+2=", "34+56="], 4)
    assert torch.equal(repeated["input_ids"], batch["input_ids"])
