"""`KeptExtents`: extents of an arena that is a file in a folder. They outlive the process that serves them.

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
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dataplane_core.digests import lasting_hash
from dataplane_core.durable_files import sync_path
from dataplane_core.errors import BackendUnavailableError, CapacityExceededError, CorruptDataError, InvalidRequestError
from dataplane_core.host_memory import Arena
from dataplane_core.host_memory.arena import GRANULE, Extent, Extents
from dataplane_core.hosting.extents import ExtentService, Layout, Payload, Place, Wanted, runs
from dataplane_core.hosting.messages import Bytes
from dataplane_core.ledger import Ref
from dataplane_core.log import FolderLog

__all__ = ["ADDRESSES", "KeptExtents", "check_extents", "digest_of"]

_log = logging.getLogger(__name__)

#: The version of what is noted: where the extents lie, and the memory that they are in.
_VERSION: Final = 1
_ARENA: Final = "arena"
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
_EXTENT_NOTE: Final = "extent "  # and the write id
_MEMORY_NOTE: Final = "memory"  # in which the bytes of the arena are


class _Memory(msgspec.Struct, array_like=True):
    """Identifies a file of the arena, and the machine's memory since it was started: unsynced bytes are only there."""

    version: int
    size_bytes: int = 0
    device: int = 0
    inode: int = 0
    boot_id: str = ""


class _Kept(msgspec.Struct, array_like=True):
    """What is noted of an extent. ``rows`` as in `Payload`. No digest: it was not made yet."""

    offset: int
    size_bytes: int
    layout: Layout
    num_rows: int
    num_positions: int
    rows: list[int] | None
    digest: bytes | None


def digest_of(data: Bytes) -> bytes:
    """The digest of the bytes of an extent."""
    return lasting_hash(data.data).digest()


def check_extents(folder: Path, notes: Mapping[str, bytes]) -> int:
    """Checks that the arena in a folder may be the one that the process before noted. Changes nothing, reads no rows.

    Returns:
        The most bytes that all extents could take, 0 if there are none yet.
    """
    return _memory_before(folder, notes).size_bytes // ADDRESSES


def _memory_before(folder: Path, notes: Mapping[str, bytes]) -> _Memory:
    path, note = folder / _ARENA, notes.get(_MEMORY_NOTE)
    before = _Memory(_VERSION) if note is None else msgspec.msgpack.decode(note, type=_Memory)
    there_bytes = path.stat().st_size if path.exists() else 0
    if before.version != _VERSION:
        raise CorruptDataError(
            f"the folder {folder} is of version {before.version}. Expected {_VERSION}.",
            hint="Another version of dataplane wrote it: use that one, or name an empty folder.",
        )
    if there_bytes < before.size_bytes:
        raise CorruptDataError(
            f"the file {path} has {there_bytes} bytes. Expected {before.size_bytes}: it was cut or removed.",
            hint="Restore a whole copy of the folder.",
        )
    if note is None and there_bytes and _holds_bytes(path):  # one that was just made when its process ended has none
        raise CorruptDataError(
            f"the folder {folder} holds rows, and nothing that says which: its journal was removed.",
            hint="Restore a whole copy of the folder, or remove it: its rows are lost then.",
        )
    return before


def _holds_bytes(path: Path) -> bool:
    """Whether there is anything but zeros in a file, which may be long and empty."""
    with path.open("rb") as file, suppress(OSError):  # only holes follow
        at = 0
        while piece := os.pread(file.fileno(), 1 << 20, at := os.lseek(file.fileno(), at, os.SEEK_DATA)):
            if piece.strip(b"\0"):
                return True
            at += len(piece)
    return False


