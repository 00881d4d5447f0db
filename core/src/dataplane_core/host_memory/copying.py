"""Copies of large memory by several threads.

numpy copies large arrays without the interpreter's lock, so a few Python threads are as fast as torch's. The calling
thread copies too. It never waits for a thread that has not begun, so a copy ends also where no thread can be started,
and where all threads are busy.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

import numpy as np

from dataplane_core.host_memory.limits import usable_cores

#: A target and a source: arrays (n,) of the same length. If their dtypes differ, numpy converts.
Copy: TypeAlias = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

#: How many threads copy at most if nothing else is said: few cores already use all that the memory gives.
_MOST_THREADS: Final = 4
#: A thread gets at least so many bytes. To wake it takes as long as copying some hundred KB.
_LEAST_BYTES: Final = 2 << 20
#: Several threads copy only if so many bytes are at most so many arrays. After each array a thread needs the
#: interpreter's lock, so with small ones threads would mostly wait for each other.
_MOST_ARRAYS: Final = 16
#: Shares per thread: a thread that comes late, or has less of its core, leaves more of them to the others.
_SHARES: Final = 4
#: Columns are cut at multiples of it.
_PAGE: Final = 4096
#: A thread that nobody needed for so long ends.
_IDLE_S: Final = 1.0


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
        copies: What is copied. No target overlaps another array of these.
        threads: How many threads copy at most, with the one that calls. None: `default_copy_threads`.
        copied: Called each time some MB were copied into targets that follow one another, with the first and the last
            of these targets, by the thread that copied.

    Example:
        >>> target = np.zeros(3, dtype=np.uint8)
        >>> copy_arrays([(target, np.ones(3, dtype=np.uint8))])
        >>> target.tolist()
        [1, 1, 1]
    """
    size_bytes = sum(target.nbytes for target, _ in copies)
    most = size_bytes // _LEAST_BYTES
    if len(copies) > most * _MOST_ARRAYS:
        most = 1
    if most > 1:
        most = min(most, default_copy_threads() if threads is None else threads)
    if most < 2 and copied is None:
        _copy(copies)
        return
    share_bytes = -(-size_bytes // (max(most, 1) * _SHARES * _PAGE)) * _PAGE
    work = (
        partial(_copy, share) if copied is None else partial(_copy_and_tell, share, copied)
        for share in _shares(copies, share_bytes)
    )
    in_threads(work, max(most, 1))


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
    helps = [_Help(left, errors, cancel) for _ in range(threads - 1)]
    try:
        try:
            _helpers.ask(helps)
            _do(left, errors, cancel)
        finally:
            _end(helps, left, cancel)
    finally:
        _end(helps, left, cancel)  # if an interrupt came just before the first
    if errors:
        raise errors[0]


def _copy(copies: Iterable[Copy]) -> None:
    for target, source in copies:
        target[:] = source


def _copy_and_tell(copies: list[Copy], copied: Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], None]) -> None:
    _copy(copies)
    targets = [target for target, _ in copies if target.nbytes]
    if targets:
        copied(targets[0], targets[-1])


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
    """What one helper is asked: to do pieces of work as long as there are any."""

    def __init__(
        self, left: deque[Callable[[], None]], errors: list[BaseException], cancel: Callable[[], None]
    ) -> None:
        self._left = left
        self._errors = errors
        self._cancel = cancel
        self._busy = False
        self._ended = threading.Lock()  # taken until the helper has ended
        self._ended.acquire()

    def give(self) -> None:
        """Does them. Called by a helper."""
        try:
            self._busy = True  # before it takes a piece
            _do(self._left, self._errors, self._cancel)
        except BaseException:  # the caller gets it
            pass
        finally:
            self._busy = False
            self._ended.release()

    def wait(self) -> None:
        """Waits while the helper is at work. Not for one that has not begun: it finds nothing to do."""
        while self._busy:
            self._ended.acquire()  # not `with`: an interrupt before its end would leave the lock taken


def _end(helps: Sequence[_Help], left: deque[Callable[[], None]], cancel: Callable[[], None]) -> None:
    """Gives out no more work, and waits until no helper is at work. An interrupt is raised only then."""
    interrupt: BaseException | None = None
    while True:
        try:
            left.clear()
            for each in helps:
                each.wait()
            break
        except BaseException as error:
            interrupt = error
            cancel()
    if interrupt is not None:
        raise interrupt


class _Helpers:
    """The threads of this process that help. They start when they are needed, and end when they are idle."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Help] = SimpleQueue()
        self._threads: set[threading.Thread] = set()

    def ask(self, helps: Sequence[_Help]) -> None:
        """Asks as many helpers. Does not wait for them."""
        for each in helps:
            self._asked.put(each)
        # no lock: a signal handler may ask too. Of callers at the same time, each may start one too many
        while len(self._threads) < len(helps):
            thread = threading.Thread(target=self._work, name="dataplane copy", daemon=True)
            try:
                self._threads.add(thread)
                thread.start()
            except BaseException as error:
                self._threads.discard(thread)
                if isinstance(error, RuntimeError):  # the system gives no thread: the caller works alone
                    return
                raise

    def _work(self) -> None:
        me = threading.current_thread()
        try:
            while True:
                try:
                    self._asked.get(timeout=_IDLE_S).give()
                except Empty:
                    self._threads.discard(me)  # whoever asks from now on starts another one
                    if self._asked.empty():
                        return
                    self._threads.add(me)  # somebody asked just before, and counted on this one
        finally:
            self._threads.discard(me)


_helpers = _Helpers()


def _forget_in_fork() -> None:
    """A fork has no helpers, and must not copy what its parent asked for."""
    global _helpers
    _helpers = _Helpers()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_forget_in_fork)
