"""`DataPlaneWorkerMixin`: a policy worker that reads its rows from the data plane and writes its results back.

Everything here runs in the worker's process. A *replica group* is the ranks that work on the same rows: the tensor,
context and pipeline parallel ranks of one data-parallel rank. Its leader is the rank that is 0 on each of those axes.
The leader fetches and broadcasts the rows, and only the leader writes: two writers of one key break single-writer
stores.

Shape legend: ``N`` rows of this data-parallel rank, ``S`` padded sequence length.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dataplane_core import NamedSharding
from dataplane_core.arguments import Index, checked_as
from dataplane_core.batch import (
    BatchedDataDict,
    SlicedDataDict,
    pad_columns,
    read_columns,
    token_columns,
    write_columns,
)
from dataplane_core.codec import as_columns, num_rows, take_rows, tensor_columns
from dataplane_core.errors import (
    InvalidRequestError,
    InvalidTypeError,
    LostSamplesError,
    MissingDataError,
    UnsupportedOperationError,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import (
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_IDS_FIELD,
    INPUT_LENGTHS_FIELD,
    MULTIMODAL_FIELDS,
    PER_TOKEN_FIELDS,
    PLAN_KEYS,
    ROUTED_EXPERTS_FIELD,
)
from dataplane_core.sharding import REPLICATED_AXES
from dataplane_integrations.attach import DataPlaneClientMixin
from dataplane_integrations.errors import ReplicaLeaderError
from dataplane_integrations.trainer.batching import Batching, Stage
from dataplane_integrations.trainer.broadcast import broadcast_from_leader

#: Who reads from the store: every rank (``independent``), or only the leader of each replica group, which then
#: broadcasts. ``auto``: the leader if the group has several ranks.
FetchPolicy: TypeAlias = Literal["auto", "independent", "leader_broadcast"]

#: ``extra_info`` key: names the read of `DataPlaneWorkerMixin.hold_presharded` whose rows a call works on.
HELD_ROWS: Final = "held_rows"
#: Rows as they were read, and the arguments of `pad_columns`.
_Rows: TypeAlias = tuple[BatchedDataDict, dict[str, Any]]
#: What a worker may return beside log-probabilities: the mask, without tokens whose log-probabilities do not count.
_MASK: Final = "token_mask"


class PolicyWorker(Protocol):
    """The methods that `DataPlaneWorkerMixin` needs. A call returns the same on all ranks of a replica group."""

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> Mapping[str, Any]:
        """Trains on this data-parallel rank's rows; with ``eval_mode``, only computes the loss. ``gbs`` is the global
        batch size in rows (None: all rows are one batch), ``mbs`` that of a microbatch where there is no plan. See
        `DataPlanePolicy.train_from_meta` for the keys that it returns."""

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> Mapping[str, Any]:
        """Returns ``logprobs`` (N, S), under the current policy.

        A ``token_mask`` (N, S) beside them replaces that of the rows: 0 where a token is not to be trained on, such as
        one whose log-probability is -inf since top-k or top-p leave it out.
        """

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> Mapping[str, Any]:
        """Returns ``reference_logprobs`` (N, S), under the reference policy; ``token_mask`` as `get_logprobs`."""


class SplitStepWorker(Protocol):
    """The methods that a split step needs: one optimizer step over rows that arrive in portions.

    `DataPlaneWorkerMixin` calls them in order: one begin, then any number of portions, then finish or abort.
    """

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Clears the gradients."""

    def train_microbatch(self, data: BatchedDataDict) -> Any:
        """Accumulates the gradients of some rows. Divide by the step's tokens only in `finish_train_step`."""

    def finish_train_step(self) -> Mapping[str, Any]:
        """Makes the optimizer step and returns what ``train`` returns."""

    def abort_train_step(self) -> None:
        """Drops the gradients; weights and optimizer stay as they were. Also called after another method has raised."""


