"""`DataPlaneWorkerMixin`: a policy worker that reads its rows from the data plane and writes its results back.

All of it runs in the worker's process. A *replica group* is the ranks that work on the same rows: one data-parallel
rank's tensor, context and pipeline parallel siblings. Its leader, 0 on each of those axes, fetches and broadcasts, and
is the only one that writes: two writers of one key break single-writer stores.

Shape legend: ``N`` rows of this data-parallel rank, ``S`` padded sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dataplane_core.batch import BatchedDataDict, SlicedDataDict, read_columns, write_columns
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, MissingDataError, UnsupportedOperationError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import (
    GLOBAL_FORWARD_PAD_SEQLEN,
    MULTIMODAL_FIELDS,
    PER_TOKEN_FIELDS,
    PLAN_KEYS,
    ROUTED_EXPERTS_FIELD,
)
from dataplane_core.sharding import REPLICATED_AXES, NamedSharding
from dataplane_integrations.attach import DataPlaneClientMixin
from dataplane_integrations.batching import Batching, Stage
from dataplane_integrations.broadcast import broadcast_from_leader, group_device

__all__ = ["DataPlaneWorkerMixin", "FetchPolicy", "PolicyWorker", "SplitStepWorker"]

#: Who reads from the store: every rank, or the leader of each replica group, which broadcasts. ``auto``: the leader
#: where the group has siblings.
FetchPolicy: TypeAlias = Literal["auto", "independent", "leader_broadcast"]

#: In place of a number of microbatches: this rank has none, since it could not plan.
_NO_PLAN: Final = -1


class PolicyWorker(Protocol):
    """What `DataPlaneWorkerMixin` is mixed into. Results of a call are equal on all ranks of a replica group."""

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> Mapping[str, Any]:
        """Trains on this data-parallel rank's rows; see `DataPlanePolicy.train_from_meta` for the keys it returns."""

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> Mapping[str, Any]:
        """Returns ``logprobs`` (N, S), under the current policy."""

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> Mapping[str, Any]:
        """Returns ``reference_logprobs`` (N, S), under the reference policy."""


class SplitStepWorker(Protocol):
    """What the split step needs of the worker: one optimizer step over rows that arrive in portions.

    `DataPlaneWorkerMixin` calls them in order: portions and an end only after a begin, no second begin in between.
    """

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Clears the gradients."""

    def train_microbatch(self, data: BatchedDataDict) -> Any:
        """Accumulates the gradients of some rows. A mean over the step's tokens has to wait for all portions."""

    def finish_train_step(self) -> Mapping[str, Any]:
        """Makes the optimizer step; returns what ``train`` returns."""

    def abort_train_step(self) -> None:
        """Drops the gradients; weights and optimizer stay as they were. Also after any of the others has raised."""


