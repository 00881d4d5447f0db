"""The model of the GRPO example: generation against a plain forward, packed rows, layers cut for tensor parallelism."""

import pytest
import torch
from grpo.config import ModelConfig
from grpo.generate import generate
from grpo.model import Transformer, build_model, token_logprobs
from grpo.packing import packed_token_logprobs
from grpo.parallel import SplitLinear
from grpo.task import EOS_ID, PAD_ID, encode
from grpo.weights import load_packed_weights, pack_weights
from torch.testing import assert_close

CONFIG = ModelConfig(width=32, layers=2, heads=2, context=24)
PROMPTS = ["1+2=", "345+678=", "12+34=", "9+10="] * 3


@pytest.fixture
def model():
    return build_model(CONFIG, seed=3)


def test_generation_keeps_prompts_ends_rows_and_has_the_logprobs_of_a_plain_forward(model):
    prompts, generator = [encode(prompt) for prompt in PROMPTS], torch.Generator().manual_seed(0)
    done = generate(model, prompts, max_new_tokens=6, temperature=1.0, generator=generator)
    finished = 0
    for row, prompt in enumerate(prompts):
        start, end = int(done.prompt_lengths[row]), int(done.input_lengths[row])
        ids = done.input_ids[row].tolist()
        assert ids[:start] == prompt
        assert 1 <= end - start <= 6
        assert EOS_ID not in ids[start : end - 1]
        assert ids[end - 1] == EOS_ID or end - start == 6
        assert set(ids[end:]) <= {PAD_ID}
        finished += ids[end - 1] == EOS_ID
    assert finished > 0
    assert done.input_ids.shape[1] == int(done.input_lengths.max())
    with torch.no_grad():
        plain = token_logprobs(model(done.input_ids), done.input_ids, done.input_lengths)
    position = torch.arange(done.input_ids.shape[1])
    is_answer = (position >= done.prompt_lengths.unsqueeze(1)) & (position < done.input_lengths.unsqueeze(1))
    assert_close(done.logprobs, torch.where(is_answer, plain, 0.0), rtol=1e-4, atol=1e-5)


def test_packed_rows_have_the_logprobs_and_gradients_of_padded_rows_which_do_not_see_the_padding():
    lengths = torch.tensor([5, 9, 1, 7])
    ids = torch.randint(1, 10, (4, 12), generator=torch.Generator().manual_seed(0))
    outcomes = []
    for packed in (False, True):
        model = build_model(CONFIG, seed=1)
        logprobs = packed_token_logprobs(model, ids, lengths) if packed else token_logprobs(model(ids), ids, lengths)
        logprobs.square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        outcomes.append((logprobs.detach(), gradients))
    (padded, padded_gradients), (one, gradients) = outcomes
    assert_close(one, padded, atol=1e-5, rtol=0)
    assert_close(gradients, padded_gradients, atol=1e-4, rtol=1e-4)
    position = torch.arange(12)
    assert torch.equal(padded != 0, (position > 0) & (position < lengths.unsqueeze(1)))
    assert torch.equal(one == 0, padded == 0)


def test_packed_weights_rebuild_the_model_and_are_the_same_of_cut_layers(model):
    packed = pack_weights(model)
    packed.flags.writeable = False  # as Ray hands them out
    other = Transformer(CONFIG)
    load_packed_weights(other, packed)
    for (name, parameter), (_, expected) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    with pytest.raises(ValueError, match="weights for a model of"):
        load_packed_weights(Transformer(ModelConfig(width=16, layers=1, heads=1)), packed)
    hidden = torch.randn(2, 3, CONFIG.width)
    for block in model.blocks:
        cut = SplitLinear(block.qkv)
        assert_close(cut(hidden), block.qkv(hidden))
        block.qkv = cut
    assert (pack_weights(model) == packed).all()