class DataPlaneWorkerMixin(DataPlaneClientMixin):
    """Data-plane entry points for a worker that offers `PolicyWorker`'s methods.

    A subclass supplies `_local_coords`, and `_get_replica_group` where rows are replicated; `FSDP2DataPlaneMixin` does
    both from a `DeviceMesh`, `MegatronDataPlaneMixin` from `megatron.core.parallel_state`.

    Attributes:
        token_aligned_fields: Fields whose dim 1 runs along the row's tokens. They are read padded, and written back cut
            to the row's length. Any other field is written as it is, whatever its shape, and read as `read_columns`
            says.
        ragged_fields: Fields that are never padded: the worker gets them as they were written, jagged if their rows
            differ, even if their rows have as many elements as the sample has tokens.
    """

    token_aligned_fields: ClassVar[frozenset[str]] = PER_TOKEN_FIELDS
    ragged_fields: ClassVar[frozenset[str]] = MULTIMODAL_FIELDS

    _split_step_open: bool = False
    #: Rows that were read before the call that works on them: the name of that read, and the batch.
    _held: tuple[Any, BatchedDataDict] | None = None

    # --- this rank's place --------------------------------------------------------------------------------------------

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
        """The ranks that work on this rank's rows, the leader first; None: no other rank does."""
        return None

    def _siblings(self) -> dist.ProcessGroup | None:
        """The replica group, if another rank is in it."""
        group = self._get_replica_group()
        return None if group is None or dist.get_world_size(group) == 1 else group

    def _is_replica_leader(self) -> bool:
        """Whether this rank is 0 on every replicated axis. Missing axes count as 0."""
        return NamedSharding.is_axis_zero(self._local_coords(), REPLICATED_AXES)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _pad_value_dict(self) -> dict[str, int | float]:
        """Pad values by field. Default: the tokenizer's pad id for ``input_ids`` and ``prompt_ids_for_adv``.

        All other fields are padded with 0, and ``routed_experts`` with -1 (no expert).
        """
        pad_id = getattr(getattr(self, "tokenizer", None), "pad_token_id", None)
        return {} if pad_id is None else dict.fromkeys(("input_ids", "prompt_ids_for_adv"), int(pad_id))

    def _forward_pad_seqlen(self, meta: KVBatchMeta) -> int:
        """The sequence length in tokens for the forward of ``meta`` on all data-parallel ranks; 0: the driver set none.

        Raises:
            InvalidRequestError: The driver's value is not a length, or is shorter than a row.
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
        preprocess: Callable[[Any, BatchedDataDict], BatchedDataDict] | None = None,
        dp_aligned_seq_len: bool = True,
    ) -> BatchedDataDict:
        """Reads the rows and fields of ``meta``. Collective over the replica group, unless ``independent``.

        Args:
            meta: Which rows and fields.
            layout: Token columns right-padded, or as ``torch.jagged`` nested tensors. Other columns are not changed.
            fetch_policy: Who reads. `FetchPolicy` says what the names mean.
            preprocess: Called with this worker and the padded rows, on every rank, after the broadcast. What it returns
                is returned.
            dp_aligned_seq_len: Pad to the length that the driver set, the same on all data-parallel ranks; else to the
                longest of these rows.

        Returns:
            One row per sample id, in that order.

        Raises:
            MissingDataError, UnknownPartitionError, OperationTimeoutError: The read failed on this rank.
            ReplicaLeaderError: The read failed on the leader; that error is the cause.
            InvalidRequestError: The replica group's first rank is not the one that is 0 on every replicated axis; or
                ``leader_broadcast`` without a replica group.
        """
        checked_as("_fetch: fetch_policy", FetchPolicy, fetch_policy)
        group = None if fetch_policy == "independent" else self._siblings()
        if group is None and fetch_policy == "leader_broadcast":
            raise InvalidRequestError(
                f"_fetch refused: fetch_policy is 'leader_broadcast', and {type(self).__name__} has no replica group. "
                "Expected _get_replica_group() to return one, or fetch_policy 'auto'."
            )
        read = functools.partial(self._read, meta, dp_aligned_seq_len)
        batch, padding = read() if group is None else self._from_leader(read, group)
        if layout == "padded":
            pad_columns(batch, meta, **padding)
        return batch if preprocess is None else preprocess(self, batch)

    def _from_leader(self, read: Callable[[], _Rows], group: dist.ProcessGroup) -> _Rows:
        """The leader reads, and every rank of the group gets the rows."""

        def check_and_read() -> _Rows:
            self._check_leader_is_first(group)
            return read()

        rows = broadcast_from_leader(check_and_read, group=group)
        self._check_leader_is_first(group)  # only now: an error before the broadcast would make other ranks wait
        return rows

    def _check_leader_is_first(self, group: dist.ProcessGroup) -> None:
        if self._is_replica_leader() != (dist.get_rank(group) == 0):
            raise InvalidRequestError(
                f"_fetch refused: rank {dist.get_rank()} has coordinates {self._local_coords()} and is rank "
                f"{dist.get_rank(group)} of its replica group. Expected the rank that is 0 on every replicated axis to "
                "be the group's first. Build the group in the order of the axes."
            )

    def _read(self, meta: KVBatchMeta, dp_aligned: bool) -> _Rows:
        """Reads the rows unpadded, and says how to pad them, so that all ranks pad alike."""
        padding: dict[str, Any] = {
            # 0 is the number of an expert
            "pad_value_dict": {ROUTED_EXPERTS_FIELD: -1, **self._pad_value_dict()},
            "pad_to_seqlen": self._forward_pad_seqlen(meta) if dp_aligned else 0,
        }
        try:
            batch = read_columns(self._require_dp_client(), meta, layout="jagged")
        except MissingDataError as error:
            if any(ROUTED_EXPERTS_FIELD in fields for fields in error.missing_cells.values()):
                error.hint = (
                    f"Router replay reads '{ROUTED_EXPERTS_FIELD}' with the tokens. Have the rollout write it; its "
                    f"first write with required_fields=['{ROUTED_EXPERTS_FIELD}'] refuses a batch without it."
                )
            raise
        padding["token_aligned_fields"] = self._token_columns(batch, meta)
        return batch, padding

    def _token_columns(self, batch: BatchedDataDict, meta: KVBatchMeta) -> list[str]:
        """The columns of rows just read that are padded to the token length."""
        lengths = batch.get(INPUT_LENGTHS_FIELD) if meta.sequence_lengths is None else meta.sequence_lengths
        by_length = token_columns(batch, lengths, ragged_fields=self.ragged_fields, padded=True)
        not_declared = PER_TOKEN_FIELDS - self.token_aligned_fields
        declared = [name for name in batch if name in self.token_aligned_fields and isinstance(batch[name], Tensor)]
        return list(dict.fromkeys(name for name in [*by_length, *declared] if name not in not_declared))

    # --- the microbatch plan ------------------------------------------------------------------------------------------

    def _attach_or_repack_pack_metadata(
        self, data: BatchedDataDict, meta: KVBatchMeta, stage: Stage = "train", gbs: int | None = None
    ) -> tuple[BatchedDataDict, KVBatchMeta]:
        """Attaches a microbatch plan to the fetched rows of ``meta``: the driver's if it has one, else one made here.

        Returns:
            The rows with their plan, and the meta in the same order. A plan made here changes the order.
        """
        plan = [meta.extra_info.get(key) for key in PLAN_KEYS]
        if all(part is None for part in plan):
            data, order = self._planned(data, stage, gbs)
            return data, meta if order is None else meta.subset(order)
        _check_plan(meta, plan[0], data.size)
        data.micro_batch_indices, data.micro_batch_lengths, data.elem_counts_per_gb = plan
        return data, meta

    def _apply_packing_prep(self, data: BatchedDataDict) -> BatchedDataDict:
        """The rows with a microbatch plan for training that is made here, in the order of the plan: see `_planned`."""
        return self._planned(data, "train", None)[0]

    def _planned(
        self, data: BatchedDataDict, stage: Stage, gbs: int | None
    ) -> tuple[BatchedDataDict, list[int] | None]:
        """Plans microbatches, if ``self.cfg`` has settings for that. Returns the rows with their plan, and their order;
        None: it is as it was."""
        batching = Batching.from_config(getattr(self, "cfg", None) or {})
        if not batching.plans:
            return data, None
        group = self._get_replica_group()
        num_twins = 1 if group is None else dist.get_world_size(group)
        num_ranks = dist.get_world_size() if dist.is_initialized() else num_twins
        if num_ranks > num_twins:
            raise InvalidRequestError(
                f"microbatch plan refused: of {num_ranks} ranks, {num_twins} work on these rows. Expected all of them, "
                "or a plan of the driver: ranks that plan apart may get different numbers of microbatches, and wait "
                "for each other for ever.",
                hint="Let the driver plan: DataPlanePolicy with batching=...",
            )
        batch_size = gbs if gbs is not None and gbs < data.size else None
        planned_shards = data.shard_by_batch_size(1, batch_size, **batching.shard_args(stage))
        (planned,), order = cast("tuple[list[SlicedDataDict], list[int]]", planned_shards)
        return planned, order

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write_back(
        self, meta: KVBatchMeta, fields: Mapping[str, Any], *, token_aligned_fields: Collection[str] | None = None
    ) -> None:
        """Writes columns for the rows of ``meta``. Only the replica leader writes; other ranks do nothing.

        Args:
            meta: The rows. Token-aligned fields need its ``sequence_lengths``. A row that repeats is written once.
            fields: Columns of N rows: tensors, or object columns. Token-aligned columns may be padded beyond the
                longest row, as by sequence parallelism.
            token_aligned_fields: Which of ``fields`` to cut to the rows' lengths; None: those in the attribute of that
                name.

        Raises:
            InvalidRequestError: A column does not have one row per sample id, or the meta has no lengths.
            InvalidTypeError: A column is neither a tensor nor one object per row.
        """
        if not self._is_replica_leader():
            return
        meta, fields = _without_repeats(replace(meta, token_starts=None), fields)  # rows that were read begin at 0
        declared = self.token_aligned_fields if token_aligned_fields is None else token_aligned_fields
        write_columns(self._require_dp_client(), meta, fields, token_aligned_fields=declared)

    def _write_back_result_field(
        self, meta: KVBatchMeta, result: Mapping[str, Any], *, result_key: str, tq_field: str
    ) -> None:
        """As `_write_back`, for the field ``tq_field``: the tensor under ``result_key`` in the mapping that a worker's
        method returned.

        Raises:
            InvalidTypeError: ``result`` is not a mapping, or its value is not a tensor.
            InvalidRequestError: The key is missing, or the tensor does not have one row per sample id.
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
        self._write_back(meta, {tq_field: column})

    # --- entry points for the driver ----------------------------------------------------------------------------------

    def hold_presharded(self, meta: KVBatchMeta) -> list[str]:
        """Reads this rank's shard and holds it for the next call. The driver must call every rank.

        The call gets the rows only if its meta has the same `HELD_ROWS` as ``meta``, a name that the driver uses once:
        the rows of a call that never came are not trained on by a later one. No data-parallel rank waits for another
        here, so a rank that cannot read its rows leaves none in a collective.

        Returns:
            The samples whose payload the store has lost. Then nothing is held.
        """
        self._held = None  # what was held may have been replaced since
        try:
            batch = self._fetch(meta)
        except (LostSamplesError, ReplicaLeaderError) as error:
            cause = error if isinstance(error, LostSamplesError) else error.__cause__
            if not isinstance(cause, LostSamplesError):
                raise
            return list(cause.missing_samples)
        self._held = (meta.extra_info[HELD_ROWS], batch)
        return []

    def _rows_of(self, meta: KVBatchMeta) -> BatchedDataDict:
        """The rows of a call: those that were read for it, which it gets once, or else a fetch."""
        held, self._held = self._held, None
        if held is not None and held[0] == meta.extra_info.get(HELD_ROWS):
            return held[1]
        return self._fetch(meta)

    def train_presharded(
        self,
        meta: KVBatchMeta,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Trains on this rank's shard: the rows of ``meta``, with the fields that ``loss_fn`` reads. The other
        arguments are those of ``train``. The driver must call every rank.

        Returns:
            What ``train`` returned, with ``is_replica_leader``.

        Raises:
            InvalidRequestError: A split step is open; its gradients would be mixed with these.
        """
        self._refuse_open_step("train_presharded")
        data, _ = self._attach_or_repack_pack_metadata(self._rows_of(meta), meta, "train", gbs)
        worker = cast(PolicyWorker, self)
        return self._tag_result(self._run(lambda: worker.train(data, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)))

    def get_logprobs_presharded(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """Computes the shard's logprobs and writes them as ``prev_logprobs``. The driver must call every rank."""
        compute = cast(PolicyWorker, self).get_logprobs
        self._compute_and_write(compute, meta, micro_batch_size, "logprobs", "prev_logprobs")

    def get_reference_policy_logprobs_presharded(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """As `get_logprobs_presharded`, for the reference policy: writes ``reference_policy_logprobs``."""
        compute = cast(PolicyWorker, self).get_reference_policy_logprobs
        self._compute_and_write(compute, meta, micro_batch_size, "reference_logprobs", "reference_policy_logprobs")

    def _compute_and_write(
        self, compute: Callable[..., Any], meta: KVBatchMeta, micro_batch_size: int | None, key: str, field: str
    ) -> None:
        data, meta = self._attach_or_repack_pack_metadata(self._rows_of(meta), meta, "logprob")
        result = self._run(lambda: compute(data, micro_batch_size=micro_batch_size))
        fields = {key: field}  # key of the result -> field
        if isinstance(result, Mapping) and result.get(_MASK) is not None:
            result = {**result, _MASK: _as_type_of(result[_MASK], data.get(_MASK))}
            fields = {_MASK: _MASK, key: field}  # written first: who waits for the log-probabilities finds it
        for name in fields:
            _check_width(result, name, data.get(INPUT_IDS_FIELD))
        for name, target in fields.items():
            self._write_back_result_field(meta, result, result_key=name, tq_field=target)

    def begin_train_step_presharded(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step whose rows arrive in portions. The driver must call every rank, here and in the calls that
        follow.

        Raises:
            InvalidRequestError: A step is already open.
            UnsupportedOperationError: The worker lacks the methods of `SplitStepWorker`.
        """
        worker = self._split_step_worker()
        self._refuse_open_step("begin_train_step_presharded")
        self._split_step_open = True  # set first: if the next line raises, an abort cleans up
        self._before_method()
        worker.begin_train_step(loss_fn, gbs=gbs, mbs=mbs)

    def train_microbatch_presharded(self, meta: KVBatchMeta) -> None:
        """Accumulates the gradients of this rank's shard of one portion.

        Raises:
            InvalidRequestError: No step is open.
        """
        self._open_split_step("train_microbatch_presharded")
        self._train_portion(meta, functools.partial(self._rows_of, meta))

    def train_microbatches_presharded(self, metas: Sequence[KVBatchMeta], read_ahead: int = 0) -> None:
        """As one `train_microbatch_presharded` for each portion, in order.

        Args:
            metas: This rank's shards of the portions.
            read_ahead: While a portion is trained on, this many of the next portions are read from the store, in a
                thread. The rank that reads holds them in memory: unpadded if it broadcasts them at their turn, else
                padded. Their errors come at their turn.

        Raises:
            InvalidRequestError: No step is open, or a negative depth.
        """
        checked_as("train_microbatches_presharded: read_ahead", Index, read_ahead)
        self._open_split_step("train_microbatches_presharded")
        group = self._siblings()
        reads: list[Callable[[], Any]]
        if group is None:
            reads = [functools.partial(self._fetch, meta) for meta in metas]
        else:
            reads = [functools.partial(self._read, meta, True) for meta in metas]
            read_ahead = read_ahead if dist.get_rank(group) == 0 else 0
        with contextlib.closing(_read_ahead(reads, read_ahead)) as results:
            for meta, read in zip(metas, results, strict=True):
                rows = read if group is None else functools.partial(self._padded_from_leader, read, meta, group)
                self._train_portion(meta, rows)

    def _train_portion(self, meta: KVBatchMeta, rows: Callable[[], BatchedDataDict]) -> None:
        """Gets the rows itself, so that they are freed before those of the next portion come."""
        data, _ = self._attach_or_repack_pack_metadata(rows(), meta, "train")
        self._before_method()
        cast(SplitStepWorker, self).train_microbatch(data)

    def _padded_from_leader(
        self, read: Callable[[], _Rows], meta: KVBatchMeta, group: dist.ProcessGroup
    ) -> BatchedDataDict:
        batch, padding = self._from_leader(read, group)
        return pad_columns(batch, meta, **padding)

    def finish_train_step_presharded(self) -> dict[str, Any]:
        """Makes the optimizer step. Returns the worker's result with ``is_replica_leader``.

        Raises:
            InvalidRequestError: No step is open.
        """
        worker = self._open_split_step("finish_train_step_presharded")
        result = self._tag_result(self._run(worker.finish_train_step))
        self._split_step_open = False
        return result

    def abort_train_step_presharded(self) -> None:
        """Drops the gradients that the step has accumulated. Without an open step, does nothing."""
        if self._split_step_open:
            self._split_step_worker().abort_train_step()
            self._split_step_open = False

    def _refuse_open_step(self, what: str) -> None:
        if self._split_step_open:
            raise InvalidRequestError(
                f"{what} refused: a step is open. Expected finish_train_step_presharded() or "
                "abort_train_step_presharded() first."
            )

    def _open_split_step(self, what: str) -> SplitStepWorker:
        if not self._split_step_open:
            raise InvalidRequestError(
                f"{what} refused: no step is open. Expected begin_train_step_presharded(loss_fn) first."
            )
        return self._split_step_worker()

    def _before_method(self) -> None:
        """Is called before each method of the worker."""

    def _run(self, compute: Callable[[], Any]) -> Any:
        """Calls the worker's method. Returns the result that every rank of the replica group gets."""
        self._before_method()
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
                "of dataplane_integrations.trainer.worker.SplitStepWorker; train_presharded needs none of them."
            )
        return cast(SplitStepWorker, self)

    def _tag_result(self, result: Any) -> dict[str, Any]:
        if not isinstance(result, Mapping):
            raise InvalidTypeError(
                f"{type(self).__name__} returned {type(result).__name__} from a training step. Expected a mapping with "
                "global_loss, grad_norm and all_mb_metrics."
            )
        return {**result, "is_replica_leader": self._is_replica_leader()}


def _read_ahead(reads: Sequence[Callable[[], Any]], depth: int) -> Generator[Callable[[], Any], None, None]:
    """Does reads in order, in one thread, up to ``depth`` of them before their turn. With 0, there is no thread.

    Yields, per read, a function that waits for it, and returns its result or raises its error. It must be called before
    the next is yielded. The close cancels reads that have not begun, waits for the one that runs, and ends the thread.
    """
    if depth == 0:
        yield from reads
        return
    waiting = iter(reads)
    begun: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        try:
            while True:
                begun.extend(thread.submit(read) for read in itertools.islice(waiting, depth + 1 - len(begun)))
                if not begun:
                    return
                yield begun.popleft().result
        finally:
            thread.shutdown(cancel_futures=True)


def _check_plan(meta: KVBatchMeta, micro_batch_indices: Any, num_rows: int) -> None:
    """Checks that the microbatches of a plan cover each row once."""
    covered: list[int] = []
    for pairs in micro_batch_indices or []:
        first = len(covered)
        covered += [first + row for start, end in pairs for row in range(start, end)]
    if sorted(covered) != list(range(num_rows)):
        raise InvalidRequestError(
            f"meta of '{meta.partition_id}' refused: its microbatch plan covers {len(covered)} rows, and it has "
            f"{num_rows}. Expected each row once.",
            hint="The plan was made for other rows. Shard the meta again: shard_meta_for_dp.",
        )


def _check_width(result: Any, name: str, ids: Any) -> None:
    """Checks that a result has a value for each token that was computed on."""
    values: Any = result.get(name) if isinstance(result, Mapping) else None
    padded = all(isinstance(column, Tensor) and not column.is_nested and column.dim() > 1 for column in (values, ids))
    if padded and values.shape[1] < ids.shape[1]:
        raise InvalidRequestError(
            f"write-back refused: '{name}' is {values.shape[1]} wide, and the tokens {ids.shape[1]}. Expected a value "
            "for each token.",
            hint="Values of the next token (S - 1 of them) get one more in front: 0 for the first token.",
        )


def _as_type_of(mask: Any, stored: Any) -> Any:
    """A mask in the dtype of another one, if that holds its values: the product with a float mask is float."""
    if not (isinstance(mask, Tensor) and isinstance(stored, Tensor)):
        return mask
    converted = mask.to(stored.dtype)
    return converted if torch.equal(converted.to(mask.dtype), mask) else mask


def _without_repeats(meta: KVBatchMeta, fields: Mapping[str, Any]) -> tuple[KVBatchMeta, Mapping[str, Any]]:
    """Each row once, with its columns. Rows that repeat have the same values."""
    rows = list({sample_id: row for row, sample_id in enumerate(meta.sample_ids)}.values())
    if len(rows) == meta.size:
        return meta, fields
    columns = tensor_columns(as_columns("write-back", fields, meta.size))
    lengths = {name: num_rows(column) for name, column in columns.items()}
    if set(lengths.values()) - {meta.size}:
        raise InvalidRequestError(f"write-back refused: columns have {lengths} rows. Expected {meta.size}.")
    kept = {name: take_rows(column, rows) for name, column in columns.items()}
    return meta.subset(rows), kept