class KeptExtents(ExtentService):
    """The extents of the arena in a folder that this process has locked. Call `retain` before they are used.

    Args:
        folder: The folder.
        most_bytes: The most bytes that all extents may take.
        notes: The log that keeps where they lie. It has what the process before noted.
        sync: Whether a put may be committed only when its bytes are on the disk.
        touch_ahead_bytes: How much memory is made ready before it is used, if the file system has room for all extents.
    """

    def __init__(
        self, folder: Path, most_bytes: int, notes: FolderLog, *, sync: bool = False, touch_ahead_bytes: int = 0
    ) -> None:
        before = _memory_before(folder, notes.notes)
        arena = Arena.open(folder / _ARENA, most_bytes * ADDRESSES)
        for path in (folder / _ARENA, folder):  # the file must be there after a loss of power, with its size
            sync_path(path)
        # memory that is ready takes room of the file system, which must be left to rows and to the journal
        has_room = arena.free_bytes + arena.touched_bytes >= most_bytes * (1 + _SPARE_SHARE)
        super().__init__(arena, touch_ahead_bytes if has_room else 0)
        self.most_bytes = most_bytes
        self._notes = notes
        self.syncs = sync
        self._has_room = np.zeros(-(-arena.size_bytes // _BLOCK), dtype=bool)  # blocks that the file system gave
        self._undigested: dict[int, bytes | None] = {}  # write id -> the digest that it must have; None: to be made
        self._left: list[Extent] = []  # clients of the process before use them; free as soon as they do not
        self._digests = self._make_digests()
        status = os.fstat(arena.fd)
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        now = _Memory(_VERSION, status.st_size, status.st_dev, status.st_ino, boot_id)
        self._restore(is_same_memory=msgspec.structs.replace(before, size_bytes=now.size_bytes) == now)
        self._restored: set[int] | None = set(self._payloads)  # None: their rows are known
        notes.note(_MEMORY_NOTE, msgspec.msgpack.encode(now))

    # --- what comes back ----------------------------------------------------------------------------------------------

    def _restore(self, *, is_same_memory: bool) -> None:
        try:
            kept = {
                int(name[len(_EXTENT_NOTE) :], 16): msgspec.msgpack.decode(value, type=_Kept)
                for name, value in self._notes.notes.items()
                if name.startswith(_EXTENT_NOTE)
            }
            writes = {(note.offset, note.size_bytes): write_id for write_id, note in kept.items()}
            if len(writes) < len(kept):
                raise ValueError("two of them lie at one place")
            places = sorted(writes)
            held = self._held_between(places)
            self._extents, extents = Extents.of(self.arena.size_bytes, sorted([*places, *held]))
        except (ValueError, msgspec.MsgspecError) as error:
            raise CorruptDataError(
                f"what is noted of the extents contradicts itself: {error}.", hint="Restore a whole copy of the folder."
            ) from error
        for extent in extents:
            write_id = writes.get((extent.offset, extent.size_bytes))
            if write_id is None:
                self._left.append(extent)
                continue
            note = kept[write_id]
            num_live = note.num_rows if note.rows is None else sum(row >= 0 for row in note.rows)
            payload = Payload(extent, note.layout, note.num_rows, num_live, note.num_positions, note.rows)
            self._payloads[write_id] = payload
            # without a digest, some bytes may never have reached the disk
            self._undigested[write_id] = None if note.digest is None and is_same_memory else note.digest or b""

    def _held_between(self, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The offset and size of what is used between extents: its rows do not exist any more, but views of them do."""
        held = []
        size_bytes = self.arena.size_bytes // GRANULE * GRANULE
        used = self.arena.used_by_others(0, size_bytes)
        end = 0
        for offset, size in [*places, (size_bytes, 0)]:
            for start, stop in used:
                start = max(start // GRANULE * GRANULE, end)
                stop = min(-(-stop // GRANULE) * GRANULE, offset)
                if start < stop:
                    held.append((start, stop - start))
                    end = stop
            end = offset + size
        return held

    def retain(self, live: Mapping[int, Sequence[int]]) -> None:
        """Of the writes that came back, keeps the positions of the rows that exist. Others are dropped."""
        if self._restored is None:
            return
        for write_id in self._restored & self._payloads.keys():
            gone = set(range(self._payloads[write_id].num_positions)).difference(live.get(write_id, ()))
            super().drop((write_id, position) for position in gone)
        self._restored = None
        before = self._has_room.copy()
        self._has_room[:] = True  # perhaps: the process before did not say
        self._free_spare()
        self._has_room &= before

    def _lose(self, write_id: int) -> None:
        """The bytes of a write are not what was put."""
        _log.error(
            "the payload of %d samples is damaged, or was never written whole. A read of them says which they are.",
            self._payloads[write_id].num_live,
        )
        self._remove(write_id)

    # --- as a service -------------------------------------------------------------------------------------------------

    def allocate(self, wanted: Sequence[Wanted]) -> list[Extent] | None:
        """As `ExtentService.allocate`. Raises `CapacityExceededError` if the file system is full."""
        extents = super().allocate(wanted)
        try:
            for extent in extents or ():
                self._give_room(extent)
        except OSError as error:
            self.unpin(extents or ())
            self.forget(write.write_id for write in wanted)
            raise CapacityExceededError(
                "the file system of the durable folder has no room for this put.",
                retryable=True,
                ask_again_s=_ASK_AGAIN_S,
                hint="Make room there, or clear samples.",
            ) from error
        return extents

    def keep(self, write_ids: Sequence[int], digests: Sequence[bytes] | None = None) -> None:
        """As `ExtentService.keep`. With ``sync``, returns when the bytes are on the disk. Raises `OSError`."""
        if not self._payloads.keys() >= set(write_ids):
            return  # it was given up meanwhile: the ledger refuses its commit
        if digests is not None and [len(digest) for digest in digests] != [_DIGEST_BYTES] * len(write_ids):
            raise InvalidRequestError("a put has digests of other extents than its own.")
        for index, write_id in enumerate(write_ids):
            extent = self._payloads[write_id].extent
            if digests is not None:
                self._note(write_id, digests[index])
                continue
            if self.syncs:
                self.arena.sync(extent.offset, extent.offset + extent.size_bytes)
            if self.syncs or extent.size_bytes <= _FEW_BYTES:
                self._note(write_id, digest_of(self.bytes_of(extent)))
            else:
                self._note(write_id, None)
                self._undigested[write_id] = None

    def _note(self, write_id: int, digest: bytes | None) -> None:
        """Notes where a write lies."""
        payload = self._payloads[write_id]
        kept = _Kept(
            *(payload.extent.offset, payload.extent.size_bytes, payload.layout, payload.num_rows),
            *(payload.num_positions, payload.rows, digest),
        )
        self._notes.note(f"{_EXTENT_NOTE}{write_id:x}", msgspec.msgpack.encode(kept))

    def find(self, wanted: Sequence[tuple[int, list[int]]]) -> list[Place]:
        """As `ExtentService.find`, after the bytes of the writes were checked."""
        for write_id, _ in wanted:
            self._is_whole(write_id)
        return super().find(wanted)

    def drop(self, refs: Iterable[Ref]) -> None:
        """As `ExtentService.drop`. A full file system gets the room back that no extent needs."""
        try:
            super().drop(refs)
        finally:
            if self.arena.free_bytes < _BLOCK:
                self._free_spare()

    def _remove(self, write_id: int) -> None:
        name = f"{_EXTENT_NOTE}{write_id:x}"
        if name in self._notes.notes:
            self._notes.note(name, None)  # it may fail, and what is noted is never overwritten
        super()._remove(write_id)
        self._undigested.pop(write_id, None)

    # --- digests ------------------------------------------------------------------------------------------------------

    def _is_whole(self, write_id: int) -> bool:
        """Checks the bytes of a write, if that was not done yet."""
        digest = self._undigested.get(write_id)
        if digest is None:
            return True
        if digest != digest_of(self.bytes_of(self._payloads[write_id].extent)):
            self._lose(write_id)
            return False
        self._undigested.pop(write_id, None)
        return True

    def work_aside(self) -> bool:
        """Makes or checks a part of a digest. False: there is nothing to do."""
        return next(self._digests)

    def _make_digests(self) -> Iterator[bool]:
        """Makes or checks all digests, in steps. A step that gives False had nothing to do, or found no room."""
        while True:
            write_id = next(iter(self._undigested), None)
            if write_id is None:
                yield False
                continue
            data, state = self.bytes_of(self._payloads[write_id].extent), lasting_hash()
            for start in range(0, len(data), _STEP):
                if start:
                    yield True
                if write_id not in self._undigested:  # it is gone, or has its digest
                    break
                state.update(data[start : start + _STEP].data)
            else:
                yield self._keeps_digest(write_id, state.digest())

    def _keeps_digest(self, write_id: int, digest: bytes) -> bool:
        try:
            if self._undigested[write_id] is None:
                self._note(write_id, digest)
            elif self._undigested[write_id] != digest:
                self._lose(write_id)
        except BackendUnavailableError as error:  # no room on the disk: later
            _log.warning("a digest is not kept yet: %s", error)
            return False
        self._undigested.pop(write_id, None)
        return True

    def finish(self) -> None:
        """Makes all digests, before the service ends."""
        while self.work_aside():
            pass

    # --- memory -------------------------------------------------------------------------------------------------------

    def _allocate(self, size_bytes: int) -> Extent | None:
        left, self._left = self._left, []
        for extent in left:
            self._free(extent)
        if self.used_bytes + size_bytes > self.most_bytes and not self._make_room(size_bytes):
            return None
        return self._new_extent(size_bytes)

    def _make_room(self, size_bytes: int) -> bool:
        """Copies extents without their dropped rows, those with most first, until all take few enough bytes."""
        waiting = deque(self._squeezable())
        while waiting and self.used_bytes + size_bytes > self.most_bytes:
            self._squeeze(waiting.popleft())
        return self.used_bytes + size_bytes <= self.most_bytes

    def _squeeze(self, write_id: int) -> int:
        if not self._is_whole(write_id):
            return 0
        payload = self._payloads[write_id]
        before = payload.extent
        data = self.bytes_of(before).copy()
        squeezed = replace(payload)
        squeezed.squeeze(data)
        extent = self._new_extent(squeezed.layout.size_bytes)
        if extent is None:
            return 0
        squeezed.extent = extent
        try:
            self._give_room(extent)
            self._settle_notes()
            self.bytes_of(extent)[:] = data[: extent.size_bytes]
            if self.syncs:
                self.arena.sync(extent.offset, extent.offset + extent.size_bytes)
        except OSError:
            self._free(extent)
            return 0
        self._payloads[write_id] = squeezed
        self._undigested.pop(write_id, None)
        self._note(write_id, digest_of(self.bytes_of(extent)))
        self._free(before)
        return before.size_bytes - extent.size_bytes

    def _new_extent(self, size_bytes: int) -> Extent | None:
        """An extent in which nobody writes or reads any more."""
        while (extent := self._extents.allocate(size_bytes)) is not None and self._is_used(extent):
            self._left.append(extent)
        return extent

    def _free(self, extent: Extent) -> None:
        if self._is_used(extent):
            self._left.append(extent)
        else:
            self._extents.free(extent)

    def _is_used(self, extent: Extent) -> bool:
        return bool(self.arena.used_by_others(extent.offset, extent.offset + extent.size_bytes))

    def _give_room(self, extent: Extent) -> None:
        """Has the file system set room aside for an extent. Raises `OSError` if it has none."""
        first, last = _blocks(extent.offset, extent.offset + extent.size_bytes)
        if self._has_room[first:last].all():
            return
        missing = first + np.flatnonzero(~self._has_room[first:last])
        if (np.count_nonzero(self._has_room) + len(missing)) * _BLOCK > self.most_bytes * (1 + _SPARE_SHARE):
            self._free_spare()
        if missing.size and self.arena.free_bytes < len(missing) * _BLOCK + _JOURNAL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for start, stop in runs(missing, missing + 1):
            self.arena.give_room(start * _BLOCK, min(stop * _BLOCK, self.arena.size_bytes))
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
        for used in self.arena.used_by_others(0, self.arena.size_bytes):
            spare[slice(*_blocks(*used))] = False
        blocks = np.flatnonzero(spare)
        for start, stop in runs(blocks, blocks + 1):
            with suppress(OSError):
                self.arena.give_back(start * _BLOCK, min(stop * _BLOCK, self.arena.size_bytes))
                self._has_room[start:stop] = False


def _blocks(start: int, stop: int) -> tuple[int, int]:
    return start // _BLOCK, -(-stop // _BLOCK)
