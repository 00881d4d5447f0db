"""Megatron: a rank's coordinates and its replica group, from `megatron.core.parallel_state`.

Importing this module does not import Megatron: a driver without it can call `megatron_pad_multiple`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dataplane_core.batch import BatchedDataDict
from dataplane_core.errors import InvalidRequestError, UnsupportedOperationError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import PAD_TO_MULTIPLE, ROUTED_EXPERTS_FIELD, padded_length
from dataplane_integrations.attach import DataPlaneSource
from dataplane_integrations.trainer.batching import Stage
from dataplane_integrations.trainer.broadcast import broadcast_from_leader
from dataplane_integrations.trainer.router_replay import RoutingReplay, model_config
from dataplane_integrations.trainer.worker import DataPlaneWorkerMixin


def megatron_pad_multiple(
    *, tensor_parallel: int = 1, context_parallel: int = 1, sequence_parallel: bool = False
) -> int:
    """The number of tokens that a forward's sequence length must be a multiple of. The driver can call it too.

    Sequence parallelism gives each tensor-parallel rank an equal part of the sequence. Context parallelism gives each
    of its ranks two parts, one from the front and one from the back, so that causal attention costs every rank the
    same. With both, sequence parallelism divides the part of a context-parallel rank.

    Args:
        tensor_parallel: Tensor-parallel ranks.
        context_parallel: Context-parallel ranks.
        sequence_parallel: Whether sequence parallelism is on. It divides over the tensor-parallel ranks.

    Returns:
        The ``pad_multiple`` of `Batching`, and the multiple for the lengths of `DynamicBatching` and `SequencePacking`.
    """
    parts = 2 * context_parallel if context_parallel > 1 else 1
    return math.lcm(parts, context_parallel * tensor_parallel if sequence_parallel else 1)


class MegatronDataPlaneMixin(DataPlaneWorkerMixin):
    """`DataPlaneWorkerMixin` for a worker whose model is distributed by `megatron.core.parallel_state`.

    With pipeline parallelism only the last stage has results. They are broadcast to the other stages, since the leader,
    on the first stage, writes them. On the other stages the return values of ``train``, ``get_logprobs`` and the like
    are ignored, and may be None.

    Attributes:
        routing_replay: The trainer's `RoutingReplay`, if it replays routes. Then ``routed_experts`` are checked once
            when they are read, and each call of the driver begins with routers that choose for themselves.
    """

    routing_replay: RoutingReplay | None = None

    def setup_data_plane(self, cfg: DataPlaneSource) -> None:
        """Attaches. If Megatron is initialized, first makes the replica group; it is then collective over all ranks."""
        if _initialized_parallel_state() is not None:
            self._get_replica_group()
        super().setup_data_plane(cfg)  # may fail on one rank: no other rank waits for it by now

    def _local_coords(self) -> dict[str, int]:
        """The coordinates of all four axes.

        Raises:
            UnsupportedOperationError: Megatron is not installed, or its model parallelism is not initialized.
        """
        state = _parallel_state()
        return {
            "data_parallel": state.get_data_parallel_rank(),
            "tensor_parallel": state.get_tensor_model_parallel_rank(),
            "context_parallel": state.get_context_parallel_rank(),
            "pipeline_parallel": state.get_pipeline_model_parallel_rank(),
        }

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        """A group of Megatron, with the timeout that ``initialize_model_parallel`` was given.

        With both context and pipeline parallelism, the first call after ``initialize_model_parallel`` is collective
        over all ranks: it makes the group, with the default timeout of ``torch.distributed.new_group``.
        """
        state = _parallel_state()
        if state.get_context_parallel_world_size() == 1:
            group = state.get_model_parallel_group()  # tensor x pipeline
        elif state.get_pipeline_model_parallel_world_size() == 1:
            group = state.get_tensor_and_context_parallel_group()
        else:
            group = _tensor_context_pipeline_group(state.get_model_parallel_group())
        return None if dist.get_world_size(group) == 1 else group

    def _read(self, meta: KVBatchMeta, dp_aligned: bool) -> tuple[BatchedDataDict, dict[str, Any]]:
        batch, padding = super()._read(meta, dp_aligned)
        if self.routing_replay is not None and ROUTED_EXPERTS_FIELD in batch:
            self.routing_replay.check(batch[ROUTED_EXPERTS_FIELD], meta.sequence_lengths, meta.sample_ids)
        return batch, padding

    # --- lengths ------------------------------------------------------------------------------------------------------

    def _sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on, by the config of ``self.model``, a Megatron module or the list of its
        chunks. Without a model: True, since more padding than needed does no harm."""
        return bool(getattr(model_config(getattr(self, "model", None)), "sequence_parallel", True))

    def _pad_multiple(self) -> int:
        state = _parallel_state()
        return megatron_pad_multiple(
            tensor_parallel=state.get_tensor_model_parallel_world_size(),
            context_parallel=state.get_context_parallel_world_size(),
            sequence_parallel=self._sequence_parallel(),
        )

    def _forward_pad_seqlen(self, meta: KVBatchMeta) -> int:
        """The driver's length, or else the longest row's, rounded up to the multiples of the forward and the meta."""
        longest = max(super()._forward_pad_seqlen(meta), *(meta.sequence_lengths or [0]))
        return padded_length(longest, self._pad_multiple(), meta.extra_info.get(PAD_TO_MULTIPLE) or 1)

    def _attach_or_repack_pack_metadata(
        self, data: BatchedDataDict, meta: KVBatchMeta, stage: Stage = "train", gbs: int | None = None
    ) -> tuple[BatchedDataDict, KVBatchMeta]:
        data, meta = super()._attach_or_repack_pack_metadata(data, meta, stage, gbs)
        multiple = self._pad_multiple()
        for length, taken in _lengths_and_taken(data, meta.sequence_lengths or [], multiple):
            if length % multiple or length < taken:
                room = f" for sequences that take {taken}, each padded to a multiple" if length < taken else ""
                raise InvalidRequestError(
                    f"microbatch plan refused: it has a microbatch of {length} tokens{room}. Expected multiples of "
                    f"{multiple}, which this worker's sequence and context parallelism divide the sequence by.",
                    hint=f"Plan with Batching(pad_multiple={multiple}, ...), and with {multiple} as dynamic batching's "
                    "sequence_length_round or packing's sequence_length_pad_multiple; see megatron_pad_multiple.",
                )
        return data, meta

    # --- results ------------------------------------------------------------------------------------------------------

    def _before_method(self) -> None:
        if self.routing_replay is not None:
            self.routing_replay.clear()  # else a forward without routes, as of the reference policy, would use the last

    def _run(self, compute: Callable[[], Any]) -> Any:
        """Calls ``compute`` and returns its result of the last pipeline stage. Collective over the pipeline."""
        self._before_method()
        group = _parallel_state().get_pipeline_model_parallel_group()
        last = dist.get_world_size(group) - 1
        if last == 0:
            return compute()
        if dist.get_rank(group) != last:
            compute()

        def plain_result() -> Any:
            result = compute()
            # a plain dict, so that its tensors are broadcast as tensors
            return dict(result) if isinstance(result, Mapping) else result

        return broadcast_from_leader(plain_result, group=group, leader=last)


