"""Puts: reserved, written and committed; and what undoes one that failed.

A put reserves (one script), writes its rows as one hash of their own, and commits (another script, sent along with the
rows); a small one is a single script. Rows are never changed after they are written and their names never used again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from dataplane_core.backends import framed_columns
from dataplane_core.codec import join_rows, row_nbytes
from dataplane_core.errors import DataPlaneError, OperationTimeoutError
from dataplane_core.spec import PutReply, PutRequest
from dataplane_redis import _refusals
from dataplane_redis._link import pack
from dataplane_redis._rows import pack_rows
from dataplane_redis._scripts import SCRIPTS
from dataplane_redis._session import Session
from dataplane_redis._wire import INLINE_BYTES, INLINE_ROWS, pack_layout, pack_request, pack_tags

__all__ = ["Puts"]

#: Rows are sent in commands of about this size.
_CHUNK_BYTES: Final = 4 << 20
#: Seconds beyond its deadline after which a put that was not committed counts as abandoned.
_ABANDON_GRACE_S: Final = 30.0
#: Seconds that undoing a failed put may take, where the put's deadline leaves so much.
_UNDO_S: Final = 5.0
#: Failed puts that a client remembers to undo.
_MOST_BEGUN: Final = 1000
#: The least pause of a put that waits for room: this share of the time waited, in seconds at most so long.
_PAUSE_SHARE: Final = 0.05
_PAUSE_S: Final = 0.1
#: What is left of its time in seconds when a put that waits for room gives up.
_LAST_ASK_S: Final = 0.02


class Puts:
    """Puts of one client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begun: deque[bytes] = deque(maxlen=_MOST_BEGUN)  # puts that failed and are not undone yet

    def put_samples(self, request: PutRequest) -> PutReply:
        """Small puts: one script. Others: reserve, write the rows, commit."""
        instance = self._session.connected()[1]
        self._undo_earlier(request.deadline)
        num_samples = len(request.sample_ids)
        what = f"put_samples('{request.partition_id}', {num_samples} samples)"
        names = list(request.columns)
        frames = framed_columns(request.columns)
        sizes = row_nbytes(request.columns, num_samples) if names else [0] * num_samples
        total = sum(sizes)
        left_s = max(0.0, request.deadline - time.monotonic())
        wait_s = left_s if instance.on_full == "block" else 0.0
        common = (
            request.partition_id,
            "" if request.epoch is None else request.epoch,
            request.sample_ids,
            sizes,
            pack_layout(names),
            [text for name in names for text in (name, request.specs[name].to_text())],
            "" if request.tags is None else [pack_tags(row) for row in request.tags],
            instance.capacity_bytes or 0,
            left_s + _ABANDON_GRACE_S,
        )
        small = num_samples <= INLINE_ROWS and total + 32 * num_samples * len(names) <= INLINE_BYTES
        if small or not names:
            rows: list[memoryview] = []
            if names:
                buffer, offsets = join_rows(frames)
                view, cuts = memoryview(buffer), offsets.tolist()
                rows = [view[cuts[row] : cuts[row + 1]] for row in range(num_samples)]
            write = _new_write()
            packed = pack_request("inline", *common, write, b"", wait_s)
            with self._undoing(write, request.deadline):
                self._reserve(what, request, total, write, packed, rows)
            return PutReply(num_samples=num_samples)
        link, _ = self._session.connected()
        link.again_where_refused(request.deadline, lambda: self._put_rows(what, request, total, frames, common, wait_s))
        return PutReply(num_samples=num_samples)

    def _put_rows(
        self,
        what: str,
        request: PutRequest,
        total: int,
        frames: Sequence[Sequence[Any]],
        common: Sequence[Any],
        wait_s: float,
    ) -> None:
        """Reserves, writes the rows, commits; where that fails, undoes it."""
        write = _new_write()
        begin = pack_request("begin", *common, write, b"", wait_s)
        with self._undoing(write, request.deadline):
            reply = self._reserve(what, request, total, write, begin, ())
            commit = pack_request("commit", common[0], reply[1], *common[2:], write, reply[2])
            self._write(what, write, frames, total, commit, request)

    def _reserve(
        self, what: str, request: PutRequest, total: int, write: bytes, packed: bytes, rows: Sequence[memoryview]
    ) -> Any:
        """Runs the put script, again where the store was full and there is room now."""
        while True:
            reply = self._session.script(what, request.deadline, "put", packed, *rows)
            if reply[0] == b"ok":
                return reply
            if reply[0] != b"full":
                _refusals.raise_put(what, request, reply)
            self._wait_for_room(what, request, total, write, reply)

    def _wait_for_room(self, what: str, request: PutRequest, total: int, write: bytes, reply: Any) -> None:
        """Waits in the line of those that wait for room, as the store says how often to ask.

        Raises:
            CapacityExceededError: It never fits, or ``on_full`` is ``raise``.
            OperationTimeoutError: There was no room until the deadline.
        """
        _, instance = self._session.connected()
        if total > (instance.capacity_bytes or 0) or instance.on_full == "raise":
            raise instance.full_error(what, total, reply[1], reply[2])
        start = time.monotonic()
        while reply[0] == b"full":
            _, held, num_before, pause_s = reply
            now = time.monotonic()
            left_s = request.deadline - now - _LAST_ASK_S
            if left_s <= 0:
                error = instance.full_error(what, total, held, num_before)
                raise OperationTimeoutError(
                    f"{what} timed out waiting for room. Nothing was written. {error.message}", hint=error.hint
                ) from error
            time.sleep(min(left_s, max(float(pause_s), min(_PAUSE_SHARE * (now - start), _PAUSE_S))))
            reply = self._session.run(what, request.deadline, "room", write, total, instance.capacity_bytes, left_s)

    def _write(
        self,
        what: str,
        write: bytes,
        frames: Sequence[Sequence[Any]],
        total: int,
        commit: bytes,
        request: PutRequest,
    ) -> None:
        """Sends the rows, and with them the commit; raises unless it is confirmed."""
        link, instance = self._session.connected()
        num_samples = len(request.sample_ids)
        key = self._session.key_of(write)
        step = max(1, min(1000, _CHUNK_BYTES * num_samples // max(1, total)))
        starts = range(0, num_samples, step)
        left_s = max(0.0, request.deadline - time.monotonic()) + _ABANDON_GRACE_S
        expiry = pack((b"PEXPIRE", key, b"%d" % int(left_s * 1000)))
        multi, execute = pack((b"MULTI",)), pack((b"EXEC",))
        put = SCRIPTS["put"]

        def commands() -> Iterator[list[Any]]:
            for start in starts:  # rows never lie there without an expiry: whoever dies, they go
                yield multi
                yield pack_rows(key, start, [column[start : start + step] for column in frames])
                yield expiry
                yield execute
            yield pack((b"EVALSHA", put.sha, b"1", self._session.base, commit, instance.asker()))

        replies = link.commands(what, request.deadline, commands(), 4 * len(starts) + 1)
        reply = replies.pop()
        for each in replies:
            if isinstance(each, Exception):
                link.refuse(what, each)
        if isinstance(reply, Exception):
            if not str(reply).startswith(("NOSCRIPT", "No matching script")):
                link.refuse(what, reply)
            reply = self._session.script(what, request.deadline, "put", commit)
        if reply[0] == b"other_history":
            _refusals.raise_history(what, link.label)
        if reply[0] != b"ok":
            _refusals.raise_put(what, request, reply)

    @contextlib.contextmanager
    def _undoing(self, write: bytes, deadline: float) -> Iterator[None]:
        """Undoes a put that fails: it holds no room then, and nobody waits behind it."""
        try:
            yield
        except BaseException:
            self._undo(write, deadline)
            raise

    def _undo(self, write: bytes, deadline: float) -> None:
        """Undoes a failed put in the time that it has left, else before this client's next put. Where that does not
        come, a later script of any client gives the put up, and its rows expire.

        A put whose commit went through although its reply was lost stays.
        """
        try:
            self._session.run("put_samples", min(deadline, time.monotonic() + _UNDO_S), "abort", write)
        except DataPlaneError:
            self._begun.append(write)

    def _undo_earlier(self, deadline: float) -> None:
        """Undoes what earlier puts had no time to."""
        while self._begun:
            try:
                write = self._begun.popleft()
            except IndexError:
                return  # another thread took it
            try:
                self._session.run("put_samples", deadline, "abort", write)
            except DataPlaneError:
                self._begun.append(write)
                raise


def _new_write() -> bytes:
    """What one attempt of a put is known by: random bits, so that no other has it, whatever the server forgets."""
    return os.urandom(16)
