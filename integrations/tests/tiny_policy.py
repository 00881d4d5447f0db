"""A policy worker small enough for tests, and real: attention, tensor parallelism, `fully_shard`, sequence packing.

Tests send it to other processes by value. Shape legend: ``N`` rows, ``S`` padded length, ``T`` tokens of all rows,
``V`` vocabulary, ``C`` width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from dataplane_core.batch import BatchedDataDict
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin

VOCAB, WIDTH, HEADS, CONTEXT = 16, 16, 4, 16

TENSOR_PARALLEL_PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Layer(nn.Module):
    """Attention and a feed-forward part. Knows neither its shard of the heads nor that there are shards."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_nsc: Tensor, mask: Tensor) -> Tensor:
        heads = [
            part(hidden_nsc).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        hidden_nsc = hidden_nsc + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden_nsc + self.down(torch.tanh(self.up(hidden_nsc)))


class TinyPolicy(nn.Module):
    """Token ids in, logits out; the same weights in every process."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.layer = Layer()
            self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids_ns: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.tokens(ids_ns) + self.positions(positions), mask))
        return logits


def batch_of(lengths: list[int], seed: int) -> BatchedDataDict:
    """Rows of these many random tokens with random advantages, right-padded with 0."""
    inside = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    generator = torch.Generator().manual_seed(seed)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(1, VOCAB, inside.shape, generator=generator) * inside,
            "input_lengths": torch.tensor(lengths),
            "token_mask": inside.float(),
            "sample_mask": torch.ones(len(lengths)),
            "advantages": torch.randn(inside.shape, generator=generator).where(inside, 0.0),
        }
    )


def padded_logprobs(model: nn.Module, ids_ns: Tensor, lengths_n: Tensor) -> Tensor:
    """(N, S): of each token given those before it; 0 at position 0 and on padding. Rows side by side, padded."""
    position_s = torch.arange(ids_ns.shape[1])
    logits = model(ids_ns, position_s, position_s.unsqueeze(1) >= position_s)
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids_ns[:, 1:].unsqueeze(-1)).squeeze(-1)
    return functional.pad(chosen, (1, 0)).where(position_s < lengths_n.unsqueeze(1), 0.0)  # a product could be -0.0


def packed_logprobs(model: nn.Module, ids_ns: Tensor, lengths_n: Tensor) -> Tensor:
    """The same from one sequence of all rows' tokens, in which a token sees its own row alone."""
    inside_ns = torch.arange(ids_ns.shape[1]) < lengths_n.unsqueeze(1)
    row_t, position_t = inside_ns.nonzero(as_tuple=True)
    mask_tt = (row_t.unsqueeze(1) == row_t) & (position_t.unsqueeze(1) >= position_t)
    ids_t = ids_ns[inside_ns]
    logits_tv = model(ids_t.unsqueeze(0), position_t, mask_tt).squeeze(0)
    chosen_t = logits_tv[:-1].log_softmax(-1).gather(-1, ids_t[1:].unsqueeze(-1)).squeeze(-1)
    aligned_t = functional.pad(chosen_t, (1, 0)) * (position_t > 0)
    return torch.zeros(ids_ns.shape).masked_scatter(inside_ns, aligned_t)


def logprobs_of(model: nn.Module, data: BatchedDataDict, packed: bool) -> Tensor:
    of = packed_logprobs if packed else padded_logprobs
    return of(model, data["input_ids"], data["input_lengths"])


def loss_of(logprobs_ns: Tensor, data: BatchedDataDict, global_tokens: float) -> Tensor:
    """A microbatch's part of the mean over all tokens of the step."""
    mask_ns = data["token_mask"] * data["sample_mask"].unsqueeze(1)
    ratio_ns = (logprobs_ns - data["prev_logprobs"]).exp()
    loss: Tensor = -(ratio_ns * data["advantages"] * mask_ns).sum() / global_tokens
    return loss


def in_one_process(data: BatchedDataDict, steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the steps of a `TinyWorker`, everything at once, nothing sharded.

    ``data`` gets the column ``prev_logprobs``.
    """
    model = TinyPolicy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with torch.no_grad():
        data["prev_logprobs"] = logprobs_of(model, data, packed=False)
    losses, norms = [], []
    for _ in range(steps):
        loss = loss_of(logprobs_of(model, data, packed=False), data, data["token_mask"].sum().item())
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def microbatches(data: BatchedDataDict, size: int | None = None) -> Iterator[BatchedDataDict]:
    """By the plan where there is one; else of ``size`` rows."""
    if data.micro_batch_indices is None:
        yield from data.make_microbatch_iterator(size or data.size)
        return
    for index in range(len(data.micro_batch_indices)):
        yield from data.get_batch(index).make_microbatch_iterator_with_dynamic_shapes()


def _local(value: Tensor | None) -> Tensor:
    assert isinstance(value, DTensor)
    return value.to_local().detach().clone()


class TinyWorker(FSDP2DataPlaneMixin):
    """One rank of a mesh (dp, cp, tp).

    The model has no context-parallel attention: the ranks of ``cp`` replicate the computation, as they replicate the
    rows, and `fully_shard` spreads the weights over dp and cp together.
    """

    def __init__(self, shape: tuple[int, int, int], packed: bool = False) -> None:
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
        self.dp_size = shape[0]
        self.packed = packed
        self.model = TinyPolicy()
        if shape[2] > 1:
            parallelize_module(self.model.layer, self.mesh["tp"], TENSOR_PARALLEL_PLAN)
        weights_mesh = self.mesh["dp", "cp"]._flatten("dp_cp")
        fully_shard(self.model.layer, mesh=weights_mesh)
        fully_shard(self.model, mesh=weights_mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.counts: list[int] = []  # of microbatches

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> dict[str, Tensor]:
        width = data["input_ids"].shape[1]
        with torch.no_grad():
            parts = [logprobs_of(self.model, part, self.packed) for part in microbatches(data, micro_batch_size)]
        self.counts.append(len(parts))
        return {"logprobs": torch.cat([functional.pad(part, (0, width - part.shape[1])) for part in parts])}

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> dict[str, Tensor]:
        """Those of the policy: its weights are the reference's before the first step."""
        return {"reference_logprobs": self.get_logprobs(data, micro_batch_size)["logprobs"]}

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        self.begin_train_step(loss_fn, gbs, mbs)
        self.train_microbatch(data)
        return self.finish_train_step()

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        self.loss_fn, self.mbs = loss_fn, mbs
        self.sums = torch.zeros(2)  # the loss and the tokens of this rank
        self.parts: list[float] = []
        self.optimizer.zero_grad()

    def train_microbatch(self, data: BatchedDataDict) -> None:
        for part in microbatches(data, self.mbs):
            loss = self.loss_fn(logprobs_of(self.model, part, self.packed), part, 1.0)
            loss.backward()
            self.sums += torch.stack([loss.detach(), part["token_mask"].sum()])
            self.parts.append(loss.item())
        self.counts.append(len(self.parts))

    def finish_train_step(self) -> dict[str, Any]:
        total, tokens = self._sum(self.sums)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            # averaged over dp and cp: every cp rank brings the same, so only dp must be undone
            parameter.grad.mul_(self.dp_size / tokens.item())
        norm = self._grad_norm()
        self.optimizer.step()
        return {"global_loss": (total / tokens).reshape(1), "grad_norm": norm, "all_mb_metrics": {"loss": self.parts}}

    def abort_train_step(self) -> None:
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step, of this rank's shards of the weights."""
        return {name: _local(parameter.grad) for name, parameter in self.model.named_parameters()}

    def state(self) -> list[Tensor]:
        """The weights of this rank, and what the optimizer keeps for them."""
        kept = [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        return [_local(value) for value in (*self.model.parameters(), *kept)]

    def _sum(self, value: Tensor) -> Tensor:
        total = value.clone()
        group = self._get_data_parallel_group()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    def _grad_norm(self) -> Tensor:
        squares = torch.zeros(())
        for parameter in self.model.parameters():
            assert isinstance(parameter.grad, DTensor)
            squares += parameter.grad.full_tensor().square().sum()
        return squares.sqrt().reshape(1)
