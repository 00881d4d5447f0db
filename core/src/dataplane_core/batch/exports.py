"""Columns that were read, as numpy arrays or as an Arrow table.

Shape legend: ``N`` rows, ``L`` a row's own length, ``T`` elements of all rows together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from tensordict import TensorDictBase

from dataplane_core.arguments import check_columns, check_iterable, takes
from dataplane_core.batch.selection import objects_of
from dataplane_core.codec import Ragged, as_column, host_tensor, ragged_of_dense, ragged_of_nested
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, preview
from dataplane_core.spec import TagValue
from dataplane_core.spec.tags import check_tags

if TYPE_CHECKING:
    import pyarrow as pa

#: Dtypes that numpy lacks, and the smallest one of numpy's that holds all of their values.
_WIDER: Final = {
    torch.complex32: torch.complex64,
    **dict.fromkeys(
        (
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
        ),
        torch.float32,
    ),
}


@takes(columns=check_columns)
def to_numpy(columns: Mapping[str, Any] | TensorDictBase) -> dict[str, Any]:
    """Columns as numpy arrays.

    Arrays alias the columns where they can: a column in host memory whose dtype numpy has is not copied. bfloat16 and
    float8 become float32, and complex32 becomes complex64, which hold all of their values.

    Args:
        columns: What `get_samples`, `get_data`, `read_columns` or `materialize` returned.

    Returns:
        Field -> an array of the column's shape. A jagged column is a list of N arrays (L, ...), and a column of objects
        an array (N,) of dtype object. `put_samples` takes all three back.

    Raises:
        InvalidTypeError: A tensor that is not carried, such as a sparse one.

    Examples:
        >>> import torch
        >>> to_numpy({"input_ids": [[5, 6, 7], [8]], "reward": torch.tensor([0.5, 1.0])})
        {'input_ids': [array([5, 6, 7]), array([8])], 'reward': array([0.5, 1. ], dtype=float32)}
    """
    converted: dict[str, Any] = {}
    for name in columns.keys():
        column = _plain(name, columns.get(name))
        if isinstance(column, Ragged):
            values = column.values.numpy()
            converted[name] = [values[start:stop] for start, stop in pairwise(column.offsets.tolist())]
        else:
            converted[name] = column.numpy() if isinstance(column, torch.Tensor) else column
    return converted


@takes(columns=check_columns, ids=check_iterable)
def to_arrow(
    columns: Mapping[str, Any] | TensorDictBase,
    *,
    ids: Sequence[str] | None = None,
    tags: Sequence[Mapping[str, TagValue]] | None = None,
) -> pa.Table:
    """Columns as a pyarrow ``Table``. Needs pyarrow, which ``dataplane-core[arrow]`` installs.

    The type of a field depends on its dtype and rank only, so the tables of all batches fit one file. It aliases the
    columns where it can: the numbers of a column in host memory are not copied, except bools. Dtypes that numpy lacks
    are widened as in `to_numpy`.

    Args:
        columns: What `get_samples`, `get_data`, `read_columns` or `materialize` returned.
        ids: N sample ids: they become the first column, ``sample_id``.
        tags: N dicts: each tag becomes a column of its name, at the end; null where a row lacks it.

    Returns:
        A table of N rows. Rows of rank 1 and more, jagged or not, are of the type ``large_list``; further dims are
        lists of a fixed size. Objects are of the type that pyarrow infers; dicts become structs, in which keys that a
        row lacks are null. `put_samples` takes the table back.

    Raises:
        ImportError: pyarrow is not installed.
        InvalidTypeError: A complex column, or one of objects that Arrow has no type for.
        InvalidRequestError: Ids or tags are not one per row, or a field or tag has the name of another column.

    Examples:
        >>> table = to_arrow({"input_ids": [[5, 6, 7], [8]], "reward": [0.5, 1.0]})
        >>> table["input_ids"].to_pylist()
        [[5, 6, 7], [8]]
        >>> to_arrow({"reward": [0.5, 1.0]}, ids=["a", "b"], tags=[{"version": 7}, {}]).to_pylist()
        [{'sample_id': 'a', 'reward': 0.5, 'version': 7}, {'sample_id': 'b', 'reward': 1.0, 'version': None}]
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError("to_arrow needs pyarrow: pip install 'dataplane-core[arrow]'") from error
    table = {name: _arrow(name, _plain(name, columns.get(name))) for name in columns.keys()}
    num_rows = len(next(iter(table.values()))) if table else len(ids or tags or ())
    if ids is not None and len(ids) != num_rows:
        raise InvalidRequestError(f"to_arrow: ids must be one per row, got {len(ids)} for {num_rows} rows.")
    tags = None if tags is None else check_tags(tags, num_rows)
    names = dict.fromkeys(name for row in tags or () for name in row)
    twice = [name for name in (*names, *([] if ids is None else ["sample_id"])) if name in table]
    if twice or (ids is not None and "sample_id" in names):
        raise InvalidRequestError(
            f"to_arrow: {preview(twice or ['sample_id'])} would be two columns. Give one of them another name."
        )
    first = {} if ids is None else {"sample_id": _arrow("sample_id", objects_of(list(ids)))}
    last = {name: _arrow(name, objects_of([row.get(name) for row in tags or ()])) for name in names}
    return pa.table({**first, **table, **last})


def _plain(name: str, column: Any) -> Ragged | torch.Tensor | np.ndarray[Any, Any]:
    """A column in host memory, of a dtype that numpy has; objects as an array."""
    what = f"field '{name}'"
    column = as_column(what, column)
    if not isinstance(column, torch.Tensor):
        return objects_of(column, what)
    column = column.to(_WIDER.get(column.dtype, column.dtype))
    return ragged_of_nested(column, what) if column.is_nested else host_tensor(column, what)


def _arrow(name: str, column: Ragged | torch.Tensor | np.ndarray[Any, Any]) -> Any:
    import pyarrow as pa

    if isinstance(column, np.ndarray):
        try:
            return pa.array(column.tolist())
        except pa.ArrowException as error:
            raise InvalidTypeError(
                f"field '{name}' holds objects that Arrow has no common type for: {error}.",
                hint="Leave the field out, or turn its items into strings: json.dumps(item).",
            ) from error
        except UnicodeEncodeError as error:
            raise InvalidTypeError(
                f"field '{name}' holds text with half of a surrogate pair, which Arrow has no form for: {error}.",
                hint="Such text comes from a cut in the middle of a character. Replace it: "
                "text.encode(errors='replace').decode().",
            ) from error
    if isinstance(column, torch.Tensor) and column.dim() > 1:  # (N, L, ...)
        column = ragged_of_dense(column)
    values = column.values if isinstance(column, Ragged) else column
    if values.is_complex():
        raise InvalidTypeError(
            f"field '{name}' is of dtype {values.dtype}, which Arrow lacks.",
            hint="Convert torch.view_as_real(column), whose last dim holds the two parts.",
        )
    cells = pa.array(values.numpy().reshape(-1))
    sizes = values.shape[1:]
    for dim in reversed(range(len(sizes))):
        count = len(values) * int(np.prod(sizes[:dim]))
        cells = pa.Array.from_buffers(pa.list_(cells.type, sizes[dim]), count, [None], children=[cells])
    return pa.LargeListArray.from_arrays(column.offsets.numpy(), cells) if isinstance(column, Ragged) else cells
