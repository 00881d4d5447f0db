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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, NoReturn

from redis.exceptions import NoScriptError

from dataplane_core.backends import Backend, columns_of, framed_columns, writes_of
from dataplane_core.codec import join_rows
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    DataPlaneError,
    InvalidRequestError,
    OperationTimeoutError,
    RoomTimeoutError,
    SchemaMismatchError,
    StalePartitionError,
)
from dataplane_core.ledger import commands, group_of, too_many_samples
from dataplane_core.spec import CANCELLATION, Cancellation, FieldSpec, PutReply, PutRequest
from dataplane_redis._acknowledged import Acknowledged
from dataplane_redis._nodes import LostNodeError
from dataplane_redis._payload import Payload, Table
from dataplane_redis._protocol import PACKED_REPLIES, pack, pack_rows
from dataplane_redis._scripts import INLINE_BYTES, INLINE_ROWS, SCRIPTS, pack_parts, pack_tags, text_of, tuples_of
from dataplane_redis._server import setting_of
from dataplane_redis._session import Session, unknown_reply
from dataplane_redis._wakes import Wakes

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
#: Rows from this size on may be too large for one value.
_LARGE_ROW_BYTES: Final = 256 << 20
#: A server takes values of less than this many bytes, if it does not say (its ACL may forbid CONFIG): its default.
_MOST_BYTES: Final = 512 << 20
#: Room for what a stored row has besides its cells: a short header for each field.
_ROW_OVERHEAD_BYTES: Final = 64 << 10
#: Seconds before its deadline at which a put that waits for room gives up.
_LAST_ASK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class _Put:
    """A put under way."""

    what: str
    request: PutRequest
    writes: Sequence[commands.Write]
    size_bytes: int
    parts: Sequence[Any]  # see `pack_parts`
    tags: Sequence[bytes]  # packed, of each sample; or none
    capacity_bytes: int  # of the store; 0: no limit
    waits: bool  # for room

    @property
    def tables(self) -> list[Table]:
        """The frames of each write, by column, and the sizes of its rows."""
        columns = self.request.columns
        return [(framed_columns(columns_of(write, columns)), write.row_bytes) for write in self.writes]

    @property
    def call(self) -> Acknowledged:
        """What the reply to its commit acknowledges."""
        return Acknowledged("put_samples", self.request.partition_id, sample_ids=self.request.sample_ids)

    def asked(self, mode: str, write: bytes, epoch: bytes | None = None, known: bytes = b"") -> dict[str, Any]:
        """The request to the script ``put``, which is told how much time is left now."""
        request = self.request
        left_s = max(0.0, request.deadline - time.monotonic())
        return {
            "mode": mode,
            "name": request.partition_id,
            "epoch": epoch or request.epoch or "",
            "ids": request.sample_ids,
            "parts": self.parts,
            "tags": self.tags or "",
            "capacity": self.capacity_bytes,
            "ttl_s": left_s + _ABANDON_GRACE_S,
            "request": request.request_id,
            "write": write,
            "known": known,
            "wait_s": left_s if self.waits else 0.0,
        }


