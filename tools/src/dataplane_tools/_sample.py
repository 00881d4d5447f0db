"""A sample as a reader sees it: prompt and answer apart, turn by turn, values per token. Prints and reads nothing.

`sample_of` makes a `Sample` from the cells of one row. What it looks at, with the names that trainers use:

- The tokens are ``input_ids``; or a prompt and an answer in two columns, as TRL and verl name them. Padding is cut off
  by ``attention_mask``, else by ``input_lengths`` (a field or a tag); that of a prompt column by ``prompt_mask``.
- The parts of the tokens are those of ``turn_lengths``, ``turn_roles`` and ``turn_contents``; else those that a mask
  (``token_mask``, ``response_mask``, ``completion_mask``) tells apart; else the two columns; else one part.
- Without tokens, an object column that is a list of ``{"role": ..., "content": ...}`` gives the parts; or two, named
  ``prompt`` and ``completion``.
- A column of numbers with one per token, or one per token of the answer column, is a column ``per_token``.

Nothing has to be there: a sample that is half written gives what it has, and names in ``lacks`` what it has not.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, Final, TypeGuard

import torch

from dataplane_core.schema import (
    ATTENTION_MASK_FIELD,
    INPUT_IDS_FIELD,
    INPUT_LENGTHS_FIELD,
    MULTIMODAL_FIELDS,
    PER_TOKEN_FIELDS,
    TURN_CONTENTS_FIELD,
    TURN_LENGTHS_FIELD,
    TURN_ROLES_FIELD,
)

#: Columns that hold prompt and answer apart.
_PAIRS: Final = (("prompt_ids", "completion_ids"), ("prompts", "responses"))
_CHATS: Final = ("prompt", "completion")
_PROMPT_MASK: Final = "prompt_mask"
_MASKS: Final = ("token_mask", "response_mask", "completion_mask")
#: What the parts of a sample are made of, besides masks.
_STRUCTURE: Final = (INPUT_IDS_FIELD, ATTENTION_MASK_FIELD, INPUT_LENGTHS_FIELD, _PROMPT_MASK, *_PAIRS[0], *_PAIRS[1])
#: What the turns of a message log are kept as.
TURNS: Final = (TURN_LENGTHS_FIELD, TURN_ROLES_FIELD, TURN_CONTENTS_FIELD)
#: The fields without which tokens cannot be read as text.
TEXT_FIELDS: Final = (*_STRUCTURE, *_MASKS, *TURNS)
#: Numbers of a column that are written out; of a longer one its shape is said.
_MOST_NUMBERS: Final = 64
#: The first and the last token ids that stand for a text without a tokenizer.
_FIRST_IDS, _LAST_IDS = 24, 8
#: What JavaScript counts exactly.
_MOST_EXACT: Final = 2**53

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a sample."""

    #: That of a turn; or ``prompt``, ``answer``, ``masked`` (no answer, after the prompt), ``text`` (undivided).
    role: str
    text: str  # without a tokenizer: the turn's content, else its first and last token ids
    start: int = 0  # of its tokens in `Sample.tokens`
    stop: int = 0
    calls: Any = None  # what a turn holds besides, such as tool calls, as JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is known of a sample: its text in ``parts`` and ``tokens``, its other fields by their names in the dicts."""

    sample_id: str
    group: str
    tags: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)  # bool, int, float, str or None
    parts: list[Part] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # without padding
    per_token: dict[str, list[Any]] = field(default_factory=dict)  # None where the column has no number of a token
    objects: dict[str, Any] = field(default_factory=dict)  # small ones, as JSON values
    shapes: dict[str, str] = field(default_factory=dict)  # what the others are, such as float32 of shape (600, 1176)
    images: dict[str, Any] = field(default_factory=dict)  # uint8 tensors, or the bytes of a file
    lacks: Sequence[str] = ()  # expected fields that it does not have yet


def sample_of(
    sample_id: str,
    tags: Mapping[str, Any],
    cells: Mapping[str, Any],
    *,
    lacks: Sequence[str] = (),
    decode: Decode | None = None,
) -> Sample:
    """What a row says. A cell is a tensor, or the item of an object column."""
    sample = Sample(sample_id=sample_id, group=group_of_id(sample_id), tags=dict(tags), lacks=lacks)
    rows = _Rows(cells, tags)
    sample.tokens.extend(rows.tokens)
    sample.parts.extend(_turns(cells, rows.tokens, decode) or _stretches(cells, rows, decode))
    if not sample.parts:
        chats = [name for name, cell in cells.items() if is_chat(cell)]
        chats = list(_CHATS) if set(chats).issuperset(_CHATS) else chats[:1]
        sample.parts.extend(_turn(turn) for name in chats for turn in cells[name])
        cells = {name: cell for name, cell in cells.items() if name not in chats}
    for name, cell in cells.items():
        if name in _STRUCTURE and name != INPUT_LENGTHS_FIELD and isinstance(cell, torch.Tensor):
            continue
        if is_value(cell) and not (name in PER_TOKEN_FIELDS and rows.aligned(cell) is not None):
            sample.values[name] = value_of(cell)
        elif (numbers := None if name in _NOT_PER_TOKEN else rows.aligned(cell)) is not None:
            sample.per_token[name] = numbers
        elif _is_image(cell):
            sample.images[name] = cell
        elif isinstance(cell, torch.Tensor) and cell.numel() > _MOST_NUMBERS:
            sample.shapes[name] = shape_of(cell)
        elif name not in TURNS:
            sample.objects[name] = json_value(cell)
    return sample


