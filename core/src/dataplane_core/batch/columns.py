"""Columns in other forms: some of their rows, cut to the lengths of their rows, as numpy arrays, as an Arrow table.

What cuts a column works on host memory (CUDA inputs are copied), and returns detached tensors.

Shape legend: ``N`` rows, ``S`` padded length, ``L`` a row's own length.
"""

from __future__ import annotations

import cmath
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from dataplane_core._compiler_marks import not_compiled
from dataplane_core.arguments import Name, check_columns, check_list, checked_as
from dataplane_core.batch.tokens import as_lengths, is_per_sample
from dataplane_core.codec.inputs import as_column
from dataplane_core.codec.rows import num_rows, object_column
from dataplane_core.codec.tensors import (
    ALL_DTYPES,
    as_ragged,
    carrier,
    dense_or_jagged,
    gather_rows,
    host_tensor,
    jagged_parts,
    offsets_of,
    plain_rows,
    ragged_of_rows,
    to_nested,
)
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, preview
from dataplane_core.ledger import rollout_of
from dataplane_core.spec import Ragged, TagValue
from dataplane_core.spec.tags import check_tags

if TYPE_CHECKING:
    import pyarrow as pa

#: Types that torch's `index_select` lacks for columns (N,).
_UNSIGNED: Final = (torch.uint16, torch.uint32, torch.uint64)


class UnsupportedColumnError(InvalidTypeError, NotImplementedError):
    """A column that is neither a tensor with rows, a list nor an array."""


# --- rows -------------------------------------------------------------------------------------------------------------


def checked_num_rows(key: str, column: Any) -> int:
    """Number of rows of what a `BatchedDataDict` can hold. Raises `UnsupportedColumnError` for anything else."""
    kind = type(column).__name__
    if not isinstance(column, torch.Tensor | np.ndarray | list):
        raise UnsupportedColumnError(
            f"column '{key}' is of type {kind}. Expected a tensor, a list or an array, one row per sample."
        )
    if not isinstance(column, list) and not column.ndim:
        raise UnsupportedColumnError(
            f"column '{key}' is a {kind} without dims. Expected one row per sample along dim 0."
        )
    return num_rows(column)


def slice_rows(key: str, column: Any, start: int, end: int) -> Any:
    """The rows ``[start, end)``, which must lie within the column. Tensors (also jagged ones) and arrays are views."""
    if not (isinstance(column, torch.Tensor) and column.is_nested):
        return column[start:end]
    values, offsets = _end_to_end(key, column)
    cuts = offsets[start : end + 1]
    return _jagged(values[int(cuts[0]) : int(cuts[-1])], cuts - cuts[0])


def select_rows(columns: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The rows at ``rows``, each of which lies in ``[0, N)``. Copies tensors and arrays, not the items of lists."""
    index = np.asarray(rows, dtype=np.int64)
    by_device: dict[torch.device, torch.Tensor] = {}
    picked: dict[str, Any] = {}
    for key, column in columns.items():
        if isinstance(column, torch.Tensor):
            if column.device not in by_device:
                by_device[column.device] = torch.from_numpy(index).to(column.device)
            picked[key] = _select(key, column, by_device[column.device])
        elif isinstance(column, np.ndarray):
            picked[key] = column[index]
        else:
            picked[key] = [column[row] for row in rows]
    return picked


def _select(key: str, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if not column.is_nested:
        if column.dtype in _UNSIGNED:
            return carrier(column).index_select(0, rows).view(column.dtype)
        return column.index_select(0, rows)
    values, offsets = _end_to_end(key, column)
    lengths = offsets.diff()[rows]
    cuts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    places = (offsets[rows] - cuts[:-1]).repeat_interleave(lengths) + torch.arange(int(cuts[-1]), device=cuts.device)
    return _jagged(carrier(values).index_select(0, places).view(values.dtype), cuts)


def _end_to_end(key: str, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A jagged column's values (T, ...) and int64 offsets (N + 1,), on its device."""
    values, offsets, lengths, dim = (
        jagged_parts(column) if column.layout is torch.jagged else (column, column, None, -1)
    )
    if lengths is not None or dim != 0:
        raise UnsupportedColumnError(
            f"column '{key}' is a nested tensor of layout {column.layout} whose rows do not lie end to end. Expected "
            "a torch.jagged one that is ragged on its first dim after the batch, without holes.",
            hint="torch.nested.as_nested_tensor(list(column.unbind()), layout=torch.jagged) makes one.",
        )
    return values, offsets.to(torch.int64)


def _jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    lengths = offsets.diff()
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=low, max_seqlen=high)
    return nested


