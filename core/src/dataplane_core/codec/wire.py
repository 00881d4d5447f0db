"""Converts columns to a backend's wire format and back, and makes digests of their cells.

The form of a field's cells on the wire depends on its `FieldSpec` and the `WireFormat`, so any process can read what
another wrote. Only the width of integers depends on the data, and cells carry it with them (`compact`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensorclass

from dataplane_core.codec.cells import (
    KIND_OBJECT,
    KIND_TENSOR,
    check_items,
    decode_items,
    encode_item,
    encode_items,
    frame_rows,
    unframe_rows,
)
from dataplane_core.codec.compact import (
    LARGE_CELL_BYTES,
    LEAST_PROBED_BYTES,
    Repeats,
    is_narrow,
    narrowed,
    row_digests,
    row_probes,
    same_memory,
    widened,
)
from dataplane_core.codec.rows import (
    EMPTY_LISTS,
    EXACT_IN_FLOAT32,
    Columns,
    EmptyLists,
    TensorRows,
    cell_nbytes,
    empty_rows,
    num_rows,
    object_column,
    spread,
    take_plain,
    tensor_columns,
)
from dataplane_core.codec.tensors import (
    DTYPE_CODES,
    BytesLike,
    as_ragged,
    byte_array,
    byte_view,
    bytes_of,
    check_ragged,
    dense_or_ragged,
    host_tensor,
    join_bytes,
    offsets_of,
    plain_rows,
    ragged_of_rows,
    take_ragged,
)
from dataplane_core.digests import fast_digest
from dataplane_core.errors import BackendError, DataPlaneError, FrameError, InvalidRequestError, InvalidTypeError
from dataplane_core.spec import FieldSpec, Ragged, SharedRows, WireColumn, WireFormat

_OBJECTS: Final = FieldSpec.of_objects()
#: Only columns of these native items are kept by content: to know the size of others takes too long.
_BULKY: Final = frozenset({bytes, torch.Tensor})
_ENCODED: Final = FieldSpec("tensor", "uint8", 1)
_Rows: TypeAlias = Ragged | torch.Tensor
_Sums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


def _values(rows: _Rows) -> torch.Tensor:
    return rows.values if isinstance(rows, Ragged) else rows


def _mapped(rows: _Rows, change: Callable[[torch.Tensor], torch.Tensor]) -> _Rows:
    """Rows with their values changed, which keep their shape."""
    return Ragged(change(rows.values), rows.offsets) if isinstance(rows, Ragged) else change(rows)


def _spec_of(rows: _Rows) -> FieldSpec:
    shape = rows.values.shape if isinstance(rows, Ragged) else rows.shape[1:]
    return FieldSpec.of_cells(_values(rows).dtype, tuple(shape))


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode_columns(
    fields: TensorDictBase | Mapping[str, Any],
    num_samples: int,
    wire: WireFormat,
    *,
    allow_pickle: bool = False,
    narrow: bool | Mapping[str, bool] = True,
    share_above: int | Mapping[str, int | None] | None = LARGE_CELL_BYTES,
) -> tuple[dict[str, WireColumn | SharedRows], dict[str, FieldSpec]]:
    """Converts columns, as `as_columns` makes them, to the form that a backend's hooks take; also returns the specs of
    the cells before that. Refuses columns as the contract says of a put. The options are those of the config:
    ``narrow`` and ``share_above`` for all fields, or by field, where a field that is not named has the default.

    A column of large cells is `SharedRows` if some of them are equal, or if the store keeps them by content. Tensors
    that need no conversion alias the caller's memory, and native object items are the caller's objects: a backend that
    keeps them must copy them (`copy_item`). Frames, which may be views of one buffer, and encoded objects are new
    memory.
    """
    columns: dict[str, WireColumn | SharedRows] = {}
    specs: dict[str, FieldSpec] = {}
    for name in fields.keys():
        leaf: Any = fields.get(name)
        least = share_above.get(name, LARGE_CELL_BYTES) if isinstance(share_above, Mapping) else share_above
        least = least if wire.shared_rows else None
        if isinstance(leaf, (torch.Tensor, Ragged, TensorRows)):
            rows, same = _ingest(name, leaf, num_samples, least)
            values, shape = (rows.values, rows.values.shape) if isinstance(rows, Ragged) else (rows, rows.shape[1:])
            is_open = isinstance(fields, Columns) and name in fields.ints and _are_ints_for_floats(values)
            specs[name] = FieldSpec.of_ints(len(shape)) if is_open else FieldSpec.of_cells(values.dtype, tuple(shape))
            if (wire.bytes or wire.narrow) and (narrow if isinstance(narrow, bool) else narrow.get(name, True)):
                values = narrowed(values)
                rows = Ragged(values, rows.offsets) if isinstance(rows, Ragged) else values
            columns[name] = _sent(rows, specs[name], same, wire, least)
        elif isinstance(leaf, EmptyLists):
            _check_rows(name, len(leaf), num_samples)
            empty = torch.empty((num_samples, 0), dtype=torch.uint8, device="cpu")
            specs[name], columns[name] = EMPTY_LISTS, _on_wire(empty, wire)
        else:
            items = _object_items(name, leaf, num_samples)
            specs[name] = _OBJECTS
            columns[name] = _encode_objects(items, name, wire, least, allow_pickle)
    return columns, specs


def _sent(
    rows: _Rows, spec: FieldSpec, same: Repeats | None, wire: WireFormat, least: int | None
) -> WireColumn | SharedRows:
    """Rows on the wire. Of large ones, of ``least`` bytes on average, those that differ, with their digests if the
    store keeps them by content. ``same``: which rows these already are."""
    digests = None
    is_large = least is not None and _values(rows).nbytes >= max(1, least * len(rows))
    # not numbers of tokens: hardly any are put again
    by_content = wire.by_content and (spec.rank != 1 or spec.dtype == "uint8")
    if is_large and (by_content or len(rows) > 1):
        rows, same, digests = _differing(rows, same, rows, spec, by_probe=wire.by_probe or not by_content)
    encoded = _on_wire(rows, wire, KIND_OBJECT if spec.kind == "object" else KIND_TENSOR)
    # cells that leave their field open are read as what it became, so those of another put are not the same
    return _with_index(encoded, same, digests if by_content and not spec.lists else None)


def _differing(
    rows: Any, same: Repeats | None, encoded: _Rows, spec: FieldSpec, *, by_probe: bool
) -> tuple[Any, Repeats | None, list[bytes]]:
    """Of equal rows the first; which rows these are then, and their digests. ``encoded``: the bytes of the rows.

    ``by_probe``: large rows have their probes in place of digests; of different ones with the same probe, the first.
    """
    is_probed = by_probe and _values(encoded).nbytes >= LEAST_PROBED_BYTES * len(encoded)
    probes = row_probes(encoded, spec.to_text()) if is_probed else [b""] * len(encoded)
    counts = Counter(probes)
    alike = [row for row, probe in enumerate(probes) if not probe or counts[probe] > 1]
    if not alike:
        return rows, same, probes
    whole = dict(zip(alike, row_digests(encoded, spec.to_text(), alike), strict=True))
    equal = Repeats.by_key([whole.get(row, probe) for row, probe in enumerate(probes)])
    firsts = range(len(probes)) if equal is None else equal.firsts
    first_of = {probes[row]: row for row in reversed(firsts)}
    digests = [probes[row] if is_probed and first_of[probes[row]] == row else whole[row] for row in firsts]
    return (rows, same, digests) if equal is None else (take_plain(rows, equal.firsts), equal.after(same), digests)


def column_digests(column: WireColumn, spec: FieldSpec, numbers: Sequence[int]) -> list[bytes]:
    """Digests of some cells of a column on a wire of tensors: `row_digests`."""
    if isinstance(column, list):
        column, numbers = _encoded_items([column[row] for row in numbers], "", allow_pickle=False), range(len(numbers))
    return row_digests(column, spec.to_text(), numbers)


def _with_index(rows: WireColumn, same: Repeats | None, digests: list[bytes] | None) -> WireColumn | SharedRows:
    if same is None and digests is None:
        return rows
    return SharedRows(rows, list(range(len(rows))) if same is None else same.index, digests)


def _ingest(
    name: str, leaf: torch.Tensor | Ragged | TensorRows, num_samples: int, least: int | None
) -> tuple[_Rows, Repeats | None]:
    """The plain rows of a leaf. Of large ones in the same memory one, and which rows these are."""
    what = f"put_samples refused: field '{name}'"
    if isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
        raise InvalidRequestError(f"{what} is a scalar tensor. Expected {num_samples} rows, one per sample id.")
    _check_rows(name, num_rows(leaf), num_samples)
    same = None
    if isinstance(leaf, Ragged):
        rows: _Rows = check_ragged(leaf, what)
    elif isinstance(leaf, TensorRows):  # large rows
        same = None if least is None else same_memory(leaf)
        try:
            rows = ragged_of_rows(leaf if same is None else [leaf[row] for row in same.firsts], what)
        except DataPlaneError:
            rows = leaf.joined(what)  # raises the error with the numbers of all rows
    else:
        is_plain = leaf.layout == torch.strided and not leaf.is_nested
        expanded = is_plain and num_samples > 1 and leaf.stride(0) == 0
        if least is not None and expanded and leaf[0].nbytes >= least:
            same, leaf = Repeats([0], [0] * num_samples), leaf[:1]
        rows = plain_rows(leaf, what)
    return rows, same


def _are_ints_for_floats(values: torch.Tensor) -> bool:
    """Whether these are int64 numbers, each of them the same as a float."""
    if values.dtype != torch.int64 or values.numel() == 0:
        return False
    least, most = values.aminmax()
    return int(least) >= -EXACT_IN_FLOAT32 and int(most) <= EXACT_IN_FLOAT32


def _object_items(name: str, leaf: Any, num_samples: int) -> list[Any]:
    what = f"put_samples refused: field '{name}'"
    # TensorDict wraps an object array in NonTensorData
    data = leaf.data if isinstance(leaf, NonTensorData) else leaf
    if isinstance(data, NonTensorStack) or (
        isinstance(data, np.ndarray) and data.dtype == np.dtype(object) and data.ndim == 1
    ):
        items: list[Any] = data.tolist()
    else:
        if isinstance(data, TensorDictBase) or is_tensorclass(data):
            kind = f"a nested {type(data).__name__}"
        elif isinstance(data, np.ndarray):
            kind = f"an ndarray of dtype {data.dtype} and shape {data.shape}"
        else:
            kind = f"a {type(data).__name__}{' for all rows' if data is not leaf else ''}"
        raise InvalidTypeError(
            f"{what} is a non-tensor leaf: {kind}. Expected a tensor, or a list, a NonTensorStack or a 1-D "
            f"np.ndarray(dtype=object) of {num_samples} items.",
            hint="Write a list of one item per sample, torch.as_tensor(x) for numbers.",
        )
    _check_rows(name, len(items), num_samples)
    return items


def _check_rows(name: str, count: int, num_samples: int) -> None:
    if count != num_samples:
        raise InvalidRequestError(
            f"put_samples refused: field '{name}' has {count} rows. Expected {num_samples}, one row per sample id."
        )


def _encode_objects(
    items: list[Any], name: str, wire: WireFormat, least: int | None, allow_pickle: bool
) -> WireColumn | SharedRows:
    """Items on the wire, as `_sent`."""
    same = None if least is None else same_memory(items)
    firsts = items if same is None else [items[row] for row in same.firsts]
    if wire.objects == "native" and not wire.bytes:
        check_items(items, name, allow_pickle=allow_pickle)
        is_bulky = least is not None and wire.by_content and set(map(type, firsts)) <= _BULKY
        is_small = same is None and not is_bulky
        if is_small or cell_nbytes(firsts, len(firsts)).sum() < (least or 0) * len(firsts):
            return items
        digests = None
        if is_bulky:
            encoded = _encoded_items(firsts, name, allow_pickle)
            firsts, same, digests = _differing(firsts, same, encoded, _OBJECTS, by_probe=wire.by_probe)
        return _with_index(firsts, same, digests)
    try:
        rows = _encoded_items(firsts, name, allow_pickle)
    except DataPlaneError:
        rows = _encoded_items(items, name, allow_pickle)  # raises the error with the number of the row
    if same is not None and rows.values.nbytes < (least or 0) * len(firsts):
        rows, same = take_ragged(rows, same.index), None
    return _sent(rows, _OBJECTS, same, wire, least)


def _encoded_items(items: Sequence[Any], name: str, allow_pickle: bool) -> Ragged:
    """Items as uint8 rows."""
    encoded = encode_items(items, name, allow_pickle=allow_pickle)
    offsets = offsets_of(list(map(len, encoded)))
    return Ragged(join_bytes(encoded, torch.uint8, (int(offsets[-1]),)), offsets)


def _on_wire(rows: _Rows, wire: WireFormat, kind: int = KIND_TENSOR) -> WireColumn:
    if wire.bytes:
        return frame_rows(rows, kind)
    if isinstance(rows, Ragged):
        return dense_or_ragged(rows)
    return rows.unsqueeze(-1) if rows.dim() == 1 and wire.promote_1d else rows


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode_columns(
    columns: Mapping[str, WireColumn | SharedRows],
    specs: Mapping[str, FieldSpec],
    num_samples: int,
    wire: WireFormat,
    *,
    allow_pickle: bool = False,
    share_rows: bool = False,
) -> dict[str, Any]:
    """Checks what a backend returned for N samples, at least 1, and converts it to what a read of the contract gives.

    Takes ownership: what needs no conversion is returned as it is. A column that was dense when it was put may come
    back as `Ragged`. A reply that does not fit its specs raises `BackendError`, and malformed bytes `FrameError`.
    """
    decoded: dict[str, Any] = {}
    for name, column in columns.items():
        spec = specs.get(name)
        if spec is None:
            raise BackendError(f"get_samples: the backend's reply has no spec for field '{name}'.")
        index, count = None, num_samples
        if isinstance(column, SharedRows):
            index, count = column.index, len(column.rows)
            _check_count(name, len(index), num_samples)
            if min(index) < 0 or max(index) >= count:
                raise _mismatch(name, f"an index that does not lie within its {count} rows", "a row for each sample")
            column = column.rows
        try:
            if spec.lists == "empty":
                rows: Any = empty_rows(spec, count)
            elif spec.kind == "object":
                rows = _decode_objects(name, column, count, wire, allow_pickle)
            else:
                rows = _decode_tensor(name, column, spec.stored, count, wire)
                if spec.dtype != spec.stored.dtype:
                    rows = _mapped(rows, partial(torch.Tensor.to, dtype=spec.torch_dtype))
            decoded[name] = rows if index is None else spread(rows, index, share=share_rows)
        except FrameError as error:
            row = error.row
            error.add_place([name], row if row is None or index is None else list(index).index(row))
            raise
    return tensor_columns(decoded)


def _mismatch(name: str, held: str, expected: str) -> BackendError:
    return BackendError(f"get_samples: the backend's reply for field '{name}' has {held}. Expected {expected}.")


def _check_count(name: str, count: int, num_samples: int) -> None:
    if count != num_samples:
        raise _mismatch(name, f"{count} rows", f"{num_samples}, one per sample id")


def _list_of(name: str, column: Any, num_samples: int, kinds: tuple[type, ...], what: str) -> list[Any]:
    """The column, a list of values of some types; of any, if ``kinds`` are none."""
    strange = set(map(type, column)) if isinstance(column, list) else {type(column)}
    if not isinstance(column, list) or (kinds and not all(issubclass(kind, kinds) for kind in strange)):
        kind = next(kind for kind in strange if not issubclass(kind, kinds))
        raise _mismatch(name, f"a {kind.__name__}", f"a list of {what}")
    _check_count(name, len(column), num_samples)
    return column


def _rows_of(name: str, column: Any, num_samples: int) -> _Rows:
    """A reply's rows as they are, one per sample."""
    if not isinstance(column, (torch.Tensor, Ragged)) or (isinstance(column, torch.Tensor) and column.is_nested):
        kind = "nested tensor" if isinstance(column, torch.Tensor) else type(column).__name__
        raise _mismatch(name, f"a {kind}", "a dense tensor or Ragged")
    if isinstance(column, torch.Tensor) and column.dim() == 0:
        raise _mismatch(name, "a scalar tensor", f"{num_samples} rows")
    _check_count(name, len(column), num_samples)
    what = f"the column '{name}' of the backend's reply"
    try:
        return check_ragged(column, what) if isinstance(column, Ragged) else host_tensor(column, what)
    except DataPlaneError as error:
        raise BackendError(f"get_samples: {error.message}") from error