_NOT_PER_TOKEN: Final = {TURN_LENGTHS_FIELD, *MULTIMODAL_FIELDS}


class _Rows:
    """The tokens of a row, and which numbers of its other columns belong to them."""

    def __init__(self, cells: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        pair = next((names for names in _PAIRS if any(_is_row(cells.get(name)) for name in names)), None)
        halves = [
            cells[name] if _is_row(cells.get(name)) else torch.empty(0, dtype=torch.int64, device="cpu")
            for name in pair or ()
        ]
        ids = cells.get(INPUT_IDS_FIELD)
        whole = _is_row(ids)
        if not whole:
            ids = torch.cat([half.long() for half in halves]) if halves else None
        self.size = 0 if ids is None else len(ids)
        #: Where the answer column begins in the row. None: no column says it.
        self.answer = self.size - len(halves[1]) if halves and (len(halves[1]) or not whole) else None
        mask = cells.get(ATTENTION_MASK_FIELD)
        if mask is None and halves and _is_row(prompt := cells.get(_PROMPT_MASK)) and len(prompt) == self.answer:
            mask = torch.cat([prompt.bool(), torch.ones(len(halves[1]), dtype=torch.bool, device="cpu")])
        length = cells.get(INPUT_LENGTHS_FIELD, tags.get(INPUT_LENGTHS_FIELD))
        if _is_row(mask) and len(mask) == self.size:
            self.places = mask.nonzero().flatten().tolist()
        else:
            length = value_of(length) if is_value(length) else None
            self.places = list(range(min(self.size, length) if type(length) is int and length >= 0 else self.size))
        row = [] if ids is None else ids.tolist()
        self.tokens: list[int] = [int(row[place]) for place in self.places]

    def aligned(self, cell: Any) -> list[Any] | None:
        """The numbers of a column, one for each token; None where they belong to other things."""
        if not _is_row(cell) or not self.size:
            return None
        before = self.size - len(cell)
        if before and before != self.answer:
            return None
        row = [None] * before + _numbers(cell)
        return [row[place] for place in self.places]


def _stretches(cells: Mapping[str, Any], rows: _Rows, decode: Decode | None) -> list[Part]:
    mask = next((found for name in _MASKS if (found := rows.aligned(cells.get(name))) is not None), None)
    if mask is None and rows.answer is not None:
        mask = [place >= rows.answer for place in rows.places]
    if mask is None:
        roles = ["text"] * len(rows.tokens)
    else:
        first = next((place for place, trained in enumerate(mask) if trained), len(mask))
        roles = ["answer" if trained else "masked" for trained in mask]
        roles[:first] = ["prompt"] * first
    cuts = list(accumulate((len(list(run)) for _, run in groupby(roles)), initial=0))
    return [
        Part(role=roles[start], text=_text(rows.tokens[start:stop], decode), start=start, stop=stop)
        for start, stop in pairwise(cuts)
    ]


def _turns(cells: Mapping[str, Any], tokens: list[int], decode: Decode | None) -> list[Part]:
    lengths, roles, contents = (_items(cells.get(name)) for name in TURNS)
    count = len(roles) or len(lengths) or len(contents)
    cuts = list(accumulate((length for length in lengths[:count] if type(length) is int and length >= 0), initial=0))
    whole = len(cuts) == count + 1 and cuts[-1] <= len(tokens)
    parts = []
    for number in range(count):
        start, stop = cuts[number : number + 2] if whole else (0, 0)
        said = _turn({"content": contents[number]} if number < len(contents) else {})
        if stop > start and (decode is not None or not said.text):
            said = Part(role="", text=_text(tokens[start:stop], decode), calls=said.calls)
        role = str(roles[number]) if number < len(roles) else f"turn {number + 1}"
        parts.append(Part(role=role, text=said.text, start=start, stop=stop, calls=said.calls))
    if parts and whole and cuts[-1] < len(tokens):
        parts.append(Part(role="text", text=_text(tokens[cuts[-1] :], decode), start=cuts[-1], stop=len(tokens)))
    return parts


def _turn(turn: Mapping[str, Any]) -> Part:
    """A turn of a log that is kept as objects. A content may itself be a message with tool calls."""
    content = turn.get("content")
    if isinstance(content, Mapping) and not content.keys().isdisjoint(("content", "tool_calls")):
        turn, content = {**content, **turn}, content.get("content")
    empty = [key for key, value in turn.items() if value is None or (isinstance(value, list) and not value)]
    rest = {key: value for key, value in turn.items() if key not in ("role", "content", *empty)}
    if isinstance(content, list) and content and all(isinstance(part, Mapping) and "type" in part for part in content):
        if all(part["type"] == "text" and isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)
        else:  # as with images
            rest["content"], content = content, None
    text = content if isinstance(content, str) else "" if content is None else json.dumps(json_value(content))
    return Part(role=str(turn.get("role", "")), text=text, calls=json_value(rest) if rest else None)


def _text(ids: Sequence[int], decode: Decode | None) -> str:
    if decode is not None:
        return decode(ids)
    if len(ids) <= _FIRST_IDS + _LAST_IDS:
        return " ".join(map(str, ids))
    first, last = (" ".join(map(str, some)) for some in (ids[:_FIRST_IDS], ids[-_LAST_IDS:]))
    return f"{first} ... {last} ({len(ids)} tokens)"


# --- cells ------------------------------------------------------------------------------------------------------------


def group_of_id(sample_id: str) -> str:
    """The group that claims count a sample to, or empty: the id holds no ``_g``."""
    return sample_id.rpartition("_g")[0]


def is_value(cell: Any) -> bool:
    """Whether a cell is one value: a number in a tensor of one element, or None, bool, int, float or str."""
    if isinstance(cell, torch.Tensor):
        return cell.numel() == 1 and cell.dim() <= 1 and not cell.is_complex()
    return cell is None or isinstance(cell, (bool, int, float, str))


def value_of(cell: Any) -> Any:
    """The value of such a cell, as Python's own, with the digits that are shown."""
    return _numbers(cell.flatten())[0] if isinstance(cell, torch.Tensor) else cell


def shape_of(cell: torch.Tensor) -> str:
    """What a tensor is, in words."""
    return f"{str(cell.dtype).removeprefix('torch.')} of shape {tuple(cell.shape)}"


def json_value(value: Any, *, exact_ints: bool = False) -> Any:
    """A value as JSON has it: bytes and large tensors by their size, and what is no number of JSON as a string; with
    ``exact_ints`` also integers that JavaScript would round.
    """
    if isinstance(value, torch.Tensor):
        return shape_of(value) if value.numel() > _MOST_NUMBERS else json_value(_numbers(value), exact_ints=exact_ints)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int) and exact_ints and abs(value) > _MOST_EXACT:
        return str(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, Mapping):
        return {str(key): json_value(item, exact_ints=exact_ints) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, exact_ints=exact_ints) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _numbers(cell: torch.Tensor) -> Any:
    """Its numbers as Python's, those of fewer than 64 bits with the digits that they have."""
    values = cell.tolist()
    short = cell.is_floating_point() and cell.dtype != torch.float64
    return _rounded(values) if short else values


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else float(f"{values:.6g}")


