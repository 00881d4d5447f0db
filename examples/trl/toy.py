"""What is trained: a small model, which begins with random weights, learns to count on.

A prompt is four random digits, such as ``2740``. Right are four more, each one more than the digit before, modulo 10:
``1234``. The reward is the share of right digits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DIGITS = 4
_NAMES = ["<pad>", "<eos>", *"0123456789"]


def draw_prompts(count: int, seed: int) -> list[str]:
    """Prompts for training; none of `HELD_OUT`."""
    random_numbers = random.Random(seed)
    drawn = (f"{random_numbers.randrange(10**4):04}" for _ in itertools.count())
    return list(itertools.islice((prompt for prompt in drawn if prompt not in HELD_OUT), count))


#: Prompts of the evaluation, which are never trained on.
HELD_OUT = [f"{number:04}" for number in range(37, 10**4, 157)]


def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """The share of right digits: a reward function for GRPOTrainer."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        digits = prompt[-1] + completion
        right = sum(int(after) == (int(before) + 1) % 10 for before, after in itertools.pairwise(digits))
        rewards.append(right / DIGITS)
    return rewards


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(_NAMES)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(_NAMES),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


class Generator:
    """Answers prompts with a model: the ``generate`` of a rollout process."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model, self._tokenizer = model, tokenizer

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[str], answers: int, max_new_tokens: int, temperature: float
    ) -> dict[str, list[Any]]:
        """Answers each prompt ``answers`` times; with a temperature of 0, with the likeliest tokens."""
        repeated = [prompt for prompt in prompts for _ in range(answers)]
        encoded = self._tokenizer(repeated, padding=True, return_tensors="pt", return_token_type_ids=False)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        made: Any = self._model.generate(
            **encoded, max_new_tokens=max_new_tokens, output_scores=True, return_dict_in_generate=True, **sampling
        )
        tokens = made.sequences[:, encoded["input_ids"].shape[1] :]
        logprobs = torch.stack(made.scores, 1).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        ended = tokens == self._tokenizer.eos_token_id
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, tokens.shape[1]).tolist()
        return {
            "prompt_ids": self._tokenizer(repeated)["input_ids"],
            "completion_ids": [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)],
            "logprobs": [row[:length].tolist() for row, length in zip(logprobs, lengths, strict=True)],
        }


def evaluate(generate: Generator, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """The mean reward on the held-out prompts: sampled, 8 answers each, from one fixed seed; and greedy."""
    shares = {}
    for name, answers, temperature in (("sampled", 8, 1.0), ("greedy", 1, 0.0)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            ids = generate(HELD_OUT, answers, DIGITS, temperature)["completion_ids"]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        rewards = reward([prompt for prompt in HELD_OUT for _ in range(answers)], texts)
        shares[name] = sum(rewards) / len(rewards)
    return shares
