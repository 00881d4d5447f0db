"""The policy worker: one rank of training with FSDP2 (`fully_shard`) over gloo, with tensor parallelism if asked.

Two of them or more run as Ray actors. All make the same calls in the same order, since every forward gathers the shards
of the weights from all. Shape legend: ``N`` rows of this rank, ``S`` padded sequence length.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from dataplane_core.batch import BatchedDataDict

from .config import GrpoSection, ModelConfig
from .loss import loss_mask
from .model import Transformer, token_logprobs
from .packing import packed_token_logprobs
from .parallel import Layout, clip_gradients, make_mesh, shard_policy
from .training_state import read_state, write_state
from .weights import PackedWeights, load_packed_weights, pack_weights

__all__ = ["LossFunction", "PolicyWorker"]


class LossFunction(Protocol):
    """Computes one microbatch's part of a global mean; see `loss.ClippedPolicyLoss`."""

    def __call__(
        self, logprobs_ns: Tensor, data: BatchedDataDict, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass
class _OpenStep:
    """What the portions of a step have added up to; sums over this rank's tokens."""

    loss_fn: LossFunction
    mbs: int | None
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    tokens: Tensor = field(default_factory=lambda: torch.zeros(()))
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)


class PolicyWorker:
    """One data-parallel rank: a shard of the policy and its optimizer, and a frozen copy of the reference policy."""

    mesh: DeviceMesh
    model: nn.Module
    reference: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        model_config: ModelConfig,
        optimizer_config: GrpoSection,
        rank: int,
        world_size: int,
        layout: Layout | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.model_config = model_config
        self.optimizer_config = optimizer_config
        self.rank = rank
        self.world_size = world_size
        self.layout = layout or Layout()
        #: Data-parallel ranks: those with rows of their own.
        self.dp_size = world_size // self.layout.tensor_parallel
        self._store: dist.TCPStore | None = None

    def process_id(self) -> int:
        """Process id; answers as soon as the actor is up."""
        return os.getpid()

    def open_rendezvous(self) -> tuple[str, int]:
        """Opens the address at which the ranks find each other. Rank 0 only.

        Returns:
            Host and port. The port is bound when this returns, so no other program can take it meanwhile.
        """
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def setup(self, rendezvous: tuple[str, int], packed: PackedWeights, timeout_s: float) -> None:
        """Joins the process group and shards the policy. Collective: every rank must be called.

        Args:
            rendezvous: What `open_rendezvous` of rank 0 returned.
            packed: Weights of the policy and of its reference.
            timeout_s: Timeout of a collective, in seconds. Longer than the driver's deadline, so
                that the driver is the one to say who did not answer.
        """
        store = self._store or dist.TCPStore(*rendezvous, is_master=False)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        self._build(packed)
        config = self.optimizer_config
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / max(1, config.warmup_steps))
        )

    def _build(self, packed: PackedWeights) -> None:
        """Makes the policy, spread over the ranks, and its reference."""
        self.mesh = make_mesh(self.world_size, self.layout)
        self.model = Transformer(self.model_config)
        load_packed_weights(self.model, packed)
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        shard_policy(self.model, self.mesh)

    def packed_weights(self) -> PackedWeights | None:
        """The whole policy on rank 0, None elsewhere. Collective: start the call on every rank, then wait."""
        packed = pack_weights(self.model)
        return packed if self.rank == 0 else None

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """Log-probabilities under the current policy. Collective.

        Args:
            data: Rows with ``input_ids`` (N, S) and ``input_lengths`` (N,), and perhaps a microbatch plan.
            micro_batch_size: Rows per microbatch where ``data`` has no plan; None: all at once.

        Returns:
            ``logprobs`` (N, S) float32, aligned with ``input_ids``: 0 at position 0 and on padding.
        """
        return self._logprobs(self.model, data, micro_batch_size, "logprobs")

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """As `get_logprobs`, for the reference policy: ``reference_logprobs``."""
        return self._logprobs(self.reference, data, micro_batch_size, "reference_logprobs")

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step per global batch. Collective.

        Args:
            data: This rank's rows, with all columns that ``loss_fn`` reads, and perhaps a microbatch plan.
            loss_fn: The loss.
            eval_mode: Only compute the loss.
            gbs: Global batch size, in rows of all ranks together; None: one batch of everything.
            mbs: Rows per microbatch where ``data`` has no plan; None: all at once.

        Returns:
            ``global_loss`` (B,) float64 and ``grad_norm`` (B,) float64 with one value per global batch, equal on all
            ranks; ``all_mb_metrics``: per name this rank's parts, one per microbatch, whose sum over microbatches and
            ranks is the global mean of a batch; ``global_tokens``: answer tokens of all ranks.

        Raises:
            ValueError: ``gbs`` does not divide the rows.
        """
        rows = data.size if gbs is None else gbs // self.dp_size
        if rows == 0 or data.size % rows:
            raise ValueError(
                f"train: {data.size} rows on each of {self.dp_size} ranks are not a multiple of gbs={gbs}."
            )
        self.model.train(not eval_mode)
        losses, grad_norms, total_tokens = [], [], 0.0
        metrics: dict[str, list[float]] = {}
        for index in range(data.size // rows):
            batch = data.get_batch(index, rows)
            global_tokens = self._sum_over_ranks(loss_mask(batch).sum())
            loss = torch.zeros(())
            microbatches = list(_microbatches(batch, mbs))
            for number, microbatch in enumerate(microbatches, start=1):
                self._before_backward(number == len(microbatches))
                with torch.set_grad_enabled(not eval_mode):
                    logprobs_ns = self._forward(self.model, microbatch)
                    part, part_metrics = loss_fn(logprobs_ns, microbatch, global_tokens.clamp(min=1.0))
                if not eval_mode:
                    # Gradients are averaged over ranks; the parts must add up, hence the factor.
                    (part * self.dp_size).backward()
                loss += part.detach()
                for name, value in part_metrics.items():
                    metrics.setdefault(name, []).append(value.item())
            losses.append(self._sum_over_ranks(loss).item())
            grad_norms.append(0.0 if eval_mode else self._optimizer_step())
            total_tokens += global_tokens.item()
        return {
            "global_loss": torch.tensor(losses, dtype=torch.float64),
            "grad_norm": torch.tensor(grad_norms, dtype=torch.float64),
            "all_mb_metrics": metrics,
            "global_tokens": int(total_tokens),
        }

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """`train` on portions of one global batch; see `dataplane_integrations.trainer.worker.SplitStepWorker`."""
        self.model.train()
        self.optimizer.zero_grad()
        self._open_step = _OpenStep(loss_fn, mbs)

    def train_microbatch(self, data: BatchedDataDict) -> None:
        """Adds up the gradients of a portion's sums over tokens. Collective."""
        step = self._open_step
        microbatches = list(_microbatches(data, step.mbs))
        for number, microbatch in enumerate(microbatches, start=1):
            self._before_backward(number == len(microbatches))
            logprobs_ns = self._forward(self.model, microbatch)
            part, part_metrics = step.loss_fn(logprobs_ns, microbatch, torch.ones(()))
            (part * self.dp_size).backward()
            step.loss += part.detach()
            step.tokens += loss_mask(microbatch).sum()
            for name, value in part_metrics.items():
                step.metrics.setdefault(name, []).append(value)

    def finish_train_step(self) -> dict[str, Any]:
        """Divides by all tokens, and makes the optimizer step. Collective. Returns what `train` does."""
        step = self._open_step
        global_tokens = self._sum_over_ranks(step.tokens)
        divisor = global_tokens.clamp(min=1.0).item()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= divisor
        return {
            "global_loss": torch.tensor([self._sum_over_ranks(step.loss).item() / divisor], dtype=torch.float64),
            "grad_norm": torch.tensor([self._optimizer_step()], dtype=torch.float64),
            "all_mb_metrics": {
                name: [value.item() / divisor for value in values] for name, values in step.metrics.items()
            },
            "global_tokens": int(global_tokens.item()),
        }

    def abort_train_step(self) -> None:
        """Drops the gradients of the portions."""
        self.optimizer.zero_grad()

    def write_training_state(self, folder: Path) -> None:
        """Writes this rank's shards of weights and moments, and the schedule, into ``folder``; see `write_state`."""
        write_state(folder, self.rank, self.model, self.optimizer, self._schedule)

    def read_training_state(self, folder: Path) -> None:
        """Takes over what `write_training_state` wrote. The reference policy stays as `setup` got it."""
        read_state(folder, self.rank, self.model, self.optimizer, self._schedule)

    def _optimizer_step(self) -> float:
        norm = self._clip_gradients()
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()
        return norm

    def _clip_gradients(self) -> float:
        max_norm = self.optimizer_config.max_grad_norm
        if self.layout.tensor_parallel > 1:
            return clip_gradients(self.model, max_norm)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return float(norm.full_tensor().item())  # type: ignore[attr-defined]  # a DTensor under FSDP

    @torch.no_grad()
    def _logprobs(
        self, model: nn.Module, data: BatchedDataDict, micro_batch_size: int | None, key: str
    ) -> BatchedDataDict:
        width = data["input_ids"].shape[1]
        parts = []
        for microbatch in _microbatches(data, micro_batch_size):
            logprobs_ns = self._forward(model, microbatch)
            parts.append(functional.pad(logprobs_ns, (0, width - logprobs_ns.shape[1])))
        return BatchedDataDict({key: torch.cat(parts)})

    def _forward(self, model: nn.Module, data: BatchedDataDict) -> Tensor:
        if self.layout.pack_sequences:
            return packed_token_logprobs(model, data["input_ids"], data["input_lengths"])
        return token_logprobs(model(data["input_ids"]), data["input_ids"], data["input_lengths"])

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=self._rows_group())
        return total

    def _rows_group(self) -> dist.ProcessGroup:
        """The ranks that have other rows."""
        return self.mesh.get_group("dp")

    def _before_backward(self, last: bool) -> None:
        """Lets gradients be exchanged once per batch, with its last microbatch."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)


def _microbatches(data: BatchedDataDict, size: int | None) -> Iterator[BatchedDataDict]:
    """The driver's plan where the data carries one; it gives every rank the same number of microbatches."""
    if data.micro_batch_indices is None:
        yield from data.make_microbatch_iterator(size or data.size)
        return
    num_batches = len(data.micro_batch_indices)
    for index in range(num_batches):
        yield from data.get_batch(index, data.size // num_batches).make_microbatch_iterator_with_dynamic_shapes()
