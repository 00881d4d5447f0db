"""Copies by several threads: the same bytes, and nobody at work on the memory when the call has ended."""

import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from dataplane_core.host_memory import copy_arrays, copying

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A few bytes are enough for several threads."""
    monkeypatch.setattr(copying, "_LEAST_BYTES", 16)
    monkeypatch.setattr(copying, "_PAGE", 8)


class Watch:
    """Which threads copy, and which helpers are copying now. All take their time, so that each gets shares."""

    def __init__(self, copy):
        self.copy, self.caller = copy, threading.get_ident()
        self.inside, self.calls = [], Counter()
        self.pause_s, self.together = 0.0, None

    def __call__(self, copies):
        me = threading.get_ident()
        self.calls[me == self.caller] += 1
        if self.together is not None:
            self.together.wait(WAIT_S)
            self.together = None
        if me == self.caller:
            time.sleep(self.pause_s / 2)
            self.copy(copies)
            return
        self.inside.append(me)
        try:
            time.sleep(self.pause_s)
            self.copy(copies)
        finally:
            self.inside.remove(me)


@pytest.fixture
def watch(monkeypatch):
    each = Watch(copying._copy)
    monkeypatch.setattr(copying, "_copy", each)
    return each


def arrays(size_bytes):
    source = np.arange(1, size_bytes + 1, dtype=np.uint64).astype(np.uint8) | 1
    return np.zeros(size_bytes, dtype=np.uint8), source


@pytest.mark.parametrize("threads", [None, 1, 2, 4])
def test_the_bytes_are_the_same_however_they_lie(threads):
    draw = random.Random(0)
    for _ in range(60):
        memory, source = np.zeros(20_000, dtype=np.uint8), np.frombuffer(draw.randbytes(20_000), dtype=np.uint8)
        expected, copies, at = memory.copy(), [], 0
        while at < len(memory) and len(copies) < draw.choice([0, 1, 3, 200]):
            begin, size = at + draw.choice([0, 1, 64]), draw.choice([0, 1, 7, 16, 100, 5000, 20_000])
            size = min(size, max(0, len(memory) - begin))
            start = draw.randrange(len(source) - size + 1)
            copies.append((memory[begin : begin + size], source[start : start + size]))
            expected[begin : begin + size] = source[start : start + size]
            at = begin + size
        draw.shuffle(copies)
        copy_arrays(copies, threads)
        assert memory.tobytes() == expected.tobytes()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("sizes", [[], [0], [800], [100] * 8, [1] * 800, [0, 790, 10, 0]], ids=str)
def test_what_was_copied_is_told_once_and_after_it_was_copied(sizes, threads):
    target, source = arrays(sum(sizes))
    cuts, told = np.cumsum([0, *sizes]).tolist(), []

    def copied(first, last):
        start = first.ctypes.data - target.ctypes.data
        stop = last.ctypes.data + last.nbytes - target.ctypes.data
        assert target[start:stop].tobytes() == source[start:stop].tobytes()
        told.extend(range(start, stop))

    copy_arrays([(target[a:b], source[a:b]) for a, b in pairwise(cuts)], threads, copied=copied)
    assert sorted(told) == list(range(sum(sizes)))


def test_few_bytes_small_arrays_and_one_thread_are_left_to_the_caller(watch):
    target, source = arrays(1000)
    copy_arrays([(target[:31], source[:31])], 4)
    copy_arrays([(target, source)], 1)
    copy_arrays([(target[:1], source[:1])] * 1000, 4)
    copy_arrays([], 4)
    assert watch.calls == {True: 4}


def test_without_a_thread_the_caller_copies_alone(monkeypatch, watch):
    def start(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying, "start_new_thread", start)
    target, source = arrays(1000)
    copy_arrays([(target, source)], 4)
    assert target.tobytes() == source.tobytes()
    assert list(watch.calls) == [True]


def test_an_error_of_a_helper_is_raised(watch):
    def fail(copies):
        if threading.get_ident() != watch.caller:
            raise ValueError("sizes differ")

    watch.together, watch.copy = threading.Barrier(2), fail
    with pytest.raises(ValueError, match="sizes differ"):
        copy_arrays([arrays(1000)], 2)


# --- interrupts -------------------------------------------------------------------------------------------------------


def test_when_an_interrupt_is_raised_no_helper_copies_any_longer(watch, interrupted):
    watch.pause_s = 0.0005
    at = completed = 0
    while completed < 3:
        target, source = arrays(64)
        error = interrupted(partial(copy_arrays, [(target, source)], 2), at, copying)
        assert watch.inside == []
        if error is None:
            assert target.tobytes() == source.tobytes()
            completed += 1
        at += 1
    assert watch.calls[False]


def test_interrupts_while_it_waits_are_raised_when_it_has_waited(watch):
    raised, copy = [], watch.copy

    def interrupt(*_):
        if watch.inside and len(raised) < 3:
            raised.append(None)
            raise KeyboardInterrupt

    def until_interrupted(copies):
        while threading.get_ident() != watch.caller and len(raised) < 3:
            time.sleep(0.001)
        copy(copies)

    watch.copy, watch.together = until_interrupted, threading.Barrier(2)
    before, limit = signal.signal(signal.SIGALRM, interrupt), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(KeyboardInterrupt):
            copy_arrays([arrays(1000)], 2)
        assert watch.inside == []
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *limit)
    assert len(raised) == 3


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "torch_threads", "expected"), [(1, 1, 1), (2, 1, 2), (64, 1, 4), (8, 6, 3), (8, 8, 1), (2, 8, 1)]
)
def test_by_default_it_takes_cores_that_torch_does_not_hold(monkeypatch, cores, torch_threads, expected):
    monkeypatch.setattr(copying, "usable_cores", lambda: cores)
    before = torch.get_num_threads()
    torch.set_num_threads(torch_threads)
    try:
        assert copying.default_copy_threads() == expected
        copy_arrays([arrays(1000)])
        assert torch.get_num_threads() == torch_threads
    finally:
        torch.set_num_threads(before)
