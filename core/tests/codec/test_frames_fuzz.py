"""Damaged bytes are read or refused with a `FrameError`, whatever the damage: no crash, no hang, no huge allocation."""

from __future__ import annotations

import random
import resource
import tracemalloc

import pytest
import torch
from framing import frame_cell, unframe_cell, unframe_column

from dataplane_core.codec import ALL_DTYPES, decode_item, encode_item, join_row, split_rows
from dataplane_core.errors import FrameError

INTERESTING = [0, 1, 0x7F, 0x80, 0xC1, 0xC7, 0xC9, 0xD4, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF]


@pytest.fixture(scope="module")
def seeds(random_cell):
    cells = [random_cell(shape, dtype, 1) for dtype in ALL_DTYPES for shape in [(), (0,), (5,), (3, 2), (2, 0)]]
    items = [None, 7, "text", b"bytes", [1, [2.5, None]], {"k": {"deep": [True]}, "t": torch.arange(3)}, "x" * 5000]
    return [frame_cell(cell) for cell in [*cells, *items]]


def mutate(data: bytes, dice: random.Random, others: list[bytes]) -> bytes:
    """One to four random changes."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed) + 1)
        match dice.randrange(8):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << dice.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = dice.choice(INTERESTING)
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + dice.randint(1, 9)]
            case 4:
                changed[at:at] = dice.randbytes(dice.randint(1, 9))
            case 5 if len(changed) >= 16:  # the dims, where sizes overflow
                place = dice.choice([8, 16])
                value = dice.choice([-1, 2**62, 2**63 - 1, -(2**63), 2**32, dice.randrange(-9, 99)])
                changed[place : place + 8] = value.to_bytes(8, "little", signed=True)
            case 6 if changed:  # the fixed part of the header, or the start of an object
                changed[dice.choice([4, 5, 6, 7, 16]) % len(changed)] = dice.randrange(256)
            case _:
                other = dice.choice(others)
                changed[at:] = other[dice.randrange(len(other)) :]
    return bytes(changed)


def attempt(read, *args):
    try:
        return read(*args)
    except FrameError:
        return None


def fuzz(seeds, count, seed):
    dice = random.Random(seed)
    read = 0
    for _ in range(count):
        data = mutate(dice.choice(seeds), dice, seeds)
        cell = attempt(unframe_cell, data)
        read += cell is not None
        if isinstance(cell, torch.Tensor):
            assert cell.nbytes <= len(data)
        column = attempt(unframe_column, [dice.choice(seeds), data, data][dice.randrange(3) :])
        if isinstance(column, torch.Tensor):
            plain = column.values() if column.is_nested else column
            assert plain.nbytes <= 5100 + 2 * len(data)
        attempt(decode_item, data[16:])
        attempt(decode_item, mutate(data[16:], dice, seeds))
        row = attempt(split_rows, [mutate(join_row([data, dice.choice(seeds)]), dice, seeds)])
        if row is not None:
            assert sum(map(len, row[0])) <= len(data) + 10200
    return read


def test_thousands_of_damaged_frames_are_read_or_refused(seeds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = fuzz(seeds, 4000, seed=1)
    assert 100 < read < 3000  # both outcomes are exercised
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_thousand_damaged_frames_are_read_or_refused(seeds, seed):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzz(seeds, 20_000, seed=100 + seed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_every_single_byte_of_a_frame_may_be_damaged():
    for data in (frame_cell(torch.arange(3, dtype=torch.int16)), frame_cell({"k": [1, "a"]})):
        for at in range(len(data)):
            for value in range(256):
                damaged = bytearray(data)
                damaged[at] = value
                attempt(unframe_cell, bytes(damaged))
                attempt(unframe_column, [data, bytes(damaged)])


def test_every_truncation_of_a_frame_is_refused():
    for data in (frame_cell(torch.arange(3, dtype=torch.int16)), frame_cell({"k": [1, "a"]})):
        for size in range(len(data)):
            with pytest.raises(FrameError):
                unframe_cell(data[:size])
            with pytest.raises(FrameError):
                unframe_column([data, data[:size]])


def test_a_forged_length_allocates_nothing():
    claims = b"\xdd\x00\x0f\xff\xff" * 100 + b"\xc0" * 2**20  # a hundred nested lists of a million each
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode_item(claims)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(claims)
    assert decode_item(encode_item([None] * 2**20)) == [None] * 2**20