# --- inside -----------------------------------------------------------------------------------------------------------


def _lengths_and_taken(data: BatchedDataDict, row_lengths: Sequence[int], multiple: int) -> Iterator[tuple[int, int]]:
    """Per microbatch: its length, and the sum of its packed rows' lengths, each rounded up (0 without packing)."""
    rows_of_chunk = data.elem_counts_per_gb or []
    taken = [padded_length(length, multiple) for length in row_lengths] if rows_of_chunk else []
    for chunk, lengths in enumerate(data.micro_batch_lengths or []):
        first = sum(rows_of_chunk[:chunk])
        for (start, end), length in zip((data.micro_batch_indices or [])[chunk], lengths, strict=True):
            yield length, sum(taken[first + start : first + end])


def _initialized_parallel_state() -> Any:
    """Megatron's module, or None if its model parallelism is not initialized."""
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise UnsupportedOperationError(
            f"megatron.core cannot be imported: {error}. Expected Megatron-core in this process's environment.",
            hint="Install dataplane-integrations[megatron].",
        ) from error
    return parallel_state if parallel_state.model_parallel_is_initialized() else None


def _parallel_state() -> Any:
    state = _initialized_parallel_state()
    if state is None:
        raise UnsupportedOperationError(
            "megatron.core.parallel_state is not initialized. Expected initialize_model_parallel(...) on every rank "
            "before the first fetch."
        )
    return state


@functools.lru_cache(maxsize=1)  # if Megatron has another model-parallel group, it was initialized again
def _tensor_context_pipeline_group(model_parallel: dist.ProcessGroup) -> dist.ProcessGroup:
    state = _parallel_state()
    own: int = state.get_data_parallel_rank()
    numbers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, own)
    groups: list[dist.ProcessGroup] = [  # every rank must take part in making every group
        dist.new_group([rank for rank, of in enumerate(numbers) if of == number])
        for number in range(state.get_data_parallel_world_size())
    ]
    return groups[own]