def _decode_objects(name: str, column: Any, num_samples: int, wire: WireFormat, allow_pickle: bool) -> NonTensorStack:
    if wire.bytes:
        kind, rows = unframe_rows(_list_of(name, column, num_samples, _FRAMES, "frames"))
        if kind != KIND_OBJECT:
            raise _mismatch(name, "framed tensors", "framed objects")
    elif wire.objects == "native":
        return object_column(_list_of(name, column, num_samples, (), "items"))
    else:
        rows = _rows_of(name, column, num_samples)
        if _spec_of(rows) != _ENCODED:
            raise _mismatch(name, _spec_of(rows).describe(), f"{_ENCODED.describe()} on the wire")
    encoded = as_ragged(rows)
    data = byte_view(encoded.values)
    items = [data[start:stop] for start, stop in pairwise(encoded.offsets.tolist())]
    return object_column(decode_items(items, allow_pickle=allow_pickle))


_FRAMES: Final = (bytes, bytearray, memoryview)


def _decode_tensor(name: str, column: Any, spec: FieldSpec, num_samples: int, wire: WireFormat) -> _Rows:
    dtype: Any = getattr(torch, spec.dtype, None)
    if dtype not in DTYPE_CODES:
        raise BackendError(f"get_samples: the backend's spec for field '{name}' has an unknown dtype '{spec.dtype}'.")
    if wire.bytes:
        kind, rows = unframe_rows(_list_of(name, column, num_samples, _FRAMES, "frames"), dtype)
        if kind != KIND_TENSOR:
            raise _mismatch(name, "framed objects", spec.describe())
    else:
        rows = _rows_of(name, column, num_samples)
        if wire.promote_1d and spec.rank == 0 and isinstance(rows, torch.Tensor) and rows.shape == (num_samples, 1):
            rows = rows.view(num_samples)
    held, values = _spec_of(rows), _values(rows)
    is_same = values.dtype == dtype or ((wire.bytes or wire.narrow) and is_narrow(values.dtype, dtype))
    if not is_same or (held.rank, held.trailing) != (spec.rank, spec.trailing):
        raise _mismatch(name, held.describe(), spec.describe())
    return rows if values.dtype == dtype else _mapped(rows, partial(widened, dtype=dtype))


