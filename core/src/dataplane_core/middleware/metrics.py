"""The metrics middleware: one event per operation, totals, and the bytes that this client put and has not cleared.

It does not know what other clients clear: if they clear its samples, its live bytes only grow, and it keeps a small
dict per sample. `python -m benchmarks settings` prints its cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, ImportString

from dataplane_core.arguments import check_list
from dataplane_core.errors import InvalidRequestError, Verdict
from dataplane_core.middleware.base import EventMiddleware, OperationEvent

#: When there are so many partitions, those without live bytes are forgotten.
_MOST_PARTITIONS: Final = 1024


class MetricsConfig(BaseModel):
    """The options of `Metrics`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    on_event: ImportString[Callable[[OperationEvent], None]] | None = None
    """Called with every `OperationEvent`, in the thread of the operation. Its exceptions reach the caller. In a config
    file, the name of a function that every process can import: ``package.module:function``, or with dots only."""


@dataclass(slots=True)
class _Held:
    cells: dict[str, dict[str, int]] = field(default_factory=dict)  # sample -> field -> bytes
    live_bytes: int = 0
    peak_bytes: int = 0


class Metrics(EventMiddleware):
    """Measures the operations of one client.

    Args:
        on_event: As `MetricsConfig.on_event`.
        options: Those of a class that derives from this one.

    Raises:
        ValueError: There is no function of that name.
    """

    Config: ClassVar[type[BaseModel]] = MetricsConfig
    config: MetricsConfig

    def __init__(self, on_event: Callable[[OperationEvent], None] | str | None = None, **options: Any) -> None:
        super().__init__(on_event=on_event, **options)
        self._on_event: Any = self.config.on_event
        self._lock = threading.RLock()  # a signal handler may use the client in the middle of `snapshot`
        self._operations: dict[str, dict[str, Any]] = {}
        self._held: dict[str, _Held] = {}
        self._live_bytes = 0  # of all partitions
        self._peak_bytes = 0
        self._max_bytes_per_key = 0
        self._last_bytes_per_key = 0

    def snapshot(self, *, reset: bool = False) -> dict[str, Any]:
        """What this client did so far, and what it put and has not cleared.

        Where other clients clear what this one put, its live and peak bytes are upper bounds. `merge_snapshots` joins
        the snapshots of several clients, also of other processes.

        Args:
            reset: The next snapshot counts the operations from here on, for numbers per step. Bytes that live do not
                begin anew.

        Returns:
            ``operations``: per operation ``calls``, ``errors``, ``n_keys``, ``n_bytes``; ``wall_ms``, the sum of the
            times in the hook in milliseconds, and the longest (``max_ms``). ``partitions``: ``live_bytes`` and
            ``peak_bytes`` of the payload of each; of very many, those without live bytes are forgotten. And over all
            partitions: ``total_ops``, ``total_keys`` and ``total_bytes``, the sums over all operations;
            ``bytes_outstanding`` (live) and ``peak_bytes_outstanding``; ``n_keys_outstanding``, the samples with live
            bytes; ``max_bytes_per_key_seen``, the most that a put wrote for one sample; ``last_put_bytes_per_key``, the
            mean over the samples of the last put; ``moved_rows``, the rows by their path, such as ``memory`` that is
            shared and ``wire``, on backends that have several; and ``num_clients``, 1.
        """
        with self._lock:
            operations = {op: dict(total) for op, total in self._operations.items()}
            if reset:
                self._operations = {}
            return {
                "operations": operations,
                "partitions": {
                    partition_id: {"live_bytes": held.live_bytes, "peak_bytes": held.peak_bytes}
                    for partition_id, held in self._held.items()
                },
                "total_ops": sum(total["calls"] for total in operations.values()),
                "total_keys": sum(total["n_keys"] for total in operations.values()),
                "total_bytes": sum(total["n_bytes"] for total in operations.values()),
                "bytes_outstanding": self._live_bytes,
                "peak_bytes_outstanding": self._peak_bytes,
                "n_keys_outstanding": sum(len(held.cells) for held in self._held.values()),
                "max_bytes_per_key_seen": self._max_bytes_per_key,
                "last_put_bytes_per_key": self._last_bytes_per_key,
                "moved_rows": dict(self.context.moved_rows),
                "num_clients": 1,
            }

    def note(self, event: OperationEvent, request: Any, outcome: Any) -> None:
        """Counts an operation, and the bytes that it put or dropped."""
        with self._lock:
            total = self._operations.setdefault(
                event.op, {"calls": 0, "errors": 0, "n_keys": 0, "n_bytes": 0, "wall_ms": 0.0, "max_ms": 0.0}
            )
            total["calls"] += 1
            total["errors"] += event.status != "ok"
            total["n_keys"] += event.n_keys
            total["n_bytes"] += event.n_bytes
            total["wall_ms"] += event.wall_ms
            total["max_ms"] = max(total["max_ms"], event.wall_ms)
            if event.status == "ok" and event.op == "put_samples":
                self._put(event)
            elif event.status == "ok" and (event.drops_all or event.op == "clear_samples"):
                self._drop(event)
        if self._on_event is not None:
            self._on_event(event)

    def note_verdict(self, verdict: Verdict) -> None:
        """Tells the listener why a claim of this client waits. It is no operation, and is not counted."""
        if self._on_event is not None:
            event = OperationEvent(
                op="why",
                partition_id=verdict.partition_id,
                wall_ms=verdict.waited_s * 1e3,
                task=verdict.task_name,
                verdict=verdict,
            )
            self._on_event(event)

    def _put(self, event: OperationEvent) -> None:
        held = self._held.get(event.partition_id)
        if held is None:
            if len(self._held) >= _MOST_PARTITIONS:
                self._held = {name: other for name, other in self._held.items() if other.cells}
            held = self._held[event.partition_id] = _Held()
        count, rows = event.n_keys, np.zeros(event.n_keys, dtype=np.int64)
        for name, size in event.cell_bytes.items():
            rows += size
            for sample_id, cell in zip(event.sample_ids, np.broadcast_to(size, count).tolist(), strict=True):
                cells = held.cells.setdefault(sample_id, {})
                self._grow(held, cell - cells.get(name, 0))
                cells[name] = cell
        held.peak_bytes = max(held.peak_bytes, held.live_bytes)
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        if event.cell_bytes:
            self._max_bytes_per_key = max(self._max_bytes_per_key, int(rows.max()))
            self._last_bytes_per_key = event.n_bytes // count

    def _drop(self, event: OperationEvent) -> None:
        held = self._held.get(event.partition_id)
        if held is not None:
            for sample_id in list(held.cells) if event.drops_all else event.sample_ids:
                self._grow(held, -sum(held.cells.pop(sample_id, {}).values()))

    def _grow(self, held: _Held, n_bytes: int) -> None:
        held.live_bytes += n_bytes
        self._live_bytes += n_bytes


