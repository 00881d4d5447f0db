"""The events of operations, and the lines of files that keep them: that of `dataplane flow`, and recordings."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
from xxhash import xxh3_64_hexdigest

from dataplane_core.codec import row_nbytes
from dataplane_core.errors import Verdict
from dataplane_core.spec import Claim, ClaimRequest, ClearReply, SampleList, WireBatch

with suppress(ImportError):  # Windows has none
    import fcntl

__all__ = [
    "EventFile",
    "LineFile",
    "OperationEvent",
    "Status",
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
#: How often, and after how many seconds each, `hold` asks for a lock that a reader has for a moment.
_HOLD_TRIES: Final = 50
_HOLD_PAUSE_S: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEvent:
    """An operation that has ended.

    Attributes:
        op: Name of the hook, or ``why``: see ``verdict``.
        partition_id: The partition.
        n_keys: Samples named by the request, or handed out, listed or dropped by the reply.
        n_bytes: Payload bytes written or read.
        wall_ms: Milliseconds inside the hook, inner middleware included.
        status: How it ended.
        error: The name of the error's class, or "".
        task: The consumer task of a claim, an ack and the like, or "".
        fields: The fields of a put or a get.
        sample_ids: Those samples. Empty where a whole partition is cleared.
        drops_all: Whether it drops what the partition held: a clear of all, or a registration that replaces another.
        waits: Whether it is a question of a claim that waits and was not answered, so that it asks again.
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
    waits: bool = False
    verdict: Verdict | None = None


def is_followed(sample_id: str, share: float = 1 / _FOLLOW_ONE_OF) -> bool:
    """Whether a sample is of a share of all, the same ones everywhere. By default those that `EventFile` names."""
    # the product spreads ids that differ in one digit, of which a checksum alone may choose all or none
    mixed = zlib.crc32(sample_id.encode(errors="surrogatepass")) * 0x9E3779B1 & 0xFFFFFFFF
    return mixed < share * (1 << 32)


def log_event(event: OperationEvent) -> None:
    """Logs an event at level INFO. A target for ``on_event``."""
    _log.info("%s", event)


def observe(
    operation: str, request: Any, note: Callable[[OperationEvent, Any], None], n_bytes: int = 0
) -> Generator[None, Any, Any]:
    """The body of a wrapper of pluggy that notes the operation when it has ended.

    Args:
        operation: The name of the hook.
        request: Its request.
        note: Called with the event, and with the reply; or with None, if the operation failed.
        n_bytes: The payload of a put. That of a read is counted.
    """
    start = time.perf_counter()
    status: Status = "ok"
    name_of_error = ""
    waits, drops_all = False, getattr(request, "if_exists", "") == "replace"
    sample_ids: Sequence[str] = getattr(request, "sample_ids", None) or ()
    n_keys = len(sample_ids)
    fields: Iterable[str] = getattr(request, "columns", getattr(request, "fields", ()))
    reply = None
    try:
        reply = yield
        if isinstance(reply, (Claim, SampleList)):
            sample_ids = reply.sample_ids
            n_keys = len(sample_ids)
            waits = isinstance(reply, Claim) and asks_again(request, reply)
        elif isinstance(reply, ClearReply) and request.sample_ids is None:
            drops_all, n_keys = True, reply.num_samples
        elif isinstance(reply, WireBatch):
            n_bytes = sum(row_nbytes(reply.columns, n_keys))
        return reply
    except BaseException as error:
        status = "timeout" if isinstance(error, TimeoutError) else "error"
        name_of_error = type(error).__name__
        raise
    finally:
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
            waits=waits,
        )
        note(event, reply if status == "ok" else None)


def asks_again(request: ClaimRequest, claim: Claim) -> bool:
    """Whether this is a question of a claim that waits, and not its last one."""
    return request.all_or_nothing and not (claim.answered or request.explain)


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
        end = os.fstat(descriptor).st_size  # 0 for a pipe
        if end and os.pread(descriptor, 1, end - 1) != b"\n":  # half a line, or one that another process is writing
            data = b"\n" + data
        if self._file.write(data) != len(data):
            if not self._shared:
                os.ftruncate(descriptor, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size_bytes += len(data)

    def hold(self) -> None:
        """From now on `is_held` tells every process of the host that this one writes the file, until its end."""
        for _ in range(_HOLD_TRIES):
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a process is in `is_held`
                time.sleep(_HOLD_PAUSE_S)
            except (OSError, NameError):  # a file system without locks, or Windows
                return
            else:
                return

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
    The next event begins on a line of its own. So a line may be empty, where two processes wrote at once.

    A line has ``at`` (the end, in seconds
    since 1970), ``op``, ``partition``, ``rows``, ``bytes`` and ``seconds``; where they apply ``task``, ``fields``,
    ``status`` and ``error`` of a failure, ``drops_all``, and ``ids``: the samples that are followed, one in 16.

    Other operations that name and hand out no samples leave no line unless they fail: a claim that waits asks often.

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