class DataPlaneWorkerMixin(DataPlaneClientMixin):
    """Data-plane entry points for a worker that offers `PolicyWorker`'s methods.

    A subclass supplies `_local_coords`, and `_get_replica_group` where rows are replicated; `FSDP2DataPlaneMixin` does
    both from a `DeviceMesh`, `MegatronDataPlaneMixin` from `megatron.core.parallel_state`.

    Attributes:
        token_aligned_fields: Fields whose dim 1 runs along the row's tokens; written back cut to the row's length. Any
            other field is written as it is, whatever its shape.
        ragged_fields: Fields that reach the worker as they went, jagged where their rows differ: never padded, though
            their rows should happen to have as many elements as the sample has tokens (see `read_columns`).
    """

    token_aligned_fields: ClassVar[frozenset[str]] = PER_TOKEN_FIELDS
    ragged_fields: ClassVar[frozenset[str]] = MULTIMODAL_FIELDS

    _split_step_open: bool = False

    # --- where this rank stands ---------------------------------------------------------------------------------------

    def _local_coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis, such as ``{"data_parallel": 1, "tensor_parallel": 0}``.

        There is no default: a wrong guess would make every rank a writer.

        Raises:
            UnsupportedOperationError: The subclass does not supply it.
        """
        raise UnsupportedOperationError(
            f"{type(self).__name__} does not say where it stands on the mesh. Expected an override of _local_coords(), "
            "with the rank's coordinate on each axis.",
            hint="Use FSDP2DataPlaneMixin where there is a DeviceMesh, MegatronDataPlaneMixin with Megatron.",
        )

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that work on this rank's rows, the leader first; None: this rank has no siblings."""
        return None

    def _is_replica_leader(self) -> bool:
        """Whether this rank is 0 on every replicated axis; axes that it does not have count as 0."""
        return NamedSharding.is_axis_zero(self._local_coords(), REPLICATED_AXES)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _pad_value_dict(self) -> dict[str, int | float]:
        """Pad values by field. Default: the tokenizer's pad id for ``input_ids``.

        Fields not named pad with 0, ``routed_experts`` with -1: no expert.
        """
        pad_id = getattr(getattr(self, "tokenizer", None), "pad_token_id", None)
        return {} if pad_id is None else {"input_ids": int(pad_id)}

    def _forward_pad_seqlen(self, meta: KVBatchMeta) -> int:
        """The sequence length in tokens at which all data-parallel ranks forward ``meta``; 0: the driver set none.

        Raises:
            InvalidRequestError: It is not a length, or shorter than a row.
        """
        seqlen = meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN) or 0
        longest = max(meta.sequence_lengths or [0])
        if type(seqlen) is not int or seqlen < 0 or 0 < seqlen < longest:
            raise InvalidRequestError(
                f"meta of '{meta.partition_id}' refused: extra_info['{GLOBAL_FORWARD_PAD_SEQLEN}'] is {seqlen!r}. "
                f"Expected a length in tokens of at least {longest}, the longest of these {meta.size} rows. Let the "
                "driver stamp it (DataPlanePolicy does)."
            )
        return seqlen

    def _fetch(
        self,
        meta: KVBatchMeta,
        *,
        layout: Literal["padded", "jagged"] = "padded",
        fetch_policy: FetchPolicy = "auto",
        preprocess: Callable[[BatchedDataDict], BatchedDataDict] | None = None,
        dp_aligned_seq_len: bool = True,
    ) -> BatchedDataDict:
        """Reads the rows and fields of ``meta``. Collective over the replica group, unless ``independent``.

        Args:
            meta: Which rows and fields.
            layout: Token columns right-padded, or as ``torch.jagged`` nested tensors. Other columns come as they went.
            fetch_policy: Who reads.
            preprocess: Applied where the rows are read, before they are broadcast: once per replica group if the
                leader reads.
            dp_aligned_seq_len: Pad to the length that the driver stamped, the same on all data-parallel ranks; else to
                the longest of these rows.

        Returns:
            One row per sample id, in that order.

        Raises:
            MissingDataError, UnknownPartitionError, OperationTimeoutError: The read failed here.
            ReplicaLeaderError: It failed on the leader; that error is the cause.
            InvalidRequestError: The replica group's first rank is not the one that is 0 on every replicated axis.
        """
        if fetch_policy not in ("auto", "independent", "leader_broadcast"):
            raise InvalidRequestError(
                f"_fetch refused: fetch_policy is {fetch_policy!r}. Expected 'auto', 'independent' or "
                "'leader_broadcast'."
            )

        def read() -> BatchedDataDict:
            batch = self._read(meta, layout, dp_aligned_seq_len)
            return batch if preprocess is None else preprocess(batch)

        group = None if fetch_policy == "independent" else self._get_replica_group()
        if group is None or dist.get_world_size(group) == 1:
            return read()

        def read_in_its_place() -> BatchedDataDict:
            self._check_place(group)
            return read()

        batch = broadcast_from_leader(read_in_its_place, group=group)
        self._check_place(group)  # not before: the others would wait for this rank
        return batch

    def _check_place(self, group: dist.ProcessGroup) -> None:
        if self._is_replica_leader() != (dist.get_rank(group) == 0):
            raise InvalidRequestError(
                f"_fetch refused: rank {dist.get_rank()} has coordinates {self._local_coords()} and is rank "
                f"{dist.get_rank(group)} of its replica group. Expected the rank that is 0 on every replicated axis to "
                "be the group's first. Build the group in the order of the axes."
            )

    def _read(self, meta: KVBatchMeta, layout: Literal["padded", "jagged"], dp_aligned: bool) -> BatchedDataDict:
        try:
            return read_columns(
                self._require_dp_client(),
                meta,
                layout=layout,
                # 0 is an expert, and no padding
                pad_value_dict={ROUTED_EXPERTS_FIELD: -1, **self._pad_value_dict()},
                pad_to_seqlen=self._forward_pad_seqlen(meta) if dp_aligned else 0,
                ragged_fields=self.ragged_fields,
            )
        except MissingDataError as error:
            if any(ROUTED_EXPERTS_FIELD in fields for fields in error.missing_cells.values()):
                error.hint = (
                    f"Router replay reads '{ROUTED_EXPERTS_FIELD}' with the tokens. Have the rollout write it; its "
                    f"first write with required_fields=['{ROUTED_EXPERTS_FIELD}'] refuses a batch without it."
                )
            raise

    # --- the microbatch plan ------------------------------------------------------------------------------------------

    def _attach_or_repack_pack_metadata(
        self, data: BatchedDataDict, meta: KVBatchMeta, stage: Stage = "train"
    ) -> tuple[BatchedDataDict, KVBatchMeta]:
        """Gives fetched rows their microbatch plan: the driver's where ``meta`` carries one, else one made here.

        Args:
            data: The rows of ``meta``, in its order.
            meta: The rows' meta.
            stage: What the rows are for.

        Returns:
            The rows with their plan and the meta in the same order: a plan made here sorts the rows.
        """
        plan = {key: meta.extra_info[key] for key in PLAN_KEYS if meta.extra_info.get(key) is not None}
        if not plan:
            return self._apply_packing_prep(data, meta, stage)
        for key, value in plan.items():
            setattr(data, key, value)
        return data, meta

    def _apply_packing_prep(
        self, data: BatchedDataDict, meta: KVBatchMeta, stage: Stage = "train"
    ) -> tuple[BatchedDataDict, KVBatchMeta]:
        """Plans microbatches from ``self.cfg`` (see `Batching.from_config`); without such settings changes nothing.

        Ranks that plan apart may need different numbers of microbatches, and would then wait for each other for ever.
        So this checks the number over `_get_data_parallel_group`, where there is one: it is a collective call then.

        Raises:
            InvalidRequestError: Data-parallel ranks got different numbers of microbatches, or one of them could not
                plan, such as for a row over the token limit.
        """
        batching = Batching.from_config(getattr(self, "cfg", None) or {})
        if not batching.plans:
            return data, meta
        try:
            planned_shards = data.shard_by_batch_size(1, **batching.shard_args(stage))
        except Exception:
            self._extreme_microbatch_counts(_NO_PLAN)  # the other ranks wait for this one's number
            raise
        shards, order = cast("tuple[list[SlicedDataDict], list[int]]", planned_shards)
        planned = shards[0]
        self._check_equal_microbatches(planned)
        return planned, meta.subset(order)

    def _get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that train on different rows together with this one; None: unknown, or there are none."""
        return None

    def _check_equal_microbatches(self, data: BatchedDataDict) -> None:
        count = sum(len(chunk) for chunk in data.micro_batch_indices or [])
        least, most = self._extreme_microbatch_counts(count)
        if least == _NO_PLAN:
            raise InvalidRequestError(
                f"microbatch plan refused: this rank planned {count} microbatches, another data-parallel rank could "
                "not plan its rows. Its own error says why."
            )
        if most != least:
            raise InvalidRequestError(
                f"microbatch plan refused: this rank planned {count} microbatches, the data-parallel ranks planned "
                f"{least} to {most}. Expected equal numbers, or the ranks wait for each other for ever. Let the driver "
                "plan (DataPlanePolicy with batching=...)."
            )

    def _extreme_microbatch_counts(self, count: int) -> tuple[int, int]:
        """The least and the most of the data-parallel ranks' numbers of microbatches. Collective over them."""
        group = self._get_data_parallel_group()
        if group is None or dist.get_world_size(group) == 1:
            return count, count
        extremes = torch.tensor([-count, count], device=group_device(group))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        return -int(extremes[0]), int(extremes[1])

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write_back(
        self, meta: KVBatchMeta, fields: Mapping[str, Any], *, token_aligned_fields: Collection[str] | None = None
    ) -> None:
        """Writes columns for the rows of ``meta``; on ranks that are not the replica leader does nothing.

        Args:
            meta: The rows, with ``sequence_lengths`` where a field is token-aligned.
            fields: Columns of N rows: tensors, or object columns. Token-aligned ones may be padded beyond the longest
                row, as sequence parallelism leaves them.
            token_aligned_fields: Those of ``fields`` to cut to the rows' lengths; None: the ones that the attribute
                ``token_aligned_fields`` names.

        Raises:
            InvalidRequestError: A column without one row per sample id, or no lengths to cut by.
            InvalidTypeError: A column that is neither a tensor nor one object per row.
        """
        if not self._is_replica_leader():
            return
        declared = self.token_aligned_fields if token_aligned_fields is None else token_aligned_fields
        write_columns(self._require_dp_client(), meta, fields, token_aligned_fields=declared)

    def _write_back_result_field(
        self, meta: KVBatchMeta, result: Mapping[str, Any], *, result_key: str, tq_field: str
    ) -> None:
        """Writes one tensor of a worker's result as a column; on ranks that are not the replica leader does nothing.

        Args:
            meta: The rows.
            result: What the worker's method returned; any mapping.
            result_key: Its key in ``result``.
            tq_field: The field to write.

        Raises:
            InvalidTypeError: ``result`` is no mapping, or what lies under the key is no tensor.
            InvalidRequestError: The key is missing, or the rows are not one per sample id.
        """
        if not self._is_replica_leader():
            return
        if not isinstance(result, Mapping):
            raise InvalidTypeError(
                f"write-back of '{tq_field}' refused: the worker returned {type(result).__name__}. Expected a mapping "
                f"with the key '{result_key}'."
            )
        if result_key not in result:
            raise InvalidRequestError(
                f"write-back of '{tq_field}' refused: the worker's result has no key '{result_key}'. Found: "
                f"{', '.join(map(repr, result)) or 'nothing'}."
            )
        column = result[result_key]
        if not isinstance(column, Tensor):
            raise InvalidTypeError(
                f"write-back of '{tq_field}' refused: '{result_key}' is {type(column).__name__}. Expected a tensor of "
                f"{meta.size} rows."
            )
        if column.dim() == 0 or column.shape[0] != meta.size:
            raise InvalidRequestError(
                f"write-back of '{tq_field}' refused: '{result_key}' has shape {tuple(column.shape)}. Expected a batch "
                f"size of {meta.size}, one row per sample id of the meta."
            )
        self._write_back(meta, {tq_field: column.detach()})

    # --- entry points for the driver ----------------------------------------------------------------------------------

    def train_presharded(
        self,
        meta: KVBatchMeta,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Trains on this rank's shard. Every rank must be called.

        Args:
            meta: This data-parallel rank's rows, with the fields that ``loss_fn`` reads.
            loss_fn: The loss.
            eval_mode: Compute the loss, change nothing.
            gbs: Global batch size in rows; None: all rows are one batch.
            mbs: Rows per microbatch where there is no plan.

        Returns:
            What ``train`` returned, with ``is_replica_leader``.

        Raises:
            InvalidRequestError: A split step is open, whose gradients this would mix with.
        """
        if self._split_step_open:
            raise InvalidRequestError(
                "train_presharded refused: a split step is open. Expected finish_train_step_presharded() or "
                "abort_train_step_presharded() first."
            )
        data, _ = self._attach_or_repack_pack_metadata(self._fetch(meta), meta, "train")
        worker = cast(PolicyWorker, self)
        return self._tag_result(self._run(lambda: worker.train(data, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)))

    def get_logprobs_presharded(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """Computes the shard's logprobs and commits them as ``prev_logprobs``. Every rank must be called."""
        data, meta = self._attach_or_repack_pack_metadata(self._fetch(meta), meta, "logprob")
        worker = cast(PolicyWorker, self)
        result = self._run(lambda: worker.get_logprobs(data, micro_batch_size=micro_batch_size))
        self._write_back_result_field(meta, result, result_key="logprobs", tq_field="prev_logprobs")

    def get_reference_policy_logprobs_presharded(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """The same under the reference policy, as ``reference_policy_logprobs``."""
        data, meta = self._attach_or_repack_pack_metadata(self._fetch(meta), meta, "logprob")
        worker = cast(PolicyWorker, self)
        result = self._run(lambda: worker.get_reference_policy_logprobs(data, micro_batch_size=micro_batch_size))
        self._write_back_result_field(
            meta, result, result_key="reference_logprobs", tq_field="reference_policy_logprobs"
        )

    def begin_train_step_presharded(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step whose rows arrive in portions. Every rank must be called, as for the calls that follow.

        Raises:
            InvalidRequestError: A step is open.
            UnsupportedOperationError: The worker lacks the methods of `SplitStepWorker`.
        """
        worker = self._split_step_worker()
        if self._split_step_open:
            raise InvalidRequestError(
                "begin_train_step_presharded refused: a step is open. Expected finish_train_step_presharded() or "
                "abort_train_step_presharded() first."
            )
        self._split_step_open = True  # also if the next line raises: an abort then cleans up
        worker.begin_train_step(loss_fn, gbs=gbs, mbs=mbs)

    def train_microbatch_presharded(self, meta: KVBatchMeta) -> None:
        """Accumulates the gradients of this rank's shard of one portion.

        Raises:
            InvalidRequestError: No step is open.
        """
        worker = self._open_split_step("train_microbatch_presharded")
        data, _ = self._attach_or_repack_pack_metadata(self._fetch(meta), meta, "train")
        worker.train_microbatch(data)

    def finish_train_step_presharded(self) -> dict[str, Any]:
        """Makes the optimizer step; returns the worker's result with ``is_replica_leader``.

        Raises:
            InvalidRequestError: No step is open.
        """
        worker = self._open_split_step("finish_train_step_presharded")
        result = self._tag_result(self._run(worker.finish_train_step))
        self._split_step_open = False
        return result

    def abort_train_step_presharded(self) -> None:
        """Drops what the step has accumulated. Without an open step does nothing."""
        if self._split_step_open:
            self._split_step_worker().abort_train_step()
            self._split_step_open = False

    def _open_split_step(self, what: str) -> SplitStepWorker:
        if not self._split_step_open:
            raise InvalidRequestError(
                f"{what} refused: no step is open. Expected begin_train_step_presharded(loss_fn) first."
            )
        return self._split_step_worker()

    def _run(self, compute: Callable[[], Any]) -> Any:
        """What the worker's method returned, as every rank of the replica group is to see it."""
        return compute()

    def _split_step_worker(self) -> SplitStepWorker:
        missing = [
            name
            for name in ("begin_train_step", "train_microbatch", "finish_train_step", "abort_train_step")
            if not callable(getattr(self, name, None))
        ]
        if missing:
            raise UnsupportedOperationError(
                f"{type(self).__name__} cannot train in portions: it lacks {', '.join(missing)}. Expected the methods "
                "of dataplane_integrations.worker.SplitStepWorker; train_presharded needs none of them."
            )
        return cast(SplitStepWorker, self)

    def _tag_result(self, result: Any) -> dict[str, Any]:
        if not isinstance(result, Mapping):
            raise InvalidTypeError(
                f"{type(self).__name__} returned {type(result).__name__} from a training step. Expected a mapping with "
                "global_loss, grad_norm and all_mb_metrics."
            )
        return {**result, "is_replica_leader": self._is_replica_leader()}
