"""Copies of large memory: by several threads, into private memory that is used again.

numpy copies large arrays without the interpreter's lock, so a few Python threads are as fast as torch's. The calling
thread copies too. It never waits for a thread that has not begun, so a copy ends also where no thread can be started,
and where all threads are busy.

New memory can cost more than the copy into it, because each of its pages faults. Memory that was used before has no
faults, and with huge pages the first use has few. What is too large to be kept gets no huge pages.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from dataplane_core.host_memory.limits import usable_cores

#: A target and a source: arrays (n,) of the same length. If their dtypes differ, numpy converts.
Copy: TypeAlias = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

#: How many threads copy at most if nothing else is said: few cores already use all that the memory gives.
_MOST_THREADS: Final = 4
#: A thread gets at least so many bytes. To start it takes as long as copying some hundred KB.
_LEAST_BYTES: Final = 2 << 20
#: Several threads copy only if so many bytes are at most so many arrays. After each array a thread needs the
#: interpreter's lock, so with small ones threads would mostly wait for each other.
_MOST_ARRAYS: Final = 16
#: Shares per thread: a thread that comes late, or has less of its core, leaves more of them to the others.
_SHARES: Final = 4
#: Columns are cut at multiples of it.
_PAGE: Final = 4096

#: Arrays of fewer bytes are left to malloc, which reuses its memory too.
_LEAST_RECYCLED: Final = 1 << 20
#: How much unused memory this process keeps for later. The blocks that were unused for longest are given up first.
_KEPT_BYTES: Final = 128 << 20
_HUGE_PAGE: Final = 2 << 20


def default_copy_threads() -> int:
    """Up to 4 of the cores that this process may use and that torch's threads do not hold, with the caller's own."""
    torch = sys.modules.get("torch")  # a process that hosts memory has none
    held = 0 if torch is None else torch.get_num_threads() - 1  # one of them is the caller, which waits for the copy
    return max(1, min(_MOST_THREADS, usable_cores() - held))


def copy_arrays(
    copies: Sequence[Copy],
    threads: int | None = None,
    copied: Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], None] | None = None,
) -> None:
    """Copies each source into its target. Large copies are split among threads by bytes, wherever arrays end.

    It returns or raises only when no thread uses the memory any more, also if it is interrupted.

    Args:
        copies: No target overlaps another array of these.
        threads: How many threads copy at most, with the one that calls. None: `default_copy_threads`.
        copied: Called each time some MB were copied into targets that follow one another, with the first and the last
            of these targets, by the thread that copied.
    """
    size_bytes = sum(target.nbytes for target, _ in copies)
    most = max(1, size_bytes // _LEAST_BYTES)
    if len(copies) > most * _MOST_ARRAYS:
        most = 1
    if most > 1:
        most = min(most, default_copy_threads() if threads is None else threads)
    if most == 1 and copied is None:
        _copy(copies)
        return

    def copy(share: list[Copy]) -> None:
        _copy(share)
        targets = [target for target, _ in share if target.nbytes]
        if targets and copied is not None:
            copied(targets[0], targets[-1])

    share_bytes = -(-size_bytes // (most * _SHARES * _PAGE)) * _PAGE
    in_threads((partial(copy, share) for share in _shares(copies, share_bytes)), most)


def in_threads(work: Iterable[Callable[[], None]], threads: int, cancel: Callable[[], None] = lambda: None) -> None:
    """Does pieces of work, which give up the interpreter's lock for most of their time, in several threads.

    It returns or raises only when no thread is at work any more, also if it is interrupted. Then, and where a piece
    raises, others may not have been done.

    Args:
        work: The pieces, in any order.
        threads: How many threads take them at most, with the one that calls.
        cancel: Called when a piece has raised, or this function is interrupted: the pieces at work are to end soon.
    """
    left = deque(work)
    errors: list[BaseException] = []
    do = partial(_do, left, errors, cancel)
    helps = [_Help(do) for _ in range(threads - 1)]
    try:
        try:
            _start(helps)
            do()
        finally:
            _end(helps, left, cancel)
    finally:
        _end(helps, left, cancel)  # if an interrupt came just before the first
    if errors:
        raise errors[0]


def _copy(copies: Iterable[Copy]) -> None:
    for target, source in copies:
        target[:] = source


def _do(left: deque[Callable[[], None]], errors: list[BaseException], cancel: Callable[[], None]) -> None:
    while True:
        try:
            piece = left.popleft()
        except IndexError:
            return
        try:
            piece()
        except BaseException as error:
            errors.append(error)
            cancel()
            if not isinstance(error, Exception):
                raise
            raise errors[0] from errors[0].__cause__  # this one may have come of that


def _shares(copies: Sequence[Copy], size_bytes: int) -> Iterator[list[Copy]]:
    """The copies in lists of about ``size_bytes``, a multiple of a page, each. Long ones are cut."""
    share: list[Copy] = []
    room = size_bytes
    for target, source in copies:
        while target.nbytes > room:
            cut = room // _PAGE * _PAGE // target.itemsize
            share.append((target[:cut], source[:cut]))
            yield share
            target, source = target[cut:], source[cut:]
            share, room = [], size_bytes
        share.append((target, source))
        room -= target.nbytes
    yield share


class _Help:
    """A thread of its own for pieces of work, as long as there are any."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self._busy = False
        self._ended = threading.Lock()  # taken until the thread has ended
        self._ended.acquire()

    def give(self) -> None:
        """Does them. Called by the thread."""
        try:
            self._busy = True  # before it takes a piece
            self._do()
        except BaseException:  # the caller gets it
            pass
        finally:
            self._busy = False
            self._ended.release()

    def wait(self) -> None:
        """Waits while the thread is at work. Not for one that has not begun: it finds nothing to do."""
        while self._busy:
            self._ended.acquire()  # not `with`: an interrupt before its end would leave the lock taken


