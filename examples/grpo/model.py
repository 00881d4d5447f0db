"""A small decoder-only transformer in plain torch, used for training and, with a key-value cache, for generation.

Shape legend: ``N`` sequences, ``S`` tokens, ``V`` vocabulary, ``C`` width, ``H`` heads, ``D`` = ``C / H``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ModelConfig
from .task import VOCAB_SIZE

__all__ = ["KeyValueCache", "Transformer", "build_model", "token_logprobs"]


class KeyValueCache:
    """Keys and values of the tokens seen so far, so that generation computes each token once.

    All rows stand at the same position: a row that still has prompt left is fed its prompt.
    """

    def __init__(self, config: ModelConfig, num_rows: int) -> None:
        shape = (config.layers, num_rows, config.heads, config.context, config.width // config.heads)
        self._keys_lnhsd = torch.zeros(shape)
        self._values_lnhsd = torch.zeros(shape)
        #: Number of tokens that the cache holds; the model advances it.
        self.length = 0

    def extend(self, layer: int, key_nhsd: Tensor, value_nhsd: Tensor) -> tuple[Tensor, Tensor]:
        """Appends to one layer; returns its keys and values from the first token to the newest."""
        end = self.length + key_nhsd.shape[2]
        self._keys_lnhsd[layer, :, :, self.length : end] = key_nhsd
        self._values_lnhsd[layer, :, :, self.length : end] = value_nhsd
        return self._keys_lnhsd[layer, :, :, :end], self._values_lnhsd[layer, :, :, :end]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and a residual connection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width = config.width
        self.layer = layer
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = nn.Linear(width, 4 * width)
        self.feed_forward_out = nn.Linear(4 * width, width)

    def forward(self, hidden_nsc: Tensor, cache: KeyValueCache | None = None, mask: Tensor | None = None) -> Tensor:
        num_rows, num_tokens, _ = hidden_nsc.shape
        qkv = self.qkv(self.attention_norm(hidden_nsc)).view(num_rows, num_tokens, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        # One new token sees everything in the cache; several at once come without a past, and see what precedes them.
        causal = mask is None and num_tokens > 1
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        # Not the full width where the heads are shared out over tensor-parallel ranks.
        mixed_nsc = mixed.transpose(1, 2).reshape(num_rows, num_tokens, -1)
        hidden_nsc = hidden_nsc + self.attention_out(mixed_nsc)
        inner = functional.gelu(self.feed_forward_in(self.feed_forward_norm(hidden_nsc)))
        return hidden_nsc + self.feed_forward_out(inner)


class Transformer(nn.Module):
    """Token ids in, next-token logits out. About 0.1 million parameters at the default sizes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCAB_SIZE, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCAB_SIZE)

    def forward(
        self,
        input_ids_ns: Tensor,
        cache: KeyValueCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (N, S, V) of the token that follows each position.

        Args:
            input_ids_ns: (N, S) int64, padded on the right. Attention is causal, so padding changes nothing before it.
            cache: With a cache, ``input_ids_ns`` continues what it holds: any number of tokens into an empty cache,
                then one at a time.
            positions: (S,) int64: the position of each token in its sequence; None: they follow each other.
            mask: (S, S) bool: which tokens (second dim) each token sees; None: all that precede it, and itself.
        """
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + input_ids_ns.shape[1])
        hidden_nsc = self.token_embedding(input_ids_ns) + self.position_embedding(positions)
        for block in self.blocks:
            hidden_nsc = block(hidden_nsc, cache, mask)
        if cache is not None:
            cache.length += input_ids_ns.shape[1]
        logits: Tensor = self.head(self.norm(hidden_nsc))
        return logits


def build_model(config: ModelConfig, seed: int) -> Transformer:
    """A freshly initialised model: the same weights for the same seed, the global random state untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5)
    return model


def token_logprobs(logits_nsv: Tensor, input_ids_ns: Tensor, input_lengths_n: Tensor) -> Tensor:
    """Log-probability of every token given those before it, aligned with ``input_ids``.

    Returns:
        (N, S) float32. Position 0 is 0 (nothing precedes it), and so is everything from a row's length on.
    """
    logprobs_nsv = logits_nsv[:, :-1].float().log_softmax(dim=-1)
    chosen = logprobs_nsv.gather(-1, input_ids_ns[:, 1:].unsqueeze(-1)).squeeze(-1)
    aligned = functional.pad(chosen, (1, 0))
    inside = torch.arange(input_ids_ns.shape[1]) < input_lengths_n.unsqueeze(1)
    return torch.where(inside, aligned, torch.zeros_like(aligned))