def object_array(items: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A 1-D object array of items of any type."""
    array = np.empty(len(items), dtype=object)
    for position, item in enumerate(items):  # a slice assignment would unpack lists of equal length
        array[position] = item
    return array


def objects_of(column: Any, what: str) -> np.ndarray[Any, Any]:
    """A column of objects, in any container, as a 1-D object array."""
    if isinstance(column, NonTensorData):
        column = column.data
    if isinstance(column, np.ndarray):
        return column
    return object_array(column.tolist() if isinstance(column, NonTensorStack) else check_list(what, column))


def stack_or_nest(rows: Sequence[torch.Tensor | None], what: str = "stack_or_nest: the column") -> Any:
    """Rows as one column in new memory, on the device of the first: dense if all have the same shape, else jagged.

    Args:
        rows: N tensors (L, ...) or N scalars. None stands for a sample that has nothing there, such as one without
            images: its row has length 0.
        what: What messages call the column.

    Returns:
        A tensor. If all rows are None, a list of N empty lists: a put of them leaves the field's dtype and shape open,
        until a put says them.

    Raises:
        InvalidRequestError: There are no rows, or they differ in dtype, rank, or a dim other than their first.
    """
    like = next((row for row in rows if row is not None), None)
    if not len(rows):
        raise InvalidRequestError(f"{what} has no rows, so its dtype and shape are not known.")
    if like is None:
        return [[] for _ in rows]
    if not like.dim() and any(row is None for row in rows):
        raise InvalidRequestError(f"{what} has scalars and None. Expected rows of rank 1 or more beside None.")
    empty = like.new_empty((0, *like.shape[1:]))
    return dense_or_jagged(ragged_of_rows([empty if row is None else row for row in rows], what)).to(like.device)


def check_pad_value(what: str, value: Any, dtype: torch.dtype) -> None:
    """Refuses a pad value that a dtype cannot hold: an integer exactly, a float without becoming infinite."""
    try:
        stored = torch.full((), value, dtype=dtype, device="cpu").item()
        is_inexact = dtype.is_floating_point or dtype.is_complex
        fits = cmath.isfinite(stored) or not cmath.isfinite(value) if is_inexact else stored == value
    except (RuntimeError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise InvalidRequestError(f"{what} of {dtype} cannot be padded with {value!r}.")


# --- padded to jagged -------------------------------------------------------------------------------------------------


def to_nested_by_length(column: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Cuts the padding off a right-padded column.

    Args:
        column: (N, S, ...), any strides, padded to any width: a forward under sequence parallelism may round S up. Or
            jagged rows of exactly these lengths, which stay as they are.
        lengths: N integers of 0 to S.

    Returns:
        One jagged nested tensor of N rows (L, ...), in new memory, with cached min and max length.

    Raises:
        InvalidRequestError: The column has fewer than 2 dims, there is not one length per row, or a length is outside
            [0, S].
        InvalidTypeError: The dtype or kind of tensor is not carried.
    """
    return to_nested(cut_rows("the column", column, as_lengths("to_nested_by_length", lengths)))


#: The name of Megatron's users for it.
pack_per_token_field = to_nested_by_length


@not_compiled
def pack_jagged_fields(
    fields: TensorDictBase | Mapping[str, Any],
    *,
    lengths: torch.Tensor | Sequence[int] | None,
    token_aligned_fields: Collection[str] = (),
    starts: torch.Tensor | None = None,
) -> TensorDict:
    """Makes the token-aligned columns of a batch jagged. The others stay as they are.

    A column that is named in `schema.PER_TOKEN_FIELDS`, but has one value per sample, (N,) or (N, 1), stays too.

    Args:
        fields: Columns of N rows, of any kind that `put_samples` takes.
        lengths: N token counts; None: no column is made jagged.
        token_aligned_fields: Names of columns with one element per token on dim 1. Names that ``fields`` lacks are
            ignored, so that a declaration may cover more than one write.
        starts: (N,) int64, the place of each row's first token in dense columns. None: 0, as in right-padded ones.

    Returns:
        A TensorDict of batch size [N]. The jagged columns share their offsets, so that torch can combine them.

    Raises:
        InvalidRequestError: Sizes do not fit. The message names the field.
        InvalidTypeError: A column is neither a tensor nor one object per row.
    """
    check_columns("pack_jagged_fields: fields", fields)
    token_aligned_fields = check_list("pack_jagged_fields: token_aligned_fields", token_aligned_fields)
    columns: dict[str, Any] = {}
    for name in fields.keys():
        column = fields.get(name)
        if isinstance(column, NonTensorData) and isinstance(column.data, np.ndarray):
            column = column.data
        columns[name] = as_column(f"field '{name}'", column)
    counts = None if lengths is None else as_lengths("pack_jagged_fields", lengths)
    if counts is not None:
        offsets = offsets_of(counts)
        for name, cut in cut_columns(columns, token_aligned_fields, counts, starts).items():
            columns[name] = to_nested(Ragged(cut.values, offsets))
    size = None if counts is None else len(counts)
    for name, column in columns.items():
        if isinstance(column, np.ndarray) and column.ndim == 1:  # of objects
            columns[name] = column = object_column(list(column))
        if not isinstance(column, torch.Tensor | NonTensorStack):
            raise InvalidTypeError(
                f"field '{name}' is a non-tensor column: a {type(column).__name__}. Expected a tensor, or a list of "
                "one object per sample."
            )
        rows = column.size(0) if column.dim() else 0
        size = rows if size is None else size
        if rows != size:
            raise InvalidRequestError(f"field '{name}' has {rows} rows. Expected {size}, one per sample.")
    return TensorDict(columns, batch_size=[size or 0])


def cut_columns(
    columns: Mapping[str, Any], names: Collection[str], counts: torch.Tensor, starts: torch.Tensor | None = None
) -> dict[str, Ragged]:
    """The named columns, as far as they are there and have an element per token, cut by `cut_rows`."""
    return {
        name: cut_rows(f"field '{name}'", column, counts, starts)
        for name, column in columns.items()
        if name in names and isinstance(column, torch.Tensor) and not is_per_sample(name, column)
    }


def cut_rows(what: str, column: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor | None = None) -> Ragged:
    """The rows of a padded column, each of ``counts`` elements from ``starts`` on (None: 0). A jagged one must have
    these lengths already."""
    offsets = offsets_of(counts)
    if column.is_nested:
        rows = rows_of(column, what)
        if not torch.equal(rows.offsets, offsets):
            raise InvalidRequestError(f"{what}: its {len(rows)} rows are jagged already, but not of the given lengths.")
        return rows
    if column.dim() < 2:
        raise InvalidRequestError(f"{what} is of shape {tuple(column.shape)}. Expected a padded tensor (N, S, ...).")
    if len(counts) != len(column):
        raise InvalidRequestError(f"{what}: {len(counts)} lengths for {len(column)} rows. Expected one per row.")
    width = column.shape[1]
    ends = counts if starts is None else counts + starts
    wrong = torch.nonzero((counts < 0) | (ends > width))
    if len(wrong):
        row = int(wrong[0])
        raise InvalidRequestError(
            f"{what}: row {row} has length {int(counts[row])}, but the column is padded to {width}. Expected lengths "
            f"of 0 to {width}."
        )
    begins = torch.arange(len(counts), device="cpu") * width + (0 if starts is None else starts)
    return gather_rows(host_tensor(column, what).flatten(0, 1), begins, offsets)


def rows_of(column: torch.Tensor, what: str) -> Ragged:
    """The rows of a jagged, nested or dense column, joined end to end on the host."""
    rows = plain_rows(column, what)
    if isinstance(rows, torch.Tensor) and rows.dim() < 2:
        raise InvalidRequestError(f"{what} is of shape {tuple(column.shape)}. Expected rows of rank 1 or more.")
    return as_ragged(rows)


def rollouts_of(sample_ids: Sequence[str]) -> tuple[list[str], torch.Tensor]:
    """The rollouts of rows, to give all rows of a rollout what was worked out for it, such as its advantage.

    Args:
        sample_ids: N ids, such as ``q0_g1/2`` for row 2 of the rollout ``q0_g1``. Another id is a rollout of one row.

    Returns:
        The R rollouts, in the order of their first rows; and (N,) int64, for each row the index of its rollout.

    Examples:
        >>> rollouts, rollout_of_row = rollouts_of(["q0_g0/0", "q0_g0/1", "q0_g1/0"])
        >>> rollouts
        ['q0_g0', 'q0_g1']
        >>> torch.tensor([0.5, -0.5])[rollout_of_row]
        tensor([ 0.5000,  0.5000, -0.5000])
    """
    names = [rollout_of(name) for name in checked_as("rollouts_of: sample_ids", list[Name], sample_ids)]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return list(places), torch.tensor([places[name] for name in names], dtype=torch.int64, device="cpu")


def response_from_nested(full: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """The response part of a per-token model output, shifted left by one token.

    A model's output at a position is for the next token. So the outputs for the last R tokens of a row are at the R
    positions that end one before the row's end.

    Args:
        full: Jagged (or dense) rows of prompt and response, (L, ...).
        response_mask: Jagged (or dense) rows of response length, (R, ...); only the lengths count.

    Returns:
        One jagged nested tensor of rows (R, ...), in new memory.

    Raises:
        InvalidRequestError: Row counts differ, or a response has no token before it.
    """
    rows, mask = rows_of(full, "full"), rows_of(response_mask, "response_mask")
    if len(rows) != len(mask):
        raise InvalidRequestError(
            f"response_from_nested: full has {len(rows)} rows and response_mask {len(mask)}. Expected one "
            "response per row."
        )
    wide, need = rows.lengths, mask.lengths
    short = np.flatnonzero((need > 0) & (need >= wide))
    if len(short):
        row = int(short[0])
        raise InvalidRequestError(
            f"response_from_nested: row {row} has {wide[row]} tokens and a response of {need[row]}. Expected at least "
            "one token before the response."
        )
    starts = torch.from_numpy(np.where(need > 0, rows.offsets.numpy()[1:] - need - 1, 0))
    return to_nested(gather_rows(rows.values, starts, offsets_of(torch.from_numpy(need))))


# --- numpy and Arrow --------------------------------------------------------------------------------------------------

#: Dtypes that numpy lacks, and the smallest one of numpy's that holds all of their values.
_WIDER: Final = {
    **{dtype: torch.float32 for dtype in ALL_DTYPES if dtype.is_floating_point and dtype.itemsize == 1},
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


def to_numpy(columns: TensorDictBase | Mapping[str, Any]) -> dict[str, Any]:
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
    check_columns("to_numpy: columns", columns)
    converted: dict[str, Any] = {}
    for name in columns.keys():
        column = _plain(name, columns.get(name))
        if isinstance(column, Ragged):
            values = column.values.numpy()
            converted[name] = [values[start:stop] for start, stop in pairwise(column.offsets.tolist())]
        else:
            converted[name] = column.numpy() if isinstance(column, torch.Tensor) else column
    return converted


def to_arrow(
    columns: TensorDictBase | Mapping[str, Any],
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
    check_columns("to_arrow: columns", columns)
    ids = None if ids is None else checked_as("to_arrow: ids", list[Name], ids)
    table = {name: _arrow(name, _plain(name, columns.get(name))) for name in columns.keys()}
    size = len(next(iter(table.values()))) if table else len(ids or tags or ())
    if ids is not None and len(ids) != size:
        raise InvalidRequestError(f"to_arrow: ids must be one per row, got {len(ids)} for {size} rows.")
    tags = None if tags is None else check_tags(tags, size)
    names = dict.fromkeys(name for row in tags or () for name in row)
    twice = [name for name in (*names, *([] if ids is None else ["sample_id"])) if name in table]
    if twice or (ids is not None and "sample_id" in names):
        raise InvalidRequestError(
            f"to_arrow: {preview(twice or ['sample_id'])} would be two columns. Give one of them another name."
        )
    first = {} if ids is None else {"sample_id": _arrow("sample_id", object_array(list(ids)))}
    last = {name: _arrow(name, object_array([row.get(name) for row in tags or ()])) for name in names}
    return pa.table({**first, **table, **last})


def _plain(name: str, column: Any) -> Ragged | torch.Tensor | np.ndarray[Any, Any]:
    """A column in host memory, of a dtype that numpy has; objects as an array."""
    what = f"field '{name}'"
    column = as_column(what, column)
    if not isinstance(column, torch.Tensor):
        return objects_of(column, what)
    column = column.to(_WIDER.get(column.dtype, column.dtype))
    return plain_rows(column, what)


def _arrow(name: str, column: Ragged | torch.Tensor | np.ndarray[Any, Any]) -> Any:
    import pyarrow as pa

    if isinstance(column, np.ndarray):
        try:
            return pa.array(column.tolist())
        except (pa.ArrowException, UnicodeEncodeError) as error:  # the latter: half of a surrogate pair
            raise InvalidTypeError(
                f"field '{name}' holds objects that Arrow has no common type for: {error}.",
                hint="Leave the field out, or turn its items into strings: json.dumps(item).",
            ) from error
    if isinstance(column, torch.Tensor) and column.dim() > 1:  # (N, L, ...)
        column = as_ragged(column)
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
