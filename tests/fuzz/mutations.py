"""Random changes of valid encodings: of their bytes, or of the values in them. The same dice give the same changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

__all__ = ["JSON_VALUES", "Form", "mutate", "mutate_bytes", "mutate_value"]

#: Bytes at which formats change their meaning: limits of msgpack's types, signs, separators of text.
_BYTES: Final = (
    bytes([0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC7, 0xC9, 0xD4, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF]) + b"-*$:9,"
)
_NUMBERS: Final = [0, 1, -1, 2, 7, 255, 2**31, 2**32 - 1, -(2**31), 2**48, 2**62, 2**63 - 1, -(2**63), 2**64 - 1]
JSON_VALUES: Final = [
    *(None, True, False, 0.5, -1.0, 1e308, float("inf"), float("nan"), "", "a", "p", "x", "first_write", "keep"),
    *([], {}, [0], ["a"], [[]], {"a": 1}, {"x": "tensor:int64:1:"}, "tensor:int64:1:", "\u0000", "q0_g0", "in"),
]
_VALUES: Final = [*JSON_VALUES, b"", b"a", b"\0" * 16, b"\xff" * 16, {1: 2}, [b"\0" * 16, 0]]


@dataclass(frozen=True)
class Form:
    """How the bytes of an encoding become values and bytes again.

    Attributes:
        load: Reads the values. Raises if the bytes are damaged.
        dump: Writes them. Raises if a value does not fit.
        values: What a value may be replaced with.
    """

    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]
    values: Sequence[Any] = tuple(_VALUES)


def mutate(data: bytes, dice: random.Random, others: Sequence[bytes], form: Form | None) -> bytes:
    """A changed encoding: two times of three a changed value, if there is a form."""
    if form is not None and dice.random() < 0.67:
        try:
            tree = form.load(data)
            for _ in range(dice.choice([1, 1, 1, 2, 4])):
                tree = mutate_value(tree, dice, form.values)
            return form.dump(tree)
        except Exception:  # a value that the form cannot hold, or damaged bytes
            pass
    return mutate_bytes(data, dice, others)


def mutate_bytes(data: bytes, dice: random.Random, others: Sequence[bytes]) -> bytes:
    """One to four random changes of the bytes."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed) + 1)
        match dice.randrange(8):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << dice.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = dice.choice(_BYTES)
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + dice.randint(1, 9)]
            case 4:
                changed[at:at] = dice.randbytes(dice.randint(1, 9))
            case 5 if len(changed) > 8:  # a number of 8 or 4 bytes, where sizes overflow
                size, order = dice.choice([8, 8, 4]), dice.choice(["little", "little", "big"])
                place = dice.randrange(len(changed) // size) * size if dice.random() < 0.7 else at
                number = dice.choice([*_NUMBERS, dice.randrange(-9, 99)]) % 2 ** (8 * size)
                changed[place : place + size] = number.to_bytes(size, order)
            case 6 if changed:  # the beginning, where formats say what they are
                changed[dice.randrange(min(24, len(changed)))] = dice.randrange(256)
            case _:
                other = dice.choice(others)
                changed[at:] = other[dice.randrange(len(other) + 1) :]
    return bytes(changed)


def mutate_value(tree: Any, dice: random.Random, values: Sequence[Any] = _VALUES) -> Any:
    """The same values with one change, somewhere."""
    if isinstance(tree, dict) and tree and dice.random() < 0.93:
        key = dice.choice(list(tree))
        match dice.randrange(12):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return {**tree, dice.choice(["zz", key, 7]): dice.choice(values)}
            case 2:
                other = dice.choice(list(tree))
                return {**tree, key: tree[other]}
        return {**tree, key: mutate_value(tree[key], dice, values)}
    if isinstance(tree, (list, tuple)) and tree and dice.random() < 0.93:
        rows, at = list(tree), dice.randrange(len(tree))
        match dice.randrange(12):
            case 0:
                del rows[at]
            case 1:
                rows.insert(at, dice.choice(rows))
            case 2:
                rows[at] = dice.choice(values)
            case 3:
                rows[at] = dice.choice(rows)
            case _:
                rows[at] = mutate_value(rows[at], dice, values)
        return rows
    if type(tree) is int and dice.random() < 0.7:
        return dice.choice([*_NUMBERS, tree + 1, tree - 1, -tree])
    if isinstance(tree, (bytes, str, msgpack.ExtType)) and dice.random() < 0.6:
        return _mutate_text(tree, dice)
    return dice.choice([*values, *_NUMBERS])


def _mutate_text(text: Any, dice: random.Random) -> Any:
    if isinstance(text, msgpack.ExtType):
        return msgpack.ExtType(dice.choice([text.code, text.code, 2, 5]), mutate_bytes(text.data, dice, [text.data]))
    if isinstance(text, str):
        data = mutate_bytes(text.encode("utf-8", "surrogatepass"), dice, [text.encode("utf-8", "surrogatepass")])
        return data.decode("utf-8", dice.choice(["replace", "replace", "surrogateescape"]))
    return mutate_bytes(text, dice, [text])