class Puts(Backend):
    """The puts of `RedisBackend`."""

    #: See `writes_of`.
    row_cost_bytes: ClassVar[int | None] = 6144
    _session: Session
    _payload: Payload
    _wakes: Wakes

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._not_undone: deque[bytes] = deque(maxlen=_MAX_NOT_UNDONE)  # failed puts, by write id

    def put_samples(self, request: PutRequest) -> PutReply:
        """Runs one script for a small put; else reserves, writes the rows and commits."""
        link, instance = self._session.connected()
        self._undo_remembered(request.deadline)
        num_samples = len(request.sample_ids)
        columns = {name: request.columns[name] for name in request.specs}
        writes = writes_of(columns, num_samples, self.row_cost_bytes)
        put = _Put(
            what=f"put_samples('{request.partition_id}', {num_samples} samples)",
            request=request,
            writes=writes,
            size_bytes=sum(sum(each.row_bytes) for each in writes),
            parts=pack_parts(writes, request.specs),
            tags=[pack_tags(row) for row in request.tags or ()],
            capacity_bytes=instance.capacity_bytes or 0,
            waits=instance.on_full == "block",
        )
        self._check_rows(put)
        size_bytes = put.size_bytes + 32 * num_samples * len(request.columns)
        small = num_samples <= INLINE_ROWS and size_bytes <= INLINE_BYTES
        placing = self._payload.placing
        if not writes or (small and placing.stays(num_samples, put.size_bytes)):
            self._put_inline(put)
        elif placing.is_spread:
            self._put_spread(put)
        else:
            link.retry_while_refused(request.deadline, lambda: self._put_rows(put))
        return PutReply(num_samples=num_samples)

    def _check_rows(self, put: _Put) -> None:
        """Refuses a row that is too large for one value: the server closes the connection of who sends it."""
        if put.size_bytes < _LARGE_ROW_BYTES:
            return
        largest = max(max(each.row_bytes) for each in put.writes)
        if largest < _LARGE_ROW_BYTES:
            return
        link, _ = self._session.connected()
        most = int(setting_of(link, put.what, put.request.deadline, "proto-max-bulk-len") or _MOST_BYTES)
        if largest + _ROW_OVERHEAD_BYTES >= most:
            raise CapacityExceededError(
                f"{put.what} refused: a row has {largest} bytes. Expected less than the server's proto-max-bulk-len, "
                f"{most} bytes. Nothing was written.",
                retryable=False,
                hint="Raise proto-max-bulk-len, or split what a row holds.",
            )

    def _put_inline(self, put: _Put) -> None:
        """Does all of it in one script."""
        rows: list[memoryview] = []
        if put.writes:
            buffer, offsets = join_rows([frames for frames, _ in put.tables])
            rows = [buffer[start:stop] for start, stop in pairwise(offsets.tolist())]
        write = self._payload.placing.new_write()
        with self._undone_on_error(write, put.request.deadline):
            reply = self._reserve(put, "inline", write, rows, put.call)
        if self._payload.placing.is_spread:
            self._payload.collect(reply[2], put.request.deadline)

    def _put_rows(self, put: _Put) -> None:
        """Reserves, writes the rows, commits. Undoes the put if one of these fails."""
        write = self._payload.placing.new_write()
        with self._undone_on_error(write, put.request.deadline):
            commit = self._begin(put, write)
            if commit is not None:
                self._write(put, write, commit)

    def _put_spread(self, put: _Put) -> None:
        """Reserves, writes the rows to the nodes, commits. If a node is lost before the commit, undoes the put and
        begins again, until the deadline."""
        deadline = put.request.deadline
        num_rows = sum(len(each.row_bytes) for each in put.writes)
        while True:
            write = self._payload.placing.new_spread_write(num_rows, put.size_bytes)
            try:
                with self._undone_on_error(write, deadline):
                    commit = self._begin(put, write)
                    if commit is None:
                        return
                    try:
                        self._payload.write(put.what, write, put.tables, deadline, _ABANDON_GRACE_S)
                    except (BackendUnavailableError, OperationTimeoutError) as error:
                        error.outcome = "not_done"  # no commit was sent
                        raise
                    reply = self._commit(put, commit)
                self._payload.collect(reply[2], deadline)
                return
            except LostNodeError:
                if time.monotonic() + _LOST_PAUSE_S >= deadline:
                    raise
                time.sleep(_LOST_PAUSE_S)

    def _begin(self, put: _Put, write: bytes) -> dict[str, Any] | None:
        """Reserves. Returns the commit that follows the rows, or None if the request was carried out before: then this
        confirms it."""
        reply = self._reserve(put, "begin", write)
        if reply[0] == b"done":
            self._commit(put, put.asked("commit", write))
            return None
        return put.asked("commit", write, reply[1], reply[2])

    def _reserve(
        self,
        put: _Put,
        mode: str,
        write: bytes,
        rows: Sequence[memoryview] = (),
        confirms: Acknowledged | None = None,
    ) -> Any:
        """Runs the put script. While the store is full, waits for room and runs it again. The reply begins with "ok",
        or with "done" if the put was to begin and its request was carried out before."""
        while True:
            asked = put.asked(mode, write)
            reply = self._session.run(put.what, put.request.deadline, "put", *rows, confirms=confirms, **asked)
            if reply[0] in (b"ok", b"done"):
                return reply
            if reply[0] != b"full":
                _raise_refused(put, reply)
            self._wait_for_room(put, write, reply)

    def _commit(self, put: _Put, commit: dict[str, Any]) -> Any:
        """Runs the script of a commit, and returns its reply. Raises unless the server confirms it."""
        reply = self._session.run(put.what, put.request.deadline, "put", confirms=put.call, **commit)
        if reply[0] != b"ok":
            _raise_refused(put, reply)
        return reply

    def _wait_for_room(self, put: _Put, write: bytes, reply: Any) -> None:
        """Waits in the store's queue of puts for room. The store wakes it then, and says when to ask anyway."""
        _, instance = self._session.connected()
        deadline = put.request.deadline
        if put.size_bytes > put.capacity_bytes or not put.waits:
            raise instance.full_error(put.what, put.size_bytes, reply[1], reply[2])
        start, told = time.monotonic(), b""  # what the server knows: whether this client listens
        with self._wakes.for_room(write) as woken:
            cancellation = CANCELLATION.get() or Cancellation()
            cancellation.listen(woken.set)
            while reply[0] == b"full":
                _, held, num_before, pause_s = reply
                now = time.monotonic()
                left_s = deadline - now - _LAST_ASK_S
                full = instance.full_error(put.what, put.size_bytes, held, num_before)
                if left_s <= 0 or cancellation.is_set:
                    raise RoomTimeoutError.after(full) from full
                listener = self._wakes.listener(deadline)
                if listener == told:
                    woken.wait(min(left_s, max(float(pause_s), min(_PAUSE_SHARE * (now - start), _PAUSE_S))))
                woken.clear()
                told = listener
                asked: dict[str, Any] = {
                    "write": write,
                    "bytes": put.size_bytes,
                    "capacity": put.capacity_bytes,
                    "client": listener,
                }
                left_s = max(0.0, deadline - time.monotonic())
                try:
                    reply = self._session.run(put.what, deadline, "room", wait_s=left_s, **asked)
                except OperationTimeoutError as late:
                    raise RoomTimeoutError.after(full, asked_in_vain=True) from late

    def _write(self, put: _Put, write: bytes, commit: dict[str, Any]) -> None:
        """Sends the rows and the commit. Raises unless the server confirms the commit."""
        link, _ = self._session.connected()
        what, deadline = put.what, put.request.deadline
        key = self._payload.placing.key_of(write)
        chunks = list(self._payload.chunks(write, put.tables))
        keep_s = max(0.0, deadline - time.monotonic()) + _ABANDON_GRACE_S

        def commands(context: bytes) -> Iterator[list[Any]]:
            for _, position, frames in chunks:
                yield pack_rows(key, position, frames, keep_s)
            script = SCRIPTS["put"]
            yield pack((b"EVALSHA", script.sha, b"1", self._session.base, script.pack(commit), context))

        with self._session.receipt(put.call) as receipt:
            sent = commands(self._session.context(receipt))
            *replies, reply = link.commands(what, deadline, sent, PACKED_REPLIES * len(chunks) + 1, receipt)
            if not isinstance(reply, Exception):
                self._session.accept(what, receipt, reply)
                if reply[0] == b"ok":  # so all rows are there
                    return
        for each in replies:
            if isinstance(each, Exception):
                link.raise_error(what, each)
        if isinstance(reply, NoScriptError):
            self._commit(put, commit)
        elif isinstance(reply, Exception):
            link.raise_error(what, reply)
        else:
            _raise_refused(put, reply)

    @contextlib.contextmanager
    def _undone_on_error(self, write: bytes, deadline: float) -> Iterator[None]:
        """Undoes the put if the block raises, so that the put holds no room and no other put waits behind it."""
        try:
            yield
        except BaseException:
            self._undo(write, deadline)
            raise

    def _undo(self, write: bytes, deadline: float) -> bool:
        """Undoes a failed put before its deadline, or else before this client's next put. Returns whether it is undone.

        If this client makes no other put, a later script of any client gives the failed one up, and its rows expire. A
        put that was committed stays, even if the reply to its commit was lost.
        """
        try:
            with self._session.quietly():
                until = min(deadline, time.monotonic() + _UNDO_S)
                reply = self._session.run("put_samples", until, "abort", write=write)
                if self._payload.placing.is_spread:
                    self._payload.collect(reply[1], until)
            return True
        except DataPlaneError:
            self._not_undone.append(write)
            return False

    def _undo_remembered(self, deadline: float) -> None:
        """Undoes the failed puts that could not be undone before. If that fails, the next put tries it again."""
        with contextlib.suppress(IndexError):  # none is left, or another thread took it
            while self._undo(self._not_undone.popleft(), deadline):
                pass


