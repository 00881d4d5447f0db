"""Message logs as columns: the turns of each sample, without repeating their tokens.

A message log is a list of turns, ``{"role": "user", "content": "...", "token_ids": tensor}``. The tokens of its turns,
one after the other, are the row of ``input_ids``. So only lengths, roles and contents of the turns are stored beside
``input_ids``, and a read returns turns whose ``token_ids`` are views into it.

Shape legend: ``N`` samples, ``S`` padded sequence length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from dataplane_core.batch.selection import object_array
from dataplane_core.codec import is_jagged, jagged_parts
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import (
    INPUT_IDS_FIELD,
    MESSAGE_LOG,
    RESPONSE_TOKEN_LENGTHS_FIELD,
    TURN_CONTENTS_FIELD,
    TURN_LENGTHS_FIELD,
    TURN_ROLES_FIELD,
)


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
    roles: list[list[str]] = []
    contents: list[list[Any]] = []
    responses: list[int] = []
    for sample, log in enumerate(message_logs):
        for number, turn in enumerate(log):
            if "role" not in turn:
                raise InvalidRequestError(f"split_message_logs: turn {number} of sample {sample} lacks role.")
        counts = [_count(turn.get("token_ids"), sample, number) for number, turn in enumerate(log)]
        lengths.append(counts)
        roles.append([turn["role"] for turn in log])
        contents.append([turn.get("content", "") for turn in log])
        found = (count for count, turn in zip(counts, log, strict=True) if turn["role"] in response_roles and count)
        responses.append(next(found, 0))
    return {
        TURN_LENGTHS_FIELD: lengths,
        TURN_ROLES_FIELD: roles,
        TURN_CONTENTS_FIELD: object_array(contents),  # as objects, also where all contents are numbers
        RESPONSE_TOKEN_LENGTHS_FIELD: torch.tensor(responses, dtype=torch.int64, device="cpu"),
    }


def _count(token_ids: Any, sample: int, number: int) -> int:
    if isinstance(token_ids, torch.Tensor) and token_ids.dim() != 1:
        raise InvalidRequestError(
            f"split_message_logs: token_ids of turn {number} of sample {sample} have shape {tuple(token_ids.shape)}. "
            "Expected one dim."
        )
    return 0 if token_ids is None else len(token_ids)


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
    all_lengths = _turn_lengths(columns[TURN_LENGTHS_FIELD], all_roles)
    rows = {key: _rows(columns[name]) for key, name in views.items()}
    sizes = {len(all_roles), len(all_contents), len(all_lengths), *map(len, rows.values())}
    if len(sizes) != 1:
        raise InvalidRequestError(f"rebuild_message_logs: columns differ in their number of rows: {sorted(sizes)}.")
    logs: list[list[dict[str, Any]]] = []
    for sample, (roles, contents, lengths) in enumerate(zip(all_roles, all_contents, all_lengths, strict=True)):
        if not len(roles) == len(contents) == len(lengths):
            raise InvalidRequestError(
                f"rebuild_message_logs: sample {sample} has {len(lengths)} turn lengths, {len(roles)} roles and "
                f"{len(contents)} contents."
            )
        turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        for key, cells in rows.items():
            row = cells[sample]
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
    if columns:
        views = {"token_ids": INPUT_IDS_FIELD, "generation_logprobs": "generation_logprobs"}
        views = {key: name for key, name in views.items() if name in columns}
        columns[MESSAGE_LOG] = rebuild_message_logs(columns, token_fields=views)


def _rows(column: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of a column's rows."""
    if not is_jagged(column):
        return column.unbind()
    values, offsets, _, _ = jagged_parts(column)
    return values.split_with_sizes(offsets.diff().tolist())


def _turn_lengths(column: Any, roles: Sequence[Sequence[str]]) -> list[list[int]]:
    """Per sample a list; a tensor column may be padded."""
    if isinstance(column, torch.Tensor):
        rows = [row.tolist() for row in _rows(column)]
        return [row[: len(turns)] for row, turns in zip(rows, roles, strict=True)]
    return [list(map(int, np.asarray(row, dtype=np.int64))) for row in column]
