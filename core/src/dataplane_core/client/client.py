"""`DataPlaneClient`: what trainers call.

It checks the arguments, encodes columns, calls the backend's hook and decodes the reply. The promises of the contract
that do not depend on the backend are kept here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from tensordict import NonTensorStack, TensorDict, TensorDictBase

from dataplane_core._compiler_marks import with_methods_not_compiled
from dataplane_core.arguments import check_count, check_meta
from dataplane_core.client.checks import (
    check_counts,
    check_enum,
    check_ids,
    check_name,
    check_names,
    strings_of,
)
from dataplane_core.client.claims import Claims
from dataplane_core.client.overview import common_fields
from dataplane_core.client.saving import load, save
from dataplane_core.codec import (
    Columns,
    JaggedColumns,
    as_columns,
    decode_columns,
    encode_columns,
    join_parts,
    list_as,
    misfit_of,
    spread,
)
from dataplane_core.errors import (
    BackendError,
    FrameError,
    InvalidRequestError,
    OpenCellsError,
    SchemaMismatchError,
    StalePartitionError,
    UnknownPartitionError,
    preview,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import (
    Capability,
    ClearReply,
    ClearRequest,
    FieldSpec,
    GetRequest,
    IfExists,
    PutReply,
    PutRequest,
    TagValue,
    WireBatch,
    check_tags,
    lengths_of,
    new_id,
)

_DAMAGED: Final = (
    "They were damaged in the store or on the way. Clear these samples and produce them again. The middleware "
    "wire_guard also finds damage that leaves the bytes readable."
)


@contextmanager
def _naming_samples(partition_id: str, sample_ids: Sequence[str]) -> Iterator[None]:
    """Names the sample in the error for bytes that cannot be read."""
    try:
        yield
    except FrameError as error:
        what = f"get_samples('{partition_id}', {len(sample_ids)} samples)"
        if error.row is not None:
            sample_id = sample_ids[error.row]
            what, error.cells = f"{what}: the bytes of sample '{sample_id}' cannot be read", {sample_id: error.fields}
        error.message = f"{what}: {error.message}"
        error.hint = error.hint or _DAMAGED
        raise


@with_methods_not_compiled
class DataPlaneClient(Claims):
    """A process's connection to a store. `dataplane_core.connect` makes it; `close`, or leaving its ``with``, ends it.

    Several threads may share a client. It cannot be pickled, and a forked child cannot use its parent's. Every method
    blocks until it is done, at most ``op_timeout_s`` seconds (see the config); a blocking claim has a ``timeout_s`` of
    its own. All errors derive from `DataPlaneError`.

    Examples:
        The examples of the methods continue this one.

        >>> import torch
        >>> from dataplane_core import connect
        >>> client = connect({"backend": "noop"})
    """

    # --- operations ---------------------------------------------------------------------------------------------------

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int | None,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        if_exists: IfExists = "replace",
        followers: Sequence[str] = (),
    ) -> None:
        """Opens a partition. By default it is new and empty: what an earlier registration held is gone on return.

        Args:
            partition_id: The name of the partition, not empty.
            fields: Fields that producers are expected to write. They may write others as well.
            num_samples: How many distinct ids will be written, also those that are cleared meanwhile. More are refused.
                With it, claims, streams and `is_finished` know the end. None: not known until `finish_partition`.
            consumer_tasks: The tasks that will claim.
            grpo_group_size: Claims hand out whole groups of this many samples (capability ``groups``).
            enums: Field -> the strings that it may hold, for object columns.
            if_exists: ``replace``: drops an earlier registration of the same name with all that it held. ``keep``:
                leaves it as it is, with its rows, tags, cursors, schema and ``num_samples``, and adds the fields,
                tasks, strings of enums and followers that it lacks, and ``num_samples`` if it has none. Of several
                processes that register with ``keep`` at the same time, one opens the partition and the others keep it.
            followers: Those of ``consumer_tasks`` that follow the others, such as an export: `why` never says that
                they are starved, and what is exported is registered without them.

        Raises:
            InvalidRequestError: A size below 1, empty names, a follower that is not among the tasks, or ``keep`` with
                another group size than the partition has.
            UnsupportedOperationError: The backend does not declare groups.

        Examples:
            >>> client.register_partition("step-1", ["input_ids", "reward"], 4, ["trainer"])
        """
        with self._operation("register_partition", partition_id):
            if if_exists not in ("replace", "keep"):
                raise InvalidRequestError(
                    f"register_partition('{partition_id}') refused: if_exists must be 'replace' or 'keep', got "
                    f"{if_exists!r}."
                )
            field_names = check_names("fields", fields)
            tasks = check_names("consumer_tasks", consumer_tasks)
            follow = check_names("followers", followers)
            if unknown := [name for name in follow if name not in tasks]:
                raise InvalidRequestError(
                    f"register_partition('{partition_id}') refused: followers names {preview(unknown)}. Expected some "
                    "of its consumer_tasks."
                )
            if num_samples is not None:
                check_count("num_samples", num_samples)
            if grpo_group_size is not None:
                check_count("grpo_group_size", grpo_group_size)
                self._require(Capability.GROUPS, "register_partition(grpo_group_size=...)")
                if num_samples is not None and num_samples % grpo_group_size:
                    raise InvalidRequestError(
                        f"register_partition('{partition_id}') refused: num_samples {num_samples} is not a multiple of "
                        f"grpo_group_size {grpo_group_size}."
                    )
            words = {name: check_names(f"enums['{name}']", each) for name, each in (enums or {}).items()}
            self._register(
                partition_id,
                fields=field_names,
                num_samples=num_samples,
                consumer_tasks=tasks,
                grpo_group_size=grpo_group_size,
                enums=words,
                followers=follow,
                if_exists=if_exists,
            )

    def finish_partition(self, partition_id: str) -> None:
        """Says that no more samples will be written to a partition that was registered without ``num_samples``.

        Its ``num_samples`` is now the number of samples that it holds: claims return the rest, streams end, and
        `is_finished` becomes true once all are consumed. Puts of new ids are refused; those of further fields or tags
        are not. If it has ``num_samples``, this changes nothing. Groups that are not whole by then are never given; a
        warning in the log names the first of them.

        Raises:
            UnknownPartitionError: Not registered.

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
        with self._operation("finish_partition", partition_id):
            group_size = self._describe(partition_id).grpo_group_size
            epoch = new_id()
            info = self._register(
                partition_id, num_samples=0, grpo_group_size=group_size, if_exists="keep", epoch=epoch
            )
            if info.epoch == epoch:  # it was cleared after it was described
                self.clear_samples(None, partition_id)
                raise UnknownPartitionError(f"finish_partition('{partition_id}') refused: it was cleared meanwhile.")
            if group_size is not None and Capability.LISTING in self._capabilities:
                self._tell_short_groups(partition_id, info)

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
            UnknownPartitionError: Not registered.
            CapacityExceededError: The store is full.
            LostReplyError: The store was lost before it answered, and did not come back before the deadline. Its
                ``outcome`` is ``"unknown"``.
            OperationTimeoutError: Its ``outcome`` says whether the write happened, if the store could tell.

        Examples:
            >>> ids = ["p0_g0", "p0_g1", "p1_g0", "p1_g1"]
            >>> tokens = [[1, 2, 3], [1, 2], [4], [4, 5]]
            >>> columns = {"input_ids": tokens, "reward": torch.tensor([0.0, 1.0, 1.0, 0.0])}
            >>> meta = client.put_samples(ids, "step-1", columns, tags=[{"input_lengths": len(row)} for row in tokens])
            >>> meta.sequence_lengths
            [3, 2, 1, 2]
        """
        with self._operation("put_samples", partition_id):
            ids = check_ids(sample_ids)
            if len(set(ids)) != len(ids):
                repeated = [each for each, count in Counter(ids).items() if count > 1]
                raise InvalidRequestError(
                    f"put_samples('{partition_id}', {len(ids)} samples) refused: sample ids repeat: "
                    f"{preview(repeated)}. Expected each id once."
                )
            where = f"put_samples('{partition_id}', {len(ids)} samples)"
            rows = None if tags is None else check_tags(tags, len(ids))
            if fields is not None and isinstance(fields, TensorDictBase) and tuple(fields.batch_size) != (len(ids),):
                raise InvalidRequestError(
                    f"{where} refused: fields have batch size {list(fields.batch_size)}. Expected [{len(ids)}], one "
                    "row per sample id."
                )
            given = {} if fields is None else as_columns(where, fields, len(ids))
            columns, specs = self._encode_columns(where, given, len(ids))
            if not ids:
                return KVBatchMeta(partition_id, None, [])
            if not columns and rows is None:
                raise InvalidRequestError(f"{where} refused: neither fields nor tags were given.")
            work = self._work.begin("put_samples", partition_id, fields=columns)
            request = PutRequest(
                partition_id=partition_id,
                sample_ids=ids,
                columns=columns,
                specs=specs,
                tags=rows,
                deadline=self._deadline(),
            )
            try:
                self._put_fitting(where, request, given)
            except UnknownPartitionError:
                if not self._config.open_partitions:
                    raise
                self._open_partition(partition_id, list(columns), [], request.deadline)
                self._put_fitting(where, request, given)
            work.end(len(ids))
            return KVBatchMeta(
                partition_id,
                None,
                ids,
                fields=list(columns),
                sequence_lengths=lengths_of(rows),
                tags=rows,
            )

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
            UnknownPartitionError: Not registered.
            OperationTimeoutError: The deadline passed.

        Examples:
            >>> batch = client.get_samples(["p1_g1", "p0_g0"], "step-1", ["input_ids", "reward"])
            >>> [row.tolist() for row in batch["input_ids"].unbind()]
            [[4, 5], [1, 2, 3]]
            >>> batch["reward"]
            tensor([0., 0.])
        """
        with self._operation("get_samples", partition_id):
            ids = check_ids(sample_ids)
            names = [] if select_fields is None else check_names("select_fields", select_fields)
            if select_fields is not None and not names:
                raise InvalidRequestError(
                    f"get_samples('{partition_id}', {len(ids)} samples) refused: select_fields is empty. Expected the "
                    "names of the columns to read."
                )
            if not ids:
                return TensorDict({}, batch_size=[0])
            unique = list(dict.fromkeys(ids))
            if select_fields is None:
                what = f"get_samples('{partition_id}', {len(unique)} samples, select_fields=None)"
                names = common_fields(self._list_fields(what, partition_id, unique))
                if not names:
                    return TensorDict({}, batch_size=[len(ids)])
            columns = self._read(unique, partition_id, names, share_rows, self._deadline())
            if len(unique) != len(ids):
                at = {sample_id: position for position, sample_id in enumerate(unique)}
                positions, jagged = [at[sample_id] for sample_id in ids], JaggedColumns()
                columns = {
                    name: spread(column, positions, jagged, share=share_rows and isinstance(column, NonTensorStack))
                    for name, column in columns.items()
                }
            return TensorDict(columns, batch_size=[len(ids)])

    def get_data(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None, share_rows: bool = False
    ) -> TensorDict:
        """Reads the rows that a meta names, as `get_samples` does: ``select_fields``, or else ``meta.fields``.

        Raises:
            InvalidRequestError: Both are None.

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

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Removes samples with their tags and cursors. Ids that do not exist are ignored.

        Args:
            sample_ids: The samples, or None for the whole partition with its registration.
            partition_id: The partition.

        Examples:
            >>> client.clear_samples(["p0_g0"], "step-1")
        """
        with self._operation("clear_samples", partition_id):
            ids = None if sample_ids is None else list(dict.fromkeys(check_ids(sample_ids)))
            if ids is None:
                self._infos.pop(partition_id, None)
            elif not ids:
                return
            work = self._work.begin("clear_samples", partition_id)
            cleared = self._call("clear_samples", ClearRequest(partition_id, ids), ClearReply)
            work.end(0 if ids is None else cleared.num_samples)

    def save(
        self,
        folder: str | os.PathLike[str],
        metadata: Mapping[str, Any] | None = None,
        partitions: Sequence[str] | None = None,
    ) -> None:
        """Saves partitions in a folder: registration, rows, tags, schema, and what tasks have consumed; not leases.

        Any store of any backend and size can `load` the save. Blocks until it is on the disk. It reads and writes
        blocks of about 16 MB, or one row if that is larger, and needs memory for a few of them. Other clients may write
        and clear meanwhile: rows that are cleared during the save may be left out, and so may rows that are first
        written during it. Each row is as it was at one moment, see the contract.

        Args:
            folder: Holds one save, and is created if needed. The new save replaces the former one when it is complete.
            metadata: JSON values that `load` returns.
            partitions: The partitions to save. None: all.

        Raises:
            UnknownPartitionError: Not registered.
            StalePartitionError: A partition was registered again meanwhile. After any error, the former save is as it
                was.
            SaveError: The files cannot be written.
            InvalidRequestError: The folder has a ``manifest.json`` of something else. Nothing was written.
            InvalidTypeError: ``metadata`` has other than JSON values.
            UnsupportedOperationError: The backend does not declare ``listing`` and ``cursors``.

        Examples:
            >>> client.save(folder, {"step": 7})
        """
        with self._naming_errors():
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
        with self._naming_errors():
            return load(self, folder, partitions)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _encode_columns(self, where: str, fields: Any, num_samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
        for name in fields.keys():
            check_name("field name", name)
            if name.startswith("~"):
                raise InvalidRequestError(f"{where} refused: field name '{name}' is reserved ('~' is middleware's).")
        narrow = self._backend.narrow and self._config.narrow
        return encode_columns(fields, num_samples, self._wire, allow_pickle=self._config.allow_pickle, narrow=narrow)

    def _read(
        self, ids: list[str], partition_id: str, names: list[str], share_rows: bool, deadline: float
    ) -> dict[str, Any]:
        """The columns of different samples."""
        request = GetRequest(partition_id=partition_id, sample_ids=ids, fields=names, deadline=deadline)
        try:
            with _naming_samples(partition_id, ids):
                batch = self._call("get_samples", request, WireBatch)
        except OpenCellsError as error:
            parts = [self._read(list(some), partition_id, names, share_rows, deadline) for some in error.groups]
            places = {sample_id: place for place, sample_id in enumerate(chain.from_iterable(error.groups))}
            order = [places[sample_id] for sample_id in ids]
            return {name: join_parts([part[name] for part in parts], order) for name in names}
        for name in names:
            if name not in batch.columns or name not in batch.specs:
                raise BackendError(
                    f"get_samples('{partition_id}', {len(ids)} samples): the backend's reply lacks column '{name}'.",
                    backend=self.backend_name,
                )
        with _naming_samples(partition_id, ids):
            return decode_columns(
                {name: batch.columns[name] for name in names},
                {name: batch.specs[name] for name in names},
                len(ids),
                self._wire,
                allow_pickle=self._config.allow_pickle,
                share_rows=share_rows,
            )

    def _put_fitting(self, where: str, request: PutRequest, given: Any) -> None:
        """Puts. A list is written as its field's known spec says, if the store refuses what it became."""
        tried: set[str] = set()
        while True:
            try:
                self._put(where, request, given)
                return
            except SchemaMismatchError as error:
                lists = given.lists if isinstance(given, Columns) else {}
                fitting: dict[str, Any] = {}
                for name, text in error.expected.items():
                    column = list_as(lists[name], FieldSpec.from_text(text)) if name in lists else None
                    if column is None or name in tried:
                        if name in lists:
                            misfit = misfit_of(lists[name], FieldSpec.from_text(text))
                            error.hint = f"A list becomes what its field holds, if all of its rows fit: {misfit}."
                        raise
                    fitting[name] = column
                if not fitting:
                    raise
                tried |= fitting.keys()
                given.update(fitting)
                columns, specs = self._encode_columns(where, fitting, len(request.sample_ids))
                request.columns = {**request.columns, **columns}
                request.specs = {**request.specs, **specs}

    def _put(self, where: str, request: PutRequest, fields: Any) -> None:
        words = {
            name: strings
            for name, spec in request.specs.items()
            if spec.kind == "object" and (strings := strings_of(fields[name]))
        }
        if not words and not self._field_names.strict:
            self._commit(where, request)
            self._check_fields("put", where, request.partition_id, request.specs, request.deadline)
            return
        # enums and fields belong to one registration, so the put is tied to it
        for attempt in (0, 1):
            info = self._infos.get(request.partition_id)
            if info is None or attempt:
                info = self._remember(request.partition_id, self._describe(request.partition_id, request.deadline))
            request.epoch = info.epoch
            try:
                for name, strings in words.items():
                    check_enum(where, name, strings, info)
                self._field_names.tell("put", where, self._field_names.unknown("put", request.specs, info), info, ())
                self._commit(where, request)
                return
            except (StalePartitionError, InvalidRequestError) as error:
                # the registration that was cached may be an old one, or have got more strings since
                if attempt or (
                    isinstance(error, InvalidRequestError)
                    and self._describe(request.partition_id, request.deadline) == info
                ):
                    raise

    def _commit(self, where: str, request: PutRequest) -> None:
        """Calls the hook with a copy, since middleware changes the requests that it is given."""

        def copied() -> PutRequest:
            columns = {name: list(each) if isinstance(each, list) else each for name, each in request.columns.items()}
            return replace(
                request,
                sample_ids=list(request.sample_ids),
                columns=columns,
                specs=dict(request.specs),
                tags=None if request.tags is None else [dict(row) for row in request.tags],
            )

        reply = self._call_once("put_samples", copied, PutReply, request.deadline)
        check_counts(where, len(request.sample_ids), rows=reply.num_samples)
