"""The task: sums such as ``12+7=``, the characters they are written in, and a reward that can be verified.

Prompts come from a JSONL file, one object a line: ``{"prompt": "12+7=", "answer": "19"}``. An answer is right if the
model writes exactly those characters and then ends the sequence.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import UserError

__all__ = [
    "ALPHABET",
    "EOS_ID",
    "PAD_ID",
    "VOCAB_SIZE",
    "Answer",
    "Problem",
    "corrupt_one_digit",
    "decode",
    "encode",
    "random_problem",
    "read_problems",
    "reward",
    "split_problems",
]

#: The characters of the task. The model's vocabulary is these, plus padding and end-of-sequence: 14 tokens.
ALPHABET: Final = "0123456789+="
PAD_ID: Final = 0
EOS_ID: Final = 1
_FIRST_CHAR_ID: Final = 2
VOCAB_SIZE: Final = _FIRST_CHAR_ID + len(ALPHABET)
_ID_OF: Final = {char: _FIRST_CHAR_ID + i for i, char in enumerate(ALPHABET)}


@dataclass(frozen=True)
class Problem:
    """A prompt and the one answer that earns the reward."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Answer:
    """What the model wrote after a prompt.

    Attributes:
        text: The characters before end-of-sequence.
        finished: Whether the model ended the sequence itself (False: it ran into the limit of new tokens).
    """

    text: str
    finished: bool


def encode(text: str) -> list[int]:
    """Token ids of ``text``, without end-of-sequence.

    Raises:
        ValueError: A character is not in the alphabet.
    """
    for char in text:
        if char not in _ID_OF:
            raise ValueError(f"character {char!r} is not one of {ALPHABET!r}")
    return [_ID_OF[char] for char in text]


def decode(ids: Sequence[int]) -> Answer:
    """The answer that ``ids`` spell, up to the first end-of-sequence. Padding inside an answer shows as ``?``."""
    chars: list[str] = []
    for token in ids:
        if token == EOS_ID:
            return Answer("".join(chars), finished=True)
        chars.append(ALPHABET[token - _FIRST_CHAR_ID] if token >= _FIRST_CHAR_ID else "?")
    return Answer("".join(chars), finished=False)


def reward(problem: Problem, answer: Answer) -> float:
    """1.0 for exactly the right answer followed by end-of-sequence, else 0.0."""
    return 1.0 if answer.finished and answer.text == problem.answer else 0.0


def random_problem(rng: random.Random, max_digits: int) -> Problem:
    """A sum of two numbers of 1 to ``max_digits`` digits, every digit count equally likely."""
    a, b = (rng.randrange(10 ** rng.randint(1, max_digits)) for _ in range(2))
    return Problem(f"{a}+{b}=", str(a + b))


def corrupt_one_digit(rng: random.Random, answer: str) -> str:
    """The answer with one of its digits replaced by another."""
    position = rng.randrange(len(answer))
    others = [digit for digit in "0123456789" if digit != answer[position]]
    return answer[:position] + rng.choice(others) + answer[position + 1 :]


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
        raise UserError(f'prompts file {path} is empty. Expected lines such as {{"prompt": "12+7=", "answer": "19"}}.')
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
