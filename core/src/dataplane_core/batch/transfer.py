"""Writes batches to the data plane, without their padding, and reads them back, padded; message logs too.

A message log is a list of turns, ``{"role": "user", "content": "...", "token_ids": tensor}``. The tokens of its turns,
one after the other, are the row of ``input_ids``. So only lengths, roles and contents of the turns are stored beside
``input_ids``, and a read returns turns whose ``token_ids`` are views into it.

Shape legend: ``N`` samples, ``S`` padded sequence length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase

from dataplane_core._compiler_marks import not_compiled
from dataplane_core.arguments import (
    Count,
    Index,
    Name,
    check_columns,
    check_dict,
    check_list,
    check_meta,
    check_names,
    checked_as,
)
from dataplane_core.batch.batched_data_dict import BatchedDataDict
from dataplane_core.batch.columns import check_pad_value, cut_columns, object_array, objects_of, rows_of
from dataplane_core.batch.tokens import as_lengths, find_cut, row_lengths, token_columns
from dataplane_core.codec.inputs import as_column, as_columns
from dataplane_core.codec.rows import Columns, tensor_columns
from dataplane_core.codec.tensors import is_jagged, jagged_parts, pad_rows
from dataplane_core.errors import DataPlaneError, InvalidRequestError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import (
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_IDS_FIELD,
    INPUT_LENGTHS_FIELD,
    INPUT_LENGTHS_TAG,
    MESSAGE_LOG,
    MESSAGE_LOG_FIELDS,
    MULTIMODAL_FIELDS,
    PAD_TO_MULTIPLE,
    PER_TOKEN_FIELDS,
    PLAN_KEYS,
    RESPONSE_TOKEN_LENGTHS_FIELD,
    TURN_CONTENTS_FIELD,
    TURN_LENGTHS_FIELD,
    TURN_ROLES_FIELD,
    padded_length,
)
from dataplane_core.spec.tags import check_tags

if TYPE_CHECKING:
    from dataplane_core.client import DataPlaneClient


# --- reads ------------------------------------------------------------------------------------------------------------


@not_compiled
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

    Only token columns are padded, all to one width. Which these are is said by `token_columns` with ``padded=True``. It
    also takes a dense column as wide as the longest sample, such as ``position_ids``. Every other column comes back
    as it was written: jagged if its rows differ in length, such as the patches of a sample's images, else dense.

    Args:
        client: An open client.
        meta: The rows, in order; repeats are allowed.
        select_fields: The columns. Default: ``meta.fields``.
        layout: ``padded``: token columns are right-padded; ``jagged``: they stay nested tensors.
        pad_value_dict: Field -> pad value. Default: 0.
        pad_to_seqlen: The least padded length in tokens. Default: ``extra_info[GLOBAL_FORWARD_PAD_SEQLEN]``, else none.
            Columns are padded to the larger of this and the longest row, rounded up to a multiple of
            ``extra_info[PAD_TO_MULTIPLE]``.
        token_aligned_fields: Names of the token columns. Default: by ``meta.sequence_lengths``, else by the column
            ``input_lengths`` or ``input_ids``.
        ragged_fields: Names of columns that the default never pads.
        message_logs: Also read the columns of `split_message_logs` and ``input_ids``, and `add_message_logs`.

    Returns:
        A BatchedDataDict, owned by the caller; object columns as ``np.ndarray(dtype=object)``.

    Raises:
        InvalidRequestError: No fields are named, or a pad value does not fit a column's dtype.
        MissingDataError: A sample is missing, or a cell is not yet produced.
    """
    check_meta("read_columns: meta", meta)
    names = meta.fields if select_fields is None else check_names("read_columns: select_fields", select_fields)
    if names is None:
        raise InvalidRequestError(
            f"read_columns('{meta.partition_id}', {meta.size} samples): neither select_fields nor meta.fields names "
            "the columns to read."
        )
    if message_logs:
        names = [*names, *MESSAGE_LOG_FIELDS]
    # no name for what was read, or it would keep every jagged column until the last one is padded
    columns = materialize(
        client.get_samples(meta.sample_ids, meta.partition_id, list(dict.fromkeys(names))),
        "jagged" if layout == "padded" else layout,
    )
    if layout == "padded":
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

    Arguments and errors are those of `read_columns`, with the meta that the batch was read with, whose ``token_starts``
    become None. Each jagged column is dropped as soon as it is padded. Returns ``batch``.
    """
    check_meta("pad_columns: meta", meta)
    if pad_to_seqlen is None:
        pad_to_seqlen = int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN) or 0)
    pad_to_seqlen = checked_as("read_columns: pad_to_seqlen", Index, pad_to_seqlen)
    multiple = checked_as(f"read_columns: {PAD_TO_MULTIPLE}", Count, int(meta.extra_info.get(PAD_TO_MULTIPLE) or 1))
    meta.token_starts = None
    lengths = batch.get(INPUT_LENGTHS_FIELD) if meta.sequence_lengths is None else meta.sequence_lengths
    tokens = token_columns(
        batch, lengths, token_aligned_fields=token_aligned_fields, ragged_fields=ragged_fields, padded=True
    )
    width = 0
    if pad_to_seqlen or multiple > 1:
        declared = PER_TOKEN_FIELDS if token_aligned_fields is None else token_aligned_fields
        sure = [batch[name] for name in tokens if is_jagged(batch[name]) or name in declared]  # of tokens on dim 1
        rows = [row_lengths(column) for column in sure] if meta.sequence_lengths is None else []
        longest = max(meta.sequence_lengths or (), default=0)
        longest = max((int(row.max()) for row in rows if row is not None and len(row)), default=longest)
        width = padded_length(max(pad_to_seqlen, longest), multiple)
    for name in tokens:
        batch[name] = materialize({name: batch[name]}, "padded", pad_value_dict, width)[name]
    return batch


@not_compiled
def materialize(
    td: TensorDictBase | Mapping[str, Any],
    layout: Literal["padded", "jagged"] = "padded",
    pad_value_dict: Mapping[str, float] | None = None,
    pad_to_seqlen: int = 0,
    *,
    token_aligned_fields: Collection[str] | None = None,
) -> BatchedDataDict:
    """Converts what `get_samples` returned to the batch that trainers compute on.

    Args:
        td: Columns of N rows.
        layout: ``padded``: jagged columns are right-padded to their longest row. ``jagged``: tensors stay as they are.
        pad_value_dict: Field -> pad value. Default: 0.
        pad_to_seqlen: The least padded length in elements of dim 1.
        token_aligned_fields: Pad only these to ``pad_to_seqlen``. Default: every column of two dims or more, since a
            dense column does not tell a sequence from a feature dim.

    Returns:
        A BatchedDataDict: padded columns in new memory, others as they are in ``td``; object columns as
        ``np.ndarray(dtype=object)`` of shape (N,).

    Raises:
        InvalidRequestError: An unknown layout, or a pad value that the column's dtype cannot hold.
    """
    check_columns("materialize: td", td)
    checked_as("materialize: layout", Literal["padded", "jagged"], layout)
    check_dict("materialize: pad_value_dict", pad_value_dict or {})
    pad_to_seqlen = checked_as("materialize: pad_to_seqlen", Index, pad_to_seqlen)
    if token_aligned_fields is not None:
        token_aligned_fields = check_list("materialize: token_aligned_fields", token_aligned_fields)
    columns: dict[str, Any] = {}
    for name in td.keys():
        column = td.get(name)
        columns[name] = column
        if not isinstance(column, torch.Tensor):
            columns[name] = objects_of(column, f"field '{name}'")
        elif layout == "padded" and column.dim() >= 2:
            width = pad_to_seqlen if token_aligned_fields is None or name in token_aligned_fields else 0
            columns[name] = _pad(name, column, (pad_value_dict or {}).get(name, 0), width)
    return BatchedDataDict(columns)


def _pad(name: str, column: torch.Tensor, value: float, width: int) -> torch.Tensor:
    if column.is_nested:
        rows = rows_of(column, f"field '{name}'")
        check_pad_value(f"materialize: field '{name}'", value, rows.values.dtype)
        return pad_rows(rows, max(width, int(rows.lengths.max(initial=0))), value)
    if column.shape[1] >= width:
        return column
    check_pad_value(f"materialize: field '{name}'", value, column.dtype)
    padded = column.new_empty((column.shape[0], width, *column.shape[2:]))
    padded[:, : column.shape[1]] = column
    padded[:, column.shape[1] :] = torch.full((), value, dtype=column.dtype, device=column.device)
    return padded


# --- writes -----------------------------------------------------------------------------------------------------------


@not_compiled
def write_columns(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    fields: Any,
    *,
    token_aligned_fields: Collection[str] | None = None,
) -> KVBatchMeta:
    """Writes columns of a meta's rows. Blocks until they are committed.

    Args:
        client: An open client.
        meta: N rows, each id once.
        fields: N rows, of any kind that `put_samples` takes. Tensors may be padded beyond the longest row.
        token_aligned_fields: Names of columns with one element per token on dim 1; only these are cut to
            ``meta.sequence_lengths`` and written as jagged: from ``meta.token_starts`` on, or by the column
            ``attention_mask`` where ``fields`` have one. Names are ignored as by `pack_jagged_fields`. Default: what
            `kv_first_write` cuts, if the meta has lengths.

    Returns:
        A copy of the meta whose fields also name the written ones. Without ``fields``, nothing is written.

    Raises:
        InvalidRequestError: Sizes do not fit, ids repeat, or columns are token-aligned but the meta has no lengths.
        InvalidTypeError: A column is neither a tensor nor one object per row.
        SchemaMismatchError: A column does not fit its field's spec.
    """
    check_meta("write_columns: meta", meta)
    where = f"write_columns('{meta.partition_id}', {meta.size} samples)"
    lacks = "the meta has no sequence_lengths"
    columns = as_columns(where, fields, meta.size)
    lengths, declared = meta.sequence_lengths, token_aligned_fields
    cut, _ = _cut(where, columns, meta.size, lengths, declared, lacks, meta.token_starts)
    if cut:
        client.put_samples(meta.sample_ids, meta.partition_id, fields=cut)
    return meta.with_fields(cut)


@not_compiled
def kv_first_write(
    batch: Any,
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

    Columns are cut to ``input_lengths`` and written as jagged: those of ``token_aligned_fields``, or without it, dense
    ones as wide as ``input_ids`` (`token_columns`) that are named in `schema.PER_TOKEN_FIELDS`, or hold only zeros
    beyond the row lengths. So only known padding is cut, not an embedding that happens to be as wide. The tokens of a
    row begin where the column ``attention_mask`` says, else at 0.

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
    ids = checked_as("kv_first_write: sample_ids", list[Name], sample_ids)
    check_dict("kv_first_write: extra_info", extra_info or {})
    pad_to_multiple = checked_as("kv_first_write: pad_to_multiple", Count, pad_to_multiple)
    required_fields = check_list("kv_first_write: required_fields", required_fields)
    where = f"kv_first_write('{partition_id}', {len(ids)} samples)"
    columns = as_columns(where, batch, len(ids))
    names = list(columns.keys())
    if lacking := [name for name in required_fields if name not in names]:
        raise InvalidRequestError(
            f"{where} refused: the batch has no {preview(lacking)}, which is required. Found: "
            f"{', '.join(map(repr, names)) or 'nothing'}. Have what generates the rows return it."
        )
    rows = None if tags is None else check_tags(tags, len(ids))
    info = {name: value for name, value in (extra_info or {}).items() if name not in PLAN_KEYS}
    if pad_to_multiple != 1 or PAD_TO_MULTIPLE not in info:
        info[PAD_TO_MULTIPLE] = pad_to_multiple
    lengths: list[int] | None = None
    if INPUT_LENGTHS_FIELD in names:
        column: Any = columns.get(INPUT_LENGTHS_FIELD)
        lengths = as_lengths(f"{where} refused: field '{INPUT_LENGTHS_FIELD}'", column).tolist() if ids else []
        rows = [{} for _ in ids] if rows is None else rows
        for row, length in zip(rows, lengths, strict=False):  # the put refuses another number of them
            row[INPUT_LENGTHS_TAG] = length
    if lengths and info.get(GLOBAL_FORWARD_PAD_SEQLEN):
        info[GLOBAL_FORWARD_PAD_SEQLEN] = max(info[GLOBAL_FORWARD_PAD_SEQLEN], *lengths)
    lacks = f"the batch has no '{INPUT_LENGTHS_FIELD}'"
    cut, starts = _cut(where, columns, len(ids), lengths, token_aligned_fields, lacks)
    if ids:
        dp_client.put_samples(ids, partition_id, fields=cut, tags=rows)
    return KVBatchMeta(
        partition_id,
        task_name,
        ids,
        fields=names,
        sequence_lengths=lengths,
        extra_info=info,
        tags=rows,
        token_starts=starts,
    )


def _cut(
    where: str,
    columns: TensorDictBase | Columns,
    num_rows: int,
    lengths: Sequence[int] | None,
    declared: Collection[str] | None,
    lacks: str,
    began: Sequence[int] | None = None,
) -> tuple[Columns, list[int] | None]:
    """The columns of a write as they are stored, and where the tokens of each row begin (None: at 0): by `find_cut`.
    ``lacks``: for messages, that there are no lengths."""
    if declared is not None:
        declared = check_list(f"{where}: token_aligned_fields", declared)
    plain = tensor_columns(columns)
    lists, ints = (columns.lists, columns.ints) if isinstance(columns, Columns) else ({}, ())
    try:
        aligned, starts = find_cut(where, plain, lengths if num_rows else [], declared, began)
        if aligned and lengths is None:
            raise InvalidRequestError(
                f"{where} refused: token_aligned_fields name {preview(aligned)}, but {lacks} to cut them by."
            )
        tensors = {name: as_column(f"field '{name}'", plain[name]) for name in aligned}
        begins = None if starts is None else torch.tensor(starts, device="cpu")
        cut = cut_columns(tensors, aligned, as_lengths(where, lengths or []), begins)
    except DataPlaneError as error:
        if not error.message.startswith(where):
            error.message = f"{where} refused: {error.message}"
        raise
    return Columns({**plain, **cut}, {name: items for name, items in lists.items() if name not in cut}, ints), starts


# --- message logs -----------------------------------------------------------------------------------------------------


def split_message_logs(
    message_logs: Sequence[Sequence[Mapping[str, Any]]], *, response_roles: Collection[str] = ("assistant",)
) -> dict[str, Any]:
    """The turns of N samples as columns.

    Args:
        message_logs: Per sample its turns, in the order of its tokens. A turn has ``role``, and may have ``content``
            (else ``""``) and ``token_ids`` (1-D tensor or list; else it has no tokens). Other keys are dropped: write
            values per token as columns.
        response_roles: The roles whose turns are responses.

    Returns:
        ``turn_lengths``, ``turn_roles``, ``turn_contents``: per sample a list with one entry per turn (tokens, str, any
        object item), the last in an object array; ``response_token_lengths``: (N,) int64, the tokens of the first
        response that has any, else 0. Contents are referenced, not copied.

    Raises:
        InvalidRequestError: A turn lacks its role, or its ``token_ids`` are not one-dimensional. The message names
            sample and turn.
    """
    lengths: list[list[int]] = []
    responses: list[int] = []
    for sample, log in enumerate(message_logs):
        counts = []
        for number, turn in enumerate(log):
            tokens = turn.get("token_ids")
            if "role" not in turn:
                raise InvalidRequestError(f"split_message_logs: turn {number} of sample {sample} lacks role.")
            if isinstance(tokens, torch.Tensor) and tokens.dim() != 1:
                raise InvalidRequestError(
                    f"split_message_logs: token_ids of turn {number} of sample {sample} have shape "
                    f"{tuple(tokens.shape)}. Expected one dim."
                )
            counts.append(0 if tokens is None else len(tokens))
        lengths.append(counts)
        of_responses = [count for count, turn in zip(counts, log, strict=True) if turn["role"] in response_roles]
        responses.append(next(filter(None, of_responses), 0))
    return {
        TURN_LENGTHS_FIELD: lengths,
        TURN_ROLES_FIELD: [[turn["role"] for turn in log] for log in message_logs],
        # as objects, also where all contents are numbers
        TURN_CONTENTS_FIELD: object_array([[turn.get("content", "") for turn in log] for log in message_logs]),
        RESPONSE_TOKEN_LENGTHS_FIELD: torch.tensor(responses, dtype=torch.int64, device="cpu"),
    }


def rebuild_message_logs(
    columns: Mapping[str, Any], *, token_fields: Mapping[str, str] | None = None
) -> list[list[dict[str, Any]]]:
    """The turns of N samples from columns that were read back.

    Args:
        columns: ``turn_lengths``, ``turn_roles``, ``turn_contents`` and the token columns, padded (N, S, ...) or
            jagged.
        token_fields: Key of a turn -> token column that it views, such as ``{"token_ids": "input_ids",
            "generation_logprobs": "generation_logprobs"}``. Default: ``token_ids`` into ``input_ids``.

    Returns:
        Per sample its turns. Their token tensors are views of the columns, empty for a turn without tokens.

    Raises:
        InvalidRequestError: A column is missing, columns disagree in their rows or turns, or turns have more tokens
            than the row.
    """
    views = dict(token_fields or {"token_ids": INPUT_IDS_FIELD})
    for name in (TURN_LENGTHS_FIELD, TURN_ROLES_FIELD, TURN_CONTENTS_FIELD, *views.values()):
        if name not in columns:
            raise InvalidRequestError(f"rebuild_message_logs: column '{name}' is missing.")
    all_roles, all_contents = list(columns[TURN_ROLES_FIELD]), list(columns[TURN_CONTENTS_FIELD])
    all_lengths: Any = columns[TURN_LENGTHS_FIELD]
    if isinstance(all_lengths, torch.Tensor):  # it may be padded
        cells = zip(_rows(all_lengths), all_roles, strict=False)
        all_lengths = [row.tolist()[: len(roles)] for row, roles in cells]
    rows = {key: _rows(columns[name]) for key, name in views.items()}
    sizes = {len(all_roles), len(all_contents), len(all_lengths), *map(len, rows.values())}
    if len(sizes) != 1:
        raise InvalidRequestError(f"rebuild_message_logs: columns differ in their number of rows: {sorted(sizes)}.")
    logs: list[list[dict[str, Any]]] = []
    for sample, (roles, contents, counts) in enumerate(zip(all_roles, all_contents, all_lengths, strict=True)):
        lengths = list(map(int, np.asarray(counts, dtype=np.int64)))
        if not len(roles) == len(contents) == len(lengths):
            raise InvalidRequestError(
                f"rebuild_message_logs: sample {sample} has {len(lengths)} turn lengths, {len(roles)} roles and "
                f"{len(contents)} contents."
            )
        turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        for key, of_samples in rows.items():
            row = of_samples[sample]
            if sum(lengths) > len(row):
                raise InvalidRequestError(
                    f"rebuild_message_logs: the turns of sample {sample} have {sum(lengths)} tokens, but its row of "
                    f"'{views[key]}' has {len(row)}."
                )
            start = 0
            for turn, length in zip(turns, lengths, strict=True):
                turn[key] = row[start : start + length]
                start += length
        logs.append(turns)
    return logs


def add_message_logs(columns: MutableMapping[str, Any]) -> None:
    """Adds the column ``message_log`` to `schema.MESSAGE_LOG_FIELDS` that were read: what `rebuild_message_logs` makes.

    If ``generation_logprobs`` were read, the turns have views of them too. Without columns, nothing is added.
    """
    views = {"token_ids": INPUT_IDS_FIELD, "generation_logprobs": "generation_logprobs"}
    if columns:
        there = {key: name for key, name in views.items() if name in columns}
        columns[MESSAGE_LOG] = rebuild_message_logs(columns, token_fields=there)


def _rows(column: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of a column's rows."""
    if not is_jagged(column):
        return column.unbind()
    values, offsets, _, _ = jagged_parts(column)
    return values.split_with_sizes(offsets.diff().tolist())
