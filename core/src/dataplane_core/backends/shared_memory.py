"""`SharedMemory`: the memory of a host, shared by a client that runs on the same node."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

from dataplane_core.backends.extent_columns import StoredRows, stored_columns
from dataplane_core.host_memory import Arena, Uses
from dataplane_core.hosting import Pin, Place, Session
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec


class ExtentRead(NamedTuple):
    """Rows of a write that a read asks for.

    Attributes:
        write_id: The write.
        slots: Field -> its place among the columns of the write.
        positions: Positions in the write.
        rows: Where these rows stand in the read, one for each.
    """

    write_id: int
    slots: Mapping[str, int]
    positions: Sequence[int]
    rows: Sequence[int]


def reads_of(parts: Sequence[commands.Part]) -> list[ExtentRead]:
    """What a read asks for, of what the ledger located."""
    return [
        ExtentRead(part.write_id, dict(zip(part.fields, part.slots, strict=True)), part.positions, part.rows)
        for part in parts
    ]


class SharedMemory:
    """The memory of a host, mapped into this process. Thread-safe.

    Args:
        session: A session that has brought the descriptor of the memory, which this object takes over.
        views: Whether reads return views. Such memory is mapped read-only.

    Attributes:
        session: The session.
        arena: The memory, for puts.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, session: Session, *, views: bool) -> None:
        descriptor = session.descriptors[0]
        os.set_inheritable(descriptor, False)  # a program that inherits it would keep the memory
        self.session = session
        self.arena = self._seen = Arena(descriptor)
        self._views = views
        # of a file that another process may open when this one's host has ended
        self._uses = Uses(descriptor) if os.fstat(descriptor).st_nlink else None
        if views:
            self._seen = Arena(os.dup(descriptor), read_only=True)

    def touch_in_background(self, stop: int) -> None:
        """Makes the bytes before ``stop`` part of this process's memory, as `Arena.touch_in_background`."""
        with suppress(RuntimeError):  # no more threads are allowed: memory is ready when it is used
            for arena in {self.arena, self._seen}:
                arena.touch_in_background(0, stop)

    def writing(self, bounds: Iterable[tuple[int, int]]) -> AbstractContextManager[None]:
        """A block in which a put copies to these bytes: no later owner of the memory gives them to others meanwhile.

        Raises:
            DataPlaneError: As `check`, at its begin.
        """
        if self._uses is None:
            return nullcontext()
        return self._uses.during(bounds, lambda: self.check("put_samples"))

    def rows(
        self, reads: Sequence[ExtentRead], places: Mapping[int, Place], specs: Mapping[str, FieldSpec], pin: Pin
    ) -> list[StoredRows]:
        """Where rows are. Call `check` when they are copied.

        Args:
            reads: The rows.
            places: Write id -> where the write lies, for the writes of the reads.
            specs: The specs of the fields.
            pin: Keeps the writes where they are. It lives as long as any column.

        Raises:
            DataPlaneError: As `check`, if these are views.
        """
        if self._views and self._uses is not None:
            bounds = [place.bounds for place in places.values()]
            self._uses.as_long_as(pin, bounds, lambda: self.check("get_samples"))
        memory = self._seen.window(owner=pin)
        parts = []
        for read in reads:
            place = places[read.write_id]
            extent = memory[place.offset : place.offset + place.layout.size_bytes]
            columns = stored_columns(extent, place.layout, place.num_rows, read.slots, specs)
            parts.append(StoredRows(columns, read.positions, read.rows, in_place=self._views))
        return parts

    def check(self, what: str) -> None:
        """After a copy out of what `rows` gave: that the host has kept it in its place until now.

        Raises:
            DataPlaneError: The host has ended, and another process may have its memory.
        """
        if self._uses is not None:
            self.session.check(what)
