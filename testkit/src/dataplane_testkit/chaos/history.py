"""What happened in a run: every call with its start, its end and its outcome, and what was done to the processes.

Each process appends to a file of its own: one line when a call begins, another when it ends. So a kill loses at most
the end of the call that was under way, and the outcome of that call is then unknown.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    ClaimTimeoutError,
    DataPlaneError,
    OperationTimeoutError,
)

#: The outcomes of a call: it did what it says, it changed nothing, or one of both.
Outcome: TypeAlias = Literal["ok", "refused", "unknown"]
OK: Final = "ok"
REFUSED: Final = "refused"
UNKNOWN: Final = "unknown"

#: The operations of which an error may say that they were carried out.
_SETTLED: Final = ("put", "ack", "nack", "renew")

#: Sample -> field -> the version that was read. A string instead of a version says what is wrong with the cell.
Seen: TypeAlias = dict[str, dict[str, int | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a client.

    Attributes:
        process: Who called, such as ``w0.2``: worker 0 in its life 2 (a new life begins after each kill).
        number: The how manieth call of that process.
        operation: ``put``, ``get``, ``claim``, ``ack``, ``nack``, ``renew``, ``clear``, ``register``, ``keep``,
            ``list``, ``consumed``, ``save`` or ``saved`` (what a save holds, as it was loaded after the run).
        partition: The partition.
        begin_s: When it began, in seconds since the run began.
        end_s: When it ended. Infinite if nobody saw its end.
        timeout_s: Its deadline in seconds.
        outcome: ``ok``, ``refused`` (it changed nothing) or ``unknown``.
        error: The class of the error and its message. Empty if there was none, or if nobody saw its end.
        samples: The samples that were asked for; of a claim, a list or a save, those of the reply, in order.
        whole: A clear of the whole partition.
        fields: The fields that were written, read or required.
        version: The version that a put wrote; each put has its own. Of a save: the number of its folder.
        size_bytes: The payload of each sample of a put, in bytes.
        task: The task of a claim, and of the ack, nack or renewal of a claim.
        tokens: The lease tokens, one per sample.
        lease_s: The lease of a claim or renewal in seconds. None: without a lease.
        limit: The batch size of a claim.
        blocking: Whether a claim waits for a full batch.
        flag: What ``consumed`` returned.
        seen: What a reply showed of each sample. The names of tags begin with ``#``.
    """

    process: str
    number: int
    operation: str
    partition: str
    begin_s: float
    end_s: float = math.inf
    timeout_s: float = 60.0
    outcome: Outcome = UNKNOWN
    error: str = ""
    samples: tuple[str, ...] = ()
    whole: bool = False
    fields: tuple[str, ...] = ()
    version: int = 0
    size_bytes: tuple[int, ...] = ()
    task: str = ""
    tokens: tuple[str, ...] = ()
    lease_s: float | None = None
    limit: int = 0
    blocking: bool = False
    flag: bool = False
    seen: Seen = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The process and the number of the call."""
        return f"{self.process}#{self.number}"

    def __str__(self) -> str:
        return f"{self.name} ({self.operation})"

    @property
    def done_s(self) -> float:
        """The moment by which it had taken effect for certain. Infinite: it may take effect later, or never."""
        return self.end_s if self.outcome == OK else math.inf

    @property
    def error_name(self) -> str:
        """The class of the error."""
        return self.error.partition(":")[0]

    def only(self, samples: Collection[str]) -> Call:
        """The same call, as if it had been about these of its samples only."""
        kept = [sample in samples for sample in self.samples]
        parts: dict[str, Any] = {
            name: tuple(compress(getattr(self, name), kept)) for name in ("samples", "size_bytes", "tokens")
        }
        return replace(self, **parts, seen={sample: cells for sample, cells in self.seen.items() if sample in samples})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What was done to a process or to the store.

    Attributes:
        kind: ``kill`` (kill -9), ``stop`` (SIGSTOP until ``end_s``), or the name of a disturbance of the store.
        process: The process, as in `Call`. Empty: the store.
        begin_s: When it began, in seconds since the run began.
        end_s: When it was over.
        loses_data: Whether the store may have lost data by it.
    """

    kind: str
    process: str
    begin_s: float
    end_s: float
    loses_data: bool = False

    @property
    def done_s(self) -> float:
        """As of a `Call`."""
        return self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run as the checker sees it.

    Attributes:
        calls: All calls, those first that began first.
        events: What was done to processes and to the store.
        end_s: When the run was over, in seconds since it began. What is open then never ended.
        audited_s: When the closing audit began: no worker ran any more, and all leases had ended. Infinite: no audit.
        capacity_bytes: What the store may hold. None: no limit.
        atomic_overwrite: Whether the backend declares it.
        fenced: Whether the backend declares it.
        whole_puts: Whether a put is seen whole or not at all, as the contract says. False: of a store that does not
            promise it, see `Shim`.
        allowance_s: Seconds that a call may take beyond its deadline, since a machine may be busy.
        left_bytes: The payload bytes that the engine held when all was cleared and all puts had ended, beyond those
            from before the run. None: nobody can say.
    """

    calls: tuple[Call, ...]
    events: tuple[Event, ...] = ()
    end_s: float = math.inf
    audited_s: float = math.inf
    capacity_bytes: int | None = None
    atomic_overwrite: bool = True
    fenced: bool = True
    whole_puts: bool = True
    allowance_s: float = 10.0
    left_bytes: int | None = None


def outcome_of(operation: str, error: BaseException) -> Outcome:
    """What the error of a call says about whether the call changed anything."""
    said = getattr(error, "outcome", "unknown")
    if isinstance(error, ClaimTimeoutError) or said == "not_done":
        return REFUSED
    if said == "done" and operation in _SETTLED:
        return OK
    doubtful = (OperationTimeoutError, BackendUnavailableError, BackendError)
    return REFUSED if isinstance(error, DataPlaneError) and not isinstance(error, doubtful) else UNKNOWN


def said(error: BaseException) -> str:
    """The `Call.error` of an error. One that does not derive from `DataPlaneError` begins with ``!``."""
    mark = "" if isinstance(error, DataPlaneError) else "!"
    return f"{mark}{type(error).__name__}: {error}"


class Recorder:
    """Appends the calls of one process to its file, with times since ``epoch_s``. Only one thread may use it."""

    def __init__(self, path: Path, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._numbers = 0

    def call(
        self, act: Callable[[], Any], shows: Callable[[Any], Mapping[str, Any]] = lambda reply: {}, **about: Any
    ) -> Any:
        """Makes a call, and writes down what it is about and, at its end, what the reply shows, or the error.

        It returns the reply, True in place of None, and None if the call failed.
        """
        self._numbers += 1
        self._write({"number": self._numbers, **about, "begin_s": self._now()})
        end: dict[str, Any] = {"number": self._numbers, "outcome": OK}
        reply = None
        try:
            reply = act()
            end |= shows(reply)
        except Exception as error:
            end |= {"outcome": outcome_of(about["operation"], error), "error": said(error)}
        self._write({**end, "end_s": self._now()})
        if end["outcome"] != OK:
            return None
        return True if reply is None else reply

    def close(self) -> None:
        os.close(self._file)

    def _now(self) -> float:
        return round(time.monotonic() - self._epoch_s, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read_calls(path: Path, process: str) -> list[Call]:
    """The calls that a process wrote down."""
    calls: dict[int, dict[str, Any]] = {}
    for text in path.read_bytes().split(b"\n")[:-1]:  # what follows the last line's end was cut by a kill
        line: dict[str, Any] = json.loads(text)
        line = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
        calls.setdefault(line["number"], {}).update(line)
    return [Call(process=process, **values) for values in calls.values()]
