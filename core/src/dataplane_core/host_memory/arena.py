"""`Arena`: shared memory, mapped once per process; and `Extents`: which parts of one are in use.

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
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
from sortedcontainers import SortedList

from dataplane_core.host_memory.copying import Window

with contextlib.suppress(ImportError):  # Windows has none, and no arena
    import fcntl

#: Values of `madvise` that Python's mmap module lacks (Linux 5.14): fill page tables ahead of use.
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23
#: A flag of `sync_file_range`: begin to write what was changed, and do not wait.
_SYNC_FILE_RANGE_WRITE: Final = 2
#: Bytes that one call touches. Other threads can map memory between two calls.
_TOUCH_STEP: Final = 16 << 20


class Arena:
    """Shared memory, mapped into this process.

    The mapping lasts as long as the arena or any array from `window` does. Memory is used only for pages that were
    touched. Linux only. Each method that asks the system raises `OSError`. The object takes the file descriptor over,
    and closes it when it is collected. Where it is ``read_only``, a write ends the process with SIGSEGV.
    """

    def __init__(self, fd: int, *, read_only: bool = False) -> None:
        self.fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self.size_bytes = os.fstat(fd).st_size
        access = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        self._mapping = mmap.mmap(fd, self.size_bytes, flags=mmap.MAP_SHARED, prot=access)
        with contextlib.suppress(OSError):  # this kernel gives shared memory no huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._populate = _POPULATE_READ if read_only else _POPULATE_WRITE
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)

    @classmethod
    def create(cls, size_bytes: int, name: str = "dataplane") -> Arena:
        """A new arena. Its memory is zero and not yet touched. Tools such as lsof show it as ``memfd:NAME``.

        Raises `OSError` also if ``ulimit -f`` is less than the size.
        """
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

        Who cuts the file ends the processes that use its memory (SIGBUS).
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
    def touched_bytes(self) -> int:
        """How much memory of the system the arena uses: the pages that any process has touched."""
        return os.fstat(self.fd).st_blocks * 512

    @property
    def free_bytes(self) -> int:
        """How much room is left in the file system of the arena."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def touch(self, start: int, stop: int) -> None:
        """Makes these bytes part of this process's memory, so that later uses do not fault (since Linux 5.14)."""
        page = mmap.PAGESIZE
        stop = min(-(-stop // page) * page, self.size_bytes)
        for begin in range(start // page * page, stop, _TOUCH_STEP):
            length = ctypes.c_size_t(min(_TOUCH_STEP, stop - begin))
            if ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address + begin), length, self._populate):
                return

    def touch_in_background(self, start: int, stop: int) -> threading.Thread:
        """`touch` in a daemon thread, which is returned."""
        thread = threading.Thread(target=self.touch, args=(start, stop), name="arena touch", daemon=True)
        thread.start()
        return thread

    def give_room(self, start: int, stop: int) -> None:
        """Has the file system set room aside for these bytes. A write where there is none would end the process."""
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
        uses, asked = [], [(start, stop)]
        while asked:  # the kernel tells any one of the uses
            start, stop = asked.pop()
            if start < stop:
                words = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _lock_words(fcntl.F_WRLCK, start, stop))
                kind, _, at, count, _ = _LOCK_WORDS.unpack(words)
                if kind != fcntl.F_UNLCK:
                    first, last = max(at, start), min(at + count, stop) if count else stop
                    uses.append((first, last))
                    asked += [(start, first), (last, stop)]
        return sorted(uses)

    def window(self, owner: object) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """As ``bytes``. It keeps ``owner`` alive, as do all arrays and tensors that are made from it."""
        # declared writable, though the memory may not be: torch cannot represent memory that is not
        return np.asarray(Window(self.address, self.size_bytes, (self.bytes, owner)))