def _items(cell: Any) -> list[Any]:
    return _numbers(cell) if _is_row(cell) else list(cell) if isinstance(cell, (list, tuple)) else []


def _is_row(cell: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(cell, torch.Tensor) and cell.dim() == 1 and not cell.is_complex()


def is_chat(cell: Any) -> bool:
    return isinstance(cell, list) and bool(cell) and all(isinstance(turn, Mapping) and "role" in turn for turn in cell)


def _is_image(cell: Any) -> bool:
    if isinstance(cell, bytes):
        return cell.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8")) or cell[8:12] == b"WEBP"
    if not isinstance(cell, torch.Tensor) or cell.dtype != torch.uint8 or cell.dim() != 3:
        return False
    return min(cell.shape) > 0 and (cell.shape[-1] in (1, 3, 4) or cell.shape[0] in (1, 3, 4))


# --- images -----------------------------------------------------------------------------------------------------------


_MOST_PIXELS: Final = 256


def describe_image(cell: Any) -> str:
    """What an image is, in words."""
    return f"an image of {len(cell)} bytes" if isinstance(cell, bytes) else f"an image, {shape_of(cell)}"


def thumbnail(cell: Any) -> bytes | None:
    """A PNG of at most 256 pixels in width and height. None: there is no Pillow, or it cannot read the cell: a uint8
    tensor (H, W, C) or (C, H, W) of 1, 3 or 4 channels, or the bytes of a file.
    """
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        if isinstance(cell, bytes):
            image: Image.Image = Image.open(io.BytesIO(cell), formats=("PNG", "JPEG", "GIF", "WEBP"))
        else:
            pixels = (cell if cell.shape[-1] in (1, 3, 4) else cell.permute(1, 2, 0)).contiguous().numpy()
            image = Image.fromarray(pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels)
        image.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
        written = io.BytesIO()
        image.convert("RGBA").save(written, "PNG")
    except Exception:  # a file that is damaged, or has too many pixels: whatever Pillow says of it
        return None
    return written.getvalue()
