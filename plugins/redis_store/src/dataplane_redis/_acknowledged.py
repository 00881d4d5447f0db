"""What this client was told is done: the wait for replicas, and what a server lost that went back to an older state.

A call that acknowledges something carries a mark: the caller and a number that grows. The script stores it with what it
changes, so a server that has the mark has the change. When a new connection meets another history of the store (after a
failover or a restart), the client compares the marks there with the calls that were acknowledged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import redis
from redis.exceptions import MasterDownError

from dataplane_core.errors import (
    BackendUnavailableError,
    LostReplyError,
    OperationTimeoutError,
    StalePartitionError,
    preview,
    printable,
)
from dataplane_redis._protocol import Parts, is_temporary_refusal, pack, to_error

_log = logging.getLogger("dataplane_redis")

#: How many acknowledged calls, and samples of them, a client remembers. Older ones it cannot name if they are lost.
_MAX_CALLS: Final = 1000
_MAX_SAMPLES: Final = 20_000
#: How many lost calls an error names.
_NAMED: Final = 3
#: The wait for replicas ends this share of the time that is left before the deadline, but at most so many seconds, so
#: that the answer still comes in time.
_MARGIN_SHARE: Final = 0.25
_MARGIN_S: Final = 0.15
#: A mark: a lane of a client, and the number of the call.
_MARK: Final = struct.Struct("<10sQ")


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A call that was acknowledged.

    Attributes:
        operation: ``put_samples``, ``ack``, ``register_partition``, ...
        partition_id: The partition.
        task_name: The task of a claim, an ack, a nack or a renewal; else empty.
        sample_ids: The samples.
    """

    operation: str
    partition_id: str
    task_name: str = ""
    sample_ids: Sequence[str] = ()

    def __str__(self) -> str:
        names = [repr(self.partition_id), *([repr(self.task_name)] if self.task_name else [])]
        samples = f": {preview(self.sample_ids)}" if self.sample_ids else ""
        return f"{self.operation}({', '.join(names)}{samples})"


