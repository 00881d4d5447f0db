"""The events of operations, and the file of them that `dataplane flow` draws."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import socket
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from dataplane_core.errors import Verdict

__all__ = ["EventFile", "OperationEvent", "Status", "log_event"]

#: How an operation ended: ``timeout`` for a `TimeoutError`, ``error`` for all others.
Status: TypeAlias = Literal["ok", "error", "timeout"]

_log = logging.getLogger(__name__)
#: One of so many samples is named in the file wherever it appears. All processes choose the same ones.
_FOLLOW_ONE_OF: Final = 16


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


def _is_followed(sample_id: str) -> bool:
    # the product spreads ids that differ in one digit, of which a checksum alone may choose all or none
    mixed = zlib.crc32(sample_id.encode()) * 0x9E3779B1 & 0xFFFFFFFF
    return mixed * _FOLLOW_ONE_OF < 1 << 32


def log_event(event: OperationEvent) -> None:
    """Logs an event at level INFO. A target for ``on_event``."""
    _log.info("%s", event)


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
        place = Path(str(path).replace("{host}", socket.gethostname()))
        place.parent.mkdir(parents=True, exist_ok=True)
        self._file = place.open("a+b", buffering=0)
        self._failed = False

    def __call__(self, event: OperationEvent) -> None:
        """Writes an event. A target for ``on_event``."""
        failed = event.status != "ok"
        if not (event.n_keys or failed or event.drops_all):
            return
        ids = [name for name in event.sample_ids if _is_followed(name)]
        more = {
            "task": event.task,
            "fields": [name for name in event.fields if not name.startswith("~")],
            "status": event.status if failed else "",
            "error": event.error,
            "drops_all": event.drops_all,
            "ids": ids,
        }
        self._write(
            op=event.op,
            partition=event.partition_id,
            rows=event.n_keys,
            bytes=event.n_bytes,
            seconds=round(event.wall_ms / 1e3, 6),
            **{name: value for name, value in more.items() if value},
        )

    def step(self, step: int, **values: float) -> None:
        """Writes that a training step has ended. One process of the run calls it.

        Args:
            step: Its number.
            values: What is known of it. ``dataplane flow`` draws ``staleness``: how many weight versions old the rows
                were that it trained on. Numbers of numpy and torch go too. One that is not finite is left out, since
                JSON has none.
        """
        plain = {name: value for name, value in values.items() if math.isfinite(value)}
        self._write(op="step", step=int(step), **{name: float(value) for name, value in plain.items()})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, **line: Any) -> None:
        try:
            data = (json.dumps({"at": round(time.time(), 6), **line}) + "\n").encode()
            descriptor = self._file.fileno()
            end = os.fstat(descriptor).st_size  # 0 for a pipe
            if end and os.pread(descriptor, 1, end - 1) != b"\n":  # half a line, or one that another process is writing
                data = b"\n" + data
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except (OSError, ValueError) as error:  # a full disk, or a closed file, must not end the run
            if not self._failed:
                _log.warning("the events of the data plane cannot be written: %s", error)
            self._failed = True
