"""Writes batches to the data plane and reads them back.

Trainers use right-padded tensors; the data plane stores each row with its own length. These functions cut the padding
when they write, and pad when they read, so that trainers need not handle jagged tensors.

Shape legend: ``N`` samples, ``S`` padded sequence length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDictBase

from dataplane_core._compiler_marks import not_compiled
from dataplane_core.arguments import check_columns, check_dict, check_iterable, check_meta, check_number, takes
from dataplane_core.batch.batched_data_dict import BatchedDataDict
from dataplane_core.batch.jagged import materialize, pack_jagged_fields, to_tensordict
from dataplane_core.batch.message_log import add_message_logs
from dataplane_core.batch.padding import find_cut
from dataplane_core.batch.tokens import as_lengths, row_lengths, token_columns
from dataplane_core.codec import (
    Columns,
    EmptyLists,
    TensorRows,
    as_columns,
    is_jagged,
    num_rows,
)
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import (
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_LENGTHS_FIELD,
    INPUT_LENGTHS_TAG,
    MESSAGE_LOG_FIELDS,
    MULTIMODAL_FIELDS,
    PAD_TO_MULTIPLE,
    PER_TOKEN_FIELDS,
    PLAN_KEYS,
    padded_length,
)
from dataplane_core.spec.tags import check_tags

if TYPE_CHECKING:
    from dataplane_core.client import DataPlaneClient


@not_compiled
@takes(
    meta=check_meta,
    select_fields=check_iterable,
    pad_value_dict=check_dict,
    pad_to_seqlen=check_number,
    token_aligned_fields=check_iterable,
    ragged_fields=check_iterable,
)
def read_columns(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str] | None = None,
    *,
    layout: Literal["padded", "jagged"] = "padded",
    pad_value_dict: Mapping[str, float] | None = None,
    pad_to_seqlen: int | None = None,
    token_aligned_fields: Collection[str] | None = None,
    ragged_fields: Collection[str] = MULTIMODAL_FIELDS,
    message_logs: bool = False,
) -> BatchedDataDict:
    """Reads the rows of a meta as the batch that trainers compute on. Blocks until they are read.

    Padded rows begin at 0, also if they were written with padding on the left. ``meta.token_starts`` is then set to
    None, so that `write_columns` cuts what was computed from the batch as the batch is.

    Only token columns are padded, all to one width. Every other column comes back as it was written: jagged if its rows
    differ in length, such as the patches of a sample's images, else dense. A dense column that is at least as wide as
    the longest sample counts as a token column, such as ``position_ids`` that were written with their padding. If it is
    something else, name it in ``ragged_fields``.

    Args:
        client: An open client.
        meta: The rows, in order; repeats are allowed.
        select_fields: The columns. Default: ``meta.fields``.
        layout: ``padded``: token columns are right-padded; ``jagged``: they stay nested tensors.
        pad_value_dict: Field -> pad value. Default: 0.
        pad_to_seqlen: The least padded length in tokens. Default: ``extra_info[GLOBAL_FORWARD_PAD_SEQLEN]``, else none.
            Columns are padded to the larger of this and the longest row, rounded up to a multiple of
            ``extra_info[PAD_TO_MULTIPLE]``.
        token_aligned_fields: Names of the token columns. Default: `token_columns`, with ``meta.sequence_lengths``, else
            the column ``input_lengths`` or ``input_ids``, as the lengths.
        ragged_fields: Names of columns that the default never treats as token columns, so that they keep their width.
        message_logs: Also read the columns of `split_message_logs` and ``input_ids``, and `add_message_logs`.

    Returns:
        A BatchedDataDict, owned by the caller; object columns as ``np.ndarray(dtype=object)``.

    Raises:
        InvalidRequestError: No fields are named, or a pad value does not fit a column's dtype.
        MissingDataError: A sample is missing, or a cell is not yet produced.
    """
    names = select_fields if select_fields is not None else meta.fields
    if names is None:
        raise InvalidRequestError(
            f"read_columns('{meta.partition_id}', {meta.size} samples): neither select_fields nor meta.fields names "
            "the columns to read."
        )
    if message_logs:
        names = [*names, *MESSAGE_LOG_FIELDS]
    td = client.get_samples(meta.sample_ids, meta.partition_id, list(dict.fromkeys(names)))
    columns = materialize(td, "jagged" if layout == "padded" else layout)
    if layout == "padded":
        del td  # or it would keep every jagged column until the last one is padded
        pad_columns(
            columns,
            meta,
            pad_value_dict=pad_value_dict,
            pad_to_seqlen=pad_to_seqlen,
            token_aligned_fields=token_aligned_fields,
            ragged_fields=ragged_fields,
        )
    if message_logs:
        add_message_logs(columns)
    return columns


@not_compiled
@takes(batch=check_columns, meta=check_meta, pad_value_dict=check_dict, pad_to_seqlen=check_number)
def pad_columns(
    batch: BatchedDataDict,
    meta: KVBatchMeta,
    *,
    pad_value_dict: Mapping[str, float] | None = None,
    pad_to_seqlen: int | None = None,
    token_aligned_fields: Collection[str] | None = None,
    ragged_fields: Collection[str] = MULTIMODAL_FIELDS,
) -> BatchedDataDict:
    """Right-pads the token columns of a batch that was read jagged, in place, as `read_columns` does for ``padded``.

    As there, ``meta.token_starts`` is set to None.

    Each jagged column is dropped as soon as it is padded.

    Args:
        batch: The rows of ``meta``.
        meta: The meta that they were read with; it and the other arguments are those of `read_columns`.

    Returns:
        ``batch``.

    Raises:
        InvalidRequestError: A pad value does not fit a column's dtype.
    """
    meta.token_starts = None
    lengths = batch.get(INPUT_LENGTHS_FIELD) if meta.sequence_lengths is None else meta.sequence_lengths
    tokens = token_columns(
        batch, lengths, token_aligned_fields=token_aligned_fields, ragged_fields=ragged_fields, padded=True
    )
    known = PER_TOKEN_FIELDS if token_aligned_fields is None else token_aligned_fields
    width = _target_length(meta, {name: batch[name] for name in tokens}, known, pad_to_seqlen)
    for name in tokens:
        batch[name] = materialize({name: batch[name]}, "padded", pad_value_dict, width)[name]
    return batch


def _target_length(
    meta: KVBatchMeta, tokens: Mapping[str, Any], known: Collection[str], pad_to_seqlen: int | None
) -> int:
    """The width that token columns are padded to. Those whose names are ``known`` surely have tokens on dim 1."""
    if pad_to_seqlen is None:
        pad_to_seqlen = int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN) or 0)
    multiple = int(meta.extra_info.get(PAD_TO_MULTIPLE) or 1)
    if pad_to_seqlen < 0 or multiple < 1:
        raise InvalidRequestError(
            f"read_columns('{meta.partition_id}', {meta.size} samples): pad_to_seqlen is {pad_to_seqlen} and "
            f"{PAD_TO_MULTIPLE} is {multiple}. Expected at least 0 and at least 1."
        )
    if pad_to_seqlen == 0 and multiple == 1:
        return 0
    if meta.sequence_lengths is not None:
        longest = max(meta.sequence_lengths, default=0)
    else:
        sure = [column for name, column in tokens.items() if is_jagged(column) or name in known]
        longest = max((_longest(column) for column in sure), default=0)
    return padded_length(max(pad_to_seqlen, longest), multiple)


def _longest(column: Any) -> int:
    """The longest row. 0 without rows, or without dim 1."""
    found = row_lengths(column)
    return 0 if found is None or not len(found) else int(found.max())


@not_compiled
@takes(meta=check_meta, token_aligned_fields=check_iterable)
def write_columns(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    fields: TensorDictBase | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Any,
    *,
    token_aligned_fields: Collection[str] | None = None,
) -> KVBatchMeta:
    """Writes columns of a meta's rows. Blocks until they are committed.

    Args:
        client: An open client.
        meta: N rows, each id once.
        fields: N rows, of any kind that `put_samples` takes. Tensors may be padded beyond the longest row.
        token_aligned_fields: Names of columns with one element per token on dim 1; these are cut to
            ``meta.sequence_lengths`` and written as jagged: from ``meta.token_starts`` on, or by the column
            ``attention_mask`` where ``fields`` have one. No other column is cut. Names that ``fields`` lacks are
            ignored. Default: if the meta has lengths, what `kv_first_write` cuts by default. A column that is named in
            `schema.PER_TOKEN_FIELDS`, but is of shape (N,) or (N, 1), is never cut.

    Returns:
        A copy of the meta whose fields also name the written ones. Without ``fields``, nothing is written.

    Raises:
        InvalidRequestError: Sizes do not fit, columns are token-aligned but the meta has no lengths, or ids repeat.
        InvalidTypeError: A column is neither a tensor nor one object per row.
        SchemaMismatchError: A field changes kind, dtype, rank or trailing shape.
    """
    where = f"write_columns('{meta.partition_id}', {meta.size} samples)"
    given = as_columns(where, fields, meta.size)
    columns: dict[str, Any] = {name: given.get(name) for name in given.keys()}
    if not columns:
        return meta.with_fields(())
    _check_rows(where, columns, meta.size)
    lengths = meta.sequence_lengths
    lacks = "the meta has no sequence_lengths"
    packed, _ = _packed(where, given, columns, meta.size, lengths, token_aligned_fields, lacks, meta.token_starts)
    client.put_samples(meta.sample_ids, meta.partition_id, fields=packed)
    return meta.with_fields(columns)


@not_compiled
@takes(
    sample_ids=check_iterable,
    extra_info=check_dict,
    pad_to_multiple=check_number,
    token_aligned_fields=check_iterable,
    required_fields=check_iterable,
)
def kv_first_write(
    batch: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Any,
    *,
    sample_ids: Sequence[str],
    dp_client: DataPlaneClient,
    partition_id: str,
    extra_info: Mapping[str, Any] | None = None,
    task_name: str | None = "train",
    pad_to_multiple: int = 1,
    tags: Sequence[Mapping[str, Any]] | None = None,
    token_aligned_fields: Collection[str] | None = None,
    required_fields: Collection[str] = (),
) -> KVBatchMeta:
    """Writes a rollout's batch in one put: every tensor and object column. Blocks until it is committed.

    These columns are cut to ``input_lengths`` and written as jagged:

    - With ``token_aligned_fields``: exactly those.
    - Without: dense columns as wide as ``input_ids`` (`token_columns`) that are named in `schema.PER_TOKEN_FIELDS`, or
      hold only zeros beyond the row lengths. So only known padding is cut: not an unknown column of another width, nor
      an embedding that happens to be as wide, nor a column that is narrower than the longest row, such as
      ``advantages`` of shape (N, 1).

    The tokens of a row begin where the column ``attention_mask`` says, else at 0.

    Args:
        batch: N rows, of any kind that `put_samples` takes. ``input_lengths`` (N,) gives the tokens per row; without it
            nothing is cut.
        sample_ids: N ids, each once.
        dp_client: An open client.
        partition_id: A registered partition.
        extra_info: Copied into the meta, without a microbatch plan. A padded length that is shorter than the longest
            row becomes that.
        task_name: The meta's task name.
        pad_to_multiple: Readers of the meta round their padded length up to a multiple of this many tokens; recorded in
            ``extra_info``.
        tags: N dicts of primitives. If the batch has the column ``input_lengths``, it becomes a tag, so that claims
            return the lengths; also in place of one that came along.
        token_aligned_fields: Names of the columns to cut, instead of the rule above.
        required_fields: Names of columns that the batch must have, else nothing is written. For columns that a later
            stage needs and only this writer knows, such as ``routed_experts`` for router replay.

    Returns:
        The meta of the rows, with fields, ``sequence_lengths``, tags, and ``token_starts`` if rows were padded on the
        left.

    Raises:
        InvalidRequestError: A required column is missing, the number of ids differs from the batch size, or other sizes
            do not fit.
        InvalidTypeError: A column is neither a tensor nor one object per row.
    """
    ids = list(sample_ids)
    where = f"kv_first_write('{partition_id}', {len(ids)} samples)"
    given = as_columns(where, batch, len(ids))
    batch = {name: given.get(name) for name in given.keys()}
    if pad_to_multiple < 1:
        raise InvalidRequestError(f"{where} refused: pad_to_multiple must be at least 1, got {pad_to_multiple}.")
    lacking = [name for name in required_fields if name not in batch]
    if lacking:
        raise InvalidRequestError(
            f"{where} refused: the batch has no {preview(lacking)}, which is required. Found: "
            f"{', '.join(map(repr, batch)) or 'nothing'}. Have what generates the rows return it."
        )
    _check_rows(where, batch, len(ids))
    rows = None if tags is None else check_tags(tags, len(ids))
    info = {name: value for name, value in (extra_info or {}).items() if name not in PLAN_KEYS}
    if pad_to_multiple != 1 or PAD_TO_MULTIPLE not in info:
        info[PAD_TO_MULTIPLE] = pad_to_multiple
    lengths: list[int] | None = None
    if INPUT_LENGTHS_FIELD in batch:
        what = f"{where} refused: field '{INPUT_LENGTHS_FIELD}'"
        lengths = as_lengths(what, batch[INPUT_LENGTHS_FIELD]).tolist() if ids else []
    if lengths is not None:
        rows = [{} for _ in ids] if rows is None else rows
        for row, length in zip(rows, lengths, strict=True):
            row[INPUT_LENGTHS_TAG] = length
    if lengths and info.get(GLOBAL_FORWARD_PAD_SEQLEN):
        info[GLOBAL_FORWARD_PAD_SEQLEN] = max(info[GLOBAL_FORWARD_PAD_SEQLEN], *lengths)
    lacks = f"the batch has no '{INPUT_LENGTHS_FIELD}'"
    packed, starts = _packed(where, given, batch, len(ids), lengths, token_aligned_fields, lacks)
    if ids:
        dp_client.put_samples(ids, partition_id, fields=packed, tags=rows)
    return KVBatchMeta(
        partition_id,
        task_name,
        ids,
        fields=list(batch),
        sequence_lengths=lengths,
        extra_info=info,
        tags=rows,
        token_starts=starts,
    )


def _check_rows(where: str, columns: Mapping[str, Any], num_ids: int) -> None:
    for name, column in columns.items():
        has_rows = isinstance(column, TensorRows) or getattr(column, "ndim", 0) > 0
        if has_rows and (found := num_rows(column)) != num_ids:
            raise InvalidRequestError(
                f"{where} refused: field '{name}' has {found} rows. Expected {num_ids}: the number of sample_ids must "
                "match batch size."
            )


def _packed(
    where: str,
    given: TensorDictBase | Columns,
    columns: Mapping[str, Any],
    num_rows: int,
    lengths: Sequence[int] | None,
    declared: Collection[str] | None,
    lacks: str,
    began: Sequence[int] | None = None,
) -> tuple[Columns, list[int] | None]:
    """The columns of what was given as they are written, and where the tokens of each row begin (None: at 0).

    Adds the call to the message of a refusal.

    Args:
        where: The call.
        given: What the caller gave.
        columns: Its columns.
        num_rows: Their number of rows.
        lengths: The tokens of each row, if they are known.
        declared: Names of the columns to cut, if the caller named them.
        lacks: What says the lengths, and was not there, if they are not known.
        began: Where the tokens of each row begin, as far as the columns do not say so themselves.
    """
    aligned, starts = find_cut(where, columns, lengths if num_rows else [], declared, began)
    if aligned and lengths is None:
        raise InvalidRequestError(
            f"{where} refused: token_aligned_fields name {preview(aligned)}, but {lacks} to cut them by."
        )
    kept = {
        name: rows
        for name, rows in columns.items()
        if isinstance(rows, EmptyLists) or (isinstance(rows, TensorRows) and name not in aligned)
    }
    cut = [name for name in aligned if name not in kept]
    others = {name: column for name, column in columns.items() if name not in kept}
    try:
        if cut:
            began_at = None if starts is None else torch.tensor(starts, device="cpu")
            packed = pack_jagged_fields(others, lengths=lengths, token_aligned_fields=cut, starts=began_at)
        else:
            packed = to_tensordict(others, num_rows)
        return Columns(
            {name: kept[name] if name in kept else packed.get(name) for name in columns},
            {name: items for name, items in getattr(given, "lists", {}).items() if name not in cut},
            getattr(given, "ints", ()),
        ), starts
    except (InvalidRequestError, InvalidTypeError) as error:
        error.message = f"{where} refused: {error.message}"
        raise
