"""TransferQueue's public functions over a dataplane store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase

from dataplane_compat.transfer_queue import _session
from dataplane_compat.transfer_queue._columns import columns_to_put, one_row, parsed, tags_to_put, to_batch
from dataplane_compat.transfer_queue._indexes import check_keys
from dataplane_compat.transfer_queue._pool import in_threads
from dataplane_compat.transfer_queue._rows import find_rows, put_rows
from dataplane_compat.transfer_queue.client import TransferQueueClient
from dataplane_compat.transfer_queue.metadata import KVBatchMeta
from dataplane_core.client import DataPlaneClient, common_fields
from dataplane_core.errors import LostSamplesError, MissingDataError, UnknownPartitionError


class RowsNotFoundError(MissingDataError, ValueError):
    """Rows are not there, or have none of the fields. A `ValueError`, as in TransferQueue, and a `KeyError`."""


def init(conf: Any = None) -> Any:
    """Connects this process. The first one starts the store, and ends it when it closes.

    Args:
        conf: A dataplane config (a dict with ``backend``, a path, a `DataPlaneConfig`), which may have the key
            ``controller`` with ``sampler`` and ``polling_mode``; or TransferQueue's own config, of which only
            ``controller`` counts. None, or TransferQueue's own: the config is found by the environment variable
            ``DATAPLANE_CONFIG``, or from the process of the Ray cluster that started the store.

    Returns:
        The config given, or else the one found.

    Raises:
        ConfigError: There is no config.
    """
    session = _session.start(conf)
    return session.config if conf is None else conf


def close() -> None:
    """Disconnects this process. Only the process that started the store ends it."""
    _session.end()


def get_client() -> TransferQueueClient:
    """The client of this process.

    Raises:
        AssertionError: `init` was not called.
    """
    session = _session.current()
    assert session is not None, "Please initialize the TransferQueue first by calling `tq.init()`!"
    return session.client


def get_metrics_endpoint() -> str | None:
    """None: the store has no Prometheus exporter. The middleware ``metrics`` counts."""
    return None


# --- rows by key ------------------------------------------------------------------------------------------------------


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """Writes fields of one row, its tags, or both.

    Args:
        key: The row. It is created if it is not there.
        partition_id: Its partition. It is created if it is not there.
        fields: A dict of values without a batch dimension, or a TensorDict of batch size 1.
        tag: Tags, merged into those that the row has.
        data_parser: Changes the columns in place before they are written.

    Returns:
        The row, with all its tags and fields.
    """
    if fields is None and tag is None:
        raise ValueError("Please provide at least one parameter of fields or tag.")
    columns = None if fields is None else one_row(fields)
    return _put([key], partition_id, columns, None if tag is None else [tag], data_parser)


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """Writes columns of rows, their tags, or both.

    Args:
        keys: The rows, each once. Those that are not there are created.
        partition_id: Their partition. It is created if it is not there.
        fields: The columns, one row per key.
        tags: One dict per key, merged into the tags that the row has.
        data_parser: Changes the columns in place before they are written.

    Returns:
        The rows, with all their tags and the fields that all of them have.
    """
    if fields is None and tags is None:
        raise ValueError("Please provide at least one parameter of `fields` or `tags`.")
    if fields is not None and isinstance(fields, TensorDictBase) and tuple(fields.batch_size[:1]) != (len(keys),):
        raise ValueError(
            f"`keys` with length {len(keys)} does not match the `fields` TensorDict with batch_size "
            f"{list(fields.batch_size)}"
        )
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"keys with length {len(keys)} does not match length of tags {len(tags)}")
    columns = None if fields is None else columns_to_put(fields, len(keys))
    return _put(keys, partition_id, columns, tags, data_parser)


def _put(
    keys: list[str],
    partition_id: str,
    columns: dict[str, Any] | None,
    tags: list[dict[str, Any]] | None,
    data_parser: Callable[[Any], Any] | None,
) -> KVBatchMeta:
    check_keys(keys)
    store = _session.attached().client.store
    if columns is not None and data_parser is not None:
        columns = parsed(columns, data_parser)
    put_rows(store, partition_id, keys, columns, None if tags is None else tags_to_put(tags))
    rows = find_rows(store, partition_id, keys)
    found = {row.sample_id: row.tags for row in rows}  # rows that were cleared meanwhile have no tags
    fields = sorted(common_fields(row.fields for row in rows))
    return KVBatchMeta(list(keys), [found.get(key, {}) for key in keys], partition_id, fields)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> TensorDict:
    """Reads rows, in the order of the keys.

    Args:
        keys: The rows.
        partition_id: Their partition.
        select_fields: The fields to read; those that not all of the rows have are left out. None: all that they have.

    Raises:
        RowsNotFoundError: A row is not there, or the rows have none of the fields in common.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    names = [select_fields] if isinstance(select_fields, str) else select_fields
    store = _session.attached().client.store
    what = f"kv_batch_get('{partition_id}', {len(wanted)} keys)"
    try:
        columns = _read(store, wanted, partition_id, names)
    except LostSamplesError:
        raise
    except (MissingDataError, UnknownPartitionError) as error:
        raise RowsNotFoundError(
            f"{what}: not found: {error}",
            partition_id=partition_id,
            missing_samples=getattr(error, "missing_samples", ()),
            missing_cells=getattr(error, "missing_cells", None),
        ) from error
    if wanted and not list(columns.keys()):
        raise RowsNotFoundError(f"{what} refused: the rows have no field in common.", partition_id=partition_id)
    return to_batch(columns)


