"""`BatchedDataDict`: equally long columns, with methods to cut, join and reorder them, also over a process group.

Shape legend: ``N`` rows, ``S`` padded sequence length.
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections import UserDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from dataplane_core.arguments import check_dict, check_list
from dataplane_core.batch.columns import (
    UnsupportedColumnError,
    check_pad_value,
    checked_num_rows,
    object_array,
    select_rows,
    slice_rows,
    stack_or_nest,
    to_arrow,
    to_numpy,
)
from dataplane_core.batch.tokens import token_columns
from dataplane_core.codec.inputs import column_of_array
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, MissingDataError, preview
from dataplane_core.schema import MULTIMODAL_FIELDS, PLAN_KEYS
from dataplane_core.sharding.balancing import BalanceBy
from dataplane_core.sharding.plan import order_of, plan_shards
from dataplane_core.spec import TagValue

if TYPE_CHECKING:
    import pyarrow as pa

_B = TypeVar("_B", bound="BatchedDataDict")


class BatchedDataDict(UserDict[str, Any]):
    """A dict of equally long columns, each a tensor (batch first), a list, or an array.

    Tensors may be ``torch.jagged`` nested ones, whose rows differ in length. Their rows can be cut, selected and
    reordered. `from_batches` joins those of ``ragged_fields``, such as images; else it and `all_gather`, which join
    padded columns, refuse them.

    Methods that return rows do not change this batch, and return no plan that is shared with it, unless they say "in
    place". All raise `InvalidRequestError` for numbers that do not fit the batch or its plan.

    Attributes:
        micro_batch_indices: Per chunk (global batch) the ``[start, end)`` pair of each microbatch, counted in this
            shard's rows of that chunk. None unless sharding set it.
        micro_batch_lengths: Per chunk the length in tokens of each microbatch, aligned with the pairs: what its rows
            are padded to (dynamic batching), or the sum of its rows' rounded lengths (packing). None unless sharding
            set it.
        elem_counts_per_gb: Per chunk the number of its rows in this shard. None unless packing set it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None
        super().__init__(*args, **kwargs)

    # --- joining ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_batches(
        cls: type[_B],
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, int | float] | None = None,
        *,
        ragged_fields: Collection[str] = MULTIMODAL_FIELDS,
        allow_missing_packed_tensors: bool = False,
    ) -> _B:
        """Concatenates batches: lists join, 1-D tensors join, tensors of 2 and more dims are right-padded on dim 1.

        Mixed dtypes of a column are promoted, as `torch.cat` does. Those of ``ragged_fields`` must be equal, unless all
        rows have the same shape.

        Args:
            batches: In order. One without rows may lack columns, and says nothing about those of ``ragged_fields``.
            pad_value_dict: Column -> its pad value; default 0.
            ragged_fields: Columns, such as those of images, that are not padded: rows that differ become one jagged
                column. Empty lists count as rows of length 0.
            allow_missing_packed_tensors: A batch may lack columns of ``ragged_fields``, as one of text only does: its
                samples get rows of length 0.

        Returns:
            The joined batch, without a plan. Empty if there are no batches.

        Raises:
            MissingDataError: A ``KeyError``: a key is missing from a batch with rows.
            NotImplementedError: A column has another type. The message names key and type.
            InvalidRequestError: A column differs between batches in number of dims, trailing dims or device, its dtypes
                cannot be promoted to one, or the columns of one batch differ in length.
        """
        batches = check_list("from_batches: batches", batches)
        pad_values = pad_value_dict or {}
        check_dict("from_batches: pad_value_dict", pad_values)
        ragged_fields = check_list("from_batches: ragged_fields", ragged_fields)
        sizes = [_common_size(f"from_batches: batch {number}: ", batch) for number, batch in enumerate(batches)]
        joined = cls()
        for key in dict.fromkeys(key for batch in batches for key in batch):
            is_ragged = key in ragged_fields
            for number, batch in enumerate(batches):
                if key not in batch and sizes[number] and not (is_ragged and allow_missing_packed_tensors):
                    raise MissingDataError(
                        f"from_batches: key '{key}' is missing from batch {number}, which has {', '.join(batch)}. "
                        "Expected the same columns in every batch that has rows."
                        + (" Pass allow_missing_packed_tensors=True where samples have none." if is_ragged else "")
                    )
            columns = [batch.get(key) for batch in batches]
            if is_ragged:
                joined[key] = join_ragged(key, columns, sizes)
            else:
                there = [column for column in columns if column is not None]
                joined[key] = concatenate(key, there, pad_values.get(key, 0))
        return joined

    def all_gather(self: _B, group: Any) -> _B:
        """Concatenates the batches of all ranks of a process group (None: the default one), in rank order.

        Collective, and blocks. Leading sizes may differ between ranks, and may be 0; a rank may also have no columns at
        all. Tensors are sent on the group's own device (NCCL: the current CUDA device; gloo: CPU), lists and arrays are
        pickled. The result is detached, on the old device, or on the group's for a rank without columns.

        Raises:
            InvalidRequestError: On every rank: the ranks disagree on the columns, their dtypes or trailing dims, or one
                of them cannot send its own.
        """
        gathered = type(self)()
        gathered.data = all_gather_columns(self.data, group)
        return gathered

    # --- cutting ------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of rows. Raises `InvalidRequestError` if columns differ in length, ``NotImplementedError`` if one is
        neither a tensor, a list nor an array."""
        return _common_size("", self.data)

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """The rows ``[start, end)`` of the batch. Tensors and arrays are views, and pickled with the whole memory
        behind them. Raises `InvalidRequestError` if the batch has fewer rows."""
        size = self.size
        if not 0 <= start <= end <= size:
            raise InvalidRequestError(f"slice: [{start}, {end}) does not lie within the {size} rows.")
        return SlicedDataDict({key: slice_rows(key, column, start, end) for key, column in self.data.items()})

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """The ``rank``-th of ``chunks`` equal parts. Copies tensors and arrays, not the items of lists."""
        size = self.size
        if chunks < 1 or size % chunks:
            raise InvalidRequestError(f"chunk: {size} rows are not a multiple of {chunks} chunks.")
        if not 0 <= rank < chunks:
            raise InvalidRequestError(f"chunk: rank {rank} is out of range for {chunks} chunks.")
        part = size // chunks
        return self._rows(range(rank * part, (rank + 1) * part))

    def select_indices(self: _B, indices: Sequence[int] | torch.Tensor) -> _B:
        """The rows at ``indices`` in ``[-size, size)``, in that order; repeats are allowed, a mask is not. Copies
        tensors, not the items of lists."""
        picks = _as_ints("select_indices", indices)
        size = self.size
        for index in picks:
            if not -size <= index < size:
                raise InvalidRequestError(f"select_indices: index {index} is out of range for {size} rows.")
        picked = type(self)()
        picked.data = select_rows(self.data, [index % size for index in picks])
        return picked

    def _rows(self, rows: Sequence[int]) -> SlicedDataDict:
        piece = SlicedDataDict()
        piece.data = select_rows(self.data, rows)
        return piece

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """This shard's rows of the global batch ``batch_idx``, a `slice`, with that batch's part of the plan.

        Args:
            batch_idx: From 0 on.
            batch_size: This shard's rows of each global batch. May be None if there is a plan; else it must be that of
                the plan. With packing, batches differ in size: ``elem_counts_per_gb`` is used and this is ignored.
        """
        size = self.size
        if batch_size is not None and batch_size < 1:
            raise InvalidRequestError(f"get_batch: batch_size must be at least 1, got {batch_size}.")
        if self.elem_counts_per_gb is not None:
            counts = self.elem_counts_per_gb
        elif self.micro_batch_indices is not None:
            counts = [pairs[-1][1] for pairs in self.micro_batch_indices]
            if batch_size is not None and any(count != batch_size for count in counts):
                raise InvalidRequestError(
                    f"get_batch: batch_size {batch_size} is not that of the plan, which has {counts} rows per batch. "
                    "Expected the batch_size that the batch was sharded with, divided by the number of shards."
                )
        elif batch_size is not None:
            counts = [batch_size] * (size // batch_size)
        else:
            raise InvalidRequestError("get_batch: the batch has no plan. Expected a batch_size.")
        if not 0 <= batch_idx < len(counts):
            raise InvalidRequestError(
                f"get_batch: batch {batch_idx} is out of range: {size} rows make {len(counts)} batches of {counts[:9]}."
            )
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        for key in PLAN_KEYS:
            plan = getattr(self, key)
            setattr(batch, key, None if plan is None else copy.deepcopy([plan[batch_idx]]))
        return batch

    # --- sharding -----------------------------------------------------------------------------------------------------

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: Mapping[str, Any] | None = None,
        sequence_packing_args: Mapping[str, Any] | None = None,
        balance: BalanceBy | None = None,
    ) -> Any:
        """Cuts the batch into chunks, each chunk into ``shards`` equal parts, and joins the parts by position.

        ``[A A B B C C D D]`` with batch_size 2 and shards 2 gives ``[A B C D]`` twice. With dynamic batching or
        packing, all shards get the same number of microbatches in every chunk: ranks that communicate once for each
        microbatch would else deadlock.

        Args:
            shards: Number of shards.
            batch_size: Rows of a chunk over all shards; None: one chunk of everything.
            allow_uneven_shards: Without ``batch_size``: the last shards may be smaller, or empty.
            dynamic_batching_args: `dataplane_core.sharding.DynamicBatchingArgs`: cut microbatches of rows of similar
                length, whose rows x padded length stays within a token limit. All shards get the same plan.
            sequence_packing_args: `dataplane_core.sharding.SequencePackingArgs`: pack each chunk into bins of a
                token limit. Shards may get different numbers of rows. A chunk needs at least one row per shard, but no
                multiple of ``shards``.
            balance: Shards cost about as much, as `shard_meta_for_dp` says. Without the arguments above, lengths are
                those of the column ``input_lengths``.

        Returns:
            A list of `SlicedDataDict`, whose tensors are copies. With dynamic batching, packing or balance, ``(shards,
            indices)``: `reorder_data` with these restores the batch from the concatenated shards.

        Raises:
            InvalidRequestError: Sizes are not multiples, both kinds of arguments are given, their keys are wrong, a row
                is over the token limit, there are too few rows to pack, or ``balance`` names no cost or gives none.
            MissingDataError: A ``KeyError``: a column that the arguments name is missing.
        """
        if allow_uneven_shards and (batch_size is not None or dynamic_batching_args is not None):
            raise InvalidRequestError(
                f"shard_by_batch_size refused: allow_uneven_shards with "
                f"{'dynamic batching' if batch_size is None else f'batch_size {batch_size}'}. Expected equal shards "
                "there: leave it out."
            )
        planned = plan_shards(
            self.size,
            shards,
            batch_size,
            dynamic_batching_args,
            sequence_packing_args,
            lengths=self._lengths,
            width=lambda args: self._input(args["input_key"]).shape[1],
            uneven=allow_uneven_shards,
            balance=balance,
        )
        pieces = [self._rows(shard.rows) for shard in planned]
        for piece, shard in zip(pieces, planned, strict=True):
            vars(piece).update(shard.plan())
        if dynamic_batching_args is None and sequence_packing_args is None and balance is None:
            return pieces
        return pieces, order_of(planned)

    def _lengths(self, args: Mapping[str, Any]) -> list[int]:
        """Tokens per row."""
        _, column = (self._column(args[key]) for key in ("input_key", "input_lengths_key"))
        if isinstance(column, torch.Tensor | np.ndarray) and column.ndim != 1:
            raise InvalidRequestError(
                f"shard_by_batch_size: lengths '{args['input_lengths_key']}' have shape {tuple(column.shape)}. "
                f"Expected one length for each of the {self.size} rows."
            )
        return _as_ints("shard_by_batch_size", column)

    def _input(self, name: str) -> torch.Tensor:
        column = self._column(name)
        if not isinstance(column, torch.Tensor) or column.is_nested or column.dim() < 2:
            kind = f"a {type(column).__name__}"
            if isinstance(column, torch.Tensor):
                kind = "a nested tensor" if column.is_nested else f"a tensor of shape {tuple(column.shape)}"
            raise InvalidRequestError(
                f"shard_by_batch_size: input_key '{name}' names {kind}. Expected a padded tensor (N, S, ...)."
            )
        return column

    def _column(self, name: str) -> Any:
        if name not in self.data:
            raise MissingDataError(f"shard_by_batch_size: column '{name}' is not among {', '.join(self.data)}.")
        return self.data[name]

    # --- ordering and changing ----------------------------------------------------------------------------------------

    def reorder_data(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Reorders **in place**: row j moves to the rank of ``indices[j]`` among all ``indices``.

        ``indices`` are the original indices of the rows, as `shard_by_batch_size` returns them: the rows move back to
        their original order. (If ``indices`` is a permutation p, new row p[j] is old row j, which is the inverse of
        selecting by p.) A microbatch plan is dropped, since it is for the old order.

        Raises:
            InvalidRequestError: There is not one index per row, or an index repeats.
        """
        came_from = _as_ints("reorder_data", indices)
        size = self.size
        if len(came_from) != size or len(set(came_from)) != size:
            raise InvalidRequestError(
                f"reorder_data: got {len(came_from)} indices, {len(set(came_from))} of them different. Expected one "
                f"for each of the {size} rows, all different."
            )
        self.data = select_rows(self.data, np.argsort(np.asarray(came_from, dtype=np.int64)).tolist())
        self.micro_batch_indices = self.micro_batch_lengths = self.elem_counts_per_gb = None

    def repeat_interleave(self: _B, num_repeats: int, *, share_immutable_media: bool = False) -> _B:
        """Repeats each row ``num_repeats`` times, side by side. List items are deep-copied.

        Args:
            num_repeats: 0 or more.
            share_immutable_media: The copies of a list item share what it holds under a name of
                `schema.MULTIMODAL_FIELDS`, at any depth. Do not change it in place then.
        """
        if num_repeats < 0:
            raise InvalidRequestError(f"repeat_interleave: num_repeats must be at least 0, got {num_repeats}.")
        repeated = type(self)()
        rows = np.arange(self.size).repeat(num_repeats).tolist()
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor) or (isinstance(column, np.ndarray) and column.dtype != object):
                repeated.data |= select_rows({key: column}, rows)
            else:
                items = []
                for item in column:
                    shared = {id(value): value for value in _media_of({key: item})} if share_immutable_media else {}
                    items += [copy.deepcopy(item, dict(shared)) for _ in range(num_repeats)]
                repeated.data[key] = object_array(items) if isinstance(column, np.ndarray) else items
        return repeated

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cuts **in place** every dense tensor that has ``dim``, which is 1 or more, to its first ``truncated_len``
        elements there. The cut tensors are views. Jagged columns stay as they are."""
        if dim < 1 or truncated_len < 0:
            raise InvalidRequestError(
                f"truncate_tensors: dim must be at least 1 and truncated_len at least 0, got {dim} and {truncated_len}."
            )
        self._truncate(self.data, dim, truncated_len)

    def _truncate(self, names: Iterable[str], dim: int, truncated_len: int) -> None:
        for key in list(names):
            column = self.data[key]
            if isinstance(column, torch.Tensor) and not column.is_nested and column.dim() > dim:
                self.data[key] = column.narrow(dim, 0, min(truncated_len, column.shape[dim]))

    def to(self: _B, device: str | torch.device) -> _B:
        """Moves the tensors to a device, **in place**. Returns this batch."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[key] = column.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """The columns as a plain dict, not copied."""
        return self.data

    def to_numpy(self) -> dict[str, Any]:
        """The columns as numpy arrays, jagged ones as lists of arrays: `dataplane_core.to_numpy`."""
        return to_numpy(self.data)

    def to_arrow(
        self, *, ids: Sequence[str] | None = None, tags: Sequence[Mapping[str, TagValue]] | None = None
    ) -> pa.Table:
        """The columns as a pyarrow ``Table``, with the ids and tags of the rows: `dataplane_core.to_arrow`."""
        return to_arrow(self.data, ids=ids, tags=tags)

    # --- microbatches -------------------------------------------------------------------------------------------------

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Microbatches of ``microbatch_size`` rows, of which the batch has a multiple, in order."""
        size = self.size
        if microbatch_size < 1 or size % microbatch_size:
            raise InvalidRequestError(f"{size} rows are not a multiple of microbatch_size {microbatch_size}.")
        return (self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(
        self,
        sequence_dim: int = 1,
        token_aligned_fields: Collection[str] | None = None,
        ragged_fields: Collection[str] = MULTIMODAL_FIELDS,
    ) -> Iterator[SlicedDataDict]:
        """Microbatches of a plan of one chunk, as `get_batch` returns it. Their dense token columns are cut to the
        microbatch's padded length. Other columns are never cut.

        Args:
            sequence_dim: The dim of the tokens.
            token_aligned_fields: Names of the columns to cut. Default: `token_columns`.
            ragged_fields: Names of columns that the default never cuts.
        """
        pairs, lengths = self._planned_microbatches()
        tokens = token_columns(
            self.data, token_aligned_fields=token_aligned_fields, ragged_fields=ragged_fields, dim=sequence_dim
        )
        return self._microbatches(pairs, lengths, sequence_dim, tokens)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """The number of microbatches of a plan of one chunk."""
        return len(self._planned_microbatches()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """Microbatches of a plan of one chunk, as `get_batch` returns it: the sequences of one bin each, uncut."""
        pairs, lengths = self._planned_microbatches()
        return self._microbatches(pairs, lengths, 1, ())

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """The number of microbatches of a plan of one chunk, and the tokens of the longest."""
        _, lengths = self._planned_microbatches()
        return len(lengths), max(lengths)

    def _planned_microbatches(self) -> tuple[list[list[int]], list[int]]:
        """The pairs and lengths of a plan of one chunk."""
        indices, lengths = self.micro_batch_indices, self.micro_batch_lengths
        if indices is None or lengths is None or len(indices) != 1 or len(lengths) != 1:
            held = "no plan" if indices is None or lengths is None else f"a plan of {len(indices)} chunks"
            raise InvalidRequestError(
                f"the batch has {held}. Expected the microbatch plan of one chunk: shard with dynamic batching or "
                "sequence packing, then take get_batch."
            )
        return indices[0], lengths[0]

    def _microbatches(
        self, pairs: list[list[int]], lengths: list[int], sequence_dim: int, tokens: Sequence[str]
    ) -> Iterator[SlicedDataDict]:
        for (start, end), length in zip(pairs, lengths, strict=True):
            microbatch = self.slice(start, end)
            microbatch._truncate(tokens, sequence_dim, length)
            yield microbatch


class SlicedDataDict(BatchedDataDict):
    """A shard, or a part of a batch."""


def _common_size(where: str, columns: Mapping[str, Any]) -> int:
    sizes = {key: checked_num_rows(key, column) for key, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise InvalidRequestError(f"{where}columns differ in length: {sizes}. Expected one row per sample in each.")
    return next(iter(sizes.values()), 0)


def _media_of(item: Any) -> Iterator[Any]:
    """What lies under a name of `MULTIMODAL_FIELDS` in nested dicts and lists."""
    if isinstance(item, dict):
        for key, value in item.items():
            yield from (value,) if key in MULTIMODAL_FIELDS else _media_of(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _media_of(value)


def _as_ints(what: str, indices: Any) -> list[int]:
    if isinstance(indices, torch.Tensor):
        indices = indices.detach().cpu()
    numbers = np.asarray(indices)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise InvalidTypeError(
            f"{what}: got {numbers.dtype} of shape {numbers.shape}. Expected integers in one dim; for a mask, "
            "mask.nonzero().flatten()."
        )
    listed: list[int] = numbers.tolist()
    return listed


# --- joining columns --------------------------------------------------------------------------------------------------


def concatenate(key: str, columns: Sequence[Any], pad_value: float) -> Any:
    """Joins one column or more along dim 0. Tensors of 2 and more dims are right-padded on dim 1 to the widest, and
    mixed dtypes are promoted, as `torch.cat` does."""
    if all(isinstance(column, torch.Tensor) for column in columns):
        return _concatenate_tensors(key, columns, pad_value)
    if all(isinstance(column, np.ndarray) for column in columns):
        _require_equal(key, (column.shape[1:] for column in columns))
        return np.concatenate(list(columns))
    if any(isinstance(column, torch.Tensor) for column in columns):
        raise UnsupportedColumnError(
            f"from_batches: column '{key}' is {' and '.join(sorted({type(column).__name__ for column in columns}))}. "
            "Expected one type in every batch."
        )
    return [item for column in columns for item in column]


def _concatenate_tensors(key: str, columns: Sequence[torch.Tensor], pad_value: float) -> torch.Tensor:
    if any(column.is_nested for column in columns):
        raise UnsupportedColumnError(
            f"from_batches: column '{key}' is a nested tensor. Expected a padded one: materialize(td, "
            "layout='padded').",
            hint="Name it in ragged_fields if its rows are not one value per token.",
        )
    first = columns[0]
    _require_equal(key, ((column.dim(), column.shape[2:], str(column.device)) for column in columns))
    try:
        dtype = functools.reduce(torch.promote_types, (column.dtype for column in columns))
    except RuntimeError:  # not even torch.cat joins them
        _require_equal(key, ((column.dtype,) for column in columns))
        raise
    widths = {column.shape[1] for column in columns} if first.dim() > 1 else {0}
    if len(widths) == 1:
        return torch.cat([column.to(dtype) for column in columns])
    check_pad_value(f"from_batches: column '{key}'", pad_value, dtype)
    total = sum(len(column) for column in columns)
    joined = first.new_full((total, max(widths), *first.shape[2:]), pad_value, dtype=dtype)
    start = 0
    for column in columns:
        joined[start : start + len(column), : column.shape[1]] = column
        start += len(column)
    return joined


def join_ragged(key: str, columns: Sequence[Any | None], sizes: Sequence[int]) -> Any:
    """Joins columns whose rows differ in their first dim, row by row, without padding: into an array if all are arrays
    whose rows have one shape; a list if one has objects, or none has numbers; else a tensor. A column is None of a
    batch whose samples have nothing there. What a batch without rows holds counts only if none has rows."""
    filled = [(column, size) for column, size in zip(columns, sizes, strict=True) if size]
    if not filled:
        return slice_rows(key, next(column for column in columns if column is not None), 0, 0)
    whole: list[Any] = [column for column, _ in filled]
    dense = all(isinstance(column, torch.Tensor) and not column.is_nested for column in whole)
    arrays = all(isinstance(column, np.ndarray) for column in whole)
    if (dense or arrays) and len({column.shape[1:] for column in whole}) == 1:  # they need no padding
        return concatenate(key, whole, 0)
    rows: list[Any] = []
    for column, size in filled:
        if isinstance(column, np.ndarray) and column.dtype.kind in "biufc":
            column = column_of_array(f"column '{key}'", column)
        if column is None:
            rows += [None] * size
        else:
            rows += column.unbind() if isinstance(column, torch.Tensor) else list(column)
    if any(not (row is None or isinstance(row, torch.Tensor) or (isinstance(row, list) and not row)) for row in rows):
        return [[] if row is None else row for row in rows]
    _require_equal(key, ((str(row.device),) for row in rows if isinstance(row, torch.Tensor)))
    return stack_or_nest([row if isinstance(row, torch.Tensor) else None for row in rows], f"column '{key}'")


def _require_equal(key: str, forms: Iterable[tuple[Any, ...]]) -> None:
    different = dict.fromkeys(forms)
    if len(different) > 1:
        raise InvalidRequestError(
            f"from_batches: column '{key}' differs between batches: {' against '.join(map(str, different))}. Expected "
            "one number of dims, trailing shape, kind of dtype and device."
        )


# --- over a process group ---------------------------------------------------------------------------------------------


class _TensorForm(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str


def all_gather_columns(columns: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """As `BatchedDataDict.all_gather`. All ranks learn before the first tensor is sent if one cannot send its columns,
    or if ranks disagree. They then all raise, and none waits for the others."""
    import torch.distributed as dist

    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, _described(columns), group=group)
    faults = [f"rank {rank}: {said}" for rank, said in enumerate(of_ranks) if isinstance(said, str)]
    if faults:
        raise InvalidRequestError(f"all_gather refused: {'; '.join(faults)}.")
    # every rank walks the columns in the same order
    names = list(dict.fromkeys(name for said in of_ranks for name in said))
    for name in names:
        _require_equal_forms(name, {rank: said for rank, said in enumerate(of_ranks) if said})
    joined: dict[str, Any] = {}
    for name in names:
        parts = [said.get(name) for said in of_ranks]
        there = [part for part in parts if part is not None]
        if isinstance(there[0], _TensorForm):
            shapes = [(0, *there[0].shape[1:]) if part is None else part.shape for part in parts]
            # by a backend config such as cpu:gloo,cuda:nccl, so the same on all ranks
            backends = str(dist.get_backend_config(group))
            on_host = "nccl" not in backends or (
                "cpu:" in backends and all(form.device_type == "cpu" for form in there)
            )
            via = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
            joined[name] = _gather_tensor(columns.get(name), there[0].dtype, shapes, via, group)
        else:
            joined[name] = concatenate(name, there, 0)
    return joined


def _described(columns: Mapping[str, Any]) -> dict[str, Any] | str:
    """Per column its `_TensorForm`, or the column itself if it is no tensor; or text that says what is wrong."""
    try:
        _common_size("", columns)
        tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
        if nested := [name for name, column in tensors.items() if column.is_nested]:
            return f"columns {preview(nested)} are nested tensors; expected padded ones: materialize(td, 'padded')"
        if unsent := [
            name
            for name, column in tensors.items()
            if column.is_meta or column.layout != torch.strided or column.is_quantized
        ]:
            return f"columns {preview(unsent)} are sparse, quantised or on device 'meta'; expected dense tensors"
        forms = {name: _TensorForm(part.dtype, tuple(part.shape), part.device.type) for name, part in tensors.items()}
        # all_gather_object pickles too, but a rank that fails inside it leaves the others waiting
        pickle.dumps(described := {**columns, **forms})
    except InvalidRequestError as error:
        return error.message.rstrip(".")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return described


def _require_equal_forms(name: str, senders: Mapping[int, Mapping[str, Any]]) -> None:
    forms: dict[str, list[int]] = {}
    for rank, said in senders.items():
        part = said.get(name)
        form = "missing" if name not in said else type(part).__name__
        if isinstance(part, _TensorForm | np.ndarray):
            kind = "array of " if isinstance(part, np.ndarray) else ""
            form = f"{kind}{part.dtype} with rows of shape {part.shape[1:]}"
        forms.setdefault(form, []).append(rank)
    if len(forms) > 1:
        held = "; ".join(f"{form} on ranks {ranks}" for form, ranks in forms.items())
        raise InvalidRequestError(
            f"all_gather refused: column '{name}' is {held}. Expected one dtype and row shape; pad to a common width."
        )


def _gather_tensor(
    column: torch.Tensor | None, dtype: torch.dtype, shapes: list[tuple[int, ...]], via: torch.device, group: Any
) -> torch.Tensor:
    """Pads the leading size to the largest, gathers as bytes (so that every dtype works), and removes the padding."""
    import torch.distributed as dist

    home = via if column is None else column.device
    joined = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=home)
    if not joined.numel():
        return joined
    row_bytes = joined.element_size() * math.prod(shapes[0][1:])
    sent = torch.zeros(max(shape[0] for shape in shapes) * row_bytes, dtype=torch.uint8, device=via)
    if column is not None and len(column):
        plain = column.detach().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # dims of size 1 may have unusual strides
        sent[: len(column) * row_bytes] = flat.view(torch.uint8).to(via)
    received = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(received, sent, group=group)
    joined_bytes = joined.view(-1).view(torch.uint8)
    start = 0
    for part, shape in zip(received, shapes, strict=True):
        end = start + shape[0] * row_bytes
        joined_bytes[start:end] = part[: end - start].to(home)
        start = end
    return joined
