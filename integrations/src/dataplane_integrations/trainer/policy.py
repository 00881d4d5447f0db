"""`DataPlanePolicy`: the driver's side. It holds metas, never a token tensor: workers fetch their rows themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from dataplane_core import shard_meta_for_dp
from dataplane_core.arguments import Index, checked_as
from dataplane_core.batch import BatchedDataDict, read_columns, write_columns
from dataplane_core.client import DataPlaneClient
from dataplane_core.connecting import connect
from dataplane_core.errors import (
    ConfigError,
    InvalidRequestError,
    LostSamplesError,
    UnknownPartitionError,
    preview,
    printable,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.middleware import merge_snapshots
from dataplane_core.schema import (
    DP_TRAIN_FIELDS,
    GLOBAL_FORWARD_PAD_SEQLEN,
    LP_SEED_FIELDS,
    MULTIMODAL_FIELDS,
    PAD_TO_MULTIPLE,
    ROUTED_EXPERTS_FIELD,
    fields_with_optional_routed_experts,
    padded_length,
)
from dataplane_core.spec import Scope
from dataplane_integrations.attach import DataPlaneSource, metrics_of
from dataplane_integrations.errors import noted_on
from dataplane_integrations.trainer.batching import Batching, Stage
from dataplane_integrations.trainer.groups import WorkerGroup
from dataplane_integrations.trainer.results import FlopsTracker, aggregate_training_results, theoretical_tflops
from dataplane_integrations.trainer.worker import HELD_ROWS, DataPlaneWorkerMixin

_log = logging.getLogger(__name__)
#: Seconds to wait for the workers after a failure: some hang in a collective with the failed ones and do not answer.
_PATIENCE_AFTER_FAILURE_S: Final = 2.0
#: How often the rows of one call may be lost before it gives up.
_MOST_REPLACEMENTS: Final = 5
#: ``extra_info`` key: ``replace_lost`` has left rows out. Later calls with the meta may not find whole global batches.
_SHORTENED: Final = "replace_lost_left_rows_out"

#: The ``replace_lost`` of a `DataPlanePolicy`: gets the meta of a call and lost ids, returns the meta to go on with.
ReplaceLost: TypeAlias = Callable[[KVBatchMeta, Sequence[str]], KVBatchMeta]


class Timer(Protocol):
    """Measures the phases of a call: ``shard_meta`` (planning) and ``workers`` (from their call to their results)."""

    def time(self, label: str) -> contextlib.AbstractContextManager[Any]:
        """Measures a block. ``label`` is the call and the phase, such as ``get_logprobs/workers``."""


class DataPlanePolicy:
    """Drives policy workers through the data plane; a context manager. Splits a step's meta into one per data-parallel
    rank, with the microbatch plan and the common length.

    Args:
        workers: The policy workers, each with `DataPlaneWorkerMixin`; see `RayWorkerGroup`.
        config: The data plane. A config is started here (``bootstrap=True``) and ended by `close`; a client is used and
            left open. Workers attach with the same config, except for middleware given as an object, which only this
            client uses.
        batching: How rows become microbatches. The plan is made here, so all ranks get the same number.
        train_fields: The fields that workers read in `train_from_meta`. None: `schema.DP_TRAIN_FIELDS`, and those of
            `schema.MULTIMODAL_FIELDS` that the meta has.
        logprob_fields: The fields that workers read in the logprob calls. None: `schema.LP_SEED_FIELDS`, and those of
            `schema.MULTIMODAL_FIELDS` that the meta has.
        router_replay: Workers also read ``routed_experts`` in both; rows without it are refused. The reference policy
            does not: its routers choose for themselves.
        reference_router_replay: The reference policy reads ``routed_experts`` too.
        timeout_s: For one call on all workers, in seconds.
        flops_tracker: Gets the lengths of every shard that is trained on.
        read_ahead: How many portions of `train_microbatches_from_metas` each worker reads ahead while it trains. 0:
            none.
        replace_lost: Is called when the store has lost rows of a call, with the meta of the call and the lost ids. It
            produces these rows again, or leaves them out, and returns the meta to go on with. If it leaves rows out,
            global batches become smaller, and stay equal. If the rest cannot be divided equally among them and the
            ranks, it is called again for the last row, until it can. If none is left, the call raises a
            `LostSamplesError`. With this argument, workers read their rows in a separate call before
            they compute (not in `train_microbatches_from_metas`). `ReplayBuffer.leave_out` fits here. What it raises,
            the call raises, and no row is cleared. None: lost rows fail the call, and workers that wait for others in a
            collective may hang.
        clear_on_failure: Whether a call that fails clears its rows. False: they stay, for a run that is started again
            on a store that outlives its processes.

    Raises:
        ConfigError: The backend's scope does not include the workers.
        InvalidRequestError: A negative ``read_ahead``.
        WorkerFailedError: A worker could not attach. What was started here has been ended.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        config: DataPlaneSource,
        *,
        batching: Batching | None = None,
        train_fields: Sequence[str] | None = None,
        logprob_fields: Sequence[str] | None = None,
        router_replay: bool = False,
        reference_router_replay: bool = False,
        timeout_s: float = 600.0,
        flops_tracker: FlopsTracker | None = None,
        read_ahead: int = 0,
        replace_lost: ReplaceLost | None = None,
        clear_on_failure: bool = True,
    ) -> None:
        self._replace_lost = replace_lost
        self._clear_on_failure = clear_on_failure
        self._num_lost = 0
        self._read_ahead = checked_as("DataPlanePolicy: read_ahead", Index, read_ahead)
        self._workers = workers
        self._batching = batching or Batching()
        self._router_replay = router_replay
        with_experts = fields_with_optional_routed_experts
        self._named: dict[Stage, bool] = {"train": train_fields is not None, "logprob": logprob_fields is not None}
        self._train_fields = with_experts(train_fields or DP_TRAIN_FIELDS, enabled=router_replay)
        self._logprob_fields = with_experts(logprob_fields or LP_SEED_FIELDS, enabled=router_replay)
        self._reference_fields = with_experts(logprob_fields or LP_SEED_FIELDS, enabled=reference_router_replay)
        self._told_left_out: set[str] = set()
        self._timeout_s = timeout_s
        self._flops_tracker = flops_tracker
        self._step_partition: str | None = None
        self._split_step: list[KVBatchMeta] | None = None
        self._owns_client = not isinstance(config, DataPlaneClient)
        self._client = config if isinstance(config, DataPlaneClient) else connect(config, bootstrap=True)
        self._source: DataPlaneSource | None = None
        self._closed = False
        self._failed = False
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        config = self._client.config
        # a middleware object serves one client; one that the config names, every worker makes for itself
        named = [item for item in config.middleware if isinstance(item, (str, Mapping))]
        source: DataPlaneSource = config.model_copy(update={"middleware": named})
        if self._client.scope is Scope.PROCESS and not self._client.opens_anywhere:
            if not self._workers.in_process:
                raise ConfigError(
                    f"backend '{self._client.backend_name}' lives in one process, the policy workers are others. "
                    "Expected a backend of scope host or cluster.",
                    backend=self._client.backend_name,
                    hint="Choose one of scope host or cluster: `dataplane doctor NAME` says it.",
                )
            source = self._client
        self._source = source
        self._call("setup_data_plane", lambda _: (source,), doing="attaching to the data plane")

    @property
    def client(self) -> DataPlaneClient:
        """The driver's client."""
        return self._client

    @property
    def num_lost(self) -> int:
        """Number of rows so far that the store had lost and ``replace_lost`` was asked to replace."""
        return self._num_lost

    # --- a step's rows ------------------------------------------------------------------------------------------------

    def prepare_step(
        self,
        num_samples: int | None = None,
        group_size: int | None = None,
        *,
        partition_id: str = "train",
        fields: Sequence[str] | None = None,
        consumer_tasks: Sequence[str] = ("prev_lp", "ref_lp", "train"),
        keep_rows: bool = True,
        rollouts: bool = False,
    ) -> str:
        """Registers the step's partition, as `DataPlaneClient.register_partition` does. Rows that it holds stay; an
        empty one begins anew. Returns ``partition_id``.

        Args:
            num_samples: Number of rows that will be written, if claims need to know the end. Used with
                ``keep_rows=False`` only: where rows stay, further calls may add to them, and `finish_partition` of the
                client says that no more will come.
            group_size: Claims hand out whole groups of this many rows. Where rows stay, that of the earlier call.
            fields: Fields that producers are expected to write; None: those of training. They may write more.
            consumer_tasks: The tasks that may claim. The calls on the workers claim nothing.
            keep_rows: Whether rows stay, such as those that dynamic sampling has kept of earlier generations. False:
                they are dropped.
        """
        names = self._train_fields if fields is None else list(fields)
        try:
            keeps = keep_rows and bool(self._client.list_sample_ids(partition_id))
        except UnknownPartitionError:
            keeps = False
        self._client.register_partition(
            partition_id,
            names,
            None if keep_rows else num_samples,
            consumer_tasks,
            grpo_group_size=group_size,
            if_exists="keep" if keeps else "replace",
            rollouts=rollouts,
        )
        self._step_partition = partition_id
        return partition_id

    def prepare_val_partition(
        self,
        num_samples: int | None = None,
        *,
        partition_id: str = "val",
        fields: Sequence[str] | None = None,
        consumer_tasks: Sequence[str] | None = None,
    ) -> str:
        """Registers a partition for validation, in addition to the step's partition.

        `discard_samples` or a new call empties it. The arguments are those of `prepare_step`. By default, the only task
        is named as the partition.
        """
        names = self._logprob_fields if fields is None else list(fields)
        self._client.register_partition(partition_id, names, num_samples, consumer_tasks or [partition_id])
        return partition_id

    def discard_samples(self, sample_ids: KVBatchMeta | Sequence[str] | None, partition_id: str | None = None) -> None:
        """Clears rows. Ignores rows that do not exist.

        Args:
            sample_ids: The ids; or a meta; or None for the whole partition.
            partition_id: Their partition; None: the meta's, else the step's.
        """
        if isinstance(sample_ids, KVBatchMeta):
            self._client.clear_samples(sample_ids.sample_ids, partition_id or sample_ids.partition_id)
            return
        partition = partition_id or self._step_partition
        if partition is None:
            raise InvalidRequestError(
                "discard_samples refused: ids without a partition, and no step is open. Expected partition_id=..., a "
                "meta, or prepare_step() first."
            )
        self._client.clear_samples(sample_ids, partition)

    def finish_step(self, meta: KVBatchMeta | None = None) -> None:
        """Clears the rows of ``meta``; without a meta, everything in the step's partition."""
        if meta is not None or self._step_partition is not None:
            self.discard_samples(meta)

    def read_from_dataplane(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        pad_value_dict: Mapping[str, int | float] | None = None,
    ) -> BatchedDataDict:
        """Reads columns into the driver, padded to the common length of the workers. Meant for small columns.

        Args:
            meta: The rows. If it has lengths, the common length is written into its ``extra_info``.
            select_fields: The columns; None: those that the meta names.
            pad_value_dict: Pad values by field; default 0.
        """
        if meta.sequence_lengths:
            self._stamp_common_length(meta)
        return read_columns(self._client, meta, select_fields, pad_value_dict=pad_value_dict)

    def write_to_dataplane(
        self, meta: KVBatchMeta, fields: Mapping[str, Any], *, token_aligned_fields: Collection[str] | None = None
    ) -> KVBatchMeta:
        """Adds columns to the rows of ``meta``.

        Args:
            meta: The rows. Token-aligned fields need its ``sequence_lengths``.
            fields: Columns of one row per id.
            token_aligned_fields: Which to cut to the rows' lengths; None: the ones that workers cut.

        Returns:
            The meta, with the fields added.
        """
        declared = DataPlaneWorkerMixin.token_aligned_fields if token_aligned_fields is None else token_aligned_fields
        return write_columns(self._client, meta, fields, token_aligned_fields=declared)

    # --- calls on the workers -----------------------------------------------------------------------------------------

    def get_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> KVBatchMeta:
        """The workers compute the logprobs and write the column ``prev_logprobs``.

        Args:
            meta: The rows, with ``sequence_lengths``. The common length is written into its ``extra_info``.
            micro_batch_size: Rows per microbatch if `Batching` makes no plan.
            timer: Measures ``get_logprobs/shard_meta`` and ``get_logprobs/workers``.

        Returns:
            The meta, with the field added.

        Raises:
            InvalidRequestError: The rows cannot be sharded (see `shard_meta_for_dp`). They are not cleared.
            WorkerFailedError: A worker raised, died or did not answer. The rows have been cleared.
        """
        return self._logprobs("get_logprobs", "prev_logprobs", self._logprob_fields, meta, micro_batch_size, timer)

    def get_reference_policy_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> KVBatchMeta:
        """As `get_logprobs_from_meta`, for the reference policy: writes ``reference_policy_logprobs``."""
        call, field = "get_reference_policy_logprobs", "reference_policy_logprobs"
        return self._logprobs(call, field, self._reference_fields, meta, micro_batch_size, timer)

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        train_fields: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """The workers train on the rows.

        Args:
            meta: The rows, with ``sequence_lengths``. The common length is written into its ``extra_info``.
            loss_fn: The loss, which is sent to the workers.
            eval_mode: Only compute the loss.
            gbs: Global batch size in rows, with one optimizer step each; None: that of `Batching`, which by default is
                one step for all rows.
            mbs: Rows per microbatch if `Batching` makes no plan; None: that of `Batching`.
            timer: Measures ``policy_training/shard_meta`` and ``policy_training/workers``.
            train_fields: The fields that workers read in this call; None: those given to the constructor. With router
                replay, ``routed_experts`` is added.

        Returns:
            ``loss`` and ``grad_norm``, one value per global batch; ``all_mb_metrics``; other keys that the workers
            report; with a FLOPs tracker also ``total_flops``, ``num_ranks`` and ``theoretical_tflops`` (None if
            unknown).

        Raises:
            InvalidRequestError: A split step is open, or the rows cannot be sharded (see `shard_meta_for_dp`). They are
                not cleared.
            WorkerFailedError: A worker raised, died or did not answer. The rows have been cleared.
        """
        self._refuse_open_step("train_from_meta")
        fields: Sequence[str] | None = None
        if train_fields is not None:
            fields = fields_with_optional_routed_experts(train_fields, enabled=self._router_replay)
        gbs, mbs = gbs or self._batching.global_batch_size, mbs or self._batching.micro_batch_size
        with _timed(timer, "policy_training/shard_meta"):
            meta, shards = self._readable(meta, "train", fields or self._fields(meta, "train"), gbs)
        if self._flops_tracker is not None:
            self._flops_tracker.reset()
        self._track(shards)
        with self._undone_on_failure(meta):
            with _timed(timer, "policy_training/workers"):
                results = self._call(
                    "train_presharded",
                    lambda rank: (shards[rank], loss_fn),
                    {"eval_mode": eval_mode, "gbs": _batch_size(meta, gbs), "mbs": mbs},
                    doing="training",
                )
            return self._aggregate(results)

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens an optimizer step whose rows arrive in portions. Call `train_microbatch_from_meta` for each portion,
        then `finish_train_step`. ``gbs`` and ``mbs`` are those of `train_from_meta`.

        Raises:
            InvalidRequestError: A step is already open.
            WorkerFailedError: A worker raised, died or did not answer. No step is open.
        """
        self._refuse_open_step("begin_train_step")
        self._split_step = []
        with self._undone_on_failure(step=self._split_step):
            sizes = {"gbs": gbs or self._batching.global_batch_size, "mbs": mbs or self._batching.micro_batch_size}
            self._call("begin_train_step_presharded", lambda _: (loss_fn,), sizes, doing="beginning a training step")
        if self._flops_tracker is not None:
            self._flops_tracker.reset()

    def train_microbatch_from_meta(self, meta: KVBatchMeta, timer: Timer | None = None) -> None:
        """The workers accumulate the gradients of one portion of the open step. ``meta`` and ``timer`` are those of
        `train_from_meta`.

        Raises:
            InvalidRequestError: No step is open, or the rows cannot be sharded (see `shard_meta_for_dp`). The rows are
                not cleared, and the step stays open.
            WorkerFailedError: A worker raised, died or did not answer. The rows of all portions have been cleared, and
                the step is aborted. A worker that is still busy aborts when it is done with the portion.
        """
        step = self._require_split_step("train_microbatch_from_meta")
        with _timed(timer, "policy_training/shard_meta"):
            meta, shards = self._readable(meta, "train", self._fields(meta, "train"), step=step)
        step.append(meta)
        self._track(shards)
        with self._undone_on_failure(step=step), _timed(timer, "policy_training/workers"):
            self._call(
                "train_microbatch_presharded", lambda rank: (shards[rank],), doing="training on a portion of a step"
            )

    #: The name of this call in NeMo RL, where a portion is cut into microbatches too.
    train_microbatches_from_meta = train_microbatch_from_meta

    def train_microbatches_from_metas(self, metas: Sequence[KVBatchMeta]) -> None:
        """As one `train_microbatch_from_meta` for each portion, in order, but in one call of the workers. So they can
        read the next portions from the store while they train on one (``read_ahead``).

        Raises:
            InvalidRequestError: As `train_microbatch_from_meta`, before any portion is trained on.
            WorkerFailedError: As `train_microbatch_from_meta`. ``timeout_s`` is the time for each portion.
        """
        step = self._require_split_step("train_microbatches_from_metas")
        portions = [self._shard(meta, "train", self._fields(meta, "train")) for meta in metas]
        for shards in portions:
            self._track(shards)
        step.extend(metas)
        with self._undone_on_failure(step=step):
            self._call(
                "train_microbatches_presharded",
                lambda rank: ([shards[rank] for shards in portions],),
                {"read_ahead": self._read_ahead},
                doing="training on portions of a step",
                timeout_s=self._timeout_s * max(len(portions), 1),
            )

    def finish_train_step(self) -> dict[str, Any]:
        """The workers make the optimizer step. Returns what `train_from_meta` returns.

        Raises:
            InvalidRequestError: No step is open.
            WorkerFailedError: As `train_microbatch_from_meta`.
        """
        step = self._require_split_step("finish_train_step")
        with self._undone_on_failure(step=step):
            results = self._call("finish_train_step_presharded", doing="finishing a training step")
            self._split_step = None
            return self._aggregate(results)

    def abort_train_step(self) -> None:
        """The workers drop the gradients of the open step, if there is one. Its rows are not cleared."""
        self._abort_train_step(self._timeout_s)

    def metrics(self, *, reset: bool = False) -> dict[str, Any]:
        """What the clients of the driver and of all workers did, joined by `merge_snapshots`: counts, bytes and
        times of each operation. Needs the middleware ``metrics`` in the config. Other processes, such as rollout
        actors, are not in it: join what their ``data_plane_metrics()`` returns to it.

        Args:
            reset: The next call counts from here on, for numbers per step.
        """
        snapshots = self._call("data_plane_metrics", kwargs={"reset": reset}, doing="reading metrics")
        shared = self._source is self._client  # all workers use this client
        return merge_snapshots(snapshots[:1] if shared else [metrics_of(self._client, reset), *snapshots])

    # --- close --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Detaches the workers, and ends what was started here. Idempotent, and safe after a failure."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._source is not None:
                patience_s = min(self._timeout_s, _PATIENCE_AFTER_FAILURE_S if self._failed else 10.0)
                # a worker that is attached to something else was not attached here
                with contextlib.suppress(Exception):  # a worker that is gone has no client to close
                    self._call("close_data_plane", lambda _: (self._source,), doing="detaching", timeout_s=patience_s)
        finally:
            if self._owns_client:
                self._client.close()

    def __enter__(self) -> DataPlanePolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _logprobs(
        self,
        call: str,
        field: str,
        fields: Sequence[str],
        meta: KVBatchMeta,
        micro_batch_size: int | None,
        timer: Timer | None,
    ) -> KVBatchMeta:
        with _timed(timer, f"{call}/shard_meta"):
            meta, shards = self._readable(meta, "logprob", self._fields(meta, "logprob", fields))
        with self._undone_on_failure(meta), _timed(timer, f"{call}/workers"):
            options = {"micro_batch_size": micro_batch_size}
            self._call(f"{call}_presharded", lambda rank: (shards[rank],), options, doing=f"computing {field}")
        return meta.with_fields([field])

    def _fields(self, meta: KVBatchMeta, stage: Stage, fields: Sequence[str] | None = None) -> list[str]:
        """The fields that workers read, with the optional columns that the rows have. Says once what is left out."""
        names = list(self._train_fields if fields is None else fields)
        optional = [name for name in meta.fields or () if name in MULTIMODAL_FIELDS and name not in names]
        if not self._named[stage]:
            names, optional = names + optional, []
        if fields is not self._reference_fields and ROUTED_EXPERTS_FIELD in (meta.fields or ()):  # it may route anew
            optional += [ROUTED_EXPERTS_FIELD] * (ROUTED_EXPERTS_FIELD not in names)
        left_out = [name for name in optional if name not in self._told_left_out]
        if left_out:
            self._told_left_out.update(left_out)
            _log.warning(
                "the rows of '%s' have %s, which the workers do not read: name them in %s_fields, or set router_replay "
                "for '%s'.",
                printable(meta.partition_id),
                preview(left_out),
                stage,
                ROUTED_EXPERTS_FIELD,
            )
        return names

    def _stamp_common_length(self, meta: KVBatchMeta) -> None:
        """Writes the sequence length of every rank's forward into ``meta``, once: all calls on its rows use it."""
        if meta.sequence_lengths is None or not meta.size:
            raise InvalidRequestError(
                f"meta of '{meta.partition_id}' refused: {meta.size} rows "
                f"{'without' if meta.sequence_lengths is None else 'with'} sequence_lengths. Expected at least one "
                "row, and a length for each: kv_first_write fills them from input_lengths."
            )
        longest = max(meta.sequence_lengths)
        if (meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN) or 0) < longest:
            multiples = (self._batching.pad_multiple, self._batching.length_round)
            own_multiple = meta.extra_info.get(PAD_TO_MULTIPLE) or 1
            meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = padded_length(longest, own_multiple, *multiples)

    def _shard(
        self, meta: KVBatchMeta, stage: Stage, fields: Sequence[str], gbs: int | None = None
    ) -> list[KVBatchMeta]:
        """One meta per data-parallel rank, with its microbatch plan, the common length, and the fields to read."""
        self._stamp_common_length(meta)
        ranks = max(self._workers.dp_ranks) + 1
        shards, _ = shard_meta_for_dp(
            meta, dp_world=ranks, batch_size=_batch_size(meta, gbs), **self._batching.shard_args(stage)
        )
        return [dataclasses.replace(shard, fields=list(fields)) for shard in shards]

    def _readable(
        self,
        meta: KVBatchMeta,
        stage: Stage,
        fields: Sequence[str],
        gbs: int | None = None,
        step: Sequence[KVBatchMeta] | None = None,
    ) -> tuple[KVBatchMeta, list[KVBatchMeta]]:
        """The rows to work on and their shards. With ``replace_lost``, the workers have read them.

        ``step`` has the earlier portions of the split step that the rows belong to.
        """
        if self._replace_lost is None:
            return meta, self._shard(meta, stage, fields, gbs)
        lost: list[str] = []
        rounds = 0
        while rounds < _MOST_REPLACEMENTS:
            refusal = None
            try:
                shards = self._shard(meta, stage, fields, gbs)
            except InvalidRequestError as error:
                if _SHORTENED not in meta.extra_info:
                    raise
                refusal, gone = error, meta.sample_ids[-1:]  # the ranks cannot share the rest: more is left out
            else:
                gone = self._hold(meta, shards, step)
                if not gone:
                    return meta, shards
                lost, rounds = gone, rounds + 1
                self._num_lost += len(lost)
            size, meta = meta.size, self._replace_lost(meta, gone)
            if not meta.size:
                raise LostSamplesError(
                    f"no rows of '{meta.partition_id}' are left of those of the call: "
                    f"{preview(lost) or 'some of an earlier call'} were lost, and replace_lost has left out all. "
                    "Expected as many as the data-parallel ranks can share.",
                    partition_id=meta.partition_id,
                    missing_samples=lost,
                    hint="Make the call with other rows.",
                )
            if meta.size < size:
                meta.extra_info[_SHORTENED] = True
            elif refusal is not None:
                raise refusal
        raise LostSamplesError(
            f"rows of '{meta.partition_id}' were lost again after replace_lost had replaced them {rounds} times, the "
            f"last time {preview(lost)}.",
            partition_id=meta.partition_id,
            missing_samples=lost,
            hint="Check that replace_lost writes the rows it is given or leaves them out, and that the storage lives.",
        )

    def _hold(self, meta: KVBatchMeta, shards: Sequence[KVBatchMeta], step: Sequence[KVBatchMeta] | None) -> list[str]:
        """The workers read their shards for the next call. Returns the lost samples."""
        name = uuid.uuid4().hex
        for shard in shards:
            shard.extra_info[HELD_ROWS] = name
        with self._undone_on_failure(meta, step=step):
            lost = self._call("hold_presharded", lambda rank: (shards[rank],), doing="reading rows")
        return list(dict.fromkeys(itertools.chain.from_iterable(lost)))

    def _track(self, shards: Sequence[KVBatchMeta]) -> None:
        if self._flops_tracker is not None:
            for shard in shards:
                self._flops_tracker.track_batch(list(shard.sequence_lengths or []))

    def _aggregate(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        aggregated = aggregate_training_results(results, self._workers.dp_ranks)
        if self._flops_tracker is not None:
            aggregated["total_flops"] = self._flops_tracker.total_flops
            aggregated["num_ranks"] = len(results)
            aggregated["theoretical_tflops"] = theoretical_tflops(results)
        return aggregated

    def _call(
        self,
        method: str,
        args: Callable[[int], tuple[Any, ...]] = lambda rank: (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        doing: str,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Calls a method on all workers, with the arguments that ``args`` makes for their data-parallel ranks."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            of_ranks = [args(rank) for rank in self._workers.dp_ranks]
            return self._workers.call(method, of_ranks, kwargs, timeout_s=timeout_s, doing=doing)
        except BaseException:
            self._failed = True
            raise

    def _refuse_open_step(self, what: str) -> None:
        if self._split_step is not None:
            raise InvalidRequestError(
                f"{what} refused: a step is open. Expected finish_train_step() or abort_train_step() first."
            )

    def _require_split_step(self, what: str) -> list[KVBatchMeta]:
        if self._split_step is None:
            raise InvalidRequestError(f"{what} refused: no step is open. Expected begin_train_step() first.")
        return self._split_step

    def _abort_train_step(self, timeout_s: float) -> None:
        if self._split_step is not None:
            self._split_step = None
            self._call("abort_train_step_presharded", doing="aborting a training step", timeout_s=timeout_s)

    @contextlib.contextmanager
    def _undone_on_failure(self, *metas: KVBatchMeta, step: Sequence[KVBatchMeta] | None = None) -> Iterator[None]:
        """After a failure, clears the rows, and those of a split step, which is aborted."""
        try:
            yield
        except BaseException as error:
            try:
                for meta in [*(step or ()), *metas] if self._clear_on_failure else ():
                    with noted_on(error, f"Its {meta.size} rows could not be cleared"):
                        self.discard_samples(meta)
            finally:  # also where the clearing is interrupted
                if step is not None:
                    with noted_on(error, "The step could not be aborted"):
                        self._abort_train_step(min(self._timeout_s, _PATIENCE_AFTER_FAILURE_S))
            raise


def _timed(timer: Timer | None, label: str) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if timer is None else timer.time(label)


def _batch_size(meta: KVBatchMeta, gbs: int | None) -> int | None:
    """Rows of a global batch. If rows were left out: that of the fewest equal batches of at most ``gbs`` rows."""
    if gbs is None or _SHORTENED not in meta.extra_info:
        return gbs
    return meta.size // -(-meta.size // gbs)