class LostCallsError(StalePartitionError):
    """The server went back to an older state, which lacks what this client was told is done. The call that raises this
    changed nothing. Later calls work with what the server has.

    Attributes:
        calls: The acknowledged calls that the server no longer knows, in their order. A client remembers its newest
            thousand calls, and those for at most 20,000 samples.
        complete: False if older calls are lost too, which the client no longer remembers.
    """

    def __init__(
        self, message: str, *, calls: Iterable[Acknowledged] = (), complete: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(message, **kwargs)
        self.calls = tuple(calls)
        self.complete = complete


#: What a call acknowledges, or what it acknowledges by its reply, if anything.
Confirms: TypeAlias = Acknowledged | Callable[[Any], Acknowledged | None]


@dataclass(slots=True)
class Receipt:
    """A call that will be acknowledged, by its lane (a caller, who makes one call at a time) and its number there."""

    lane: bytes
    number: int
    confirms: Confirms
    wait: Callable[[float], Parts]  # makes the command that waits for replicas; nothing: none need to have it
    reply: Any = None  # to the wait for replicas, or the error that came instead; the link sets it, if it waited
    history: bytes = b""  # of its connection, set by the link; later the newest one that is known to have the call

    @property
    def mark(self) -> bytes:
        """Belongs at the end of the script's last argument."""
        return _MARK.pack(self.lane, self.number)

    def call_of(self, reply: Any) -> Acknowledged | None:
        """What the reply of the script acknowledges."""
        if not isinstance(reply, list) or reply[:1] not in ([b"ok"], [b"part"]):
            return None
        return self.confirms if isinstance(self.confirms, Acknowledged) else self.confirms(reply)

    def next_command(self, reply: Any, deadline: float) -> Parts:
        """The command that must follow on the same connection after this reply: the wait for replicas."""
        command = self.wait(deadline)
        return command if command and self.call_of(reply) is not None else ()


class Acknowledgements:
    """The acknowledged calls of one client: what so many replicas have, or have synced. Thread-safe."""

    def __init__(self, base: bytes, replicas: int, synced: bool) -> None:
        self._base = base
        self._replicas = replicas
        self._synced = synced
        self._client = os.urandom(8)
        self._lock = threading.Lock()
        self._numbers: dict[bytes, int] = {}  # the last number of each lane
        self._free: list[bytes] = []  # lanes: a lane has one call at a time
        self._noted: deque[tuple[Receipt, Acknowledged]] = deque()
        self._num_samples = 0
        self._forgotten: Receipt | None = None  # the newest call that is no longer remembered
        self._history = b""
        self._unjudged = False  # a call was made on a connection that had met another history
        self._lost: list[Acknowledged] = []  # not yet told
        self._lost_more = False  # calls that were forgotten are lost too
        self._here = threading.local()

    # --- calls --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def receipt(self, confirms: Confirms) -> Iterator[Receipt]:
        """The receipt of a new call."""
        with self._lock:
            lane = self._free.pop() if self._free else self._client + struct.pack("<H", len(self._numbers))
            number = self._numbers.get(lane, 0) + 1
            self._numbers[lane] = number
        try:
            yield Receipt(lane, number, confirms, self.wait)
        finally:
            with self._lock:
                self._free.append(lane)

    def accept(self, what: str, label: str, receipt: Receipt, reply: Any) -> None:
        """Notes what a reply acknowledges. Raises if too few replicas have it, or the wait was refused."""
        call = receipt.call_of(reply)
        if call is None:
            return
        waited = receipt.reply
        if isinstance(waited, Exception) and not isinstance(waited, (redis.TimeoutError, TimeoutError)):
            self._raise_refused_wait(what, label, waited)
        if waited is not None:
            local, count = self._counts(0 if isinstance(waited, Exception) else waited)
            if count < self._replicas or not local:
                self._raise_too_few(what, label, local, count)
        with self._lock:
            self._noted.append((receipt, call))
            self._num_samples += len(call.sample_ids)
            while len(self._noted) > _MAX_CALLS or (self._num_samples > _MAX_SAMPLES and len(self._noted) > 1):
                self._forgotten, forgotten = self._noted.popleft()
                self._num_samples -= len(forgotten.sample_ids)
            if receipt.history != self._history:  # another thread has met a newer history meanwhile
                self._unjudged = True

    def _counts(self, reply: Any) -> tuple[int, int]:
        """Whether the server itself has synced a change (or need not), and how many replicas have it."""
        local, count = (reply or (0, 0)) if self._synced else (1, reply)
        return int(local), int(count)

    def _raise_too_few(self, what: str, label: str, local: int, count: int) -> NoReturn:
        has = "has" if count == 1 else "have"
        kept = "synced it to their append-only files" if self._synced else "it"
        where = f"; {label} itself has not" if self._synced and not local else ""
        raise OperationTimeoutError(
            f"{what} timed out waiting for replicas: {label} has made the change, but {count} of "
            f"{self._replicas} replicas {has} {kept}{where}. If that server dies now, the change may be lost.",
            hint="Call again once the replicas are back: a repeated put or ack does no harm. Else lower wait_replicas.",
            outcome="done",
        )

    def _raise_refused_wait(self, what: str, label: str, reply: Exception) -> NoReturn:
        text = str(reply)
        if is_temporary_refusal(reply):
            then = f"it refused to wait until {self._replicas} replicas had it: {text}"
        elif isinstance(reply, (redis.ConnectionError, OSError)):
            then = f"the connection was lost before {self._replicas} replicas had it: {text}"
        elif isinstance(reply, MasterDownError) or text.startswith(("UNBLOCKED", "ERR WAIT cannot")):
            then = "it became a replica of another server, which may lack it"
        else:
            raise BackendUnavailableError(
                f"{what} failed: {label} made the change, but refuses to wait for replicas: {text}.",
                retryable=False,
                hint="Let the user run WAIT and WAITAOF, or leave the options wait_replicas and wait_fsync off.",
                outcome="done",
            ) from reply
        raise LostReplyError(
            f"{what} failed: {label} made the change, but then {then}.",
            hint="Call again: a repeated put or ack does no harm.",
        ) from reply

    def wait(self, deadline: float) -> Parts:
        """The command that waits until replicas have what was sent before it, until shortly before the deadline.
        Nothing: none need to have it."""
        if not (self._replicas or self._synced):
            return ()
        left_s = deadline - time.monotonic()
        wait_ms = max(1, int(1000 * (left_s - min(_MARGIN_S, _MARGIN_SHARE * left_s))))
        words = (b"%d" % self._replicas, b"%d" % wait_ms)
        return pack((b"WAITAOF", b"1", *words) if self._synced else (b"WAIT", *words))

    def check_wait(self, what: str, label: str, replies: Iterable[Any]) -> None:
        """Checks the replies to `wait`, one per node. Raises if one refused, or too few of its replicas have it."""
        for reply in replies:
            if isinstance(reply, Exception):
                raise to_error(what, label, reply) from reply
            local, count = self._counts(reply)
            if count < self._replicas or not local:
                raise OperationTimeoutError(
                    f"{what} timed out waiting for replicas: {count} of {self._replicas} replicas of a node of "
                    f"{label} {'has' if count == 1 else 'have'} the payload. Nothing was written.",
                    hint="Call again once the replicas are back. Else lower wait_replicas.",
                    outcome="not_done",
                )

    @property
    def history(self) -> str:
        """Names the history of the ledger's server that this client met last."""
        return self._history.decode()

    # --- histories ----------------------------------------------------------------------------------------------------

    def is_newest(self, history: bytes) -> bool:
        """Whether no other history was met since a connection met this one."""
        return history == self._history

    def meet(self, history: bytes, ask: Callable[..., Any]) -> None:
        """Called with each new connection before it is used, and with what sends a command on it.

        A failover or a restart begins another history. It need not be an older state: a server also begins one when its
        first replica joins. So only the marks that it has now tell what was lost, and only of calls that were
        acknowledged before it was asked.
        """
        with self._lock:
            if history == self._history and not self._unjudged:
                return
            noted = [each for each in self._receipts() if each.history != history]
        lanes = list({each.lane for each in noted})
        marks = ask(b"HMGET", self._base + b":marks", *lanes) if lanes else []
        newest = {lane: int(mark or 0) for lane, mark in zip(lanes, marks, strict=True)}
        with self._lock:
            self._history = history
            gone = set()
            for each in noted:
                if each.number <= newest[each.lane]:
                    each.history = history
                else:
                    gone.add(id(each))
            self._note_lost(gone)
            self._unjudged = any(each.history != history for each in self._receipts())

    def _receipts(self) -> list[Receipt]:
        """Those of all remembered calls, and of the newest one that is not."""
        return [*([self._forgotten] if self._forgotten is not None else []), *(receipt for receipt, _ in self._noted)]

    def _note_lost(self, gone: set[int]) -> None:
        """Moves what the history lacks, by `id`, to what the user must be told."""
        calls = [call for receipt, call in self._noted if id(receipt) in gone]
        if id(self._forgotten) in gone:
            self._forgotten, self._lost_more = None, True
        if calls:
            self._noted = deque(each for each in self._noted if id(each[0]) not in gone)
            self._num_samples = sum(len(call.sample_ids) for _, call in self._noted)
            self._lost += calls
            _log.error("the store went back to an older state, without %s", printable(_shown(calls)))

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Calls of this thread in the block are not the user's: `raise_lost` waits for one that is."""
        before = getattr(self._here, "quiet", False)
        self._here.quiet = True
        try:
            yield
        finally:
            self._here.quiet = before

    def raise_lost(self, what: str, label: str) -> None:
        """Raises what was lost, if the user was not told yet."""
        if not self._lost or getattr(self._here, "quiet", False):
            return
        with self._lock:
            lost, self._lost = self._lost, []
            lost_more, self._lost_more = self._lost_more, False
        if not lost:  # another thread told its user
            return
        count = f"{len(lost)} {'call' if len(lost) == 1 else 'calls'}"
        more = " It also lacks older ones, which this client no longer remembers." if lost_more else ""
        raise LostCallsError(
            f"{what} refused: {label} went back to an older state. It lacks {count} of this client that had been "
            f"acknowledged: {_shown(lost)}.{more} This call changed nothing.",
            calls=lost,
            complete=not lost_more,
            hint="Make these calls again. Samples whose ack was lost are handed out again. To lose nothing in a "
            "failover, set wait_replicas.",
        )

    def end(self, command: Callable[..., Any], deadline: float) -> None:
        """Removes this client's marks from the server."""
        with self._lock:
            lanes = list(self._numbers)
        if lanes:
            command("close", deadline, b"HDEL", self._base + b":marks", *lanes)


def _shown(calls: Sequence[Acknowledged]) -> str:
    rest = len(calls) - _NAMED
    return ", ".join(map(str, calls[:_NAMED])) + (f" and {rest} more" if rest > 0 else "")
