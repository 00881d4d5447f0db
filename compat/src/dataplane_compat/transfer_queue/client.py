"""`TransferQueueClient`: rows by index and by key, claims, and what was produced and consumed.

Each method has an ``async_`` form, which runs it in a thread of a bounded pool.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from tensordict import TensorDict

from dataplane_compat.transfer_queue._claims import Asked, Claims
from dataplane_compat.transfer_queue._columns import (
    columns_to_put,
    parsed,
    tags_to_put,
    tags_to_show,
    to_batch,
)
from dataplane_compat.transfer_queue._indexes import (
    HIDDEN_PARTITION,
    Numbers,
    check_keys,
    id_of_number,
    index_of,
    is_number,
    number_of,
)
from dataplane_compat.transfer_queue._pool import in_threads, submit
from dataplane_compat.transfer_queue._rows import KEY, TAGS, find_rows, forget_shapes, meta_of, put_rows
from dataplane_compat.transfer_queue.metadata import BatchMeta
from dataplane_core.client import DataPlaneClient, common_fields
from dataplane_core.codec import join_parts, take_rows
from dataplane_core.errors import MissingDataError, UnknownPartitionError, UnknownTaskError, preview

#: What a read of rows or cells that are not there raises. It is a `KeyError`.
StorageKeyNotFoundError = MissingDataError

#: Seconds for which `get_meta` waits for a whole batch.
_WAIT_S: Final = 3600.0
#: Seconds between two looks of `async_get_meta`.
_LOOK_S: Final = 0.1

_T = TypeVar("_T")


class TransferQueueClient:
    """TransferQueue's client over a dataplane store. `init` makes it, `get_client` returns it."""

    def __init__(self, client_id: str, store: DataPlaneClient, controller: Mapping[str, Any] | None = None) -> None:
        """Wraps a client.

        Args:
            client_id: A name, for messages.
            store: The client.
            controller: The key ``controller`` of TransferQueue's config: ``sampler``, ``polling_mode``.
        """
        self.client_id = client_id
        self.store = store
        self._numbers = Numbers(store)
        self._claims = Claims(store, controller)
        self._kept: list[tuple[Asked, BatchMeta]] = []  # what cancelled calls were given; guarded by _keeping
        self._keeping = threading.Lock()

    # --- rows and their metadata --------------------------------------------------------------------------------------

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Rows of a partition.

        Args:
            data_fields: The fields that the rows must have, and that the result names.
            batch_size: How many rows.
            partition_id: Their partition.
            mode: ``fetch``: rows that have the fields and that the task was not given. ``force_fetch``: all rows, ready
                or not; they do not count as consumed. ``insert``: indexes for new rows.
            task_name: Who consumes, for ``fetch``.
            sampling_config: Arguments for the sampler.

        Returns:
            With ``fetch`` a whole batch. If there are not enough rows, it waits; with ``polling_mode``, it returns an
            empty `BatchMeta`.

        Raises:
            TimeoutError: There were not enough rows for an hour.
        """
        asked = Asked(data_fields, batch_size, partition_id, mode, task_name, sampling_config)
        deadline = time.monotonic() + _WAIT_S
        pause_s = 0.01
        while True:
            meta = self._look(asked)
            if meta is not None:
                return meta
            _check_wait(deadline, asked)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 1.0)

    async def async_get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """`get_meta` for asyncio. It holds no thread while it waits.

        If it is cancelled while it is given rows, the next call with the same arguments in this process gets them.
        """
        asked = Asked(data_fields, batch_size, partition_id, mode, task_name, sampling_config)
        deadline = time.monotonic() + _WAIT_S
        while True:
            look = submit(self._look, asked)
            try:
                meta = await asyncio.wrap_future(look)
            except asyncio.CancelledError:
                look.add_done_callback(partial(self._keep, asked))
                raise
            if meta is not None:
                return meta
            _check_wait(deadline, asked)
            await asyncio.sleep(_LOOK_S)

    def _look(self, asked: Asked) -> BatchMeta | None:
        """What `get_meta` returns now, or None if it has to wait."""
        partition_id = asked.partition_id
        if asked.mode == "insert":
            return self._new_rows(asked.fields, asked.batch_size, partition_id)
        if asked.mode == "force_fetch":
            rows = find_rows(self.store, partition_id)
            fields = asked.fields or sorted({name for row in rows for name in row.fields})
            return meta_of(self.store, partition_id, rows, fields, lenient=True)
        if asked.mode != "fetch":
            raise ValueError(f"Invalid mode: {asked.mode}")
        if asked.task_name is None:
            raise ValueError("get_meta in mode 'fetch' needs a task_name.")
        with self._keeping:
            for number, (before, kept) in enumerate(self._kept):
                if before == asked:
                    del self._kept[number]
                    return kept
        rows = self._claims.claim(asked, asked.task_name)
        if rows:
            return meta_of(self.store, partition_id, rows, asked.fields)
        return BatchMeta.empty() if self._claims.polling_mode else None

    def _new_rows(self, fields: Sequence[str], count: int, partition_id: str) -> BatchMeta:
        numbers = self._numbers.take(count)
        schema = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
        own = [{KEY: id_of_number(number), TAGS: {}} for number in numbers]
        return BatchMeta(
            numbers, [partition_id] * count, dict.fromkeys(fields, schema), None, None, None, _custom_backend_meta=own
        )

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Writes the tags of the rows."""
        for part in metadata.chunk_by_partition():
            tags = tags_to_put(part.custom_meta)
            self.store.put_samples(self._ids(part), part.partition_ids[0], tags=tags)

    # --- data ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> BatchMeta:
        """Writes columns of rows, with the tags that changed since their metadata was read.

        Args:
            data: The columns.
            metadata: The rows. None: new rows.
            partition_id: The partition of new rows.
            data_parser: Changes the columns in place before they are written, such as URLs into what they point to.

        Returns:
            The metadata, with the fields of ``data`` added.
        """
        size = data.batch_size[0] if data.batch_size else 0
        if metadata is None:
            if partition_id is None:
                raise ValueError("partition_id must be provided if metadata is not given")
            metadata = self._new_rows(list(data.keys()), size, partition_id)
        if not metadata.size:
            raise ValueError("metadata cannot be none or empty")
        columns = columns_to_put(data, size)
        if data_parser is not None:
            columns = parsed(columns, data_parser)
        parts = metadata._places()
        ids, tags = self._ids(metadata), self._changed_tags(metadata)
        for part_id, places in parts.items():
            whole = len(parts) == 1
            put_rows(
                self.store,
                part_id,
                ids if whole else [ids[place] for place in places],
                columns if whole else {name: take_rows(column, places) for name, column in columns.items()},
                None if tags is None else [tags[place] for place in places],
            )
        return metadata.add_fields(data)

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Reads the fields that the metadata names."""
        fields = metadata.field_names
        if not metadata.size or not fields:
            return TensorDict({}, batch_size=[0])
        ids, parts = self._ids(metadata), metadata._places()
        if len(parts) == 1:
            return to_batch(self.store.get_samples(ids, metadata.partition_ids[0], fields))
        wanted = {part_id: [ids[place] for place in places] for part_id, places in parts.items()}
        reads = [self.store.get_samples(part, part_id, fields) for part_id, part in wanted.items()]
        places_read = list(chain.from_iterable(parts.values()))
        order = sorted(range(metadata.size), key=places_read.__getitem__)
        columns = {name: join_parts([read.get(name) for read in reads], order) for name in fields}
        return to_batch(TensorDict(columns, batch_size=[metadata.size]))

    def clear_partition(self, partition_id: str) -> None:
        """Removes a partition with all of its rows."""
        self._claims.forget(partition_id)
        forget_shapes(self.store, partition_id)
        self._drop_kept(lambda asked, _: asked.partition_id == partition_id)
        self.store.clear_samples(None, partition_id)

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Removes rows. Those that are not there are passed over."""
        gone = {*zip(metadata.partition_ids, metadata.global_indexes, strict=True)}
        self._drop_kept(lambda _, kept: not gone.isdisjoint(zip(kept.partition_ids, kept.global_indexes, strict=True)))
        for part in metadata.chunk_by_partition():
            self.store.clear_samples(self._ids(part), part.partition_ids[0])

    def _keep(self, asked: Asked, look: Future[BatchMeta | None]) -> None:
        """Keeps the rows that a cancelled call was given. Runs where the look ends, perhaps in its thread."""
        meta = None if look.cancelled() or look.exception() is not None else look.result()
        if meta is not None and meta.size and asked.mode == "fetch":
            with self._keeping:
                self._kept.append((asked, meta))

    def _drop_kept(self, gone: Callable[[Asked, BatchMeta], bool]) -> None:
        """Drops what cancelled calls were given, where that holds no longer."""
        with self._keeping:
            self._kept = [kept for kept in self._kept if not gone(*kept)]

    # --- what was produced and consumed -------------------------------------------------------------------------------

    def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The indexes of the partition's rows, and for each 1 if the task was given the row, else 0."""
        try:
            ids = self.store.list_sample_ids(partition_id)
        except UnknownPartitionError:
            return None, None
        try:
            consumed = set(self.store.list_consumed(partition_id, task_name))
        except (UnknownPartitionError, UnknownTaskError):
            consumed = set()
        return _by_index(partition_id, ids, [sample_id in consumed for sample_id in ids])

    def get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The indexes of the partition's rows, and for each row and field 1 if it is written, else 0."""
        rows = find_rows(self.store, partition_id)
        known = {name for row in rows for name in row.fields}
        if not data_fields or not known.issuperset(data_fields):
            return None, None
        written = [[name in row.fields for name in data_fields] for row in rows]
        return _by_index(partition_id, [row.sample_id for row in rows], written)

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether the task was given all rows of the partition. False while it has none."""
        return self.store.check_consumption_status(partition_id, [task_name])

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether all rows of the partition have these fields."""
        _, status = self.get_production_status(data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Lets a task, or all tasks, claim all rows again. Returns True, also if there is nothing to do."""
        try:
            tasks = [task_name] if task_name is not None else list(self.store.describe(partition_id).tasks)
            for task in tasks:
                self.store.reset_consumption(partition_id, task)
        except (UnknownPartitionError, UnknownTaskError):
            pass
        self._drop_kept(lambda asked, _: asked.partition_id == partition_id and task_name in (None, asked.task_name))
        self._claims.forget(partition_id, task_name)
        return True

    def get_partition_list(self) -> list[str]:
        """The names of all partitions."""
        return [name for name in self.store.list_partitions() if not name.startswith(HIDDEN_PARTITION)]

    # --- rows with keys -----------------------------------------------------------------------------------------------

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """The rows with these keys, with their tags and the fields that all of them have.

        Args:
            keys: The keys. Those that do not exist are left out.
            partition_id: Their partition.
            create: Whether to create those that do not exist, without fields.
        """
        wanted = _listed("keys", keys, str)
        rows = find_rows(self.store, partition_id, wanted)
        if create and len(rows) < len(set(wanted)):
            known = {row.sample_id for row in rows}
            new = [key for key in dict.fromkeys(wanted) if key not in known]
            check_keys(new)
            self.store.put_samples(new, partition_id, tags=[{}] * len(new))
            rows = find_rows(self.store, partition_id, wanted)
        if not rows:
            return BatchMeta.empty()
        return meta_of(self.store, partition_id, rows, common_fields(row.fields for row in rows))

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """The keys of rows, by index.

        Raises:
            RuntimeError: A row is not there, or has no key.
        """
        wanted = _listed("global_indexes", global_indexes, int)
        keys = self._keys(wanted, partition_id)
        unknown = [index for index in wanted if index not in keys]
        if unknown:
            raise RuntimeError(
                f"kv_retrieve_keys('{partition_id}') refused: no row with a key has the indexes {preview(unknown)}."
            )
        return [keys[index] for index in wanted]

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Partition -> key -> tags, of one partition or of all."""
        listed: dict[str, dict[str, Any]] = {}
        for name in self.get_partition_list() if partition_id is None else [partition_id]:
            try:
                found = self.store.list_samples(name)
            except UnknownPartitionError:
                continue
            rows = zip(found.sample_ids, found.tags or (), strict=True)
            listed[name] = {key: tags_to_show(tags) for key, tags in rows if number_of(key) is None}
        return listed

    # --- its end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the client."""
        self.store.close()

    def load(self, folder: str | Path) -> None:
        """Loads a save into the store, which keeps its own settings, and gives no number of a row twice."""
        num_blocks, settings = self._numbers.num_blocks(), self._claims.settings()
        self.store.load(folder)
        self._drop_kept(lambda *_: True)
        self._numbers.skip(num_blocks)
        self._claims.keep_settings(settings)
        self._claims.forget(None)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _keys(self, indexes: Sequence[int], partition_id: str) -> dict[int, str]:
        """Index -> key, of those rows of a partition that have keys."""
        try:
            ids = self.store.list_sample_ids(partition_id)
        except UnknownPartitionError:
            return {}
        wanted = set(indexes)
        keys = {index_of(partition_id, key): key for key in ids if number_of(key) is None}
        return {index: key for index, key in keys.items() if index in wanted}

    def _ids(self, metadata: BatchMeta) -> list[str]:
        """The sample ids of rows: from the metadata, else from the indexes."""
        ids: list[Any] = [row.get(KEY) for row in metadata._custom_backend_meta]
        lacking = [place for place, sample_id in enumerate(ids) if sample_id is None]
        looked_up: dict[str, dict[int, str]] = {}
        for place in lacking:
            index, partition_id = metadata.global_indexes[place], metadata.partition_ids[place]
            if is_number(index):
                ids[place] = id_of_number(index)
                continue
            if partition_id not in looked_up:
                looked_up[partition_id] = self._keys(metadata.global_indexes, partition_id)
            if index not in looked_up[partition_id]:
                raise MissingDataError(
                    f"partition '{partition_id}' has no row with index {index}.", partition_id=partition_id
                )
            ids[place] = looked_up[partition_id][index]
        return ids

    def _changed_tags(self, metadata: BatchMeta) -> list[dict[str, Any]] | None:
        """The tags that a put has to write, or None: those that differ from what the store had."""
        rows = []
        for own, tags in zip(metadata._custom_backend_meta, metadata.custom_meta, strict=True):
            before = own.get(TAGS, {})
            rows.append({name: value for name, value in tags.items() if name not in before or before[name] != value})
        return tags_to_put(rows) if any(rows) else None

    async_set_custom_meta = in_threads(set_custom_meta)
    async_put = in_threads(put, "put")
    async_get_data = in_threads(get_data)
    async_clear_partition = in_threads(clear_partition)
    async_clear_samples = in_threads(clear_samples)
    async_get_consumption_status = in_threads(get_consumption_status)
    async_get_production_status = in_threads(get_production_status)
    async_check_consumption_status = in_threads(check_consumption_status)
    async_check_production_status = in_threads(check_production_status)
    async_reset_consumption = in_threads(reset_consumption)
    async_get_partition_list = in_threads(get_partition_list)
    async_kv_retrieve_meta = in_threads(kv_retrieve_meta)
    async_kv_retrieve_keys = in_threads(kv_retrieve_keys)
    async_kv_list = in_threads(kv_list)


def _listed(what: str, given: list[_T] | _T, kind: type[_T]) -> list[_T]:
    """One or several of a kind, as a list."""
    found = [given] if isinstance(given, kind) else given
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise TypeError(f"Only {kind.__name__} or list of {kind.__name__} are allowed as `{what}`.")
    if not found:
        raise ValueError(f"Received an empty list as `{what}`.")
    return found


def _check_wait(deadline: float, asked: Asked) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(
            f"get_meta('{asked.partition_id}', task '{asked.task_name}') timed out: {asked.batch_size} rows were not "
            f"ready within {_WAIT_S:.0f} s."
        )


def _by_index(partition_id: str, ids: Sequence[str], status: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    indexes = torch.tensor([index_of(partition_id, sample_id) for sample_id in ids], dtype=torch.int64, device="cpu")
    order = indexes.argsort()
    return indexes[order], torch.tensor(status, dtype=torch.int8, device="cpu")[order]