# --- digests ----------------------------------------------------------------------------------------------------------


def cell_digests(column: WireColumn | SharedRows, spec: FieldSpec, wire: WireFormat) -> _Sums:
    """A digest (`fast_digest`) of each cell of an encoded column, (N,) uint64.

    On a wire of tensors they are digests of the cells' bytes in the dtype that was put, whatever their container and
    their width on the wire. A scalar of up to 8 bytes is its own digest. On a wire of bytes they are digests of the
    frames. An object that only pickle could encode has the digest of no bytes.
    """
    if isinstance(column, SharedRows):
        digests: _Sums = cell_digests(column.rows, spec, wire)[np.asarray(column.index)]
        return digests
    if isinstance(column, list):
        cells: Iterable[BytesLike] = column if wire.bytes else map(_item_bytes, column)
        return np.fromiter(map(fast_digest, cells), np.uint64, len(column))
    spec, values = spec.stored, _values(column)
    if _is_own_digest(spec) and values.numel() == len(column):
        wide = widened(values, spec.torch_dtype).contiguous()
        words = np.zeros((len(column), 8), dtype=np.uint8)
        words[:, : wide.itemsize] = byte_array(wide).reshape(len(column), -1)
        return words.view("<u8").reshape(-1).astype(np.uint64, copy=False)
    data, cuts = bytes_of(column)
    if spec.kind == "tensor" and is_narrow(values.dtype, spec.torch_dtype):
        wide_dtype = torch.empty(0, dtype=spec.torch_dtype, device="cpu").numpy().dtype
        cells = _wide_cells(values.reshape(-1).numpy(), cuts // values.itemsize, wide_dtype)
    else:
        cells = (data.data[start:stop] for start, stop in pairwise(cuts.tolist()))
    return np.fromiter(map(fast_digest, cells), np.uint64, len(column))


def scalar_of_digest(digest: int, spec: FieldSpec) -> torch.Tensor | None:
    """The scalar whose digest this is, on the host. None: cells of this field are hashed.

    Example:
        >>> scalar_of_digest(7, FieldSpec("tensor", "int64", 0, ()))
        tensor(7)
    """
    spec = spec.stored
    if not _is_own_digest(spec):
        return None
    return torch.frombuffer(bytearray(digest.to_bytes(8, "little")), dtype=spec.torch_dtype, count=1)[0]


def _wide_cells(values: np.ndarray[Any, Any], cuts: Any, dtype: np.dtype[Any]) -> Iterator[BytesLike]:
    """The bytes of cells in the dtype of their field: one after the other in the same memory, which stays in the
    processor's cache."""
    wide = np.empty(int(np.diff(cuts).max()), dtype)
    data = wide.view(np.uint8).data
    for start, stop in pairwise(cuts.tolist()):
        wide[: stop - start] = values[start:stop]
        yield data[: (stop - start) * wide.itemsize]


def _is_own_digest(spec: FieldSpec) -> bool:
    return spec.kind != "object" and spec.rank == 0 and spec.torch_dtype.itemsize <= 8


def _item_bytes(item: Any) -> bytes:
    try:
        return encode_item(item)
    except InvalidTypeError:  # allow_pickle is on, but a native object is not pickled
        return b""
