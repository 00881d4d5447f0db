"""`DataPlaneClient`: what trainers call.

Its methods check their arguments, call what the modules beside this one do, and keep the promises of the contract that
do not depend on the backend.

This file is long because it is one class, and half of it is docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import wrapt
from msgspec.structs import replace

from dataplane_core.arguments import (
    Count,
    Name,
    PositiveSeconds,
    check_meta,
    check_name,
    check_names,
    checked,
    checked_as,
)
from dataplane_core.client.claims import checked_claim, claim_now, settle
from dataplane_core.client.connection import ClientFacts, Connection, check_counts, note_step
from dataplane_core.client.explaining import clients_of, judged, list_partitions
from dataplane_core.client.partitions import (
    HIDDEN,
    common_fields,
    declared_fields,
    encode,
    export,
    opening,
    put,
    read,
    register,
    set_cursor,
    tell_short_groups,
)
from dataplane_core.errors import (
    BackendError,
    InvalidRequestError,
    InvalidTypeError,
    MissingDataError,
    UnknownPartitionError,
    UnknownTaskError,
    UnsupportedOperationError,
    Verdict,
    preview,
)
from dataplane_core.ledger import group_of, rollout_of
from dataplane_core.meta import KVBatchMeta, lengths_of
from dataplane_core.schema import GROUP_ROLLOUTS_TAG, ROLLOUT_ROWS_TAG
from dataplane_core.spec import (
    Capability,
    ClearRequest,
    ClientInfo,
    FieldsRequest,
    GetRequest,
    InspectRequest,
    ListRequest,
    ListUnitsRequest,
    PartitionDescription,
    PutRequest,
    RegisterRequest,
    SampleList,
    Sampler,
    TagFilter,
    TagValue,
    UnitInfo,
    check_tag_filter,
    new_id,
)
from dataplane_core.spec.replies import FieldList
from dataplane_core.spec.requests import AckRequest, ConsumptionRequest, IfExists, NackRequest, RenewRequest, Words
from dataplane_core.spec.tags import check_tags

if TYPE_CHECKING:  # torch is imported by the first call that needs it
    from tensordict import TensorDict, TensorDictBase

_Class = TypeVar("_Class", bound=type)


def with_methods_not_compiled(kind: _Class) -> _Class:
    """A class whose own public methods `torch.compile` leaves alone: they send bytes and wait.

    `torch.compiler.disable` is put around them once the compiler is imported, since to use it imports the compiler.
    """

    def mark(_: object) -> None:
        disable = importlib.import_module("torch.compiler").disable
        for name, method in list(vars(kind).items()):
            if not name.startswith("_") and inspect.isfunction(method):
                setattr(kind, name, disable(method))

    wrapt.register_post_import_hook(mark, "torch._dynamo")
    return kind


def _check_tasks(partition_id: str, names: list[str], registered: Collection[str]) -> None:
    unknown = [name for name in names if name not in registered]
    if unknown:
        raise UnknownTaskError(
            f"partition '{partition_id}' has no consumer task {preview(unknown)}.",
            hint=f"Registered: {preview(registered, limit=5) or 'none'}.",
        )


@with_methods_not_compiled
class DataPlaneClient(ClientFacts):
    """A process's connection to a store. `dataplane_core.connect` makes it; `close`, or leaving its ``with``, ends it.

    Several threads may share a client. It cannot be pickled, and a forked child cannot use its parent's. Every method
    blocks until it is done, at most ``op_timeout_s`` seconds (see the config); a blocking claim has a ``timeout_s`` of
    its own. All errors derive from `DataPlaneError`. Unless a method says otherwise, they are: for a partition or a
    task that is not registered, `UnknownPartitionError` and `UnknownTaskError`; for what the backend does not declare,
    `UnsupportedOperationError`; for a deadline that passed, `OperationTimeoutError`.

    Examples:
        The examples of the methods continue this one.

        >>> import torch
        >>> from dataplane_core import connect
        >>> client = connect({"backend": "noop"})
    """

    def __init__(self) -> None:
        raise UnsupportedOperationError(
            "DataPlaneClient is not constructed directly.", hint="Use dataplane_core.connect(config)."
        )

    @classmethod
    def _of(cls, connection: Connection) -> Self:
        client = object.__new__(cls)
        client._connection = connection
        return client

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str] | Mapping[str, Any],
        num_samples: int | None,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        if_exists: IfExists = "replace",
        rollouts: bool = False,
    ) -> None:
        """Opens a partition. By default it is new and empty: what an earlier registration held is gone on return.

        Args:
            partition_id: The name of the partition, not empty.
            fields: Fields that producers are expected to write. They may write others as well. A dict also declares
                what a field holds, so that another first write is refused: ``"float32"``, ``"object"``, a dtype and the
                shape of a cell such as ``("uint8", (3, 224, 224))``, or None. The first dim of a cell may differ from
                row to row, as in any field.
            num_samples: How many distinct ids will be written, also those that are cleared meanwhile. More are refused.
                With it, claims, streams and `is_finished` know the end. None: not known until `finish_partition`.
            consumer_tasks: The tasks that will claim.
            grpo_group_size: Claims hand out whole groups of this many samples (capability ``groups``).
            enums: Field -> the strings that it may hold, for object columns: at most 256, of at most 64 characters.
            if_exists: ``replace``: drops an earlier registration of the same name with all that it held. ``keep``:
                leaves it as it is, with its rows, tags, cursors, schema and ``num_samples``, and adds the fields, tasks
                and strings of enums that it lacks, and ``num_samples`` if it has none. Of several processes that
                register with ``keep`` at the same time, one opens the partition and the others keep it.
            rollouts: Whether samples are rows of rollouts, with ids such as ``q0_g1/2``. Claims hand out groups of
                sealed rollouts (see `seal`), and count groups. ``grpo_group_size`` is then how many rollouts a group
                has; None: that is known when the group is sealed.

        Raises:
            InvalidRequestError: A size below 1, empty names, no kind of cells, or ``keep`` with another group size,
                ``rollouts`` or kind of cells than the partition has.

        Examples:
            >>> client.register_partition("step-1", ["input_ids", "reward"], 4, ["trainer"])
        """
        with self._connection.operation("register_partition", partition_id):
            request = checked(
                "register_partition",
                RegisterRequest,
                partition_id=partition_id,
                fields=fields,
                declared=declared_fields(f"register_partition('{partition_id}')", fields),
                num_samples=num_samples,
                consumer_tasks=consumer_tasks,
                grpo_group_size=grpo_group_size,
                enums=checked_as("register_partition: enums", dict[Name, Words], enums or {}),
                if_exists=if_exists,
                rollouts=rollouts,
            )
            if num_samples is not None:
                checked_as("register_partition: num_samples", Count, num_samples)
            if rollouts:
                self._connection.require(Capability.GROUPS, "register_partition(rollouts=True)")
            elif grpo_group_size is not None:
                self._connection.require(Capability.GROUPS, "register_partition(grpo_group_size=...)")
                if num_samples is not None and num_samples % grpo_group_size:
                    raise InvalidRequestError(
                        f"register_partition('{partition_id}') refused: num_samples {num_samples} is not a multiple of "
                        f"grpo_group_size {grpo_group_size}."
                    )
            register(self._connection, request)

    def finish_partition(self, partition_id: str) -> None:
        """Says that no more samples will be written to a partition that was registered without ``num_samples``.

        Its ``num_samples`` is now the number of samples that it holds: claims return the rest, streams end, and
        `is_finished` becomes true once all are consumed. Puts of new ids are refused; those of further fields or tags
        are not. If it has ``num_samples``, this changes nothing. Groups that are not whole by then are never given; a
        warning in the log names the first of them.

        Examples:
            >>> client.register_partition("open", ["reward"], None, ["trainer"])
            >>> meta = client.put_samples(["a", "b", "c"], "open", {"reward": [0.0, 1.0, 0.5]})
            >>> client.finish_partition("open")
            >>> client.claim_meta("open", "trainer", ["reward"], batch_size=8).sample_ids
            ['a', 'b', 'c']
            >>> client.is_finished("open", ["trainer"])
            True
            >>> client.clear_samples(None, "open")
        """
        with self._connection.operation("finish_partition", partition_id):
            before = self._connection.describe(partition_id)
            epoch = new_id()
            request = RegisterRequest(partition_id, num_samples=0, if_exists="keep", epoch=epoch)
            request.grpo_group_size, request.rollouts = before.grpo_group_size, before.rollouts
            info = register(self._connection, request)
            if info.epoch == epoch:  # it was cleared after it was described
                self.clear_samples(None, partition_id)
                raise UnknownPartitionError(f"finish_partition('{partition_id}') refused: it was cleared meanwhile.")
            if before.is_grouped and Capability.LISTING in self._connection.capabilities:
                tell_short_groups(self._connection, partition_id, info)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDictBase | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Any | None = None,
        tags: Sequence[Mapping[str, TagValue]] | None = None,
    ) -> KVBatchMeta:
        """Writes cells, tags, or both; returns when the write is committed and visible to every other client.

        Args:
            sample_ids: N unique ids. An empty list, with columns and tags of no rows: nothing is sent, and the meta is
                empty.
            partition_id: A registered partition.
            fields: Columns of batch size ``[N]``: tensors (dense, jagged or strided nested), or row-aligned object
                columns; in a dict also numpy arrays, lists and Arrow arrays. Or N dicts, one per row, a
                ``datasets.Dataset``, a pyarrow ``Table`` or ``RecordBatch``, or a pandas ``DataFrame``.
                `codec.inputs.as_columns` says what each becomes. The caller may reuse its memory as soon as this
                returns.
            tags: N dicts of primitive values, merged key by key into the tags that the samples have.

        Returns:
            A meta with the fields and tags that were written.

        Raises:
            InvalidRequestError: Nothing to write, repeated ids, sizes or keys of rows that differ, a string outside its
                enum, more samples than ``num_samples``.
            SchemaMismatchError: A field changes kind, dtype, rank or trailing shape; nothing is written.
            InvalidTypeError: A non-tensor leaf, a meta-device tensor, an object item outside the closed set, None or a
                null among numbers.
            CapacityExceededError: The store is full.
            LostReplyError, OperationTimeoutError: Its ``outcome`` says whether the write happened, if the store could
                tell before the deadline.

        Examples:
            >>> ids = ["p0_g0", "p0_g1", "p1_g0", "p1_g1"]
            >>> tokens = [[1, 2, 3], [1, 2], [4], [4, 5]]
            >>> columns = {"input_ids": tokens, "reward": torch.tensor([0.0, 1.0, 1.0, 0.0])}
            >>> meta = client.put_samples(ids, "step-1", columns, tags=[{"input_lengths": len(row)} for row in tokens])
            >>> meta.sequence_lengths
            [3, 2, 1, 2]
        """
        from dataplane_core.codec.inputs import as_columns  # it imports torch

        # isort: split
        from tensordict import TensorDictBase  # after the codec, which delays its marks for the compiler

        connection = self._connection
        with connection.operation("put_samples", partition_id):
            ids = checked_as("put_samples: sample_ids", list[Name], sample_ids)
            where = f"put_samples('{partition_id}', {len(ids)} samples)"
            if len(set(ids)) != len(ids):
                repeated = [sample_id for sample_id, count in Counter(ids).items() if count > 1]
                raise InvalidRequestError(
                    f"{where} refused: sample ids repeat: {preview(repeated)}. Expected each id once."
                )
            rows = None if tags is None else check_tags(tags, len(ids))
            if isinstance(fields, TensorDictBase) and tuple(fields.batch_size) != (len(ids),):
                raise InvalidRequestError(
                    f"{where} refused: fields have batch size {list(fields.batch_size)}. Expected [{len(ids)}], one "
                    "row per sample id."
                )
            inputs = {} if fields is None else as_columns(where, fields, len(ids))
            request = PutRequest(
                partition_id=partition_id,
                sample_ids=ids,
                columns={},
                specs={},
                tags=rows,
                strict=connection.config.strict_fields,
            )
            encode(connection, where, request, inputs)
            if not ids:
                return KVBatchMeta(partition_id, None, [])
            names = list(request.columns)
            if not names and rows is None:
                raise InvalidRequestError(f"{where} refused: neither fields nor tags were given.")
            if connection.config.open_partitions:
                request.opens = opening(connection, partition_id, names, [])
            work = connection.work.begin("put_samples", partition_id, names)
            put(connection, where, request, inputs)
            work.served_at = time.monotonic()
            lengths = None if rows is None else lengths_of(rows)
            return KVBatchMeta(partition_id, None, ids, fields=names, sequence_lengths=lengths, tags=rows)

    def seal(self, rollouts: Mapping[str, int], partition_id: str, *, ends_groups: bool = False) -> KVBatchMeta:
        """Says how many rows rollouts have, and with that, that they are complete once these are there.

        It puts tags on the last row of each: ``rollout_rows``, and ``group_rollouts`` if ``ends_groups``. The put of
        that row may bring them along, which saves this call. May be called again.

        Args:
            rollouts: Rollout -> how many rows it has.
            partition_id: A partition that was registered with ``rollouts``.
            ends_groups: Whether these are all rollouts of their groups, which are then complete without the others: say
                it when a process died that made one of them. The rows of the others are never given.

        Raises:
            InvalidRequestError: A rollout has more rows, or is sealed with another number; a group has more sealed
                rollouts; or the partition is not one of rollouts.

        Examples:
            >>> client.register_partition("agents", ["reward"], None, ["trainer"], grpo_group_size=2, rollouts=True)
            >>> written = client.put_samples(["q0_g0/0", "q0_g0/1", "q0_g1/0"], "agents", {"reward": [0.0, 1.0, 0.5]})
            >>> sealed = client.seal({"q0_g0": 2, "q0_g1": 1}, "agents")
            >>> client.claim_meta("agents", "trainer", ["reward"], batch_size=1).sample_ids
            ['q0_g0/0', 'q0_g0/1', 'q0_g1/0']
            >>> client.clear_samples(None, "agents")
        """
        with self._connection.operation("seal", partition_id):
            counts = checked_as("seal: rollouts", dict[Name, Count], rollouts)
            checked_as("seal: ends_groups", bool, ends_groups)
            if row := next((name for name in counts if rollout_of(name) != name), None):
                raise InvalidRequestError(f"seal: '{row:.90}' is a row. Expected its rollout, '{rollout_of(row):.90}'.")
            if not self._connection.describe(partition_id).rollouts:
                raise InvalidRequestError(
                    f"seal('{partition_id}') refused: the partition is not one of rollouts.",
                    hint="Register it with rollouts=True.",
                )
            in_group = Counter(map(group_of, counts))
            tags: list[dict[str, TagValue]] = [
                {ROLLOUT_ROWS_TAG: count, **({GROUP_ROLLOUTS_TAG: in_group[group_of(name)]} if ends_groups else {})}
                for name, count in counts.items()
            ]
            return self.put_samples([f"{name}/{count - 1}" for name, count in counts.items()], partition_id, tags=tags)

    def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None,
        *,
        share_rows: bool = False,
    ) -> TensorDict:
        """Reads one row per id, in the order of the ids, repeated ids included. It changes no cursor.

        Args:
            sample_ids: N ids. An empty list: nothing is sent, and the batch has size 0.
            partition_id: A registered partition.
            select_fields: The columns to read. None: all fields that every one of the samples has.
            share_rows: Whether rows may share memory. Large equal cells of a put, such as the image of a group, are
                stored and moved once. By default each row gets a copy. With True they share one: a column with such
                cells is a ``NonTensorStack``, where equal rows are the same tensor or item.

        Returns:
            A TensorDict of batch size ``[N]`` that belongs to the caller. A column whose rows have equal shapes is a
            dense tensor, any other tensor column a nested tensor (layout ``torch.jagged``), an object column a
            ``NonTensorStack``.

        Raises:
            MissingDataError: A sample is not there, or a cell is not yet produced. It is also a `KeyError`.
            LostSamplesError: The store has lost payload of samples that were produced. A `MissingDataError`.
            CorruptDataError: The bytes that were read are not those that were written.

        Examples:
            >>> batch = client.get_samples(["p1_g1", "p0_g0"], "step-1", ["input_ids", "reward"])
            >>> [row.tolist() for row in batch["input_ids"].unbind()]
            [[4, 5], [1, 2, 3]]
            >>> batch["reward"]
            tensor([0., 0.])
        """
        from dataplane_core.codec.rows import repeat_rows

        # isort: split
        from tensordict import TensorDict

        connection = self._connection
        with connection.operation("get_samples", partition_id):
            ids = checked_as("get_samples: sample_ids", list[Name], sample_ids)
            names = [] if select_fields is None else check_names("get_samples: select_fields", select_fields)
            if select_fields is not None and not names:
                raise InvalidRequestError(
                    f"get_samples('{partition_id}', {len(ids)} samples) refused: select_fields is empty. Expected the "
                    "names of the columns to read."
                )
            if not ids:
                return TensorDict({}, batch_size=[0])
            unique = list(dict.fromkeys(ids))
            if select_fields is None:
                connection.require(Capability.LISTING, f"get_samples('{partition_id}', select_fields=None)")
                names = common_fields(self.list_fields(unique, partition_id))
                if not names:
                    return TensorDict({}, batch_size=[len(ids)])
            columns = read(connection, GetRequest(partition_id, sample_ids=unique, fields=names), share_rows)
            if len(unique) != len(ids):
                at = {sample_id: position for position, sample_id in enumerate(unique)}
                columns = repeat_rows(columns, [at[sample_id] for sample_id in ids], share=share_rows)
            return TensorDict(columns, batch_size=[len(ids)])

    def get_data(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None, share_rows: bool = False
    ) -> TensorDict:
        """Reads the rows that a meta names, as `get_samples` does: ``select_fields``, or else ``meta.fields``. Raises
        `InvalidRequestError` if both are None.

        Examples:
            >>> client.get_data(meta.slice(1, 3), ["reward"])["reward"]
            tensor([1., 1.])
        """
        check_meta("get_data: meta", meta)
        names = select_fields if select_fields is not None else meta.fields
        if names is None:
            raise InvalidRequestError(
                f"get_data('{meta.partition_id}', {meta.size} samples) refused: neither select_fields nor meta.fields "
                "names the columns to read.",
                backend=self.backend_name,
            )
        return self.get_samples(meta.sample_ids, meta.partition_id, names, share_rows=share_rows)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        lease_s: float | None = None,
        tag_filter: TagFilter | None = None,
        sampler: Sampler = "first_write",
        dp_size: int | None = None,
        batch_index: int | None = None,
        balance: Mapping[str, Any] | None = None,
        max_rows: int | None = None,
        max_tokens: int | None = None,
    ) -> KVBatchMeta:
        """Hands out samples whose required fields are all produced and that the task has not been given.

        No sample is given to a task twice, whichever clients and processes ask; with leases, no sample is held by two
        at once. A blocking claim waits until ``batch_size`` samples are ready. It also returns once the partition can
        give the task no more, with what remains, perhaps nothing. Samples leased to others count as given.

        Args:
            partition_id: A registered partition.
            task_name: A task named at its registration.
            required_fields: Fields that must be produced.
            batch_size: How many; a multiple of the group size where the partition has one. Of a partition of rollouts,
                how many groups.
            dp_rank: The data-parallel rank that claims. All claims of the task with this rank and ``batch_index`` give
                the same samples, so that the ranks of a replica can each claim (capability ``samplers``).
            blocking: Whether to wait. If not, what is ready now is returned, at most ``batch_size``.
            timeout_s: How long a blocking claim waits, in seconds.
            lease_s: Seconds after which samples that were neither acked nor nacked can be claimed again. None: there
                is no lease, and each sample is given to the task at most once.
            tag_filter: A condition on tags, such as ``{"weight_version": (">=", 7)}``.
            sampler: Which ready samples it gives (capability ``samplers``). ``first_write``: in order of first write.
                ``freshest``: the last written first. ``balanced``: in order of first write, and the ``dp_size`` ranks
                get about the same number of tokens (tag ``input_lengths``).
            dp_size: The number of ranks; ``balanced`` requires it. The first claim of a batch then chooses
                ``batch_size`` samples for each rank, or what is left, and all ranks get about as many, perhaps none.
                That there is no further batch is also said to all ranks. `stream` tells the two apart.
            batch_index: Which batch of ``dp_rank``, from 0. None: the first that this client was not given yet.
            balance: What ``balanced`` balances instead of tokens, such as ``{"cost": "flops", "hidden_size": 4096}``:
                see `shard_meta_for_dp`. It is sent to the store, so it cannot be a function.
            max_rows: The most rows; a blocking claim then waits until there are ``batch_size``, or as many as this
                allows. A group that has more comes alone. Not with ``dp_size``.
            max_tokens: The same for tokens (tag ``input_lengths``). What lacks the tag comes alone.

        Returns:
            A meta in order of first write (``freshest``: in the opposite order), with tags, and ``sequence_lengths``
            where all have the tag ``input_lengths``.

        Raises:
            ClaimTimeoutError: Says how many were ready, and what keeps the others back.
            UnknownPartitionError: It is not registered, or was cleared while the claim waited.
            InvalidRequestError: A batch size below 1 or no multiple of the group size.

        Examples:
            >>> claimed = client.claim_meta("step-1", "trainer", ["input_ids", "reward"], 2, lease_s=60.0)
            >>> claimed.sample_ids
            ['p0_g0', 'p0_g1']
        """
        with self._connection.operation("claim_meta", partition_id):
            request = checked_claim(
                self._connection,
                timeout_s=timeout_s,
                batch_index=batch_index,
                tag_filter=tag_filter,
                partition_id=partition_id,
                task_name=task_name,
                required_fields=required_fields,
                batch_size=batch_size,
                all_or_nothing=bool(blocking),
                lease_s=lease_s,
                sampler=sampler,
                dp_rank=dp_rank,
                dp_size=dp_size,
                balance=balance,
                max_rows=max_rows,
                max_tokens=max_tokens,
            )
            return claim_now(self._connection, request, timeout_s if blocking else None, self._connection.waiters)[0]

    def ack(self, meta: KVBatchMeta) -> None:
        """Says that the samples of a claim, or of a part of it, are consumed. Acks all of them, or none.

        Raises:
            LeaseExpiredError: Some leases are no longer held. It names their ids.
            InvalidRequestError: The meta has no lease tokens.

        Examples:
            >>> client.ack(claimed.slice(0, 1))
        """
        settle(self._connection, "ack", AckRequest, meta)

    def nack(self, meta: KVBatchMeta) -> None:
        """Gives leased samples back, so that they can be claimed again at once. Raises what `ack` raises.

        Examples:
            >>> client.nack(claimed.slice(1, 2))
        """
        settle(self._connection, "nack", NackRequest, meta)

    def renew(self, meta: KVBatchMeta, lease_s: float) -> None:
        """Extends leases: they end ``lease_s`` seconds from now. Raises what `ack` raises.

        Examples:
            >>> rest = client.claim_meta("step-1", "trainer", ["reward"], 3, lease_s=60.0)
            >>> client.renew(rest, lease_s=600.0)
            >>> client.ack(rest)
        """
        with self._connection.operation():
            checked_as("renew: lease_s", PositiveSeconds, lease_s)
        settle(self._connection, "renew", RenewRequest, meta, lease_s=lease_s)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether every task has consumed every sample that the partition holds: was given it, or acked its lease.

        If ``num_samples`` was registered, it is false until that many were written; those that were cleared since need
        not be consumed. Otherwise it says nothing of samples to come, and is false while the partition holds none: a
        loop asks `is_finished`. False for an unknown partition or task.

        Examples:
            >>> client.check_consumption_status("step-1", ["trainer"])
            True
        """
        with self._connection.operation("check_consumption_status", partition_id, needs=Capability.CLAIMS):
            about = {"partition_id": partition_id, "task_names": task_names}
            request = checked("check_consumption_status", ConsumptionRequest, **about)
            is_consumed: bool = self._connection.call(request)
            return is_consumed

    def is_finished(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether the tasks get no more samples: all are written, and each has consumed those that can be given.

        Unlike `check_consumption_status`, it is never true before the end is known: by ``num_samples`` of the
        registration, or by `DataPlaneClient.finish_partition`.

        Examples:
            >>> client.is_finished("step-1", ["trainer"])
            True
        """
        with self._connection.operation("is_finished", partition_id, needs=Capability.CLAIMS):
            info = self._connection.describe(partition_id)
            _check_tasks(partition_id, check_names("is_finished: task_names", task_names), info.consumer_tasks)
            return info.num_samples is not None and self.check_consumption_status(partition_id, task_names)

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Removes samples with their tags and cursors. Ids that do not exist are ignored, and so is a whole partition
        that does not.

        Args:
            sample_ids: The samples, or None for the whole partition with its registration.
            partition_id: The partition.

        Examples:
            >>> client.clear_samples(["p0_g0"], "step-1")
        """
        with self._connection.operation("clear_samples", partition_id):
            ids = None if sample_ids is None else check_names("clear_samples: sample_ids", sample_ids)
            if ids != []:
                self._connection.call(ClearRequest(partition_id, ids))

    def save(
        self,
        folder: str | os.PathLike[str],
        metadata: Mapping[str, Any] | None = None,
        partitions: Sequence[str] | None = None,
    ) -> None:
        """Saves partitions in a folder: registration, rows, tags, schema, and what tasks have consumed; not leases.

        Any store of any backend and size can `load` the save. Blocks until it is on the disk. It needs memory for a few
        blocks of 16 MB, or of one row if that is larger. Other clients may write and clear meanwhile: each row is as it
        was at one moment, and those that are cleared or first written during the save may be left out.

        Args:
            folder: Holds one save, and is created if needed. The new save replaces the former one when it is complete.
            metadata: JSON values that `load` returns.
            partitions: The partitions to save. None: all.

        Raises:
            StalePartitionError: A partition was registered again meanwhile. After any error, the former save is as it
                was.
            SaveError: The files cannot be written.
            InvalidTypeError: ``metadata`` has other than JSON values.

        Examples:
            >>> client.save(folder, {"step": 7})
        """
        with self._connection.naming_errors():
            from dataplane_core.client.saving import save  # it imports torch

            save(self, folder, metadata, partitions)

    def load(self, folder: str | os.PathLike[str], partitions: Sequence[str] | None = None) -> dict[str, Any]:
        """Loads partitions that `save` has saved, of this backend or another one. Leased samples are ready again.

        The save is checked before anything is changed. A partition of the same name is replaced. Its tasks are added
        at the end, so that nobody can claim from it before. If this client has ``open_partitions``, they are added
        before the columns: samples can be claimed as soon as theirs are there, and must not be cleared before the load
        has ended. Claims and puts that wait on the old partition end as if it had been registered again.

        Args:
            folder: The folder.
            partitions: The partitions to load. None: all that the save has.

        Returns:
            The metadata that `save` was given.

        Raises:
            MissingDataError: The folder has no save.
            CorruptDataError: The save is damaged. Nothing was changed.
            InvalidRequestError: The save has no such partition. Nothing was changed.
            DataPlaneError: A write failed. The partitions that were to be loaded are cleared.

        Examples:
            >>> client.load(folder, ["step-1"])
            {'step': 7}
            >>> client.list_sample_ids("step-1")
            ['p0_g1', 'p1_g0', 'p1_g1']
        """
        with self._connection.naming_errors():
            from dataplane_core.client.saving import load  # it imports torch

            return load(self, folder, partitions)

    def ping(self) -> None:
        """Asks the store for a sign of life. Blocks until it answers, at most ``op_timeout_s``.

        Raises:
            OperationTimeoutError, BackendUnavailableError: It does not answer.

        Examples:
            >>> client.ping()
        """
        with self._connection.operation("ping", needs=Capability.LISTING):
            list_partitions(self._connection)

    def list_partitions(self) -> list[str]:
        """The names of all registered partitions, sorted.

        Examples:
            >>> client.list_partitions()
            ['step-1']
        """
        with self._connection.operation("list_partitions", needs=Capability.LISTING):
            return list_partitions(self._connection)

    def describe(self, partition_id: str, *, count_rows: bool = True) -> PartitionDescription:
        """Counts what a partition holds, and what its tasks were given.

        Args:
            partition_id: A registered partition.
            count_rows: Whether ``num_rows`` is needed. If not, a backend that would look at all samples for it leaves
                it out.

        Returns:
            Its registration (``info``), kind, dtype and shape of each written field (``specs``) and how many samples
            have it (``num_rows``), the number of samples held and cleared, their bytes, the age of the oldest, and per
            task how many are ready, leased and consumed.

        Examples:
            >>> description = client.describe("step-1")
            >>> description.num_samples, description.num_cleared, description.specs["reward"].dtype
            (3, 1, 'float32')
            >>> description.tasks["trainer"].num_consumed
            3
        """
        with self._connection.operation("describe", partition_id, needs=Capability.LISTING):
            request = InspectRequest(partition_id, count_rows=count_rows)
            description: PartitionDescription = self._connection.call(request)
            specs = {name: spec for name, spec in description.specs.items() if not name.startswith(HIDDEN)}
            num_rows = {name: count for name, count in description.num_rows.items() if name in specs}
            return replace(description, specs=specs, num_rows=num_rows)

    def list_samples(
        self, partition_id: str, tag_filter: TagFilter | None = None, sample_ids: Sequence[str] | None = None
    ) -> KVBatchMeta:
        """The ids and tags of a partition's samples, in order of first write. No cells are read.

        Args:
            partition_id: A registered partition.
            tag_filter: A condition on tags, as for `claim_meta`.
            sample_ids: Only these samples, in this order. Those that are not there are left out.

        Examples:
            >>> client.list_samples("step-1", {"input_lengths": (">=", 2)}).sample_ids
            ['p0_g1', 'p1_g1']
            >>> client.list_samples("step-1", sample_ids=["p1_g1", "p9_g9"]).tags
            [{'input_lengths': 2}]
        """
        with self._connection.operation("list_samples", partition_id, needs=Capability.LISTING):
            condition = check_tag_filter(tag_filter)
            if condition is not None:
                self._connection.require(Capability.TAG_FILTERS, "list_samples(tag_filter=...)")
            ids = None if sample_ids is None else check_names("list_samples: sample_ids", sample_ids)
            if ids == []:
                return KVBatchMeta(partition_id, None, [], tags=[])
            listed: SampleList = self._connection.call(ListRequest(partition_id, condition, ids))
            ids, rows = list(listed.sample_ids), [dict(row) for row in listed.tags]
            check_counts(f"list_samples('{partition_id}')", len(ids), tags=len(rows))
            return KVBatchMeta(partition_id, None, ids, sequence_lengths=lengths_of(rows), tags=rows)

    def list_sample_ids(
        self, partition_id: str, tag_filter: TagFilter | None = None, *, fields: Sequence[str] = ()
    ) -> list[str]:
        """As `list_samples`, the ids alone.

        Args:
            partition_id: A registered partition.
            tag_filter: A condition on tags, as for `claim_meta`.
            fields: Only samples that have all of these fields, so that a read of them does not fail.

        Examples:
            >>> client.list_sample_ids("step-1")
            ['p0_g1', 'p1_g0', 'p1_g1']
            >>> client.list_sample_ids("step-1", fields=["reward", "advantages"])
            []
        """
        wanted = check_names("list_sample_ids: fields", fields)
        ids = self.list_samples(partition_id, tag_filter).sample_ids
        while wanted and ids:
            try:
                has = self.list_fields(ids, partition_id)
                return [sample_id for sample_id, names in zip(ids, has, strict=True) if set(wanted) <= set(names)]
            except UnknownPartitionError:
                raise
            except MissingDataError:  # samples were cleared meanwhile
                ids = self.list_samples(partition_id, tag_filter, ids).sample_ids
        return ids

    def list_fields(self, sample_ids: Sequence[str], partition_id: str) -> list[list[str]]:
        """For each sample, the fields that it has. No cells are read.

        Raises:
            MissingDataError: A sample is not there. It is also a `KeyError`.

        Examples:
            >>> client.list_fields(["p1_g0"], "step-1")
            [['input_ids', 'reward']]
        """
        with self._connection.operation("list_fields", partition_id, needs=Capability.LISTING):
            ids = checked_as("list_fields: sample_ids", list[Name], sample_ids)
            if not ids:
                return []
            unique = list(dict.fromkeys(ids))
            reply: FieldList = self._connection.call(FieldsRequest(partition_id, unique))
            where = f"list_fields('{partition_id}', {len(unique)} samples)"
            check_counts(where, len(unique), samples=len(reply.index))
            if not 0 <= min(reply.index) <= max(reply.index) < len(reply.patterns):
                raise BackendError(
                    f"{where}: the backend's reply holds {len(reply.patterns)} sets of fields, and names others. "
                    "Expected a set for each sample."
                )
            patterns = [[name for name in names if not name.startswith(HIDDEN)] for names in reply.patterns]
            place_of = dict(zip(unique, reply.index, strict=True))
            return [patterns[place_of[sample_id]] for sample_id in ids]

    def list_consumed(self, partition_id: str, task_name: str) -> list[str]:
        """The held samples that a task was given for good (without a lease, or acked), in order of first write.

        Examples:
            >>> client.list_consumed("step-1", "trainer")
            ['p0_g1', 'p1_g0', 'p1_g1']
        """
        with self._connection.naming_errors():
            check_name("task_name", task_name)
            state = export(self._connection, "list_consumed", partition_id)
            _check_tasks(partition_id, [task_name], state.consumed)
            return list(state.consumed[task_name])

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: Sequence[str] = ()) -> None:
        """Takes back all that a task was given, so that it can claim the samples again. Its leases end.

        Args:
            partition_id: A registered partition.
            task_name: A task of it.
            sample_ids: Samples that it keeps, or is given now, for good. Those that are not there are ignored.

        Examples:
            >>> client.reset_consumption("step-1", "trainer")
            >>> client.claim_meta("step-1", "trainer", ["reward"], 3).sample_ids
            ['p0_g1', 'p1_g0', 'p1_g1']
        """
        set_cursor(self._connection, "reset_consumption", partition_id, task_name, sample_ids, create=False)

    def why(self, partition_id: str | None = None, task_name: str | None = None) -> list[Verdict]:
        """Why tasks get no samples: for each task its state, and the one cause with names. Changes nothing.

        It looks at all samples of the tasks whose claims wait. The times of clients are as of their last announcement.

        Args:
            partition_id: A partition. None: all.
            task_name: A task. None: all.

        Examples:
            >>> [(verdict.task_name, verdict.state) for verdict in client.why("step-1")]
            [('trainer', 'done')]
        """
        partition = filter(None, [partition_id])  # None: all of them
        with self._connection.operation("why", *partition, needs=Capability.LISTING):
            self._connection.require(Capability.CLAIMS, "why")
            verdicts = judged(self._connection, partition_id, task_name)
            if not verdicts and task_name is not None:
                raise UnknownTaskError(f"why refused: no partition has a consumer task '{task_name}'.")
            return verdicts

    def list_clients(self, *, ended: bool = False) -> list[ClientInfo]:
        """The clients of the store, as they announced themselves, sorted by host and process.

        A client announces itself one second after it was opened, and then every ``announce_s`` seconds of its config
        (less often in a store with more than 500 clients). One that ended without `close` is listed a little longer
        than three times as many seconds.

        Args:
            ended: Whether to list also those that closed, or were not heard of for too long, in the last ten minutes.
                Their ``state`` says which, and whether a process of this host is stopped or gone.

        Examples:
            >>> [(info.pid, info.role, info.num_calls) for info in client.list_clients()]  # doctest: +SKIP
            [(4711, 'actor 3', 1)]
        """
        with self._connection.operation("list_clients", needs=Capability.CLIENTS):
            return clients_of(self._connection, ended=ended)

    def list_units(self) -> list[UnitInfo]:
        """The storage units: the processes that hold the payload, in order of their first start.

        Examples:
            >>> [(unit.name, unit.num_rows) for unit in client.list_units()]  # doctest: +SKIP
            [('unit-0', 512), ('unit-1', 512)]
        """
        with self._connection.operation("list_units", needs=Capability.UNITS):
            return list(self._connection.call(ListUnitsRequest()))

    def phase(
        self, name: str, *, partition_id: str | None = None, groups: Sequence[str] = ()
    ) -> AbstractContextManager[None]:
        """While the ``with`` lasts, the client says that its process is in a phase, such as one that generates.

        `why`, `list_clients` and the commands that show clients then name the phase, and `why` names the process whose
        phase makes a group that is short of a sample. Of phases that are inside each other, the innermost counts; each
        thread, and each task of asyncio, has its own. It calls nothing: the next announcement tells it. At most 64
        phases and 256 groups are told. Without announcements (``announce_s`` is None), none are.

        Args:
            name: What the process does. Of a longer name, the first 80 letters are told.
            partition_id: The partition of ``groups``.
            groups: The groups whose samples the phase makes: what their ids have before the last ``_g``. Without any,
                those of the phase around it, while that lasts.

        Raises:
            InvalidTypeError, InvalidRequestError: A name is no str, or empty, or the groups have no partition.

        Examples:
            >>> with client.phase("generate", partition_id="step-1", groups=["p0", "p1"]):
            ...     tokens = [[1, 2, 3], [1, 2]]
        """
        check_name("name", name)
        made = check_names("groups", groups)
        if partition_id is not None:
            check_name("partition_id", partition_id)
        elif made:
            raise InvalidRequestError(f"phase('{name}') refused: groups without a partition_id. Expected theirs.")
        if self._connection.announcer is None:
            return nullcontext()
        return self._connection.phases.within(name, partition_id or "", made)

    def mark_step(self, step: int, **values: float) -> None:
        """Says that a training step has ended, to the middleware that keeps a record of the run.

        One process of the run calls it, after the step's last operation. ``dataplane audit`` counts by these
        marks. First it acks what the streams of this client have given, since a loop over a stream acks a batch only
        when it asks for the next one. Call it in the thread, or the task of asyncio, of that loop.

        Args:
            step: Its number.
            values: What is known of it, such as ``loss``. Numbers of numpy and torch go too. ``staleness``: how many
                weight versions old the rows were that it trained on.

        Raises:
            LeaseExpiredError: A batch of a stream was held for too long. The step is marked all the same.

        Example:
            >>> client.mark_step(7, loss=0.25, staleness=1)
        """
        with ExitStack() as calls:  # the step last; all of them, whichever fails
            calls.callback(note_step, self._connection, step, values)
            for stream in list(self._connection.streams):
                calls.callback(stream.ack)

    def close(self) -> None:
        """Waits for running operations, then disconnects. Idempotent. Takes ``op_timeout_s`` at most, and a little more
        if operations took all of it.

        A client that bootstrapped its backend ends what it started. A client that attached leaves it running.

        In a signal handler, it does not wait for the operation that the handler interrupted. What that one claims under
        a lease is given back. If the store is in the middle of its work for it, the client is closed when that ends,
        or when the handler raises.
        """
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(
            "a DataPlaneClient cannot be pickled.",
            backend=self.backend_name,
            hint="Send its config, and call connect(config, bootstrap=False) in the other process.",
        )

    def __repr__(self) -> str:
        state = "closed" if self._connection.closed else "open"
        begun = "bootstrapped" if self._connection.bootstrapped else "attached"
        return f"<{type(self).__name__} backend={self.backend_name!r} {begun} {state}>"
