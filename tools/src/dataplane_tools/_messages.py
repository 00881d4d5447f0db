"""Rows as chats, for supervised fine-tuning: a list of ``{"role": ..., "content": ...}`` each, with its tool calls.

A message has the keys that Hugging Face's chat templates read, and none that is null: each is an object of JSON of its
own, so that all rows have one type whatever the arguments of their calls are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from dataplane_core.spec import FieldSpec
from dataplane_tools._sample import TEXT_FIELDS, TURNS, Decode, Part, is_chat, json_value, sample_of
from dataplane_tools._shards import json_text, pa

#: What the parts of a sample are in a chat, where nothing says their roles. What follows the prompt and was not
#: generated came from the environment.
_ROLES: Final = {"prompt": "user", "answer": "assistant", "masked": "user"}
#: What a message says besides, in the words of chat templates.
_CALLS: Final = "tool_calls"
_MORE: Final = ("reasoning_content", _CALLS, "tool_call_id", "name")
#: The field of the tools that a model may call, which templates take beside the messages.
_TOOLS: Final = "tools"


def is_for_messages(name: str, spec: FieldSpec) -> bool:
    """Whether a field may say what a chat is, or stays beside it."""
    return name in TEXT_FIELDS or spec.kind == "object" or is_beside_messages(name, spec)


def is_beside_messages(name: str, spec: FieldSpec) -> bool:
    """Whether a field has a column of its own beside the chats: numbers, one a row, and the schemas of tools."""
    return (name == _TOOLS and spec.kind == "object") or (spec.kind == "tensor" and spec.rank == 0)


def messages_of(
    ids: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    cells: Sequence[Mapping[str, Any]],
    decode: Decode | None,
) -> tuple[Any, Counter[str]]:
    """The Arrow column of the chats of rows, null where a row is none; and why those are none -> how many.

    The turns are those that are kept: as ``turn_roles`` and ``turn_contents``, or as a list of messages, if one of them
    is of the assistant. Else they are the text of the parts of the tokens, by ``decode``.
    """
    chats: list[list[str] | None] = []
    reasons: Counter[str] = Counter()
    for row in zip(ids, tags, cells, strict=True):
        try:
            chats.append(_chat(*row, decode))
        except _NoChatError as error:
            chats.append(None)
            reasons[str(error)] += 1
    return pa.array(chats, pa.list_(pa.string())).cast(pa.list_(pa.json_())), reasons


class _NoChatError(Exception):
    """Why a row is no chat."""


def _chat(sample_id: str, tags: Mapping[str, Any], cells: Mapping[str, Any], decode: Decode | None) -> list[str]:
    """The messages of a row, each as JSON: of what says its turns first."""
    turns = {name: cells[name] for name in TURNS if name in cells}
    lists = {name: cell for name, cell in cells.items() if name not in TEXT_FIELDS and is_chat(cell)}
    prompt, answer = lists.pop("prompt", None), lists.get("completion")
    if prompt and answer:  # as TRL has them
        lists = {"completion": [*prompt, *answer], **{name: lists[name] for name in lists if name != "completion"}}
    says: list[tuple[Mapping[str, Any], Decode | None]] = [(turns, None)]
    says += [({name: chat}, None) for name, chat in lists.items()]
    tokens = {name: cell for name, cell in cells.items() if name in TEXT_FIELDS}
    if decode is not None:  # the turns may be those of the prompt alone
        without_turns = {name: cell for name, cell in tokens.items() if name not in TURNS}
        says += [(tokens, decode), (without_turns, decode)]
    for columns, decoded_by in says:
        parts = sample_of(sample_id, tags, columns, decode=decoded_by).parts
        if _is_whole(parts):
            return [json_text(_message(part)) for part in parts]
    what = "no kept turns with one of the role 'assistant'"
    more = ", and no mask that tells prompt from answer" if decode is not None else ", and no --tokenizer was named"
    raise _NoChatError(what + (more if tokens else ""))


def _is_whole(parts: Sequence[Part]) -> bool:
    """Whether parts are a chat. A prompt alone is none, whatever it holds; of tokens, a mask says what they are."""
    roles = {part.role for part in parts}
    if roles and roles <= _ROLES.keys():
        return True
    return "text" not in roles and any(
        part.role == "assistant" and (part.text or not {_CALLS, "content"}.isdisjoint(part.calls or ()))
        for part in parts
    )


def _message(part: Part) -> dict[str, Any]:
    told = part.calls or {}
    message: dict[str, Any] = {"role": _ROLES.get(part.role, part.role), "content": told.get("content", part.text)}
    message |= {key: told[key] for key in _MORE if key in told}
    if _CALLS in told:
        calls = told[_CALLS] if isinstance(told[_CALLS], list) else [told[_CALLS]]
        message[_CALLS] = [_tool_call(call) for call in calls]
    return message


def _tool_call(call: Any) -> dict[str, Any]:
    """A call as chat templates take it. It may have been kept flat, or with its arguments as a text of JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _NoChatError("a tool call without a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what a model wrote wrong stays as it is
            arguments = json_value(json.loads(arguments))
    told = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": call["id"], **told} if call.get("id") is not None else told