def _raise_refused(put: _Put, reply: Sequence[Any]) -> NoReturn:
    """The begin or the commit of a put was refused. Nothing was written."""
    what, request, kind = put.what, put.request, reply[0]
    if kind == b"stale":
        which = (
            f"sample '{text_of(reply[1])}' was cleared" if reply[1] else "the partition was registered again or cleared"
        )
        raise StalePartitionError(f"{what} refused: {which} since the put began. Nothing was written.")
    if kind == b"abandoned":
        raise StalePartitionError(
            f"{what} refused at commit: the put took too long and counts as abandoned. Nothing was written."
        )
    if kind == b"incomplete":
        raise BackendError(
            f"{what} refused at commit: the server no longer holds all rows of the put. Nothing was written.",
            retryable=True,
        )
    if kind == b"schema":
        wrong = [(text_of(name), kept.decode()) for name, kept in tuples_of(reply[1:], 2)]
        raise SchemaMismatchError.for_fields(
            what,
            [
                (name, request.specs[name].describe(), FieldSpec.from_text(kept).describe(), kept)
                for name, kept in wrong
            ],
        )
    if kind == b"no_group":
        group_of(text_of(reply[1]))  # raises the error of an id without "_g"
    if kind == b"surplus":
        raise InvalidRequestError(
            f"{what} refused: group '{text_of(reply[1])}' would have {reply[2]} members. Expected at most {reply[3]}, "
            "the partition's group size. Nothing was written."
        )
    if kind == b"too_many":
        raise too_many_samples(what, reply[1], reply[2])
    raise unknown_reply(reply)
