"""The metrics middleware: one event per operation, totals, and the bytes that this client put and has not cleared.

Live bytes are the bytes that this client put, minus those that it dropped itself with a clear or a new registration. It
does not know what other clients clear. If others clear its samples, its live bytes only grow, and it keeps a small dict
per sample.

Its cost is one dict update per cell written and two clock reads per operation; `benchmarks/backends.py` prints it.
"""

from __future__ import annotations

import math
import pkgutil
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, field_validator

from dataplane_core.arguments import check_iterable, takes
from dataplane_core.codec import cell_nbytes
from dataplane_core.errors import InvalidRequestError, Verdict
from dataplane_core.middleware.base import MiddlewareContext, OperationMiddleware
from dataplane_core.middleware.events import EventFile, OperationEvent, WaitingClaims, observe
from dataplane_core.spec import (
    ClearRequest,
    PutRequest,
    RegisterRequest,
    SharedRows,
    WireColumn,
    hookimpl,
)

#: Buckets of times per doubling. A bucket is then 9 % wide, which limits the error of a percentile.
_PER_DOUBLING: Final = 8
#: Shorter times, in milliseconds, count as this one.
_SHORTEST_MS: Final = 1e-3
#: The times of a higher bucket are no floats.
_LAST_BUCKET: Final = 1023 * _PER_DOUBLING
#: The percentiles of a snapshot, by their names.
_PERCENTILES: Final = {"p50_ms": 0.5, "p90_ms": 0.9}
#: What the snapshots of several clients say in sum.
_SUMMED: Final = (
    "total_ops",
    "total_keys",
    "total_bytes",
    "bytes_outstanding",
    "peak_bytes_outstanding",
    "n_keys_outstanding",
)
#: When there are so many partitions, those without live bytes are forgotten.
_MOST_PARTITIONS: Final = 1024


@dataclass(slots=True)
class _Total:
    calls: int = 0
    errors: int = 0
    n_keys: int = 0
    n_bytes: int = 0
    wall_ms: float = 0.0
    max_ms: float = 0.0
    times: dict[int, int] = field(default_factory=dict)  # bucket -> calls

    def told(self) -> dict[str, Any]:
        """As a snapshot has it."""
        percentiles = {name: min(self._percentile_ms(share), self.max_ms) for name, share in _PERCENTILES.items()}
        return {**asdict(self), **percentiles}

    def add(self, told: Mapping[str, Any]) -> None:
        """Adds what another one told."""
        for name in ("calls", "errors", "n_keys", "n_bytes", "wall_ms"):
            setattr(self, name, getattr(self, name) + told[name])
        self.max_ms = max(self.max_ms, told["max_ms"])
        for bucket, calls in told["times"].items():
            if calls < 1 or int(bucket) > _LAST_BUCKET:
                raise ValueError(f"{calls} calls in bucket {bucket} of times")
            self._count(int(bucket), calls)  # JSON makes strings of the keys

    def note(self, event: OperationEvent) -> None:
        """Adds an operation."""
        self.calls += 1
        self.errors += event.status != "ok"
        self.n_keys += event.n_keys
        self.n_bytes += event.n_bytes
        self.wall_ms += event.wall_ms
        self.max_ms = max(self.max_ms, event.wall_ms)
        self._count(math.floor(math.log2(max(event.wall_ms, _SHORTEST_MS)) * _PER_DOUBLING), 1)

    def _count(self, bucket: int, calls: int) -> None:
        self.times[bucket] = self.times.get(bucket, 0) + calls

    def _percentile_ms(self, share: float) -> float:
        """The time that this share of the calls did not exceed. Inside its bucket, calls count as evenly spread."""
        wanted = share * self.calls
        below = 0
        for bucket, calls in sorted(self.times.items()):
            if below + calls >= wanted:
                return float(2 ** ((bucket + (wanted - below) / calls) / _PER_DOUBLING))
            below += calls
        return 0.0


@dataclass(slots=True)
class _SharedCell:
    size: int
    num_samples: int = 0


