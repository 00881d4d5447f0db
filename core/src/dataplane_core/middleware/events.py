"""The events of operations, and the lines of files that keep them: that of `dataplane flow`, and recordings."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
from xxhash import xxh3_64_hexdigest

from dataplane_core.codec import row_nbytes
from dataplane_core.errors import ClaimTimeoutError, Verdict
from dataplane_core.spec import Claim, ClaimRequest, ClearRequest, SampleList, WireBatch

with suppress(ImportError):  # Windows has none
    import fcntl

__all__ = [
    "EventFile",
    "LineFile",
    "OperationEvent",
    "Status",
    "WaitingClaims",
    "is_followed",
    "line_of",
    "log_event",
    "observe",
]

#: How an operation ended: ``timeout`` for a `TimeoutError`, ``error`` for all others.
Status: TypeAlias = Literal["ok", "error", "timeout"]

_log = logging.getLogger(__name__)
#: One of so many samples is named in the file wherever it appears. All processes choose the same ones.
_FOLLOW_ONE_OF: Final = 16
_SUM: Final = b',"sum":"'
#: How often, and after how many seconds each, a writer asks for the lock of a file that another has for a moment.
_LOCK_TRIES: Final = 50
_LOCK_PAUSE_S: Final = 0.002
#: A claim that waits and did not ask for this many seconds no longer waits. It asks every 10 s at least.
_ASKS_AGAIN_S: Final = 15.0
#: If more claims wait, those that no longer do are dropped.
_MOST_WAITING: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEvent:
    """An operation that has ended.

    Attributes:
        op: Name of the hook, or ``why``: see ``verdict``.
        partition_id: The partition.
        n_keys: Samples named by the request, or handed out, listed or dropped by the reply.
        n_bytes: Payload bytes written or read.
        wall_ms: Milliseconds inside the hook, inner middleware included. Of a claim that waited, those that its user
            waited.
        status: How it ended. A claim that waited in vain ends with ``timeout``.
        error: The name of the error's class, or "".
        task: The consumer task of a claim, an ack and the like, or "".
        fields: The fields of a put or a get.
        sample_ids: Those samples. Empty where a whole partition is cleared.
        drops_all: Whether it drops what the partition held: a clear of all, or a registration that replaces another.
        verdict: Why the claim waits, in an event of its own each time that the client finds it out (``warn_after_s`` of
            the config). ``wall_ms`` is then the time for which the task has got nothing.
    """

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    wall_ms: float
    status: Status
    error: str = ""
    task: str = ""
    fields: Sequence[str] = ()
    sample_ids: Sequence[str] = field(default=(), repr=False)
    drops_all: bool = False
    verdict: Verdict | None = None


def is_followed(sample_id: str, share: float = 1 / _FOLLOW_ONE_OF) -> bool:
    """Whether a sample is of a share of all, the same ones everywhere. By default those that `EventFile` names."""
    # the product spreads ids that differ in one digit, of which a checksum alone may choose all or none
    mixed = zlib.crc32(sample_id.encode(errors="surrogatepass")) * 0x9E3779B1 & 0xFFFFFFFF
    return mixed < share * (1 << 32)


def log_event(event: OperationEvent) -> None:
    """Logs an event at level INFO. A target for ``on_event``."""
    _log.info("%s", event)


class WaitingClaims:
    """The claims of a client that wait. Each asks the store many times, and is one operation of its user.

    Safe for threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may claim in the middle of a claim
        self._began: dict[str, tuple[float, float]] = {}  # token -> when it first asked, and when it asked last

    def num_waiting(self) -> int:
        """How many wait. Forgets those that were cancelled, which no longer ask."""
        since = time.perf_counter() - _ASKS_AGAIN_S
        with self._lock:
            self._began = {token: (began, last) for token, (began, last) in self._began.items() if last > since}
            return len(self._began)

    def began(self, request: ClaimRequest) -> float:
        """When a claim first asked, on `time.perf_counter`'s clock. Called before each question."""
        now = time.perf_counter()
        with self._lock:
            return self._began.get(request.token, (now, now))[0]

    def goes_on(self, request: ClaimRequest, began: float, claim: Claim | None) -> bool:
        """Whether a claim asks again after this answer. Called after each question, with None if it failed."""
        waits = claim is not None and got_nothing(request, claim) and not request.explain
        with self._lock:
            if waits:
                self._began[request.token] = began, time.perf_counter()
            else:
                self._began.pop(request.token, None)
            are_many = len(self._began) > _MOST_WAITING
        if are_many:
            self.num_waiting()
        return waits