def merge_snapshots(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins what several clients did, of any processes, into one snapshot.

    Args:
        snapshots: What `Metrics.snapshot` gave in each process, or this function; also after JSON. Empty ones count as
            those of clients without the middleware.

    Returns:
        A snapshot: sums, and the greatest of what begins with ``max``. ``peak_bytes`` and ``peak_bytes_outstanding``
        are sums too, and so upper bounds: the clients may have held most at different times.
        ``last_put_bytes_per_key`` is left out.

    Raises:
        InvalidRequestError: Something is no snapshot.
        InvalidTypeError: ``snapshots`` is no list.

    Examples:
        >>> joined = merge_snapshots([metrics.snapshot(), metrics_of_a_worker])
        >>> joined["num_clients"], joined["operations"]["put_samples"]["calls"]
        (2, 64)
    """
    merged = {**Metrics().snapshot(), "num_clients": 0}
    for number, snapshot in enumerate(check_list("merge_snapshots: snapshots", snapshots)):
        try:
            _add(merged, snapshot)
        except (AttributeError, TypeError) as error:
            raise InvalidRequestError(
                f"merge_snapshots refused: number {number} is no snapshot: {type(error).__name__}: {error}. Expected "
                "what Metrics.snapshot() returned, of the same version."
            ) from error
    del merged["last_put_bytes_per_key"]
    return merged


def _add(merged: dict[str, Any], snapshot: Mapping[str, Any]) -> None:
    for name, value in snapshot.items():
        if isinstance(value, Mapping):
            _add(merged.setdefault(name, {}), value)
        elif name.startswith("max_"):
            merged[name] = max(merged.get(name, 0), value)
        else:
            merged[name] = merged.get(name, 0) + value
