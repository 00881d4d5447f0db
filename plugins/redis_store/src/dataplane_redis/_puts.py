"""Puts: reserve, write, commit; and how a failed put is undone.

A small put is one script. A larger one reserves room (one script), writes its rows into a new hash, and commits
(another script, sent together with the rows). In a cluster, its rows go to several nodes, and the commit follows when
all nodes have them. Rows are never changed after they are written, and their keys are never used again.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from dataplane_core.backends import Bundle, bundles_of, framed_columns
from dataplane_core.codec import join_rows
from dataplane_core.errors import DataPlaneError, OperationTimeoutError
from dataplane_core.spec import PutReply, PutRequest
from dataplane_redis import _refusals
from dataplane_redis._acknowledged import Acknowledged
from dataplane_redis._litter import Litter
from dataplane_redis._nodes import LostNodeError
from dataplane_redis._payload import Payload
from dataplane_redis._protocol import pack
from dataplane_redis._rows import PACKED_REPLIES, pack_rows
from dataplane_redis._scripts import SCRIPTS
from dataplane_redis._session import Session
from dataplane_redis._wakes import Wakes
from dataplane_redis._wire import INLINE_BYTES, INLINE_ROWS, pack_parts, pack_request, pack_tags

__all__ = ["Puts"]

#: A put that is not committed so many seconds after its deadline counts as abandoned.
_ABANDON_GRACE_S: Final = 30.0
#: Seconds that undoing a failed put may take at most, within the put's deadline.
_UNDO_S: Final = 5.0
#: How many failed puts a client remembers, to undo them later.
_MAX_NOT_UNDONE: Final = 1000
#: A put that waits for room pauses at least this share of the time it has waited, but not longer than `_PAUSE_S`.
_PAUSE_SHARE: Final = 0.05
_PAUSE_S: Final = 0.1
#: Seconds until a put begins again after a node was lost.
_LOST_PAUSE_S: Final = 0.05
#: Seconds before its deadline at which a put that waits for room gives up.
_LAST_ASK_S: Final = 0.02


class Puts:
    """Puts of one client."""

    def __init__(self, session: Session, payload: Payload, litter: Litter, wakes: Wakes) -> None:
        self._session = session
        self._payload = payload
        self._wakes = wakes
        self._litter = litter
        self._not_undone: deque[bytes] = deque(maxlen=_MAX_NOT_UNDONE)  # failed puts, by write id

    def put_samples(self, request: PutRequest, row_cost_bytes: int | None) -> PutReply:
        """Runs one script for a small put; else reserves, writes the rows and commits.

        Args:
            request: The put.
            row_cost_bytes: See `bundles_of`.
        """
        instance = self._session.connected()[1]
        self._undo_remembered(request.deadline)
        num_samples = len(request.sample_ids)
        what = f"put_samples('{request.partition_id}', {num_samples} samples)"
        columns = {name: request.columns[name] for name in request.specs}
        stored = [each for each in bundles_of(columns, num_samples, row_cost_bytes) if each.columns]
        total = sum(sum(bundle.row_bytes) for bundle in stored)
        left_s = max(0.0, request.deadline - time.monotonic())
        wait_s = left_s if instance.on_full == "block" else 0.0
        common = (
            request.partition_id,
            "" if request.epoch is None else request.epoch,
            request.sample_ids,
            pack_parts(stored, request.specs),
            "" if request.tags is None else [pack_tags(row) for row in request.tags],
            instance.capacity_bytes or 0,
            left_s + _ABANDON_GRACE_S,
            request.request_id,
        )
        small = num_samples <= INLINE_ROWS and total + 32 * num_samples * len(request.columns) <= INLINE_BYTES
        placing = self._session.placing
        if not stored or (small and placing.stays(num_samples, total)):
            rows: list[memoryview] = []
            if stored:
                buffer, offsets = join_rows([framed_columns(bundle.columns) for bundle in stored])
                view, cuts = memoryview(buffer), offsets.tolist()
                rows = [view[start:stop] for start, stop in pairwise(cuts)]
            write = placing.new_write()
            packed = pack_request("inline", *common, write, b"", wait_s, b"")
            with self._undone_on_error(write, request.deadline):
                reply = self._reserve(what, request, total, write, packed, rows, _call_of(request))
            if placing.is_spread:
                self._litter.collect(reply[2], request.deadline)
            return PutReply(num_samples=num_samples)
        if placing.is_spread:
            self._put_spread(what, request, total, stored, common, wait_s)
            return PutReply(num_samples=num_samples)
        link, _ = self._session.connected()
        link.retry_while_refused(request.deadline, lambda: self._put_rows(what, request, total, stored, common, wait_s))
        return PutReply(num_samples=num_samples)

    def _put_rows(
        self,
        what: str,
        request: PutRequest,
        total: int,
        bundles: Sequence[Bundle],
        common: Sequence[Any],
        wait_s: float,
    ) -> None:
        """Reserves, writes the rows, commits. Undoes the put if one of these fails."""
        write = self._session.placing.new_write()
        begin = pack_request("begin", *common, write, b"", wait_s, b"")
        with self._undone_on_error(write, request.deadline):
            reply = self._reserve(what, request, total, write, begin, ())
            if reply[0] == b"done":
                self._confirm(what, request, common, write)
                return
            commit = pack_request("commit", common[0], reply[1], *common[2:], write, reply[2])
            self._write(what, write, bundles, commit, request)

    def _put_spread(
        self,
        what: str,
        request: PutRequest,
        total: int,
        bundles: Sequence[Bundle],
        common: Sequence[Any],
        wait_s: float,
    ) -> None:
        """Reserves, writes the rows to the nodes, commits. If a node is lost before the commit, undoes the put and
        begins again, until the deadline."""
        num_rows = sum(len(bundle.row_bytes) for bundle in bundles)
        while True:
            write = self._session.placing.new_spread_write(num_rows, total)
            begin = pack_request("begin", *common, write, b"", wait_s, b"")
            try:
                with self._undone_on_error(write, request.deadline):
                    reply = self._reserve(what, request, total, write, begin, ())
                    if reply[0] == b"done":
                        self._confirm(what, request, common, write)
                        return
                    commit = pack_request("commit", common[0], reply[1], *common[2:], write, reply[2])
                    self._payload.write(what, write, bundles, request.deadline, _ABANDON_GRACE_S)
                    reply = self._session.script(what, request.deadline, "put", commit, confirms=_call_of(request))
                    if reply[0] != b"ok":
                        _refusals.raise_put(what, request, reply)
                self._litter.collect(reply[2], request.deadline)
                return
            except LostNodeError:
                if time.monotonic() + _LOST_PAUSE_S >= request.deadline:
                    raise
                time.sleep(_LOST_PAUSE_S)

    def _reserve(
        self,
        what: str,
        request: PutRequest,
        total: int,
        write: bytes,
        packed: bytes,
        rows: Sequence[memoryview],
        confirms: Acknowledged | None = None,
    ) -> Any:
        """Runs the put script. While the store is full, waits for room and runs it again. The reply begins with "ok",
        or with "done" if the put was to begin and its request was carried out before."""
        while True:
            reply = self._session.script(what, request.deadline, "put", packed, *rows, confirms=confirms)
            if reply[0] in (b"ok", b"done"):
                return reply
            if reply[0] != b"full":
                _refusals.raise_put(what, request, reply)
            self._wait_for_room(what, request, total, write, reply)

    def _confirm(self, what: str, request: PutRequest, common: Sequence[Any], write: bytes) -> None:
        """Confirms a put that an earlier request with the same id has carried out."""
        commit = pack_request("commit", *common, write)
        reply = self._session.script(what, request.deadline, "put", commit, confirms=_call_of(request))
        if reply[0] != b"ok":
            _refusals.raise_put(what, request, reply)

    def _wait_for_room(self, what: str, request: PutRequest, total: int, write: bytes, reply: Any) -> None:
        """Waits in the store's queue of puts until there is room. The store wakes it then, and says when to ask anyway.

        Raises:
            CapacityExceededError: The put is larger than the capacity, or ``on_full`` is ``raise``.
            OperationTimeoutError: There was no room before the deadline.
        """
        _, instance = self._session.connected()
        if total > (instance.capacity_bytes or 0) or instance.on_full == "raise":
            raise instance.full_error(what, total, reply[1], reply[2])
        start, told = time.monotonic(), b""  # what the server knows: whether this client listens
        with self._wakes.for_room(write) as woken:
            while reply[0] == b"full":
                _, held, num_before, pause_s = reply
                now = time.monotonic()
                left_s = request.deadline - now - _LAST_ASK_S
                if left_s <= 0:
                    error = instance.full_error(what, total, held, num_before)
                    raise OperationTimeoutError(
                        f"{what} timed out waiting for room. Nothing was written. {error.message}",
                        hint=error.hint,
                        outcome="not_done",
                    ) from error
                listener = self._wakes.listener(request.deadline)
                if listener == told:
                    woken.wait(min(left_s, max(float(pause_s), min(_PAUSE_SHARE * (now - start), _PAUSE_S))))
                woken.clear()
                told = listener
                asked = (write, total, instance.capacity_bytes, max(0.0, request.deadline - time.monotonic()), listener)
                reply = self._session.run(what, request.deadline, "room", *asked)

    def _write(
        self,
        what: str,
        write: bytes,
        bundles: Sequence[Bundle],
        commit: bytes,
        request: PutRequest,
    ) -> None:
        """Sends the rows and the commit. Raises unless the server confirms the commit."""
        link, _ = self._session.connected()
        key = self._session.placing.key_of(write)
        chunks = list(self._payload.chunks(write, bundles))
        keep_s = max(0.0, request.deadline - time.monotonic()) + _ABANDON_GRACE_S

        def commands(context: bytes) -> Iterator[list[Any]]:
            for _, position, frames in chunks:
                yield pack_rows(key, position, frames, keep_s)
            yield pack((b"EVALSHA", SCRIPTS["put"].sha, b"1", self._session.base, commit, context))

        with self._session.receipt(_call_of(request)) as receipt:
            sent = commands(self._session.context(receipt))
            replies = link.commands(what, request.deadline, sent, PACKED_REPLIES * len(chunks) + 1, receipt)
            reply = replies.pop()
            if not isinstance(reply, Exception):
                self._session.accept(what, receipt, reply)
        for each in replies:
            if isinstance(each, Exception):
                link.raise_error(what, each)
        if isinstance(reply, Exception):
            if not str(reply).startswith(("NOSCRIPT", "No matching script")):
                link.raise_error(what, reply)
            reply = self._session.script(what, request.deadline, "put", commit, confirms=_call_of(request))
        if reply[0] == b"other_history":
            _refusals.raise_other_store(what, link.label)
        if reply[0] != b"ok":
            _refusals.raise_put(what, request, reply)

    @contextlib.contextmanager
    def _undone_on_error(self, write: bytes, deadline: float) -> Iterator[None]:
        """Undoes the put if the block raises, so that the put holds no room and no other put waits behind it."""
        try:
            yield
        except BaseException:
            self._undo(write, deadline)
            raise

    def _undo(self, write: bytes, deadline: float) -> None:
        """Undoes a failed put before its deadline, or else before this client's next put.

        If this client makes no other put, a later script of any client gives the failed one up, and its rows expire. A
        put that was committed stays, even if the reply to its commit was lost.
        """
        try:
            with self._session.quietly():
                until = min(deadline, time.monotonic() + _UNDO_S)
                reply = self._session.run("put_samples", until, "abort", write)
                if self._session.placing.is_spread:
                    self._litter.collect(reply[1], until)
        except DataPlaneError:
            self._not_undone.append(write)

    def _undo_remembered(self, deadline: float) -> None:
        """Undoes the failed puts that could not be undone before."""
        while self._not_undone:
            try:
                write = self._not_undone.popleft()
            except IndexError:
                return  # another thread took it
            try:
                self._session.run("put_samples", deadline, "abort", write)
            except DataPlaneError:
                self._not_undone.append(write)
                raise


def _call_of(request: PutRequest) -> Acknowledged:
    return Acknowledged("put_samples", request.partition_id, sample_ids=request.sample_ids)