def got_nothing(request: ClaimRequest, claim: Claim) -> bool:
    """Whether a claim that waits was handed nothing by this answer. After its last question, it has timed out."""
    return request.all_or_nothing and not claim.answered


def observe(
    operation: str,
    request: Any,
    note: Callable[[OperationEvent, Any], None],
    waiting: WaitingClaims,
    n_bytes: int = 0,
) -> Generator[None, Any, Any]:
    """The body of a wrapper of pluggy that notes the operation when it has ended.

    Args:
        operation: The name of the hook.
        request: Its request.
        note: Called with the event, and with the reply; or with None, if the operation failed. Not called for a
            question of a claim that asks again.
        waiting: The claims of this client that wait.
        n_bytes: The payload of a put. That of a read is counted.
    """
    claims = isinstance(request, ClaimRequest)
    start = waiting.began(request) if claims else time.perf_counter()
    status: Status = "ok"
    name_of_error = ""
    drops_all = getattr(request, "if_exists", "") == "replace"
    sample_ids: Sequence[str] = getattr(request, "sample_ids", None) or ()
    n_keys = len(sample_ids)
    fields: Iterable[str] = getattr(request, "columns", getattr(request, "fields", ()))
    reply = None
    try:
        reply = yield
        if isinstance(reply, (Claim, SampleList)):
            sample_ids = reply.sample_ids
            n_keys = len(sample_ids)
            if isinstance(reply, Claim) and got_nothing(request, reply):
                status, name_of_error = "timeout", ClaimTimeoutError.__name__  # which the client raises
        elif isinstance(request, ClearRequest) and request.sample_ids is None:
            drops_all, n_keys = True, reply
        elif isinstance(reply, WireBatch):
            n_bytes = sum(row_nbytes(reply.columns, n_keys))
        return reply
    except BaseException as error:
        status = "timeout" if isinstance(error, TimeoutError) else "error"
        name_of_error = type(error).__name__
        reply = None
        raise
    finally:
        if not (claims and waiting.goes_on(request, start, reply)):
            event = OperationEvent(
                op=operation,
                partition_id=getattr(request, "partition_id", ""),  # a listing of partitions names none
                n_keys=n_keys,
                n_bytes=n_bytes,
                wall_ms=(time.perf_counter() - start) * 1e3,
                status=status,
                error=name_of_error,
                task=getattr(request, "task_name", ""),
                fields=tuple(fields),
                sample_ids=sample_ids,
                drops_all=drops_all,
            )
            note(event, reply)


def line_of(event: OperationEvent, sample_ids: Sequence[str]) -> dict[str, Any]:
    """What a line says of an event: see `EventFile`. Its ``ids`` are those given."""
    failed = event.status != "ok"
    more = {
        "task": event.task,
        "fields": [name for name in event.fields if not name.startswith("~")],
        "status": event.status if failed else "",
        "error": event.error,
        "drops_all": event.drops_all,
        "ids": sample_ids,
    }
    return {
        "op": event.op,
        "partition": event.partition_id,
        "rows": event.n_keys,
        "bytes": event.n_bytes,
        "seconds": round(event.wall_ms / 1e3, 6),
        **{name: value for name, value in more.items() if value},
    }


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values of a step without those that JSON cannot say."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


