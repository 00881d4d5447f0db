"""Rows as chats, for supervised fine-tuning: a list of ``{"role": ..., "content": ...}`` each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dataplane_core.errors import InvalidRequestError
from dataplane_core.spec import FieldSpec
from dataplane_tools._columns import pa
from dataplane_tools._rows import rows_of
from dataplane_tools._sample import TEXT_FIELDS, TURNS, Decode, Part, sample_of

#: What the parts of a sample are in a chat, where nothing says their roles. What follows the prompt and was not
#: generated came from the environment.
_ROLES: Final = {"prompt": "user", "answer": "assistant", "masked": "user"}


def is_for_messages(name: str, spec: FieldSpec) -> bool:
    """Whether a field may say what a chat is, or is one value."""
    return name in TEXT_FIELDS or spec.kind == "object" or spec.rank == 0


def messages_of(
    ids: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    cells: Mapping[str, tuple[Sequence[int], Any]],
    decode: Decode | None,
) -> Any:
    """The Arrow column of the chats of rows.

    The turns are those that are kept: as ``turn_roles`` and ``turn_contents``, or as a list of messages, if one of them
    is of the assistant. Else they are the text of the parts of the tokens, by ``decode``.

    Args:
        ids: N ids.
        tags: N dicts.
        cells: Field -> the places of the rows that have it, and their column.
        decode: The text of a list of token ids. None: there is no tokenizer.

    Raises:
        InvalidRequestError: A row has no turns.
    """
    rows: list[dict[str, Any]] = [{} for _ in ids]
    for name, (places, column) in cells.items():
        for place, cell in zip(places, rows_of(column), strict=True):
            rows[place][name] = cell
    chats = [_chat(*row, decode) for row in zip(ids, tags, rows, strict=True)]
    turn = pa.struct({"role": pa.string(), "content": pa.string()})
    return pa.array(chats, pa.list_(turn))


def _chat(
    sample_id: str, tags: Mapping[str, Any], cells: Mapping[str, Any], decode: Decode | None
) -> list[dict[str, str]]:
    parts = _kept(sample_id, tags, cells)
    tokens = {name: cell for name, cell in cells.items() if name in TEXT_FIELDS}
    without_turns = {name: cell for name, cell in tokens.items() if name not in TURNS}
    if parts is None and decode is not None:
        parts = sample_of(sample_id, tags, tokens, decode=decode).parts
        if not _has_answer(parts):  # the turns are those of the prompt alone
            parts = sample_of(sample_id, tags, without_turns, decode=decode).parts
    if not parts or any(part.role == "text" for part in parts):
        what = "no kept turns" if decode is None else "neither turns nor a mask that tells prompt from answer"
        raise InvalidRequestError(
            f"sample '{sample_id}' has {what}, so it is no chat. Kept turns need one of the role 'assistant'.",
            hint="Name a tokenizer: --tokenizer T." if decode is None and tokens else None,
        )
    return [{"role": _ROLES.get(part.role, part.role), "content": part.text} for part in parts]


def _kept(sample_id: str, tags: Mapping[str, Any], cells: Mapping[str, Any]) -> Sequence[Part] | None:
    """The turns that are kept, if there is an answer among them. A prompt alone is no chat, whatever it holds."""
    turns = {name: cells[name] for name in TURNS if name in cells}
    lists = {name: cell for name, cell in cells.items() if name not in TEXT_FIELDS and _is_chat(cell)}
    prompt, answer = lists.pop("prompt", None), lists.get("completion")
    if prompt and answer:  # as TRL has them
        lists = {"completion": [*prompt, *answer], **{name: lists[name] for name in lists if name != "completion"}}
    for each in (turns, *({name: cell} for name, cell in lists.items())):
        parts = sample_of(sample_id, tags, each).parts
        if _has_answer(parts):
            return parts
    return None


def _has_answer(parts: Sequence[Part]) -> bool:
    return any(part.role == "assistant" and part.text for part in parts)


def _is_chat(cell: Any) -> bool:
    return isinstance(cell, list) and all(isinstance(each, Mapping) and "role" in each for each in cell)