@dataclass(slots=True)
class _Held:
    cells: dict[str, dict[str, int | _SharedCell]] = field(default_factory=dict)  # sample -> field -> bytes
    live_bytes: int = 0
    peak_bytes: int = 0


class MetricsConfig(BaseModel):
    """The options of `Metrics`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    on_event: Callable[[OperationEvent], None] | str | None = None
    """Called with every `OperationEvent`, in the thread of the operation. Its exceptions reach the caller. In a config
    file, the name of a function that every process can import: ``package.module:function``, or with dots only."""
    events_file: Path | None = None
    """Where to append every event as a line, for ``dataplane flow``; see `EventFile`. Processes of a host may share it;
    ``{host}`` in its name stands for the name of the host."""

    @field_validator("on_event")
    @classmethod
    def _is_a_function(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            found = pkgutil.resolve_name(value)
        except (ValueError, ImportError, AttributeError) as error:
            raise ValueError(
                f"on_event {value!r} was not found: {error}. Expected 'package.module:function'."
            ) from error
        if not callable(found):
            raise ValueError(f"on_event {value!r} is a {type(found).__name__}. Expected a function.")
        return found


class Metrics(OperationMiddleware):
    """Measures the operations of one client.

    Args:
        on_event: As `MetricsConfig.on_event`.
        events_file: As `MetricsConfig.events_file`.
        options: Those of a class that derives from this one.

    Raises:
        ValueError: There is no function of that name.
    """

    Config: ClassVar[type[BaseModel]] = MetricsConfig
    config: MetricsConfig

    def __init__(
        self,
        on_event: Callable[[OperationEvent], None] | str | None = None,
        events_file: Path | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(on_event=on_event, events_file=events_file, **options)
        self._on_event: Any = self.config.on_event
        self._event_file: EventFile | None = None
        self._moved_rows: Mapping[str, int] = {}
        self._lock = threading.RLock()  # a signal handler may use the client in the middle of `snapshot`
        self._totals: dict[str, _Total] = {}
        self._waiting = WaitingClaims()
        self._held: dict[str, _Held] = {}
        self._live_bytes = 0  # of all partitions
        self._peak_bytes = 0
        self._max_bytes_per_key = 0
        self._last_bytes_per_key = 0

    def start(self, context: MiddlewareContext) -> None:
        """Opens the file of events, if there is to be one."""
        self._moved_rows = context.moved_rows
        if self.config.events_file is not None:
            self._event_file = EventFile(self.config.events_file)

    def stop(self) -> None:
        """Closes it."""
        file, self._event_file = self._event_file, None
        if file is not None:
            file.close()

    def snapshot(self, *, reset: bool = False) -> dict[str, Any]:
        """What this client did so far, and what it put and has not cleared.

        Where other clients clear what this one put, its live and peak bytes are upper bounds. `merge_snapshots` joins
        those of several clients, also of other processes.

        Args:
            reset: The next snapshot counts the operations from here on, for numbers per step. Bytes that live do not
                begin anew.

        Returns:
            ``operations``: per operation ``calls``, ``errors``, ``n_keys``, ``n_bytes``; ``wall_ms``, the sum of the
            times in the hook in milliseconds, the longest (``max_ms``), and those that 50 and 90 percent of the calls
            did not exceed (``p50_ms``, ``p90_ms``, to within 9 percent); and ``times``, which they are counted from:
            calls per bucket, of which bucket ``b`` begins at ``2 ** (b / 8)`` ms. ``partitions``: live and
            peak payload bytes per partition; of very
            many, those without live bytes are forgotten. And over all partitions: ``total_ops``, ``total_keys`` and
            ``total_bytes``, the sums over all operations; ``bytes_outstanding`` (live) and ``peak_bytes_outstanding``;
            ``n_keys_outstanding``, the samples with live bytes; ``max_bytes_per_key_seen``, the most that a put wrote
            for one sample; ``last_put_bytes_per_key``, the mean over the samples of the last put; and ``moved_rows``,
            the rows by their path, such as ``memory`` that is shared and ``wire``, on backends that have several.
        """
        with self._lock:
            operations, totals = self._totals, self._totals.values()
            if reset:
                self._totals = {}
            return {
                "operations": {op: total.told() for op, total in operations.items()},
                "partitions": {
                    partition_id: {"live_bytes": held.live_bytes, "peak_bytes": held.peak_bytes}
                    for partition_id, held in self._held.items()
                },
                "total_ops": sum(total.calls for total in totals),
                "total_keys": sum(total.n_keys for total in totals),
                "total_bytes": sum(total.n_bytes for total in totals),
                "bytes_outstanding": self._live_bytes,
                "peak_bytes_outstanding": self._peak_bytes,
                "n_keys_outstanding": sum(len(held.cells) for held in self._held.values()),
                "max_bytes_per_key_seen": self._max_bytes_per_key,
                "last_put_bytes_per_key": self._last_bytes_per_key,
                "moved_rows": dict(self._moved_rows),
            }

    def note_step(self, step: int, values: Mapping[str, float]) -> None:
        """Writes it to the file of events."""
        if self._event_file is not None:
            self._event_file.step(step, **values)

    def note_verdict(self, verdict: Verdict) -> None:
        """Tells the listener why a claim of this client waits. It is no operation, and is not counted."""
        if self._on_event is not None:
            event = OperationEvent(
                op="why",
                partition_id=verdict.partition_id,
                n_keys=0,
                n_bytes=0,
                wall_ms=verdict.waited_s * 1e3,
                status="ok",
                task=verdict.task_name,
                verdict=verdict,
            )
            self._on_event(event)

    # --- the operations -----------------------------------------------------------------------------------------------

    def around(self, operation: str, request: Any, n_bytes: int = 0) -> Generator[None, Any, Any]:
        """Counts an operation."""
        return (yield from observe(operation, request, lambda event, _: self._count(event), self._waiting, n_bytes))

    @hookimpl(wrapper=True)
    def register_partition(self, request: RegisterRequest) -> Generator[None, Any, Any]:
        """Counts. The live bytes of a new partition start at zero."""
        info = yield from self.around("register_partition", request)
        if request.if_exists == "replace":
            with self._lock:
                self._drop(request.partition_id, None)
        return info

    @hookimpl(wrapper=True)
    def put_samples(self, request: PutRequest) -> Generator[None, Any, Any]:
        """Counts keys and bytes, and remembers the bytes of every cell."""
        num_samples = len(request.sample_ids)
        sizes = {
            name: np.broadcast_to(cell_nbytes(column, num_samples), num_samples).tolist()
            for name, column in request.columns.items()
        }
        rows = [sum(row) for row in zip(*sizes.values(), strict=True)]
        n_bytes = sum(rows)
        # before the call, which may change the request
        columns = {name: _cells_of(column, sizes[name]) for name, column in request.columns.items()}
        reply = yield from self.around("put_samples", request, n_bytes)
        with self._lock:
            if len(self._held) >= _MOST_PARTITIONS and request.partition_id not in self._held:
                self._held = {name: held for name, held in self._held.items() if held.cells}
            held = self._held.setdefault(request.partition_id, _Held())
            before = held.live_bytes
            held.live_bytes += n_bytes
            for name, column in columns.items():
                for sample_id, cell in zip(request.sample_ids, column, strict=True):
                    cells = held.cells.setdefault(sample_id, {})
                    if name in cells:
                        held.live_bytes -= _freed(cells[name])
                    cells[name] = cell
            held.peak_bytes = max(held.peak_bytes, held.live_bytes)
            self._live_bytes += held.live_bytes - before
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            if rows:
                self._max_bytes_per_key = max(self._max_bytes_per_key, *rows)
                self._last_bytes_per_key = n_bytes // num_samples
        return reply

    @hookimpl(wrapper=True)
    def clear_samples(self, request: ClearRequest) -> Generator[None, Any, Any]:
        """Counts keys, and subtracts the rows' bytes from the live bytes."""
        reply = yield from self.around("clear_samples", request)
        with self._lock:
            self._drop(request.partition_id, request.sample_ids)
        return reply

    def _count(self, event: OperationEvent) -> None:
        with self._lock:
            self._totals.setdefault(event.op, _Total()).note(event)
        if self._event_file is not None:
            self._event_file(event)
        if self._on_event is not None:
            self._on_event(event)

    def _drop(self, partition_id: str, sample_ids: list[str] | None) -> None:
        held = self._held.get(partition_id)
        if held is None:
            return
        freed = 0
        for sample_id in list(held.cells) if sample_ids is None else sample_ids:
            freed += sum(map(_freed, held.cells.pop(sample_id, {}).values()))
        held.live_bytes -= freed
        self._live_bytes -= freed