class LineFile:
    """Appends JSON lines to a file, each with its time ``at``, in seconds since 1970, by one write.

    Args:
        path: The file. Its folder is made.
        shared: Whether other processes append to it too.
        sealed: Whether a line ends with ``sum``, the XXH3-64 of what is before it, so that damage is found.

    Attributes:
        size_bytes: Of what was written here.
    """

    def __init__(self, path: Path, *, shared: bool = True, sealed: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        self._shared = shared
        self._lock = threading.RLock()  # a signal handler may write in the middle of a line
        self._sealed = sealed
        self.size_bytes = 0

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line.

        Raises:
            OSError: It is not written. A part of it may be, in a file that is shared.
            ValueError: The file is closed.
        """
        line = {"at": round(time.time(), 6), **line}
        data = (sealed(_compact(line)) if self._sealed else json.dumps(line, default=_plain).encode()) + b"\n"
        descriptor = self._file.fileno()
        with self._alone():
            end = os.fstat(descriptor).st_size  # 0 for a pipe
            if end and os.pread(descriptor, 1, end - 1) != b"\n":  # half a line
                data = b"\n" + data
            if self._file.write(data) != len(data):
                if not self._shared:
                    os.ftruncate(descriptor, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size_bytes += len(data)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While the ``with`` lasts, no other process and no other thread writes a line of a shared file."""
        if not self._shared:
            yield
            return
        with self._lock:
            is_locked = self._try_to_lock()  # not for ever: a process may be stopped while it has the lock
            try:
                yield
            finally:
                if is_locked:
                    fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)

    def hold(self) -> None:
        """From now on `is_held` tells every process of the host that this one writes the file, until its end."""
        self._try_to_lock()  # a process in `is_held` has the lock for a moment

    def _try_to_lock(self) -> bool:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
            except (OSError, NameError):  # a file system without locks, or Windows
                return False
            else:
                return True
        return False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def is_held(path: Path) -> bool:
    """Whether a process writes a file, by `LineFile.hold`. True if that cannot be known."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)  # which several may have at once
    except FileNotFoundError:
        return False
    except (OSError, NameError):
        return True
    return False


def _compact(line: Mapping[str, Any]) -> bytes:
    """A JSON object. Numbers that JSON lacks are as `json` writes them."""
    text = msgspec.json.encode(line, enc_hook=_plain)  # many times as fast as `json`
    return text if b"null" not in text else json.dumps(line, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    """What a request or reply has as a string, sequence or mapping of another class than JSON knows."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be recorded")


def sealed(text: bytes) -> bytes:
    """A JSON object with a last member ``sum``."""
    return b"".join((text[:-1], _SUM, xxh3_64_hexdigest(text).encode(), b'"}'))


def unsealed(line: bytes) -> bytes | None:
    """What `sealed` was given. None: the line is damaged."""
    text, found, rest = line.rpartition(_SUM)
    text += b"}"
    return text if found and rest == xxh3_64_hexdigest(text).encode() + b'"}' else None


class EventFile:
    """Appends a JSON line per operation, and per step, to a file.

    Processes of one host can share a file, because a line is written at once. A full disk may leave a part of a line.
    The next event begins on a line of its own.

    A line has ``at`` (the end, in seconds since 1970), ``op``, ``partition``, ``rows``, ``bytes`` and ``seconds``;
    where they apply ``task``, ``fields``, ``status`` and ``error`` of a failure, ``drops_all``, and ``ids``: the
    samples that are followed, one in 16.

    Other operations that name and hand out no samples leave no line unless they fail.

    Args:
        path: The file. Its folder is made. ``{host}`` stands for the name of this host.
    """

    def __init__(self, path: Path | str) -> None:
        self._lines = LineFile(Path(str(path).replace("{host}", socket.gethostname())))
        self._failed = False

    def __call__(self, event: OperationEvent) -> None:
        """Writes an event. A target for ``on_event``."""
        if event.n_keys or event.status != "ok" or event.drops_all:
            self._write(line_of(event, [name for name in event.sample_ids if is_followed(name)]))

    def step(self, step: int, **values: float) -> None:
        """Writes that a training step has ended. One process of the run calls it, or `DataPlaneClient.mark_step`.

        Args:
            step: Its number.
            values: What is known of it. ``dataplane flow`` draws ``staleness``: how many weight versions old the rows
                were that it trained on. Numbers of numpy and torch go too. One that is not finite is left out, since
                JSON has none, and one named ``at`` or ``op``, which a line has of its own.
        """
        kept = {name: value for name, value in finite(values).items() if name not in ("at", "op")}
        self._write({**kept, "op": "step", "step": int(step)})

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._lines.write(line)
        except (OSError, ValueError) as error:  # a full disk, or a closed file, must not end the run
            if not self._failed:
                _log.warning("the events of the data plane cannot be written: %s", error)
            self._failed = True
