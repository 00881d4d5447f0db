"""The task: add one to each digit, so that ``2749=`` is answered by ``3850``; and a reward that can be verified.

Prompts come from a JSONL file, one object a line: ``{"prompt": "2749=", "answer": "3850"}``. An answer is exact if the
model writes those characters and then ends the sequence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import UserError

__all__ = [
    "CHARACTERS",
    "EOS_ID",
    "PAD_ID",
    "VOCAB_SIZE",
    "Problem",
    "decode",
    "encode",
    "is_exact",
    "read_problems",
    "reward",
    "split_problems",
]

#: The vocabulary: token ``i`` is the ``i``-th character. ``_`` is padding, ``.`` the end of an answer.
CHARACTERS: Final = "_.0123456789+="
PAD_ID: Final = 0
EOS_ID: Final = 1
VOCAB_SIZE: Final = len(CHARACTERS)


@dataclass(frozen=True)
class Problem:
    """A prompt and the one answer that is right."""

    prompt: str
    answer: str


def encode(text: str) -> list[int]:
    """Token ids of a prompt or an answer, without the end.

    Raises:
        ValueError: A character is not in the vocabulary.
    """
    ids = [CHARACTERS.find(char) for char in text]
    for char, token in zip(text, ids, strict=True):
        if token <= EOS_ID:
            raise ValueError(f"character {char!r} is not one of {CHARACTERS[EOS_ID + 1 :]!r}")
    return ids


def decode(ids: Sequence[int]) -> str:
    """What token ids spell; an answer that the model has ended ends with a ``.``."""
    return "".join(CHARACTERS[token] for token in ids)


def reward(problem: Problem, answer: str) -> float:
    """The share of characters that are right and in their place, the end among them; of the longer of the two."""
    right = problem.answer + CHARACTERS[EOS_ID]
    return sum(a == b for a, b in zip(right, answer, strict=False)) / max(len(right), len(answer))


def is_exact(problem: Problem, answer: str) -> bool:
    """Whether the answer is right, and ends there."""
    return answer == problem.answer + CHARACTERS[EOS_ID]


def read_problems(path: Path, *, max_prompt_chars: int, max_answer_chars: int) -> list[Problem]:
    """Reads a JSONL file of prompts. Blank lines are skipped; keys other than ``prompt`` and ``answer`` are ignored.

    Args:
        path: The file.
        max_prompt_chars: The longest prompt that leaves the model room to answer.
        max_answer_chars: The longest answer that the model may write.

    Raises:
        UserError: The file is missing, unreadable or empty, or a line is broken; the message names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"prompts file {path} does not exist. Give a JSONL file with --data FILE.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts file {path} cannot be read: {error}.") from error
    problems = [
        _parse_line(f"{path}, line {number}", line, max_prompt_chars, max_answer_chars)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not problems:
        raise UserError(
            f'prompts file {path} is empty. Expected lines such as {{"prompt": "2749=", "answer": "3850"}}.'
        )
    return problems


def _parse_line(where: str, line: str, max_prompt_chars: int, max_answer_chars: int) -> Problem:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not a JSON object ({error.msg} at column {error.colno}).") from error
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(entry).__name__}.")
    texts: dict[str, str] = {}
    for key, limit in (("prompt", max_prompt_chars), ("answer", max_answer_chars)):
        if key not in entry:
            raise UserError(f"{where}: the key {key!r} is missing; the line has {sorted(entry)}.")
        text = entry[key]
        if not isinstance(text, str) or not text:
            raise UserError(f"{where}: {key!r} must be a string that is not empty, got {text!r}.")
        if len(text) > limit:
            raise UserError(f"{where}: {key!r} has {len(text)} characters, the model has room for {limit}.")
        try:
            encode(text)
        except ValueError as error:
            raise UserError(f"{where}: {key!r} is {text!r}: {error}.") from None
        texts[key] = text
    return Problem(texts["prompt"], texts["answer"])


def split_problems(problems: Sequence[Problem], num_eval: int) -> tuple[list[Problem], list[Problem]]:
    """Splits into training and held-out problems, the latter evenly spaced over the file.

    At most a fifth is held out. A file of fewer than five prompts is too small for that: both parts are then the
    whole file, and the evaluation shows what was trained on.
    """
    num_eval = min(num_eval, len(problems) // 5)
    if num_eval == 0:
        return list(problems), list(problems)
    held_out = {i * len(problems) // num_eval for i in range(num_eval)}
    return (
        [problem for i, problem in enumerate(problems) if i not in held_out],
        [problem for i, problem in enumerate(problems) if i in held_out],
    )