def _read(store: DataPlaneClient, keys: list[str], partition_id: str, names: list[str] | None) -> TensorDict:
    try:
        return store.get_samples(keys, partition_id, names)
    except MissingDataError as error:
        if names is None or error.missing_samples or isinstance(error, LostSamplesError):
            raise
        common = common_fields(row.fields for row in find_rows(store, partition_id, keys))
        names = [name for name in names if name in common]
        if not names:
            raise
        return store.get_samples(keys, partition_id, names)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """Reads the rows of a meta: ``select_fields``, which must be among its fields, or else all of its fields."""
    if meta.partition_id is None:
        raise ValueError("Must provide partition_id in the input KVBatchMeta.")
    names = [select_fields] if isinstance(select_fields, str) else select_fields
    if names is not None and not set(names) <= set(meta.fields or ()):
        raise ValueError(
            f"Some fields assigned in select_fields not found in the metadata. Assigned: {names}; Fields in "
            f"KVBatchMeta: {meta.fields}."
        )
    return kv_batch_get(meta.keys, meta.partition_id, meta.fields if names is None else names)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Partition -> key -> tags, of one partition or of all."""
    return _session.attached().client.kv_list(partition_id)


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Removes rows. Those that are not there are passed over."""
    _session.attached().client.store.clear_samples([keys] if isinstance(keys, str) else keys, partition_id)


async_kv_put = in_threads(kv_put, "put")
async_kv_batch_put = in_threads(kv_batch_put, "put")
async_kv_batch_get = in_threads(kv_batch_get)
async_kv_batch_get_by_meta = in_threads(kv_batch_get_by_meta)
async_kv_list = in_threads(kv_list)
async_kv_clear = in_threads(kv_clear)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Saves all partitions: rows, tags, and what tasks were given.

    Args:
        checkpoint_dir: The folder. What an earlier call saved there is replaced.
        include_storage: Data are always saved.
        metadata: Saved along.
    """
    _saving_client().store.save(checkpoint_dir, metadata=metadata)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Restores what `save_checkpoint` saved. A checkpoint of TransferQueue's own is not loaded.

    Args:
        checkpoint_dir: The folder.

    Raises:
        FileNotFoundError: There is no checkpoint of `save_checkpoint`.
        RuntimeError: `init` was not called.
        CorruptDataError: It is damaged.
    """
    client = _saving_client()
    try:
        client.load(checkpoint_dir)
    except MissingDataError as error:
        what = "not found, or not complete (one of TransferQueue's own, with a metadata.json, is not loaded)"
        raise FileNotFoundError(f"Checkpoint directory {what}: {error}") from error


def _saving_client() -> TransferQueueClient:
    session = _session.current()
    if session is None:
        raise RuntimeError("TransferQueue is not initialized. Call tq.init() first.")
    return session.client