@takes(snapshots=check_iterable)
def merge_snapshots(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins what several clients did, of any processes, into one snapshot.

    Counts and bytes are sums. Percentiles are counted anew from the joined times, since a mean of percentiles is none.

    Args:
        snapshots: What `Metrics.snapshot` gave in each process, or this function; also after JSON. Empty ones count as
            those of clients without the middleware.

    Returns:
        A snapshot, and ``num_clients``. ``peak_bytes`` and ``peak_bytes_outstanding`` are sums, and so upper bounds:
        the clients may have held most at different times. ``last_put_bytes_per_key`` is left out.

    Raises:
        InvalidRequestError: Something is no snapshot.
        InvalidTypeError: ``snapshots`` is no list.

    Examples:
        >>> from dataplane_core import connect
        >>> from dataplane_core.middleware import Metrics
        >>> metrics = Metrics()
        >>> with connect({"backend": "noop", "middleware": [metrics]}) as client:
        ...     client.register_partition("p", ["x"], None, ["t"])
        >>> joined = merge_snapshots([metrics.snapshot(), metrics.snapshot()])
        >>> joined["num_clients"], joined["operations"]["register_partition"]["calls"]
        (2, 2)
    """
    operations: dict[str, _Total] = {}
    partitions: dict[str, Counter[str]] = {}
    sums: Counter[str] = Counter(dict.fromkeys((*_SUMMED, "num_clients"), 0))
    moved: Counter[str] = Counter()
    max_bytes_per_key = 0
    for number, each in enumerate(snapshots):
        if not each:
            continue
        try:
            for op, told in each["operations"].items():
                operations.setdefault(op, _Total()).add(told)
            for partition_id, held in each["partitions"].items():
                partitions.setdefault(partition_id, Counter()).update(held)
            moved.update(each["moved_rows"])
            sums.update({name: each[name] for name in _SUMMED})
            sums["num_clients"] += each.get("num_clients", 1)
            max_bytes_per_key = max(max_bytes_per_key, each["max_bytes_per_key_seen"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"merge_snapshots refused: number {number} is no snapshot: {type(error).__name__}: {error}. Expected "
                "what Metrics.snapshot() returned, of the same version."
            ) from error
    return {
        "operations": {op: total.told() for op, total in operations.items()},
        "partitions": {partition_id: dict(held) for partition_id, held in partitions.items()},
        **sums,
        "max_bytes_per_key_seen": max_bytes_per_key,
        "moved_rows": dict(moved),
    }


def _cells_of(column: WireColumn | SharedRows, sizes: list[int]) -> Sequence[int | _SharedCell]:
    """The cells of a column whose sizes `cell_nbytes` gave."""
    if not isinstance(column, SharedRows):
        return sizes
    cells: dict[int, _SharedCell] = {}
    for row, size in zip(column.index, sizes, strict=True):
        cells.setdefault(row, _SharedCell(size)).num_samples += 1
    return [cells[row] for row in column.index]


def _freed(cell: int | _SharedCell) -> int:
    """The bytes that are free when a sample no longer has a cell: those of a shared one when no sample has it."""
    if isinstance(cell, int):
        return cell
    cell.num_samples -= 1
    return 0 if cell.num_samples else cell.size
