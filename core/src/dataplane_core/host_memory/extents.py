"""`Extents`: which parts of an arena are in use. Best fit, and room is made by sliding extents together.

The classic ways to allocate leave holes that no request fits (Wilson et al., "Dynamic Storage Allocation: A Survey and
Critical Review", 1995). Extents can be moved as long as nobody reads or writes them, so a request fits whenever enough
bytes are free between two extents that are pinned.

Plain Python without I/O or locks: offsets only, the bytes are moved by a function of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from sortedcontainers import SortedList

#: Offsets and sizes of extents are multiples of it.
GRANULE: Final = 64


def extent_bytes(size_bytes: int) -> int:
    """The size of an extent that has room for so many bytes."""
    return max(-(-size_bytes // GRANULE), 1) * GRANULE


@dataclass(slots=True, eq=False)
class Extent:
    """A part of the arena.

    Attributes:
        offset: Where it begins. It changes when the extent is moved.
        size_bytes: Its size, a multiple of 64.
        pins: How many use its bytes now. It is moved only while this is 0.
    """

    offset: int
    size_bytes: int
    pins: int = 0


class Extents:
    """The extents of an arena and the holes between them.

    Allocating and freeing take O(log n). `make_room` takes O(n log n), and moves as few bytes as it can.

    Args:
        size_bytes: The size of the arena.

    Example:
        >>> extents = Extents(1024)
        >>> first, second = extents.allocate(512), extents.allocate(100)
        >>> second.offset, second.size_bytes, extents.used_bytes
        (512, 128, 640)
        >>> extents.free(first)
        >>> extents.allocate(600) is None
        True
        >>> extents.make_room(600, move=lambda source, target, size_bytes: None)
        True
        >>> second.offset, extents.allocate(600).offset
        (0, 128)
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // GRANULE * GRANULE
        self.used_bytes = 0
        #: Where the highest extent so far ended: the memory that was ever used lies below.
        self.high_water = 0
        self._extents: dict[int, Extent] = {}  # offset -> extent
        self._ends: dict[int, int] = {}  # end of a hole -> its offset
        self._holes: dict[int, int] = {}  # offset of a hole -> its size
        self._by_size = SortedList()  # (size, offset) of each hole
        self._add_hole(0, self.size_bytes)

    @classmethod
    def of(cls, size_bytes: int, places: Iterable[tuple[int, int]]) -> tuple[Extents, list[Extent]]:
        """Extents that lie at given places.

        Args:
            size_bytes: The size of the arena.
            places: The offset and size in bytes of each, ascending.

        Raises:
            ValueError: They overlap, or do not lie in the arena on the bounds of extents.
        """
        made, found = cls(size_bytes), []
        made._remove_hole(0)
        end = 0
        for offset, size in places:
            if not end <= offset <= offset + size <= made.size_bytes or offset % GRANULE or size % GRANULE or not size:
                raise ValueError(f"an extent of {size} bytes at {offset} does not fit behind one that ends at {end}")
            made._add_hole(end, offset - end)
            extent = made._extents[offset] = Extent(offset, size)
            made.used_bytes += size
            end = made.high_water = offset + size
            found.append(extent)
        made._add_hole(end, made.size_bytes - end)
        return made, found

    @property
    def all(self) -> Iterable[Extent]:
        """The extents, in any order."""
        return self._extents.values()

    def allocate(self, size_bytes: int) -> Extent | None:
        """A new extent of at least ``size_bytes``, in the smallest hole that it fits. None if it fits none."""
        size_bytes = extent_bytes(size_bytes)
        at = self._by_size.bisect_left((size_bytes, 0))
        if at == len(self._by_size):
            return None
        size, offset = self._by_size[at]
        self._remove_hole(offset)
        self._add_hole(offset + size_bytes, size - size_bytes)
        extent = self._extents[offset] = Extent(offset, size_bytes)
        self.used_bytes += size_bytes
        self.high_water = max(self.high_water, offset + size_bytes)
        return extent

    def free(self, extent: Extent) -> None:
        """Frees an extent, which must not be pinned."""
        assert not extent.pins
        del self._extents[extent.offset]
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
        """Moves extents that are not pinned to lower offsets, until a hole of ``size_bytes`` exists.

        Of all ways to make such a hole by sliding neighbours together, it takes the one that moves the fewest bytes.

        Args:
            size_bytes: The size of the hole.
            move: Called as ``move(source, target, size_bytes)`` to move bytes to a lower offset. Both ranges may
                overlap.

        Returns:
            Whether such a hole exists now. If not, nothing was moved.
        """
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
            del self._extents[source]
            extent.offset = before
            self._extents[before] = extent
            self._add_hole(before + extent.size_bytes, source - before)
        return True

    def _cheapest_window(self, size_bytes: int) -> list[Extent] | None:
        """Neighbours, none of them pinned, with enough free bytes before, between and after them."""
        extents = sorted(self._extents.values(), key=attrgetter("offset"))
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
