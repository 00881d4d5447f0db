"""`dataplane import`: puts the rows of a folder that `dataplane export` wrote back into a store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from dataplane_core.client import DataPlaneClient
from dataplane_core.codec import as_columns, encode_columns, object_column
from dataplane_core.errors import (
    CorruptDataError,
    DataPlaneError,
    InvalidRequestError,
    SchemaMismatchError,
    UnknownPartitionError,
    UnsupportedOperationError,
    preview,
    printable,
)
from dataplane_core.spec import FieldSpec, Registration, WireFormat
from dataplane_tools import _columns as arrow
from dataplane_tools._inspect import attach
from dataplane_tools._shards import check_shards, columns_of, parquet_file, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import put.

    Attributes:
        partition_id: The partition.
        num_rows: Rows of the folder, which it holds now.
        num_new: Those of them that it did not hold before.
    """

    partition_id: str
    num_rows: int
    num_new: int


def import_folder(
    folder: str | os.PathLike[str],
    client: DataPlaneClient,
    partition_id: str | None = None,
    *,
    unfinished: bool = False,
) -> Imported:
    """Puts the rows of an export into a partition: ids, tags, order, dtypes, shapes and values as they were.

    A partition that is not registered is registered as the exported one was, for the fields and the number of rows that
    the folder has. Of one that is registered, missing fields, tasks and enums are added. Rows that it holds already
    must be equal, so an import that was cut off may be repeated. In memory is one portion of the rows.

    Args:
        folder: What `export_partition` wrote, without ``messages``.
        client: Of the store.
        partition_id: The partition. None: the name of the exported one.
        unfinished: Also take the complete shards of an export that has not ended, such as one whose store is gone.

    Raises:
        MissingDataError: The folder has no export.
        UnsupportedOperationError: Another version of this package wrote it, or it has messages.
        CorruptDataError: It is damaged, or was not completed. Nothing was put.
        InvalidRequestError: The partition holds other rows of these ids, has other fields or groups, or has no room for
            the rows by its ``num_samples``.
        SaveError: It cannot be read.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    if not (manifest["closed"] or unfinished):
        raise CorruptDataError(
            f"the export in '{folder}' was not completed: it is being written, or was killed.",
            hint="Run the same command again, which completes it, or take its complete shards: --unfinished.",
        )
    if manifest["what"]["messages"]:
        raise UnsupportedOperationError(
            f"the export in '{folder}' has messages instead of fields.", hint="Export without messages to import."
        )
    check_shards(path, manifest)
    name = manifest["partition_id"] if partition_id is None else partition_id
    _register(path, manifest, client, name)
    num_rows = num_new = 0
    with _as_written(path):
        for about, table, absent in _portions(path, manifest):
            ids = table["sample_id"].to_pylist()
            tags = arrow.items_of_arrow("tags", table["tags"], arrow.JSON)
            found = client.list_samples(name, sample_ids=ids)
            held = dict(zip(found.sample_ids, found.tags or ({},) * found.size, strict=True))
            fields = {
                field: _places(table[each["column"]], absent.get(field)) for field, each in about["fields"].items()
            }
            rows = [
                (sample_id in held, [field for field, has in fields.items() if has[row]])
                for row, sample_id in enumerate(ids)
            ]
            # rows that have the same fields go together, and the order stays
            for (is_held, names), run in groupby(range(len(ids)), key=rows.__getitem__):
                places = list(run)
                some = slice(places[0], places[-1] + 1)
                columns = _columns(about, table.slice(places[0], len(places)), names)
                if is_held:
                    _check_equal(client, name, ids[some], tags[some], columns, held)
                else:
                    client.put_samples(ids[some], name, columns or None, tags=tags[some])
                    num_new += len(places)
            num_rows += len(ids)
    return Imported(partition_id=name, num_rows=num_rows, num_new=num_new)


@contextmanager
def _as_written(path: Path) -> Iterator[None]:
    """Names the folder whose shards hold what no export has."""
    try:
        yield
    except DataPlaneError:
        raise
    except (
        LookupError,
        ValueError,
        TypeError,
        RuntimeError,
        OverflowError,
    ) as error:  # those of pyarrow are ValueErrors
        raise CorruptDataError(f"the export in '{path}' holds what no export has: {error}.") from error


def _portions(path: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Any, dict[str, set[int]]]]:
    """Of each row group: what its shard says of the columns, a table, and field -> places of nulls that it lacks."""
    for shard in manifest["shards"]:
        with parquet_file(path / shard["name"]) as file:
            about = columns_of(file, manifest)
            start = 0
            for number in range(file.num_row_groups):
                table = file.read_row_group(number)
                stop = start + len(table)
                absent = {
                    name: {row - start for row in rows if start <= row < stop} for name, rows in about["absent"].items()
                }
                yield about, table, absent
                start = stop


def _places(column: Any, absent: set[int] | None) -> list[bool]:
    """For each row, whether it has a field. ``absent``: the rows that lack it. None: those that are null."""
    if absent is None:
        has: list[bool] = column.is_valid().to_pylist()
        return has
    return [row not in absent for row in range(len(column))]


def _columns(about: Mapping[str, Any], table: Any, names: Sequence[str]) -> dict[str, Any]:
    """Columns of rows that have these fields."""
    columns: dict[str, Any] = {}
    for name in names:
        told = about["fields"][name]
        spec, column = FieldSpec.from_text(told["spec"]), table[told["column"]]
        if spec.kind == "object":
            columns[name] = object_column(arrow.items_of_arrow(name, column, told["form"]))
        else:
            columns[name] = arrow.tensors_of_arrow(name, column, spec)
    return columns


def _register(path: Path, manifest: Mapping[str, Any], client: DataPlaneClient, name: str) -> None:
    """Registers the partition, or adds what it lacks, if the rows fit.

    Raises:
        InvalidRequestError: They do not.
    """
    registration = {key: manifest["registration"][key] for key in Registration.__annotations__}
    only = manifest["what"]["fields"]
    registration["fields"] = [each for each in registration["fields"] if only is None or each in only]
    num_rows = sum(shard["num_rows"] for shard in manifest["shards"])
    if registration["num_samples"] is not None:
        registration["num_samples"] = num_rows  # or claims would wait for rows that were left out
    try:
        found = client.describe(name)
    except UnknownPartitionError:
        client.register_partition(name, **registration, if_exists="keep")
        return
    refused = f"import of '{path}' into partition '{name}' refused:"
    if found.info.grpo_group_size != registration["grpo_group_size"]:
        raise InvalidRequestError(
            f"{refused} its groups have {found.info.grpo_group_size} samples, those of the export "
            f"{registration['grpo_group_size']}."
        )
    ids: list[str] = []
    for about, table, _ in _portions(path, manifest):
        with _as_written(path):
            ids += table["sample_id"].to_pylist()
            specs = {field: FieldSpec.from_text(told["spec"]) for field, told in about["fields"].items()}
        for field, spec in specs.items():
            there = found.specs.get(field)
            if there is not None and there.after(spec) is None:
                raise SchemaMismatchError(
                    f"{refused} '{field}' has {there.describe()}, in the export {spec.describe()}.",
                    expected={field: there.to_text()},
                )
    most = found.info.num_samples
    num_new = len(set(ids).difference(client.list_sample_ids(name)))
    if most is not None and found.num_samples + found.num_cleared + num_new > most:
        raise InvalidRequestError(
            f"{refused} it was registered for {most} samples, has {found.num_samples + found.num_cleared}, and would "
            f"get {num_new} more."
        )
    client.register_partition(name, **{**registration, "num_samples": None}, if_exists="keep")


def _check_equal(
    client: DataPlaneClient,
    name: str,
    ids: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    columns: dict[str, Any],
    held: Mapping[str, Mapping[str, Any]],
) -> None:
    """Refuses rows that the partition holds with other values.

    Raises:
        InvalidRequestError: The partition holds one with other values.
    """
    fields = client.list_fields(ids, name)
    unlike = [
        sample_id
        for sample_id, row, has in zip(ids, tags, fields, strict=True)
        if not set(columns) <= set(has) or json.dumps({tag: held[sample_id].get(tag) for tag in row}) != json.dumps(row)
    ]
    if not unlike and columns:
        found = client.get_samples(ids, name, list(columns))
        cells = [_cells(rows, len(ids)) for rows in (dict(found.items()), columns)]
        unlike = [ids[row] for row in range(len(ids)) if cells[0][row] != cells[1][row]]
    if unlike:
        raise InvalidRequestError(
            f"import refused: partition '{name}' holds {preview(unlike)} with other values.",
            hint="Import into another partition: dataplane import FOLDER CONFIG PARTITION.",
        )


def _cells(columns: Mapping[str, Any], num_rows: int) -> list[tuple[bytes, ...]]:
    """The bytes of the cells of each row."""
    encoded, _ = encode_columns(as_columns("import", columns, num_rows), num_rows, WireFormat(bytes=True))
    rows: Any = [encoded[name] for name in sorted(encoded)]
    return [tuple(map(bytes, cells)) for cells in zip(*rows, strict=True)]


def run(folder: str, config_path: str, partition_id: str | None, *, unfinished: bool) -> int:
    """Puts the rows of a folder into a running store.

    Raises:
        DataPlaneError: As `import_folder`, and `connect`.
    """
    with attach(config_path, announced=True) as client:
        done = import_folder(folder, client, partition_id, unfinished=unfinished)
    print(printable(f"{done.partition_id}: {done.num_new} new rows, of {done.num_rows} in {folder}"))
    return 0
