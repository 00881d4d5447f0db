"""`KeptExtents`: extents of an arena that is a file. They outlive the process that serves them.

Where the extents of a put lie is noted before the put is committed, and again when they move. Nothing that is noted is
ever overwritten: extents do not slide together, and an extent without its dropped rows is a copy elsewhere, whose old
place is room once the new one is noted. So a process may be killed at any moment. Addresses are plenty for that: the
file is longer than the extents may be together, and its pages take room only while an extent lies there.

Clients may outlive the process, and still write into an extent that was not noted, or read one whose rows are dropped
now. They say so in a way that outlives it too (`Uses`): no part of the file is given to others while somebody uses it.

Each extent has a digest. It is made when the service has nothing else to do. If the bytes must be on the disk before
the put is committed, it is made before that, by the client if the client has synced them. A service that begins again
checks it before the extent is read.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import xxhash

from dataplane_core.errors import BackendUnavailableError, CapacityExceededError, CorruptDataError, InvalidRequestError
from dataplane_core.host_memory import GRANULE, Arena, Extent, Extents
from dataplane_core.hosting.extents import ExtentService, Holds, Payload, Place, Wanted
from dataplane_core.hosting.layout import Bytes, Layout, runs
from dataplane_core.ledger import Ref

_log = logging.getLogger(__name__)

#: How many times the bytes that extents may take the file is long.
ADDRESSES: Final = 4
#: The file system sets room aside, and frees it, in blocks of so many bytes.
_BLOCK: Final = 2 << 20
#: An extent of at most this many bytes gets its digest at once: it is the work of a few microseconds.
_FEW_BYTES: Final = 64 << 10
#: Bytes that are hashed between two looks for requests.
_STEP: Final = 4 << 20
#: Room that no extent needs is freed when it is more than this share of what extents may take.
_SPARE_SHARE: Final = 0.25
#: So much of the file system is left to the journal, which must be able to say what is cleared.
_JOURNAL_BYTES: Final = 4 << 20
#: Seconds after which a put that found the file system full asks again.
_ASK_AGAIN_S: Final = 1.0
_DIGEST_BYTES: Final = 16
_PREFIX: Final = "extent "


class Notes(Protocol):
    """Keeps values by name for a later process, in the order in which they were noted (`FolderLog`).

    If they must survive the end of the machine, what is noted no longer may be overwritten only after `commit_or_end`.
    """

    @property
    def notes(self) -> Mapping[str, bytes]: ...
    def note(self, name: str, value: bytes | None) -> None: ...
    def commit_or_end(self) -> None: ...


class _Kept(msgspec.Struct, array_like=True):
    """What is noted of an extent. ``rows`` as in `Payload`. No digest: it was not made yet."""

    offset: int
    size_bytes: int
    layout: Layout
    num_rows: int
    num_positions: int
    rows: list[int] | None
    digest: bytes | None


class KeptExtents(ExtentService):
    """The extents of an arena that is a file. One thread uses it.

    Args:
        arena: The memory, of at least `ADDRESSES` times ``most_bytes``.
        most_bytes: The most bytes that all extents may take.
        notes: Keeps where they lie.
        live: Write id -> the positions of the rows that exist, of the writes whose extents are to come back. None: all
            that were noted, until `retain`.
        same_memory: Whether the bytes are those that the process before left in memory. If not, an extent without a
            digest may have lost some, and does not come back.
        sync: Whether a put may be committed only when its bytes are on the disk.
        touch_ahead_bytes: How much memory is made ready before it is used, if the file system has room for all extents.

    Raises:
        CorruptDataError: What was noted contradicts itself.
    """

    def __init__(
        self,
        arena: Arena,
        most_bytes: int,
        notes: Notes,
        live: Mapping[int, Sequence[int]] | None,
        *,
        same_memory: bool,
        sync: bool = False,
        touch_ahead_bytes: int = 0,
    ) -> None:
        # memory that is ready takes room of the file system, which must be left to rows and to the journal
        has_room = arena.free_bytes + arena.touched_bytes >= most_bytes * (1 + _SPARE_SHARE)
        super().__init__(arena, touch_ahead_bytes if has_room else 0)
        self._most_bytes = most_bytes
        self._notes = notes
        self.syncs = sync
        self._has_room = np.zeros(-(-arena.size_bytes // _BLOCK), dtype=bool)  # blocks that the file system gave
        self._writes: dict[int, list[int]] = {}  # a put that is under way -> its writes
        self._to_hash: dict[int, None] = {}
        self._to_check: dict[int, bytes] = {}  # write id -> the digest that its bytes must have
        self._left: list[Extent] = []  # clients of the process before use them; free as soon as they do not
        self._hashing: tuple[int, int, Any] | None = None  # a write, how much of it is hashed, and the state
        #: The size of the last put that got no room of the file system, and how much that had left.
        self._refused: tuple[int, int] | None = None
        self._restore(live, same_memory)

    @property
    def most_bytes(self) -> int:
        """The most bytes that all extents may take."""
        return self._most_bytes

    # --- what comes back ----------------------------------------------------------------------------------------------

    def _restore(self, live: Mapping[int, Sequence[int]] | None, same_memory: bool) -> None:
        kept: dict[int, _Kept] = {}
        try:
            for name, value in self._notes.notes.items():
                if name.startswith(_PREFIX):
                    kept[int(name[len(_PREFIX) :], 16)] = msgspec.msgpack.decode(value, type=_Kept)
            for write_id in [each for each in kept if live is not None and not live.get(each)]:
                del kept[write_id]
                self._forget_note(write_id)
            in_order = sorted(kept, key=lambda write_id: kept[write_id].offset)
            places = [(kept[write_id].offset, kept[write_id].size_bytes) for write_id in in_order]
            held = self._held_between(places)
            self._extents, extents = Extents.of(self._arena.size_bytes, sorted([*places, *held]))
            self._left = [each for each in extents if (each.offset, each.size_bytes) in held]
            noted = [each for each in extents if (each.offset, each.size_bytes) not in held]
            for write_id, extent in zip(in_order, noted, strict=True):
                self._payloads[write_id] = _payload_of(kept[write_id], extent, None if live is None else live[write_id])
        except (ValueError, msgspec.MsgspecError) as error:
            raise CorruptDataError(
                f"what is noted of the extents contradicts itself: {error}.", hint="Restore a whole copy of the folder."
            ) from error
        self._restored = set(in_order)
        for write_id in in_order:
            digest = kept[write_id].digest
            if digest is not None:
                self._to_check[write_id] = digest
            elif same_memory:
                self._to_hash[write_id] = None
            else:
                self._lose(write_id)
        self._has_room[:] = True  # perhaps: the process before did not say
        self._free_spare()
        self._has_room[:] = False

    def retain(self, live: Mapping[int, Sequence[int]]) -> None:
        """Of the writes that came back, keeps the positions of the rows that exist. Others are dropped."""
        for write_id in self._restored & self._payloads.keys():
            for position in set(range(self._payloads[write_id].num_positions)).difference(live.get(write_id, ())):
                self.drop([(write_id, position)])
        self._restored.clear()

    def _lose(self, write_id: int) -> None:
        """The bytes of a write are not what was put."""
        _log.error(
            "the payload of %d samples is damaged, or was never written whole. A read of them says which they are.",
            self._payloads[write_id].num_live,
        )
        self._remove(write_id)

    # --- what is noted ------------------------------------------------------------------------------------------------

    def keep(self, put: int, digests: Sequence[bytes] | None = None) -> None:
        """As `ExtentService.keep`. With ``sync``, returns when the bytes are on the disk. Raises `OSError`."""
        writes = self._writes[put]
        if not self._payloads.keys() >= set(writes):
            return  # it was given up meanwhile: the ledger refuses its commit
        if digests is not None:
            if [len(each) for each in digests] != [_DIGEST_BYTES] * len(writes):
                raise InvalidRequestError("a put has digests of other extents than its own.")
            for write_id, digest in zip(writes, digests, strict=True):
                self._note(write_id, digest)
            return
        for write_id in writes:
            extent = self._payloads[write_id].extent
            if self.syncs:
                self._arena.sync(extent.offset, extent.offset + extent.size_bytes)
            now = self.syncs or extent.size_bytes <= _FEW_BYTES
            self._note_kept(write_id, now=now)
            if not now:
                self._to_hash[write_id] = None

    def _note_kept(self, write_id: int, *, now: bool) -> None:
        """Notes where a write lies, with a digest of it if that is made now."""
        self._note(write_id, digest_of(self._bytes_of(self._payloads[write_id].extent)) if now else None)

    def _note(self, write_id: int, digest: bytes | None) -> None:
        payload = self._payloads[write_id]
        kept = _Kept(
            payload.extent.offset,
            payload.extent.size_bytes,
            payload.layout,
            payload.num_rows,
            payload.num_positions,
            payload.rows,
            digest,
        )
        self._notes.note(f"{_PREFIX}{write_id:x}", msgspec.msgpack.encode(kept))

    def _forget_note(self, write_id: int) -> None:
        name = f"{_PREFIX}{write_id:x}"
        if name in self._notes.notes:
            self._notes.note(name, None)

    # --- as a service -------------------------------------------------------------------------------------------------

    def allocate(self, holds: Holds, put: int, wanted: Sequence[Wanted]) -> list[int] | None:
        """As `ExtentService.allocate`.

        Raises:
            CapacityExceededError: The file system is full.
        """
        offsets = super().allocate(holds, put, wanted)
        if offsets is not None:
            self._writes[put] = [each.write_id for each in wanted]
            try:
                for extent in holds.writing[put]:
                    self._give_room(extent)
            except OSError as error:
                self.stop_writing(holds, put)
                self.forget(each.write_id for each in wanted)
                self._refused = sum(each.layout.size_bytes for each in wanted), self._arena.free_bytes
                raise _full() from error
        return offsets

    def check_room(self, size_bytes: int) -> None:
        """As `ExtentService.check_room`: the file system had no room for so many, and nothing was freed since then."""
        if self._refused is None:
            return
        refused_bytes, free_bytes = self._refused
        if size_bytes >= refused_bytes and self._arena.free_bytes <= free_bytes + _BLOCK:
            raise _full()

    def stop_writing(self, holds: Holds, put: int) -> None:
        """As `ExtentService.stop_writing`."""
        self._writes.pop(put, None)
        super().stop_writing(holds, put)

    def drop(self, refs: Iterable[Ref]) -> None:
        """As `ExtentService.drop`. A full file system gets the room back that no extent needs."""
        try:
            super().drop(refs)
        finally:
            if self._arena.free_bytes < _BLOCK:
                self._free_spare()

    def find(self, write_id: int, positions: list[int]) -> tuple[Place | None, list[int], list[int]]:
        """As `ExtentService.find`, after the bytes of the write were checked."""
        self._is_whole(write_id)
        return super().find(write_id, positions)

    def _is_whole(self, write_id: int) -> bool:
        """Checks the bytes of a write, if that was not done yet."""
        digest = self._to_check.get(write_id)
        if digest is None:
            return True
        whole = digest == digest_of(self._bytes_of(self._payloads[write_id].extent))
        if whole:
            self._end_hashing(write_id)
        else:
            self._lose(write_id)
        return whole

    def work_aside(self) -> bool:
        """Makes or checks a part of a digest. False: there is nothing to do."""
        if self._hashing is None:
            write_id = next(itertools.chain(self._to_check, self._to_hash), None)
            if write_id is None:
                return False
            self._hashing = write_id, 0, xxhash.xxh3_128()
        write_id, done, state = self._hashing
        data = self._bytes_of(self._payloads[write_id].extent)
        state.update(data[done : done + _STEP].data)
        self._hashing = write_id, done + _STEP, state
        if done + _STEP < len(data):
            return True
        self._hashing = None
        wanted = self._to_check.get(write_id, state.digest())
        try:
            if write_id in self._to_hash:
                self._note(write_id, wanted)
            elif state.digest() != wanted:
                self._lose(write_id)
        except BackendUnavailableError as error:  # no room on the disk: later
            _log.warning("a digest is not kept yet: %s", error)
            return False
        self._end_hashing(write_id)
        return True

    def finish(self) -> None:
        """Makes all digests, before the service ends."""
        while self.work_aside():
            pass

    def _remove(self, write_id: int) -> None:
        self._forget_note(write_id)  # it may fail, and what is noted is never overwritten
        super()._remove(write_id)
        self._end_hashing(write_id)

    def _end_hashing(self, write_id: int) -> None:
        """The bytes of a write are gone, or its digest is known."""
        self._to_check.pop(write_id, None)
        self._to_hash.pop(write_id, None)
        if self._hashing is not None and self._hashing[0] == write_id:
            self._hashing = None

    # --- memory -------------------------------------------------------------------------------------------------------

    def _allocate(self, size_bytes: int) -> Extent | None:
        self._free_left()
        if self.used_bytes + size_bytes > self._most_bytes and not self._make_room(size_bytes):
            return None
        return self._new_extent(size_bytes)

    def _make_room(self, size_bytes: int) -> bool:
        """Copies extents without their dropped rows, those with most first, until all take few enough bytes."""
        waiting = deque(self._squeezable())
        while waiting and self.used_bytes + size_bytes > self._most_bytes:
            self._squeeze(waiting.popleft())
        return self.used_bytes + size_bytes <= self._most_bytes

    def _squeeze(self, write_id: int) -> int:
        if not self._is_whole(write_id):
            return 0
        payload = self._payloads[write_id]
        before = payload.extent
        data = self._bytes_of(before).copy()
        squeezed = replace(payload)
        squeezed.squeeze(data)
        extent = self._new_extent(squeezed.layout.size_bytes)
        if extent is None:
            return 0
        squeezed.extent = extent
        try:
            self._give_room(extent)
            self._settle_notes()
            self._bytes_of(extent)[:] = data[: extent.size_bytes]
            if self.syncs:
                self._arena.sync(extent.offset, extent.offset + extent.size_bytes)
        except OSError:
            self._free(extent)
            return 0
        self._payloads[write_id] = squeezed
        self._end_hashing(write_id)
        self._note_kept(write_id, now=True)
        self._free(before)
        return before.size_bytes - extent.size_bytes

    def _give_room(self, extent: Extent) -> None:
        """Has the file system set room aside for an extent. Raises `OSError` if it has none."""
        first, last = _blocks(extent.offset, extent.offset + extent.size_bytes)
        if self._has_room[first:last].all():
            return
        missing = first + np.flatnonzero(~self._has_room[first:last])
        if (np.count_nonzero(self._has_room) + len(missing)) * _BLOCK > self._most_bytes * (1 + _SPARE_SHARE):
            self._free_spare()
        if missing.size and self._arena.free_bytes < len(missing) * _BLOCK + _JOURNAL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for start, stop in runs(missing, missing + 1):
            self._arena.give_room(start * _BLOCK, min(stop * _BLOCK, self._arena.size_bytes))
            self._has_room[start:stop] = True

    def _settle_notes(self) -> None:
        """Has the disk know what is noted no longer, before its place is used again."""
        if self.syncs:
            self._notes.commit_or_end()

    def _free_spare(self) -> None:
        """Gives back the room of blocks in which no extent lies, if the file system takes it."""
        self._settle_notes()
        spare = self._has_room.copy()
        for extent in self._extents.all:
            spare[slice(*_blocks(extent.offset, extent.offset + extent.size_bytes))] = False
        for used in self._arena.used_by_others(0, self._arena.size_bytes):
            spare[slice(*_blocks(*used))] = False
        blocks = np.flatnonzero(spare)
        for start, stop in runs(blocks, blocks + 1):
            with suppress(OSError):
                self._arena.give_back(start * _BLOCK, min(stop * _BLOCK, self._arena.size_bytes))
                self._has_room[start:stop] = False

    # --- clients of the process before --------------------------------------------------------------------------------

    def _held_between(self, places: list[tuple[int, int]]) -> set[tuple[int, int]]:
        """The offset and size of what is used between extents: its rows do not exist any more, but views of them do."""
        held = set()
        size_bytes = self._arena.size_bytes // GRANULE * GRANULE
        used = self._arena.used_by_others(0, size_bytes)
        end = 0
        for offset, size in [*places, (size_bytes, 0)]:
            for start, stop in used:
                start = max(start // GRANULE * GRANULE, end)
                stop = min(-(-stop // GRANULE) * GRANULE, offset)
                if start < stop:
                    held.add((start, stop - start))
                    end = stop
            end = offset + size
        return held

    def _is_used(self, extent: Extent) -> bool:
        return bool(self._arena.used_by_others(extent.offset, extent.offset + extent.size_bytes))

    def _new_extent(self, size_bytes: int) -> Extent | None:
        """An extent in which nobody writes or reads any more."""
        while (extent := self._extents.allocate(size_bytes)) is not None and self._is_used(extent):
            self._left.append(extent)
        return extent

    def _free(self, extent: Extent) -> None:
        self._refused = None
        if self._is_used(extent):
            self._left.append(extent)
        else:
            self._extents.free(extent)

    def _free_left(self) -> None:
        """Frees what clients of the process before used when it was to be freed, and use no more."""
        if self._left:
            left, self._left = self._left, []
            for extent in left:
                self._free(extent)


def _payload_of(kept: _Kept, extent: Extent, live: Sequence[int] | None) -> Payload:
    """What came back of a write: of the rows that lie in its extent, those that exist; all if ``live`` is None."""
    payload = Payload(extent, kept.layout, kept.num_rows, kept.num_rows, kept.num_positions, kept.rows)
    if kept.rows is not None:
        payload.num_live = sum(row >= 0 for row in kept.rows)
    for position in () if live is None else set(range(kept.num_positions)).difference(live):
        payload.drop(position)
    return payload


def _full() -> CapacityExceededError:
    return CapacityExceededError(
        "the file system of the durable folder has no room for this put.",
        retryable=True,
        ask_again_s=_ASK_AGAIN_S,
        hint="Make room there, or clear samples.",
    )


def digest_of(data: Bytes) -> bytes:
    """The digest of the bytes of an extent."""
    return xxhash.xxh3_128_digest(data.data)


def _blocks(start: int, stop: int) -> tuple[int, int]:
    return start // _BLOCK, -(-stop // _BLOCK)
