"""The engine of ``tq_simple``: rows of bytes in the storage units of an instance.

Units die and are started again, come and go. A handle says which life of a unit has its row (see `_book`). The rows of
a life that has ended are gone.

The service in the controller knows what the rows mean, which of them exist and who may have them. The engine only moves
bytes. It gives every operation a deadline, and turns failures into clear errors.

Importing this module imports Ray and TransferQueue (`dataplane_tq_simple` itself does not).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane_core.backends import RefsGoneError
from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError, preview
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple import _wire
from dataplane_tq_simple._book import View
from dataplane_tq_simple._cluster import ControllerWatch, check_cpus
from dataplane_tq_simple._errors import UnitsGoneError
from dataplane_tq_simple._exchange import PATIENCE_S, Exchange, Peer, Request
from dataplane_tq_simple._messages import AddUnits, RemoveUnit, UnitRecords, ViewUnits
from dataplane_tq_simple._places import Places, UnitWatch
from dataplane_tq_simple._queue import QueueEngine
from dataplane_tq_simple._units import SimpleStorageInstance

# Assumed size of a row in bytes, until an engine has read some.
_ASSUMED_ROW_BYTES = 32 * 1024


# Seconds between two looks whether new storage units have started.
_LOOK_AGAIN_S = 0.1


class Engine(QueueEngine):
    """A `QueueEngine` that moves rows over TransferQueue's own sockets."""

    instance_class = SimpleStorageInstance

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exchange = Exchange(self._watch_units)
        self._row_bytes: float = _ASSUMED_ROW_BYTES
        self._places = Places(self._view, self._exchange)

    def _join(self, deadline: float) -> None:
        self._places.refresh(deadline)

    def _leave(self) -> None:
        self._exchange.close()

    def _watch_units(self, peers: Sequence[Peer]) -> UnitWatch:
        return UnitWatch(self._places, peers, lambda: ControllerWatch(self._instance))

    def _view(self, version: int, deadline: float) -> View | None:
        return self.call(ViewUnits(version), deadline)

    def units(self, deadline: float) -> list[UnitInfo]:
        """The storage units. Raises as `call`."""
        return self.call(UnitRecords(), deadline)[0]

    def add_units(self, count: int, deadline: float) -> list[UnitInfo]:
        """Starts storage units, and waits until they take rows. Returns them.

        Raises:
            BackendUnavailableError: The cluster lacks the CPUs, or one failed to start. Others may run.
            OperationTimeoutError: They did not start in time. They may start later.
            ClientClosedError: As for `call`.
        """
        check_cpus(self.config.model_copy(update={"num_storage_units": count, "controller_num_cpus": 0}), deadline)
        names = self.call(AddUnits(count), deadline)
        while True:
            units, failures = self.call(UnitRecords(), deadline)
            mine = [each for each in units if each.name in names]
            if len([each for each in mine if each.state != "removed"]) < count:
                why = [each for each in failures if each.partition(":")[0] in names]
                raise BackendUnavailableError(f"{count} storage units were to start, but: {'; '.join(why)}")
            if all(each.state != "starting" for each in mine):
                return mine
            if time.monotonic() + _LOOK_AGAIN_S >= deadline:
                waiting = [each.name for each in mine if each.state == "starting"]
                raise OperationTimeoutError(f"{preview(waiting)} did not start in time. They may start later.")
            time.sleep(_LOOK_AGAIN_S)

    def remove_unit(self, name: str, *, now: bool, deadline: float) -> None:
        """A unit gets no more rows, and ends when its last row is deleted; with ``now`` at once, its rows are lost.

        With ``now``, this client knows it when this returns. Others may still read its rows for a moment.

        Raises:
            InvalidRequestError: There is no such unit, or no other one that takes rows.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        self.call(RemoveUnit(name, now), deadline)
        self._places.refresh(deadline)

    def put_rows(
        self,
        handles: Sequence[int] | npt.NDArray[np.int64],
        buffer: Any,
        offsets: npt.NDArray[np.int64],
        *,
        deadline: float,
    ) -> None:
        """As `QueueEngine.put_rows`. A handle says which unit gets its row. Rows may have length 0.

        The caller may reuse the buffer when this returns. A unit that was suspended stores what it had received when it
        continues.
        """
        handles = np.asarray(handles, dtype=np.int64)
        offsets = np.asarray(offsets, dtype=np.int64)
        view = memoryview(buffer).cast("B")
        sizes = np.diff(offsets)
        if not len(handles):
            return
        bounds = offsets.tolist()

        def request(unit: Peer, chunk: _wire.Chunk) -> Request:
            def frames() -> list[Any]:
                rows = [view[bounds[i] : bounds[i + 1]] for i in chunk.positions]
                return _wire.put_request(unit.name, unit.token, chunk, rows)

            return Request(frames, lambda reply: _wire.check_put_reply(unit.name, reply, chunk))

        what = f"put_rows({len(handles)} rows, {sizes.sum()} bytes)"
        lives = self._places.lives_of(handles, deadline)
        if not self._places.alive(lives).all():
            raise UnitsGoneError(f"{what}: a storage unit has ended. Nothing was written.")
        self._run(what, _wire.plan_by_bytes(lives, handles, sizes, self.config.chunk_size_bytes), request, deadline)

    def get_rows(self, handles: Sequence[int] | npt.NDArray[np.int64], *, deadline: float) -> list[memoryview]:
        """As `QueueEngine.get_rows`. Handles may repeat.

        Each view is a part of a received message, which stays in memory as long as any view of it: copy what you keep.
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
                for position, row in zip(chunk.positions, _wire.read_get_reply(unit.name, reply, chunk), strict=True):
                    rows[position] = row

            return Request(functools.partial(_wire.get_request, unit.name, unit.token, chunk.handles), on_reply)

        what = f"get_rows({num_rows} rows)"
        lives = self._places.lives_of(handles, deadline)
        self._refuse_gone(what, handles, lives)
        try:
            self._run(what, _wire.plan_by_rows(lives, handles, chunk_rows), request, deadline)
        except UnitsGoneError:
            self._refuse_gone(what, handles, lives)
            raise
        self._row_bytes = max(1.0, sum(row.nbytes for row in rows) / num_rows)
        return rows

    def _refuse_gone(self, what: str, handles: npt.NDArray[np.int64], lives: npt.NDArray[np.int64]) -> None:
        alive = self._places.alive(lives)
        if not alive.all():
            gone = handles[~alive].tolist()
            raise RefsGoneError(f"{what}: the storage units of {len(gone)} rows ended.", handles=gone)

    def delete_rows(self, handles: Sequence[int] | npt.NDArray[np.int64], *, deadline: float) -> None:
        """As `QueueEngine.delete_rows`."""
        handles = np.asarray(handles, dtype=np.int64)
        if not len(handles):
            return

        def request(unit: Peer, chunk: _wire.Chunk) -> Request:
            return Request(
                functools.partial(_wire.delete_request, unit.name, unit.token, chunk.handles),
                lambda reply: _wire.check_delete_reply(unit.name, reply, chunk),
            )

        what = f"delete_rows({len(handles)} rows)"
        lives = self._places.lives_of(handles, deadline)
        while len(handles):
            alive = self._places.alive(lives)  # the rows of other units went with them
            handles, lives = handles[alive], lives[alive]
            try:
                self._run(what, _wire.plan_by_rows(lives, handles, 100_000), request, deadline)
                return
            except UnitsGoneError:
                if time.monotonic() + PATIENCE_S >= deadline:
                    raise
                if self._places.alive(lives).all():  # the unit itself said it, and the book does not know it yet
                    time.sleep(PATIENCE_S)
                    self._places.refresh(deadline)

    def _run(
        self,
        what: str,
        plans: list[list[_wire.Chunk]],
        request: Callable[[Peer, _wire.Chunk], Request],
        deadline: float,
    ) -> None:
        units = [(self._places.peer(plan[0].unit), plan) for plan in plans]
        work = [(unit, [request(unit, chunk) for chunk in plan]) for unit, plan in units]
        self._exchange.run(what, work, deadline)