class Uses:
    """Says which bytes of an arena's file this process uses, to a later owner of the file, who knows no pins of before.

    The kernel forgets it when this process ends. Thread-safe. The descriptor stays the caller's. Raises `OSError` where
    the file system has no locks.
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
        """Uses these bytes in a block. ``check`` raises if the owner of before has ended."""
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
        words = _lock_words(fcntl.F_RDLCK if begin else fcntl.F_UNLCK, start, stop)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, words)


#: The kernel's ``struct flock``: kind, from where ``start`` counts, start, length, process (0 for such locks).
_LOCK_WORDS: Final = struct.Struct("hhqqi4x")


def _lock_words(kind: int, start: int, stop: int) -> bytes:
    return _LOCK_WORDS.pack(kind, os.SEEK_SET, start, max(stop - start, 1), 0)  # a length of 0 means all that follows


# --- extents ----------------------------------------------------------------------------------------------------------

#: Offsets and sizes of extents are multiples of it.
GRANULE: Final = 64


def extent_bytes(size_bytes: int) -> int:
    """The size of an extent that has room for so many bytes."""
    return max(-(-size_bytes // GRANULE), 1) * GRANULE


@dataclass(slots=True, eq=False)
class Extent:
    """A part of the arena."""

    offset: int  # changes when it is moved
    size_bytes: int  # a multiple of 64
    pins: int = 0  # how many use its bytes now; it is moved only while this is 0


class Extents:
    """The extents of an arena and the holes between them. It touches no memory.

    Ways to allocate that move nothing leave holes that no request fits. Here a request fits whenever enough bytes are
    free between two extents that are pinned. Allocating and freeing take O(log n), `make_room` O(n log n).
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // GRANULE * GRANULE
        self.used_bytes = 0
        #: Where the highest extent so far ended: the memory that was ever used lies below.
        self.high_water = 0
        self._all: set[Extent] = set()
        self._ends: dict[int, int] = {}  # end of a hole -> its offset
        self._holes: dict[int, int] = {}  # offset of a hole -> its size
        self._by_size = SortedList()  # (size, offset) of each hole
        self._add_hole(0, self.size_bytes)

    @property
    def all(self) -> Set[Extent]:
        """In no order."""
        return self._all

    @classmethod
    def of(cls, size_bytes: int, places: Iterable[tuple[int, int]]) -> tuple[Extents, list[Extent]]:
        """Extents that lie at these offsets, ascending, and have these sizes. Raises `ValueError` if they cannot."""
        made, extents = cls(size_bytes), []
        made._remove_hole(0)
        end = 0
        for offset, size in places:
            if not end <= offset <= offset + size <= made.size_bytes or offset % GRANULE or size % GRANULE or not size:
                raise ValueError(f"an extent of {size} bytes at {offset} does not fit behind one that ends at {end}")
            made._add_hole(end, offset - end)
            extents.append(Extent(offset, size))
            made.used_bytes += size
            end = made.high_water = offset + size
        made._add_hole(end, made.size_bytes - end)
        made._all.update(extents)
        return made, extents

    def allocate(self, size_bytes: int) -> Extent | None:
        """A new extent of at least ``size_bytes``, in the smallest hole that it fits. None if it fits none."""
        size_bytes = extent_bytes(size_bytes)
        at = self._by_size.bisect_left((size_bytes, 0))
        if at == len(self._by_size):
            return None
        size, offset = self._by_size[at]
        self._remove_hole(offset)
        self._add_hole(offset + size_bytes, size - size_bytes)
        extent = Extent(offset, size_bytes)
        self._all.add(extent)
        self.used_bytes += size_bytes
        self.high_water = max(self.high_water, offset + size_bytes)
        return extent

    def free(self, extent: Extent) -> None:
        """Frees an extent, which must not be pinned."""
        assert not extent.pins
        self._all.remove(extent)
        self.used_bytes -= extent.size_bytes
        self._add_hole(extent.offset, extent.size_bytes)

    def shrink(self, extent: Extent, size_bytes: int) -> None:
        """Frees the end of an extent: all but its first ``size_bytes``."""
        size_bytes = extent_bytes(size_bytes)
        freed = extent.size_bytes - size_bytes
        assert freed >= 0
        extent.size_bytes = size_bytes
        self.used_bytes -= freed
        self._add_hole(extent.offset + size_bytes, freed)

    def make_room(self, size_bytes: int, move: Callable[[int, int, int], None]) -> bool:
        """Slides extents together that are not pinned, until a hole of ``size_bytes`` exists, by the way that moves the
        fewest bytes. ``move(source, target, size_bytes)`` moves them to a lower offset; both ranges may overlap. False:
        there is no such way, and nothing was moved."""
        if self._by_size and self._by_size[-1][0] >= size_bytes:
            return True
        enough = self.size_bytes - self.used_bytes >= size_bytes
        window = self._cheapest_window(size_bytes) if enough else None
        if window is None:
            return False
        for extent in window:
            source, before = extent.offset, self._ends.get(extent.offset)
            if before is None:
                continue
            self._remove_hole(before)
            move(source, before, extent.size_bytes)
            extent.offset = before
            self._add_hole(before + extent.size_bytes, source - before)
        return True

    def _cheapest_window(self, size_bytes: int) -> list[Extent] | None:
        """Neighbours, none of them pinned, with enough free bytes before, between and after them."""
        extents = sorted(self._all, key=attrgetter("offset"))
        best: tuple[int, int, int] | None = None  # bytes to move, first, past the last
        first, free, moved = 0, 0, 0  # of the window that ends with this extent
        for index, extent in enumerate(extents):
            # a pinned extent cannot slide, so no window reaches over it
            if extent.pins:
                first, free, moved = index + 1, 0, 0
                continue
            if index == first:
                free = self._hole_before(extent)
            moved += extent.size_bytes
            free += self._holes.get(extent.offset + extent.size_bytes, 0)
            # leaves out extents at the front as long as the room is enough: they would be moved for nothing
            while first < index and free - self._hole_before(extents[first]) >= size_bytes:
                free -= self._hole_before(extents[first])
                moved -= extents[first].size_bytes
                first += 1
            if free >= size_bytes and (best is None or moved < best[0]):
                best = (moved, first, index + 1)
        return None if best is None else extents[best[1] : best[2]]

    def _hole_before(self, extent: Extent) -> int:
        offset = self._ends.get(extent.offset)
        return 0 if offset is None else self._holes[offset]

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        """Adds free bytes, joined with the holes beside them."""
        if not size_bytes:
            return
        end = offset + size_bytes
        if end in self._holes:
            end += self._remove_hole(end)
        before = self._ends.get(offset)
        if before is not None:
            self._remove_hole(before)
            offset = before
        self._holes[offset] = end - offset
        self._ends[end] = offset
        self._by_size.add((end - offset, offset))

    def _remove_hole(self, offset: int) -> int:
        size_bytes = self._holes.pop(offset)
        del self._ends[offset + size_bytes]
        self._by_size.remove((size_bytes, offset))
        return size_bytes
