"""Extents: never two at one place, moved only while nobody uses them, and room wherever enough bytes are free."""

import random

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from dataplane_core.host_memory.arena import Extents

SIZE = 64 * 64


class Memory(RuleBasedStateMachine):
    """Extents beside the bytes that they stand for: each holds its own number until it is freed."""

    held = Bundle("held")

    @initialize()
    def begin(self):
        self.extents = Extents(SIZE)
        self.bytes = np.zeros(SIZE, np.uint8)
        self.numbers = {}
        self.last = 0

    def keep(self, extent):
        self.last = self.last % 250 + 1
        self.numbers[extent] = self.last
        self.bytes[extent.offset : extent.offset + extent.size_bytes] = self.last
        return extent

    @rule(target=held, size=st.integers(1, SIZE // 3))
    def allocate(self, size):
        extent = self.extents.allocate(size)
        return multiple() if extent is None else self.keep(extent)

    @rule(extent=consumes(held))
    def free(self, extent):
        del self.numbers[extent]
        extent.pins = 0
        self.extents.free(extent)

    @rule(extent=held, pinned=st.booleans())
    def pin(self, extent, pinned):
        extent.pins = int(pinned)

    @rule(extent=held, share=st.floats(0, 1))
    def shrink(self, extent, share):
        self.extents.shrink(extent, max(1, int(extent.size_bytes * share)))

    @rule(target=held, size=st.integers(1, SIZE))
    def make_room(self, size):
        pinned = {extent: extent.offset for extent in self.numbers if extent.pins}
        walls = sorted((offset, offset + extent.size_bytes) for extent, offset in pinned.items())
        starts, ends = [0, *(end for _, end in walls)], [*(start for start, _ in walls), SIZE]
        between = [
            end - start - sum(e.size_bytes for e in self.numbers if not e.pins and start <= e.offset < end)
            for start, end in zip(starts, ends, strict=True)
        ]
        made = self.extents.make_room(size, self.move)
        assert made == (max(between) >= size), "room is made wherever enough bytes are free between two pins"
        assert all(extent.offset == offset for extent, offset in pinned.items())
        return self.keep(self.extents.allocate(size)) if made else multiple()

    def move(self, source, target, size):
        assert target < source
        self.bytes[target : target + size] = self.bytes[source : source + size].copy()

    @invariant()
    def each_holds_its_own_bytes(self):
        for extent, number in self.numbers.items():
            assert (self.bytes[extent.offset : extent.offset + extent.size_bytes] == number).all()
        assert self.extents.used_bytes == sum(extent.size_bytes for extent in self.numbers)


TestMemory = Memory.TestCase
TestMemory.settings = settings(stateful_step_count=40)


def test_the_cheapest_neighbours_are_moved():
    extents = Extents(64 * 20)
    made = [extents.allocate(64 * n) for n in (2, 1, 8, 1, 1, 1)]  # 6 granules are free at the end
    for index in (0, 3, 5):
        extents.free(made[index])
    moved = []
    assert extents.make_room(64 * 8, lambda source, target, size: moved.append((source, target, size)))
    assert moved == [(64 * 12, 64 * 11, 64)]  # the one beside the end, not the eight at the front


def test_a_size_that_can_never_fit_moves_nothing():
    extents = Extents(1024)
    extents.free(extents.allocate(64))
    assert not extents.make_room(1025, move=None)
    assert extents.allocate(1025) is None


@pytest.mark.parametrize("seed", range(3))
def test_cycles_of_puts_and_clears_of_changing_lengths_leave_ninety_percent_usable(seed):
    draw = random.Random(seed)
    extents, live = Extents(1 << 24), []
    for _ in range(10_000):
        size = int(draw.lognormvariate(13, 1.5))
        while live and (extents.used_bytes + size > 0.9 * extents.size_bytes or draw.random() < 0.3):
            extents.free(live.pop(draw.randrange(len(live))))
        if extents.used_bytes + size + 64 > extents.size_bytes:
            continue
        extent = extents.allocate(size)
        if extent is None:
            assert extents.make_room(size, lambda *_: None)
            extent = extents.allocate(size)
        live.append(extent)
    assert extents.make_room(int(0.99 * (extents.size_bytes - extents.used_bytes)), lambda *_: None)
