"""Checkpoints that TransferQueue saved, so that a job can move over in the middle.

Such a folder holds ``metadata.json``, the state of the controller, and a file for each storage unit. All but the first
are pickles.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dataplane_compat.transfer_queue._columns import column_of_cells, tags_to_put
from dataplane_compat.transfer_queue._indexes import FIRST_OF_KEYS, check_keys, id_of_number
from dataplane_compat.transfer_queue._rows import put_rows
from dataplane_compat.transfer_queue._their_pickles import load_pickle
from dataplane_core import connect
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import CorruptDataError, DataPlaneError, UnsupportedOperationError

METADATA_FILE: Final = "metadata.json"
#: Of a save of the client, which may lie in the same folder and is the later one: TransferQueue does not load it.
_OURS: Final = "dataplane-partitions.save"
_CONTROLLER: Final = "controller_state.pkl"
_UNITS: Final = "simple_storage"
_MANIFEST: Final = "storage_unit_info.json"
#: Rows of one put.
_ROWS: Final = 1024
#: Seconds for which a task holds all rows while it is set which of them it was given.
_HOLD_S: Final = 60.0


@dataclass
class _Partition:
    """A partition of a checkpoint.

    Attributes:
        partition_id: Its name.
        ids: Its rows, in the order of their indexes.
        tags: Their tags.
        columns: Field -> row -> its cell.
        consumed: Task -> the rows that it was given.
    """

    partition_id: str
    ids: list[str]
    tags: list[dict[str, Any]]
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    consumed: dict[str, set[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class TheirCheckpoint:
    """What a checkpoint of TransferQueue holds.

    Attributes:
        partitions: Its partitions.
        num_indexes: Indexes from here on were never given to a row.
    """

    partitions: Sequence[_Partition]
    num_indexes: int


def is_theirs(folder: Path) -> bool:
    """Whether TransferQueue saved the checkpoint in a folder, and nothing was saved there since."""
    return not (folder / _OURS).exists() and (folder / METADATA_FILE).exists() and (folder / _CONTROLLER).exists()


def read_checkpoint(folder: Path, *, allow_pickle: bool) -> TheirCheckpoint:
    """Reads a whole checkpoint into memory.

    Raises:
        UnsupportedOperationError: It has not the data of all rows in its files.
        InvalidTypeError: It holds an object of a class that is not allowed.
        CorruptDataError: Files are missing or damaged.
    """
    try:
        saved = json.loads((folder / METADATA_FILE).read_text())["storage_saved"]
        if not saved:
            raise UnsupportedOperationError(
                f"load_checkpoint('{folder}') refused: it holds no data of rows, since its storage keeps them "
                "elsewhere. Expected one of SimpleStorage."
            )
        state = load_pickle(folder / _CONTROLLER, allow_pickle)
        cells = _cells(folder, allow_pickle)
        partitions = [_partition(name, status, cells) for name, status in state["partitions"].items()]
        num_indexes = int(state["index_manager"]["global_index_counter"])
        if not 0 <= num_indexes <= FIRST_OF_KEYS:
            raise CorruptDataError(f"load_checkpoint('{folder}') refused: its number of indexes is {num_indexes}.")
        return TheirCheckpoint(partitions, num_indexes)
    except DataPlaneError:
        raise
    except Exception as error:
        raise CorruptDataError(
            f"load_checkpoint('{folder}') failed: it is damaged, or not as TransferQueue 0.1.11 saves it: {error!r}."
        ) from error


def _cells(folder: Path, allow_pickle: bool) -> dict[str, dict[int, Any]]:
    """Field -> index -> cell, of all storage units."""
    named = len(json.loads((folder / _UNITS / _MANIFEST).read_text()))
    units = sorted((folder / _UNITS).glob("su_*.pkl"))
    if len(units) != named:
        raise CorruptDataError(f"load_checkpoint('{folder}') refused: it has {len(units)} of {named} storage units.")
    cells: dict[str, dict[int, Any]] = {}
    for path in units:
        unit = load_pickle(path, allow_pickle)
        if unit.get("format") is not None:
            raise UnsupportedOperationError(
                f"load_checkpoint('{folder}') refused: it was saved with ssd_offload. Expected one without."
            )
        for name, values in unit["field_data"].items():
            cells.setdefault(name, {}).update(values)
    return cells


def _partition(name: str, status: Any, cells: dict[str, dict[int, Any]]) -> _Partition:
    indexes = sorted({*status.global_indexes, *status.revert_keys_mapping})
    ids = {index: status.revert_keys_mapping.get(index) or id_of_number(index) for index in indexes}
    check_keys(status.keys_mapping)
    found = _Partition(name, list(ids.values()), [dict(status.custom_meta.get(index) or {}) for index in indexes])
    for column, place in status.field_name_mapping.items():
        written = [index for index in indexes if int(status.production_status[index, place])]
        found.columns[column] = {ids[index]: cells[column][index] for index in written}
    for task, given in status.consumption_status.items():
        found.consumed[task] = {ids[index] for index in indexes if index < len(given) and int(given[index])}
    return found


def check_restore(store: DataPlaneClient, checkpoint: TheirCheckpoint) -> None:
    """Raises what `restore` would raise, as far as it is due to the checkpoint: one in memory takes it first."""
    config = {"backend": "noop", "allow_pickle": store.config.allow_pickle, "open_partitions": True}
    for partition in checkpoint.partitions:
        with closing(connect(config)) as trial:
            _restore(trial, partition)


def restore(store: DataPlaneClient, checkpoint: TheirCheckpoint) -> None:
    """Writes the partitions into a store that has none of them. If it fails, it leaves none of them."""
    try:
        for partition in checkpoint.partitions:
            _restore(store, partition)
    except BaseException:
        for partition in checkpoint.partitions:
            with suppress(DataPlaneError):  # the caller gets the error of the load
                store.clear_samples(None, partition.partition_id)
        raise


def _restore(store: DataPlaneClient, partition: _Partition) -> None:
    """Writes rows without columns, sets what tasks were given of them, and adds the columns, which claims wait for."""
    name, ids = partition.partition_id, partition.ids
    for start in range(0, len(ids), _ROWS):
        store.put_samples(ids[start : start + _ROWS], name, tags=tags_to_put(partition.tags[start : start + _ROWS]))
    for task, given in partition.consumed.items() if ids else ():
        held = store.claim_meta(name, task, [], len(ids), blocking=False, lease_s=_HOLD_S)
        places = [place for place, each in enumerate(held.sample_ids) if each in given]
        rest = held.drop(places)
        if places:
            store.ack(held.subset(places))
        if rest is not None:
            store.nack(rest)
    fields: dict[tuple[str, ...], list[str]] = {}  # those of the same rows are written together
    for column, cells in partition.columns.items():
        fields.setdefault(tuple(cells), []).append(column)
    for rows, names in fields.items():
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS]
            columns = {each: column_of_cells(each, [partition.columns[each][row] for row in some]) for each in names}
            put_rows(store, name, some, columns, None)