def _start(helps: Sequence[_Help]) -> None:
    # no part of its caller, where CPython 3.11 lets an interrupt at the end of this loop out without a `finally`
    with contextlib.suppress(RuntimeError):  # the system gives no more threads: those that are there do all
        for help_ in helps:
            start_new_thread(help_.give, ())  # not a `Thread`: its caller waits until it has begun


def _end(helps: Sequence[_Help], left: deque[Callable[[], None]], cancel: Callable[[], None]) -> None:
    """Gives out no more work, and waits until no helper is at work. An interrupt is raised only then."""
    interrupt: BaseException | None = None
    while True:
        try:
            left.clear()
            for help_ in helps:
                help_.wait()
            break
        except BaseException as error:
            interrupt = error
            cancel()
    if interrupt is not None:
        raise interrupt


# --- memory that is used again ----------------------------------------------------------------------------------------


_unused: Final[deque[_Block]] = deque()


def recycled_bytes(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An array (size_bytes,) uint8 with undefined content.

    Its memory belongs to the array and to all arrays and tensors that are made from it. When the last of them is gone,
    a later array may get the memory. The process keeps at most 128 MiB in this way.

    Example:
        >>> recycled_bytes(3).shape
        (3,)
    """
    if size_bytes < _LEAST_RECYCLED:
        return np.empty(size_bytes, dtype=np.uint8)
    block = _take(size_bytes)
    return np.asarray(_Lease(block.address, size_bytes, block))


class _Block:
    """A mapping."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        # Windows has no flags
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.mapping = mmap.mmap(-1, -(-size_bytes // _HUGE_PAGE) * _HUGE_PAGE, **private)
        whole = size_bytes // _HUGE_PAGE * _HUGE_PAGE  # the rest would take a huge page for a part of one
        if size_bytes > _KEPT_BYTES:  # used once: where free memory is in pieces, finding huge pages takes far longer
            whole = 0
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self.mapping.madvise(mmap.MADV_HUGEPAGE, 0, whole)
        self.address = int(np.frombuffer(self.mapping, dtype=np.uint8).ctypes.data)


class Window:
    """Gives numpy an array over memory, which then holds this object, and so the memory's ``owner``."""

    def __init__(self, address: int, size_bytes: int, owner: Any) -> None:
        self._owner = owner
        data = (address, False)
        self.__array_interface__ = {"shape": (size_bytes,), "typestr": "|u1", "data": data, "version": 3}


class _Lease(Window):
    """Gives its block back when the array is gone."""

    def __del__(self) -> None:
        _unused.append(self._owner)
        with contextlib.suppress(IndexError, RuntimeError):  # another thread gave back or took one meanwhile
            while sum(block.size_bytes for block in _unused) > _KEPT_BYTES:
                _unused.popleft()


def _take(size_bytes: int) -> _Block:
    """The smallest unused block that is large enough and not more than twice too large, or a new one."""
    while True:
        try:
            fitting = [block for block in _unused if size_bytes <= block.size_bytes <= 2 * size_bytes]
            if not fitting:
                return _Block(size_bytes)
            block = min(fitting, key=lambda block: block.size_bytes)
            _unused.remove(block)
            return block
        except (RuntimeError, ValueError):  # another thread was faster
            continue
