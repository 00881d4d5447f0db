"""Arrow columns as columns, without a copy where Arrow's memory can be a tensor's. It imports pyarrow: import it late.

Shape legend: ``N`` rows, ``T`` elements of all rows together, ``L`` a row's own length.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import torch

from dataplane_core.codec.lists import column_of_array, column_of_list
from dataplane_core.codec.tensors import dense_or_ragged, offsets_of
from dataplane_core.errors import DataPlaneError, InvalidTypeError
from dataplane_core.spec import Ragged

#: Under these names, a column's schema keeps an extension type that this process does not know.
_NAME: Final = b"ARROW:extension:name"
_PARAMETERS: Final = b"ARROW:extension:metadata"
_LISTS: Final = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def column_of_arrow(what: str, column: Any, metadata: Any = None) -> Any:
    """The column that an Arrow array (or chunked array) of N rows stands for.

    - Numbers: a tensor (N,) of their dtype. Lists of numbers: a tensor (N, L) if all rows are equally long, else
      `Ragged`. Lists may hold lists of a fixed size, or tensors of one shape, which are trailing dims. Values of one
      chunk are not copied; chunks are joined first. Bools have one bit in Arrow, so they are copied.
    - Tensors (Arrow's own of a fixed or variable shape, those of Ray and of ``datasets``): a tensor (N, ...) if all
      rows have one shape, else the rows as a list of tensors.
    - ``bool8``: bools. ``json``: what the text says, an object per row. ``uuid``: its string.
    - Dictionaries and run-end encoded arrays: what their values are.
    - Anything else (strings, binary, structs, lists of them): an object per row, by `column_of_list`.

    Args:
        what: The call and the field. Messages begin with it.
        column: The array.
        metadata: That of the field in its table's schema. It names an extension type that this process does not know.

    Raises:
        InvalidTypeError: A column of numbers or tensors has nulls, or holds times or decimals, or a column has another
            extension type.
    """
    column = _joined(column)
    kind = column.type
    if (metadata and _NAME in metadata) or isinstance(kind, pa.BaseExtensionType):
        values = _values_of_extension(what, column, metadata or {})
        return column_of_list(what, values) if isinstance(values, list) else values
    _holds_extensions(what, kind)  # refuses what is not known
    innermost = kind
    while isinstance(innermost, _LISTS):
        innermost = innermost.value_type
    if pa.types.is_temporal(innermost) or pa.types.is_decimal(innermost):
        raise InvalidTypeError(
            f"{what} is an Arrow column of {kind}, which torch lacks.",
            hint="Cast it: column.cast(pyarrow.int64()), or to pyarrow.float64() or pyarrow.string().",
        )
    if _is_number(kind):
        _refuse_nulls(what, column)
        return column_of_array(what, column.to_numpy(zero_copy_only=False))
    if not isinstance(kind, _LISTS) or not _has_one_shape(kind.value_type):
        return column_of_list(what, _items(what, column))
    _refuse_nulls(what, column)
    cells = column_of_arrow(what, column.flatten())
    if pa.types.is_fixed_size_list(kind):
        return cells.reshape(len(column), kind.list_size, *cells.shape[1:])
    return dense_or_ragged(Ragged(cells.contiguous(), offsets_of(_lengths(column))))


def _joined(column: Any) -> Any:
    """One array of plain values: chunks joined, dictionaries and runs decoded."""
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return _joined(column.dictionary_decode()) if pa.types.is_dictionary(column.type) else column


def _items(what: str, column: Any) -> list[Any]:
    """An object per row. Those of extension types, also inside lists and structs, are what these stand for."""
    column = _joined(column)
    if not _holds_extensions(what, column.type):
        return column.to_pylist()  # type: ignore[no-any-return] # pyarrow has no types
    if column.null_count:
        items = iter(_items(what, column.drop_null()))
        return [next(items) if valid else None for valid in column.is_valid().to_pylist()]
    if isinstance(column.type, pa.BaseExtensionType):
        values = _values_of_extension(what, column, {})
        if not isinstance(values, torch.Tensor):
            return values  # type: ignore[no-any-return] # pyarrow has no types
        return values.tolist() if values.dim() == 1 else list(values.unbind())
    if isinstance(column.type, _LISTS):
        cells = iter(_items(what, column.flatten()))
        return [[next(cells) for _ in range(length)] for length in _lengths(column).tolist()]
    if pa.types.is_struct(column.type):
        names = [field.name for field in column.type]
        columns = [_items(what, part) for part in column.flatten()]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    raise InvalidTypeError(
        f"{what} is an Arrow column of {column.type}. Expected extension types only in lists and structs."
    )


def _lengths(lists: Any) -> torch.Tensor:
    return torch.tensor(pc.list_value_length(lists).to_numpy(), dtype=torch.int64, device="cpu")


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _has_one_shape(kind: Any) -> bool:
    """Whether values of a type are numbers, or tensors of one shape, so that lists of them can be joined."""
    if pa.types.is_fixed_size_list(kind):
        return _has_one_shape(kind.value_type)
    if not isinstance(kind, pa.BaseExtensionType):
        return _is_number(kind)
    read = _EXTENSIONS.get(kind.extension_name)
    return read is _bools or (read is _tensors_of_one_shape and _parameters(kind)["shape"][0] is not None)


def _refuse_nulls(what: str, cells: Any) -> None:
    if cells.null_count:
        raise InvalidTypeError(
            f"{what} is an Arrow column of numbers with nulls: {cells.null_count} of {len(cells)} "
            f"{'lists' if isinstance(cells.type, _LISTS) else 'values'}, the first at {cells.is_null().index(True)}. "
            "Expected a value everywhere.",
            hint="Write column.fill_null(value), or table.drop_null() without these rows and their sample ids, or "
            "NonTensorStack(*column.to_pylist()) for one object per sample.",
        )


# --- extension types --------------------------------------------------------------------------------------------------


def _values_of_extension(what: str, column: Any, metadata: Mapping[bytes, bytes]) -> Any:
    """What an array of an extension type stands for: a tensor of N rows, `Ragged`, or a list of N items.

    Args:
        what: As for `column_of_arrow`.
        column: An array of the type; or what its values are stored as, with ``metadata``.
        metadata: As for `column_of_arrow`.
    """
    source, storage = metadata.get(_PARAMETERS, b""), column
    name = metadata.get(_NAME, b"").decode(errors="replace")
    if isinstance(column.type, pa.BaseExtensionType):
        name, source, storage = column.type.extension_name, column.type, column.storage
    read = _EXTENSIONS.get(name)
    if read is None:
        raise InvalidTypeError(
            f"{what} is an Arrow column of the extension type '{name}', which is not known. Expected "
            f"{', '.join(_EXTENSIONS)}.",
            hint="Write what its values mean, as a tensor, an array or a list. Write column.storage if they are what "
            "they are stored as.",
        )
    try:
        return read(what, storage, _parameters(source))
    except DataPlaneError:
        raise
    except (ValueError, LookupError, RuntimeError) as error:
        raise InvalidTypeError(
            f"{what} is an Arrow column of the extension type '{name}', and cannot be read: {error}.",
            hint="Write its values as a tensor, an array or a list.",
        ) from error


def _parameters(source: Any) -> Mapping[str, Any]:
    """The parameters of an extension type: ``shape`` and ``permutation``, where it has them."""
    if hasattr(source, "shape"):
        return {"shape": source.shape, "permutation": getattr(source, "permutation", None)}
    if not isinstance(source, bytes):
        source = source.__arrow_ext_serialize__() if hasattr(source, "__arrow_ext_serialize__") else b""
    parameters = json.loads(source or b"{}")
    if isinstance(parameters, list):  # Ray's have the shape, those of `datasets` the shape and the dtype
        return {"shape": parameters[0] if isinstance(parameters[0], list) else parameters}
    return parameters if isinstance(parameters, dict) else {}


def _tensors_of_one_shape(what: str, storage: Any, parameters: Mapping[str, Any]) -> Any:
    """(N, ...). If the first dim of the shape is None, rows may differ in it."""
    lengths = _lengths(storage) if parameters["shape"][0] is None else None
    num_rows, shape = len(storage), parameters["shape"]
    while isinstance(storage.type, _LISTS):
        _refuse_nulls(what, storage)
        storage = storage.flatten()
    if not _is_number(storage.type):
        raise ValueError(f"its tensors hold {storage.type}, which are no numbers")
    values = column_of_arrow(what, storage)
    if lengths is not None:
        return dense_or_ragged(Ragged(values.reshape(int(lengths.sum()), *shape[1:]), offsets_of(lengths)))
    return _permuted(values.reshape(num_rows, *shape), parameters, num_batch=1)


def _tensors_of_any_shape(what: str, storage: Any, parameters: Mapping[str, Any]) -> list[torch.Tensor]:
    """Rows of a shape of their own, stored as their values and their shapes."""
    _refuse_nulls(what, storage)
    columns = dict(zip([field.name for field in storage.type], storage.flatten(), strict=True))
    rows = column_of_arrow(what, columns["data"].flatten()).split_with_sizes(_lengths(columns["data"]).tolist())
    shapes = columns["shape"].cast(pa.list_(pa.int64())).to_pylist()
    return [_permuted(row.reshape(shape), parameters) for row, shape in zip(rows, shapes, strict=True)]


def _permuted(values: torch.Tensor, parameters: Mapping[str, Any], num_batch: int = 0) -> torch.Tensor:
    """The tensor whose dims are stored in another order."""
    order = parameters.get("permutation")
    return values.permute(*range(num_batch), *(num_batch + dim for dim in order)) if order else values


def _bools(what: str, storage: Any, parameters: Mapping[str, Any]) -> Any:
    return column_of_arrow(what, storage) != 0


def _from_json(what: str, storage: Any, parameters: Mapping[str, Any]) -> Any:
    return [None if text is None else json.loads(text) for text in storage.to_pylist()]


def _uuids(what: str, storage: Any, parameters: Mapping[str, Any]) -> Any:
    return [None if data is None else str(uuid.UUID(bytes=data)) for data in storage.to_pylist()]


#: Name -> what reads its values: what, their storage, and the parameters of the type.
_EXTENSIONS: Final[Mapping[str, Callable[[str, Any, Mapping[str, Any]], Any]]] = {
    "arrow.fixed_shape_tensor": _tensors_of_one_shape,
    "arrow.variable_shape_tensor": _tensors_of_any_shape,
    "arrow.bool8": _bools,
    "arrow.json": _from_json,
    "arrow.uuid": _uuids,
    "ray.data.arrow_tensor": _tensors_of_one_shape,
    "ray.data.arrow_tensor_v2": _tensors_of_one_shape,
    "ray.data.arrow_variable_shaped_tensor": _tensors_of_any_shape,
    **{f"datasets.features.features.Array{rank}DExtensionType": _tensors_of_one_shape for rank in range(2, 6)},
}


def _holds_extensions(what: str, kind: Any) -> bool:
    """Whether a type is an extension type, or has one inside. Refuses one that this process does not know."""
    if isinstance(kind, pa.BaseExtensionType):
        return True
    fields = [kind.field(number) for number in range(kind.num_fields)]
    for field in fields:
        if field.metadata and _NAME in field.metadata:
            raise InvalidTypeError(
                f"{what} is an Arrow column of {kind}, in which '{field.name}' has the extension type "
                f"'{field.metadata[_NAME].decode()}', which this process does not know.",
                hint="Import the package that defines it before the column is read.",
            )
    return any(_holds_extensions(what, field.type) for field in fields)
