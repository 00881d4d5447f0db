"""`Arena`: shared memory, mapped once per process.

The memory is a memfd: a file without a name, whose memory the kernel frees when the last process that has it open or
mapped ends. So nothing is left after any crash, and the size of /dev/shm does not limit it. Or it is a file, which
outlives its processes. Another process gets the arena as a file descriptor, over a Unix socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

#: Values of `madvise` that Python's mmap module lacks (Linux 5.14): fill page tables ahead of use.
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23
#: A flag of `sync_file_range`: begin to write what was changed, and do not wait.
_SYNC_FILE_RANGE_WRITE: Final = 2
#: Bytes that one call touches. Other threads can map memory between two calls.
_TOUCH_STEP: Final = 16 << 20


class Arena:
    """Shared memory, mapped into this process.

    The mapping lasts as long as the arena or any array from `window` does. Linux only.

    Args:
        fd: The file descriptor of an arena. The object takes it over, and closes it when it is collected.
        read_only: Map the memory so that a write ends the process with SIGSEGV.

    Attributes:
        fd: The file descriptor.
        size_bytes: The size of the arena. Memory is used only for pages that were touched.
        address: Where the arena begins in this process.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, fd: int, *, read_only: bool = False) -> None:
        self.fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self.size_bytes = os.fstat(fd).st_size
        access = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        self._mapping = mmap.mmap(fd, self.size_bytes, flags=mmap.MAP_SHARED, prot=access)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # this kernel gives shared memory no huge pages
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._populate = _POPULATE_READ if read_only else _POPULATE_WRITE
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)

    @classmethod
    def create(cls, size_bytes: int, name: str = "dataplane") -> Arena:
        """Makes a new arena. Its memory is zero and not yet touched.

        Args:
            size_bytes: The size. It cannot change later.
            name: Shown by tools such as lsof, as ``memfd:NAME``.

        Raises:
            OSError: The system has no memfd, or ``ulimit -f`` is less than the size.
        """
        import fcntl  # Windows has none

        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            # nobody can cut the file, which would end the processes that use its memory (SIGBUS)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> Arena:
        """The arena in a file, which is made, or made larger, as needed. Pages that were never written take no room.

        Args:
            path: The file. Who cuts it ends the processes that use its memory (SIGBUS).
            size_bytes: The least size.

        Raises:
            OSError: The file cannot be used.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(fd).st_size < size_bytes:
                os.ftruncate(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @property
    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The whole arena as an array (size_bytes,) uint8. A view."""
        return self._bytes

    @property
    def touched_bytes(self) -> int:
        """How much memory of the system the arena uses: the pages that any process has touched."""
        return os.fstat(self.fd).st_blocks * 512

    @property
    def free_bytes(self) -> int:
        """How much room is left in the file system of the arena."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def touch(self, start: int, stop: int) -> None:
        """Makes the bytes from ``start`` to ``stop`` part of this process's memory, so that later uses do not fault.

        Blocks until it is done, longest for memory that no process has touched. Other threads run meanwhile. It does
        nothing on kernels before Linux 5.14.
        """
        page = mmap.PAGESIZE
        address, start = self.address, start // page * page
        stop = min(-(-stop // page) * page, self.size_bytes)
        for begin in range(start, stop, _TOUCH_STEP):
            length = min(_TOUCH_STEP, stop - begin)
            if _madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(length), self._populate):
                return

    def touch_in_background(self, start: int, stop: int) -> threading.Thread:
        """`touch` in a daemon thread, which is returned."""
        thread = threading.Thread(target=self.touch, args=(start, stop), name="arena touch", daemon=True)
        thread.start()
        return thread

    def give_room(self, start: int, stop: int) -> None:
        """Has the file system set room aside for these bytes. A write where there is none would end the process.

        Raises:
            OSError: The file system is full.
        """
        os.posix_fallocate(self.fd, start, stop - start)

    def give_back(self, start: int, stop: int) -> None:
        """Frees the room of whole pages. They are zero from now on."""
        self._mapping.madvise(mmap.MADV_REMOVE, start, stop - start)

    def begin_sync(self, first: np.ndarray[Any, Any], last: np.ndarray[Any, Any]) -> None:
        """Has the system begin to write to the disk what lies in this memory from one array to the end of another.

        It does not wait for the disk. Where it cannot be done, `sync` does it.
        """
        start = first.ctypes.data - self.address
        stop = last.ctypes.data + last.nbytes - self.address
        if stop > start:  # a length of zero means all that follows
            with contextlib.suppress(AttributeError):  # a C library without it
                ctypes.CDLL(None).sync_file_range(
                    self.fd, ctypes.c_int64(start), ctypes.c_int64(stop - start), _SYNC_FILE_RANGE_WRITE
                )

    def sync(self, start: int, stop: int) -> None:
        """Returns when these bytes are on the disk. Raises `OSError`."""
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.flush(start, stop - start)

    def used_by_others(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Parts of these bytes that somebody says to use (`Uses`), also who got this descriptor; ascending."""
        import fcntl  # Windows has none

        found, asked = [], [(start, stop)]
        while asked:  # the kernel tells any one of the uses
            start, stop = asked.pop()
            if start < stop:
                words = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _lock_words(fcntl.F_WRLCK, start, stop))
                kind, _, at, count, _ = _LOCK_WORDS.unpack(words)
                if kind != fcntl.F_UNLCK:
                    first, last = max(at, start), min(at + count, stop) if count else stop
                    found.append((first, last))
                    asked += [(start, first), (last, stop)]
        return sorted(found)

    def window(self, owner: object) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The whole arena as an array (size_bytes,) uint8. It keeps ``owner`` alive, as do all arrays and tensors that
        are made from it.

        Example:
            >>> arena = Arena.create(1 << 20)
            >>> arena.window(owner=object())[64:67].tolist()
            [0, 0, 0]
        """
        return np.asarray(_Window(self._bytes, self.address, owner))


class Uses:
    """Says which bytes of an arena's file this process uses, to a later owner of the file, who knows no pins of before.

    The kernel forgets it when this process ends. Thread-safe.

    Args:
        fd: A file descriptor of the arena. It stays the caller's.

    Raises:
        OSError: The file cannot be opened again, or its file system has no locks.

    Example:
        >>> arena = Arena.create(1 << 20)
        >>> uses = Uses(arena.fd)
        >>> uses.begin(64, 128)
        >>> arena.used_by_others(0, 1 << 20)
        [(64, 128)]
        >>> uses.end(64)
        >>> arena.used_by_others(0, 1 << 20)
        []
    """

    def __init__(self, fd: int) -> None:
        # the locks belong to the open file, and the one that was passed is shared with the owner and its other clients
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # threads may still write; the kernel closes it after them
        self._lock = threading.RLock()  # a collection may end a view in the middle of a call
        self._stops: dict[int, list[int]] = {}  # start -> where each use ends
        self._set(0, 1, begin=True)
        self._set(0, 1, begin=False)

    def begin(self, start: int, stop: int) -> None:
        """These bytes are used, until `end` was called as often. Uses that begin at one place end at one, too."""
        with self._lock:
            self._set(start, stop, begin=True)
            self._stops.setdefault(start, []).append(stop)

    def end(self, start: int) -> None:
        """One use less of the bytes that begin there."""
        with self._lock:
            stops = self._stops[start]
            stop = stops.pop()
            if not stops:
                del self._stops[start]
                self._set(start, stop, begin=False)

    @contextlib.contextmanager
    def during(self, places: Iterable[tuple[int, int]], check: Callable[[], object]) -> Iterator[None]:
        """Uses these bytes in a block.

        Args:
            places: Where they begin and end.
            check: Raises if the owner of before has ended: a later one may have given the bytes to others, since
                nobody had said that they are used. Called when that is said.
        """
        with contextlib.ExitStack() as used:
            for start, stop in places:
                self.begin(start, stop)
                used.callback(self.end, start)
            check()  # if it lives now, no later owner has given the bytes to others
            yield

    def as_long_as(self, holder: object, places: Iterable[tuple[int, int]], check: Callable[[], object]) -> None:
        """Uses these bytes until an object is gone. ``places`` and ``check`` as for `during`."""
        for start, stop in places:
            self.begin(start, stop)
            weakref.finalize(holder, self.end, start).atexit = False
        check()

    def _set(self, start: int, stop: int, *, begin: bool) -> None:
        import fcntl  # Windows has none

        words = _lock_words(fcntl.F_RDLCK if begin else fcntl.F_UNLCK, start, stop)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, words)


#: The kernel's ``struct flock``: kind, from where ``start`` counts, start, length, process (0 for such locks).
_LOCK_WORDS: Final = struct.Struct("hhqqi4x")


def _lock_words(kind: int, start: int, stop: int) -> bytes:
    return _LOCK_WORDS.pack(kind, os.SEEK_SET, start, max(stop - start, 1), 0)  # a length of 0 means all that follows


class _Window:
    """Gives numpy an array over memory, which then holds this object."""

    def __init__(self, memory: np.ndarray[Any, np.dtype[np.uint8]], address: int, owner: object) -> None:
        self._memory = memory
        self._owner = owner
        # declared writable, though the memory may not be: torch cannot represent memory that is not
        self.__array_interface__ = {"shape": memory.shape, "typestr": "|u1", "data": (address, False), "version": 3}


def _madvise(address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
    return int(ctypes.CDLL(None).madvise(address, length, advice))
