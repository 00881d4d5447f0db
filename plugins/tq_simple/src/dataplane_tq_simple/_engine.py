"""The engine of ``tq_simple``: rows of bytes in the storage units of an instance.

The service in the controller knows what the rows mean, which of them exist and who may have them. The engine only moves
bytes. It gives every operation a deadline, and turns failures into clear errors.

Importing this module imports Ray and TransferQueue (`dataplane_tq_simple` itself does not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane_core.errors import InvalidRequestError
from dataplane_tq_simple import _wire
from dataplane_tq_simple._exchange import Peer, Request
from dataplane_tq_simple._queue import QueueEngine
from dataplane_tq_simple._units import SimpleStorageInstance

__all__ = ["Engine"]

# Assumed size of a row in bytes, until an engine has read some.
_ASSUMED_ROW_BYTES = 32 * 1024


class Engine(QueueEngine):
    """A `QueueEngine` that moves rows over TransferQueue's own sockets."""

    instance_class = SimpleStorageInstance

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._row_bytes: float = _ASSUMED_ROW_BYTES

    def put_rows(
        self,
        handles: Sequence[int] | npt.NDArray[np.int64],
        buffer: Any,
        offsets: npt.NDArray[np.int64],
        *,
        column: str,
        timeout_s: float,
    ) -> None:
        """Stores rows of bytes. Returns when every unit has confirmed its rows.

        If it raises, some of the rows may be stored, now or later: a unit that was suspended stores what it had
        received when it continues. Then do not commit their handles; delete them.

        Args:
            handles: N integers, 0 or more, each used for one put only. Row h goes to unit ``h % num_storage_units``.
            buffer: The bytes: any contiguous object with the buffer protocol, such as a uint8 array. The caller may
                reuse it when this returns.
            offsets: Shape (N + 1,): row i is ``buffer[offsets[i]:offsets[i + 1]]``. Rows may have length 0.
            column: The TransferQueue field to store under; handles of different columns must differ too.
            timeout_s: In seconds.

        Raises:
            InvalidRequestError: Offsets that do not fit the buffer, or a negative handle.
            CapacityExceededError: A unit holds as many rows as it may.
            BackendError: A unit refused for another reason.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        handles = np.asarray(handles, dtype=np.int64)
        offsets = np.asarray(offsets, dtype=np.int64)
        view = memoryview(buffer).cast("B")
        sizes = np.diff(offsets)
        if (
            offsets.shape != (len(handles) + 1,)
            or offsets[0] < 0
            or offsets[-1] > view.nbytes
            or (sizes < 0).any()
            or (handles < 0).any()
        ):
            raise InvalidRequestError(
                f"put_rows({len(handles)} rows) refused: offsets of shape {offsets.shape} over {view.nbytes} bytes. "
                f"Expected {len(handles) + 1} ascending offsets within the buffer, and handles of 0 or more.",
            )
        if not len(handles):
            return
        bounds = offsets.tolist()

        def request(unit: Peer, chunk: _wire.Chunk) -> Request:
            def frames() -> list[Any]:
                rows = [view[bounds[i] : bounds[i + 1]] for i in chunk.positions]
                return _wire.put_request(unit.name, column, chunk, rows)

            return Request(frames, lambda reply: _wire.check_put_reply(unit.name, reply, chunk))

        plans = _wire.plan_by_bytes(handles, sizes, len(self._instance.units), self.config.chunk_size_bytes)
        self._run(f"put_rows({len(handles)} rows, {sizes.sum()} bytes)", plans, request, timeout_s)

    def get_rows(
        self,
        handles: Sequence[int] | npt.NDArray[np.int64],
        *,
        column: str,
        timeout_s: float,
    ) -> list[memoryview]:
        """Reads rows of bytes.

        Args:
            handles: N row handles; repeats are allowed.
            column: The field that they were stored under.
            timeout_s: In seconds.

        Returns:
            N views, in the order of the handles. Do not write to them. Each is a part of a received message, which
            stays in memory as long as any view of it: copy what you keep. They are aligned for bytes only.

        Raises:
            RowsGoneError: A row does not exist, or no longer.
            BackendError: A unit refused for another reason.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        handles = np.asarray(handles, dtype=np.int64)
        num_rows = len(handles)
        rows: list[Any] = [None] * num_rows
        if not num_rows:
            return rows
        # Only the unit knows the size of its rows: assume the mean size of the last read.
        chunk_rows = max(1, int(self.config.chunk_size_bytes / self._row_bytes))

        def request(unit: Peer, chunk: _wire.Chunk) -> Request:
            def on_reply(reply: list[Any]) -> None:
                for position, row in zip(
                    chunk.positions, _wire.read_get_reply(unit.name, reply, column, chunk), strict=True
                ):
                    rows[position] = row

            return Request(functools.partial(_wire.get_request, unit.name, column, chunk.handles), on_reply)

        plans = _wire.plan_by_rows(handles, len(self._instance.units), chunk_rows)
        self._run(f"get_rows({num_rows} rows)", plans, request, timeout_s)
        self._row_bytes = max(1.0, sum(row.nbytes for row in rows) / num_rows)
        return rows

    def delete_rows(self, handles: Sequence[int] | npt.NDArray[np.int64], *, timeout_s: float) -> None:
        """Deletes rows, in all columns, and frees their memory in the units. Ignores handles of rows that do not exist.

        Args:
            handles: Row handles.
            timeout_s: In seconds.

        Raises:
            BackendError: A unit refused.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        handles = np.asarray(handles, dtype=np.int64)
        if not len(handles):
            return

        def request(unit: Peer, chunk: _wire.Chunk) -> Request:
            return Request(
                functools.partial(_wire.delete_request, unit.name, chunk.handles),
                lambda reply: _wire.check_delete_reply(unit.name, reply, chunk),
            )

        plans = _wire.plan_by_rows(handles, len(self._instance.units), 100_000)
        self._run(f"delete_rows({len(handles)} rows)", plans, request, timeout_s)

    def _run(
        self,
        what: str,
        plans: list[list[_wire.Chunk]],
        request: Callable[[Peer, _wire.Chunk], Request],
        timeout_s: float,
    ) -> None:
        units = self._instance.units
        work = [(units[plan[0].unit], [request(units[chunk.unit], chunk) for chunk in plan]) for plan in plans]
        self._exchange.run(what, work, timeout_s=timeout_s)
