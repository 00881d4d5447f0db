"""What people have, as columns: the one way for everything that `put_samples`, `write_columns` and `kv_first_write` are
given.

Arrow tables, DataFrames and data sets are recognized by the names of their classes, so that their packages are not
imported here.

Shape legend: ``N`` rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from dataplane_core.codec.lists import column_of_array, column_of_list, says_its_dtype
from dataplane_core.codec.rows import Columns, EmptyLists, TensorRows, object_column
from dataplane_core.codec.tensors import dense_or_jagged
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, preview
from dataplane_core.spec import Ragged


def as_columns(where: str, fields: Any, num_samples: int) -> TensorDictBase | Columns:
    """Columns that `encode_columns` takes, of whatever a caller has.

    - A dict (or another mapping) of columns: each by `as_column`. A TensorDict stays as it is; a lazy stack of rows,
      which gives no columns whose rows differ in shape, is read as a list of rows.
    - A list of N dicts with the same keys, one per row: each key is a column, the list of its values.
    - A pyarrow ``Table`` or ``RecordBatch``, or a pandas ``DataFrame``: its columns.
    - A ``datasets.Dataset``: its columns as Arrow, whatever its format. Features that decode what is stored give their
      values, as in ``dataset[:]``. With a transform, what that returns.

    Args:
        where: The call. Messages begin with it.
        fields: N rows.
        num_samples: N.

    Returns:
        Columns, which alias ``fields`` where they can: tensors, object columns, `Ragged` for rows that differ in their
        first dim, `TensorRows` for a list of large tensors, and `EmptyLists`. The numbers of rows are not checked.

    Raises:
        InvalidTypeError: None of these, or a column that cannot be converted.
        InvalidRequestError: The rows of a list have different keys, or are not N; two columns have the same name.
        SchemaMismatchError: Tensors of one column do not fit together.
    """
    if isinstance(fields, LazyStackedTensorDict) and fields.stack_dim == 0:
        rows = _columns_of_rows(where, fields.tensordicts, num_samples)
        tensors = {name for name, cells in rows if all(isinstance(cell, torch.Tensor) for cell in cells)}
        columns = [(name, cells if name in tensors else fields.get(name)) for name, cells in rows]
    elif isinstance(fields, (TensorDictBase, Columns)):
        return fields
    elif isinstance(fields, Mapping):
        columns = list(fields.items())
    elif isinstance(fields, (list, tuple)):
        columns = _columns_of_rows(where, fields, num_samples)
    elif _is_a(fields, "pyarrow.lib", "Table", "RecordBatch"):
        return _columns_of_table(where, fields)
    elif _is_a(fields, "datasets.arrow_dataset", "Dataset"):
        return as_columns(where, _columns_of_dataset(fields), num_samples)
    elif _is_a(fields, "pandas", "DataFrame"):
        columns = list(fields.items())
    else:
        raise InvalidTypeError(
            f"{where} refused: fields are a {type(fields).__name__}. Expected a dict of columns, a TensorDict, a list "
            "of dicts, a datasets.Dataset, an Arrow table or a DataFrame.",
            hint="Write {'name': column} for one column, and list(data.take(n)) for the next rows of a stream.",
        )
    _check_names(where, [name for name, _ in columns])
    lists = {name: column for name, column in columns if isinstance(column, (list, tuple))}
    found = {name: _column(f"{where} refused: field '{name}'", column) for name, column in columns}
    return Columns(found, lists, [name for name, items in lists.items() if not says_its_dtype(items)])


def as_column(what: str, column: Any) -> Any:
    """The tensor or object column that a column stands for. What it does not know, it returns as it is.

    Lists by `column_of_list`, arrays by `column_of_array`, Arrow columns by `column_of_arrow`. A pandas ``Series`` is
    an array, or, if it has strings or objects, a list. A column of a ``datasets.Dataset`` is what ``column[:]`` gives.
    """
    column = _column(what, column)
    if isinstance(column, EmptyLists):
        return object_column(column)
    rows = column.joined(what) if isinstance(column, TensorRows) else column
    return dense_or_jagged(rows) if isinstance(rows, Ragged) else rows


def _column(what: str, column: Any) -> Any:
    """As `as_column`, in the forms that only the codec takes."""
    if isinstance(column, (torch.Tensor, TensorDictBase, Ragged, TensorRows)):
        return column
    if isinstance(column, (list, tuple)):
        return column_of_list(what, column)
    if isinstance(column, np.ndarray):
        return column_of_array(what, column)
    if _is_a(column, "pyarrow.lib", "Array", "ChunkedArray"):
        return column_of_arrow(what, column)
    if _is_a(column, "datasets.arrow_dataset", "Column"):
        return _column(what, column[:])
    if _is_a(column, "pandas", "Series"):
        if _is_a(column.dtype, "pandas", "ArrowDtype"):
            return column_of_arrow(what, column.array.__arrow_array__())
        if _is_a(column.dtype, "pandas", "CategoricalDtype") and not column.hasnans:
            column = column.astype(column.dtype.categories.dtype)
        # strings and objects, where pandas writes NaN if one is missing; numbers of which some are missing
        if column.dtype.kind == "O" or (hasattr(column.dtype, "na_value") and column.hasnans):
            return column_of_list(what, column.astype(object).where(column.notna(), None).tolist())
        return column_of_array(what, column.to_numpy())
    if _is_a(column, "datasets.arrow_dataset", "Dataset"):
        raise InvalidTypeError(f"{what} is a datasets.Dataset.", hint="Write one split, such as splits['train'].")
    return column


def _check_names(where: str, names: Sequence[Any]) -> None:
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise InvalidRequestError(f"{where} refused: fields have several columns named {preview(repeated)}.")


def _columns_of_table(where: str, table: Any) -> Columns:
    _check_names(where, table.schema.names)
    fields = zip(table.schema, table.columns, strict=True)
    found = {
        field.name: column_of_arrow(f"{where} refused: field '{field.name}'", column, field.metadata)
        for field, column in fields
    }
    return Columns(found)


def _columns_of_dataset(dataset: Any) -> Any:
    """The columns of a ``datasets.Dataset``: as Arrow, or, where its features decode what is stored, what they give.

    So a column is the same whatever the format is. Only images, audio and the like are what the format makes of them.
    """
    form = dataset.format
    if form["type"] in ("custom", "arrow"):
        return dataset[:]
    table = dataset.with_format("arrow", columns=form["columns"])[:]
    decoded = {name: kinds for name in table.schema.names if (kinds := _decoders(dataset.features[name]))}
    columns = dict(zip(table.schema.names, table.columns, strict=True))
    for name, kinds in decoded.items():
        shown = dataset.select_columns([name])
        columns[name] = (shown.with_format(None) if kinds == {"Json"} else shown)[:][name]
    return columns


def _decoders(feature: Any) -> set[str]:
    """The names of the features, inside this one too, whose values are not what is stored."""
    if isinstance(feature, Mapping):
        return set().union(*map(_decoders, feature.values()))
    if isinstance(feature, (list, tuple)):
        return set().union(*map(_decoders, feature))
    if hasattr(feature, "decode_example"):
        return {type(feature).__name__}
    return _decoders(feature.feature) if hasattr(feature, "feature") else set()


def _columns_of_rows(where: str, rows: Sequence[Any], num_samples: int) -> list[tuple[str, list[Any]]]:
    if len(rows) != num_samples:
        raise InvalidRequestError(
            f"{where} refused: fields are a list of {len(rows)} rows. Expected {num_samples}, one per sample id."
        )
    names: list[str] = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidTypeError(
                f"{where} refused: fields are a list, but row {number} is a {type(row).__name__}. Expected a dict of "
                "one value per field.",
                hint="Write {'name': values} for one column.",
            )
        keys = list(row.keys())
        names = keys if number == 0 else names
        if keys != names and set(keys) != set(names):
            lacks, has = [name for name in names if name not in keys], [name for name in keys if name not in names]
            found = f"lacks {preview(lacks)}, which row 0 has" if lacks else f"has {preview(has)}, which row 0 lacks"
            raise InvalidRequestError(
                f"{where} refused: row {number} {found}. Expected the same keys in every row.",
                hint="Write None where a row has no object, and a list or tensor of length 0 where it has no numbers.",
            )
    return [(name, [row[name] for row in rows]) for name in names]


def _is_a(value: object, module: str, *names: str) -> bool:
    """Whether a value is of one of the classes, or of a class derived from them. Imports nothing."""
    return any(kind.__module__.startswith(module) and kind.__name__ in names for kind in type(value).__mro__)


def column_of_arrow(*given: Any) -> Any:
    """See `codec.arrow`, which imports pyarrow: whoever has a column of Arrow has it."""
    from dataplane_core.codec import arrow

    return arrow.column_of_arrow(*given)
