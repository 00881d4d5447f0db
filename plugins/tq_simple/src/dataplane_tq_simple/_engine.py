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
from dataplane_core.hosting import Watch
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple import _wire
from dataplane_tq_simple._book import View
from dataplane_tq_simple._cluster import check_cpus
from dataplane_tq_simple._errors import UnitsGoneError
from dataplane_tq_simple._exchange import Peer, Request
from dataplane_tq_simple._messages import AddUnits, RemoveUnit, UnitRecords, ViewUnits
from dataplane_tq_simple._places import UNIT_PATIENCE_S, Places, UnitWatch
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
        self._row_bytes: float = _ASSUMED_ROW_BYTES
        self._places = Places(self._view, self._exchange)

    def _join(self, deadline: float) -> None:
        self._places.refresh(deadline - time.monotonic())

    def _watch_peers(self, peers: Sequence[Peer]) -> Watch:
        if any(peer.actor == self._instance.controller.actor for peer in peers):
            return super()._watch_peers(peers)
        return UnitWatch(self._places, lambda: self._instance.controller, peers, super()._watch_peers)

    def _view(self, version: int, timeout_s: float) -> View | None:
        return self.call(ViewUnits(version), timeout_s=timeout_s)

    def units(self, *, timeout_s: float) -> list[UnitInfo]:
        """The storage units. Raises as `call`."""
        return self.call(UnitRecords(), timeout_s=timeout_s)[0]

    def add_units(self, count: int, *, timeout_s: float) -> list[UnitInfo]:
        """Starts storage units, and waits until they take rows. Returns them.

        Raises:
            BackendUnavailableError: The cluster lacks the CPUs, or one failed to start. Others may run.
            OperationTimeoutError: They did not start in time. They may start later.
            ClientClosedError: As for `call`.
        """
        deadline = time.monotonic() + timeout_s
        check_cpus(self.config.model_copy(update={"num_storage_units": count, "controller_num_cpus": 0}), deadline)
        names = self.call(AddUnits(count), timeout_s=timeout_s)
        while True:
            units, failures = self.call(UnitRecords(), timeout_s=max(0.0, deadline - time.monotonic()))
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

    def remove_unit(self, name: str, *, now: bool, timeout_s: float) -> None:
        """A unit gets no more rows, and ends when its last row is deleted; with ``now`` at once, its rows are lost.

        With ``now``, this client knows it when this returns. Others may still read its rows for a moment.

        Raises:
            InvalidRequestError: There is no such unit, or no other one that takes rows.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        deadline = time.monotonic() + timeout_s
        self.call(RemoveUnit(name, now), timeout_s=timeout_s)
        self._places.refresh(deadline - time.monotonic())

    def put_rows(
        self,
        handles: Sequence[int] | npt.NDArray[np.int64],
        buffer: Any,
        offsets: npt.NDArray[np.int64],
        *,
        timeout_s: float,
    ) -> None:
        """Stores rows of bytes. Returns when every unit has confirmed its rows.

        If it raises, some of the rows may be stored, now or later: a unit that was suspended stores what it had
        received when it continues. Then do not commit their handles; delete them.

        Args:
            handles: N integers, 0 or more, each used for one put only. Each says which unit gets its row.
            buffer: The bytes: any contiguous object with the buffer protocol, such as a uint8 array. The caller may
                reuse it when this returns.
            offsets: Shape (N + 1,): row i is ``buffer[offsets[i]:offsets[i + 1]]``. Rows may have length 0.
            timeout_s: In seconds.

        Raises:
            CapacityExceededError: A unit holds as many rows as it may.
            UnitsGoneError: A unit has ended. Put the rows under other handles.
            BackendError: A unit refused for another reason.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        handles = np.asarray(handles, dtype=np.int64)
        offsets = np.asarray(offsets, dtype=np.int64)
        view = memoryview(buffer).cast("B")
        sizes = np.diff(offsets)
        if not len(handles):
            return
        bounds = offsets.tolist()

        def request(unit: Peer, token: str, chunk: _wire.Chunk) -> Request:
            def frames() -> list[Any]:
                rows = [view[bounds[i] : bounds[i + 1]] for i in chunk.positions]
                return _wire.put_request(unit.name, token, chunk, rows)

            return Request(frames, lambda reply: _wire.check_put_reply(unit.name, reply, chunk))

        what = f"put_rows({len(handles)} rows, {sizes.sum()} bytes)"
        deadline = time.monotonic() + timeout_s
        lives = self._places.lives_of(handles, timeout_s)
        if not self._places.alive(lives).all():
            raise UnitsGoneError(f"{what}: a storage unit has ended. Nothing was written.")
        self._run(what, _wire.plan_by_bytes(lives, handles, sizes, self.config.chunk_size_bytes), request, deadline)

    def get_rows(self, handles: Sequence[int] | npt.NDArray[np.int64], *, timeout_s: float) -> list[memoryview]:
        """Reads rows of bytes.

        Args:
            handles: N row handles; repeats are allowed.
            timeout_s: In seconds.

        Returns:
            N views, in the order of the handles. Do not write to them. Each is a part of a received message, which
            stays in memory as long as any view of it: copy what you keep. They are aligned for bytes only.

        Raises:
            RefsGoneError: A row does not exist, or no longer. Or its unit has ended: at once, with the handles.
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

        def request(unit: Peer, token: str, chunk: _wire.Chunk) -> Request:
            def on_reply(reply: list[Any]) -> None:
                for position, row in zip(chunk.positions, _wire.read_get_reply(unit.name, reply, chunk), strict=True):
                    rows[position] = row

            return Request(functools.partial(_wire.get_request, unit.name, token, chunk.handles), on_reply)

        what = f"get_rows({num_rows} rows)"
        deadline = time.monotonic() + timeout_s
        lives = self._places.lives_of(handles, timeout_s)
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

    def delete_rows(self, handles: Sequence[int] | npt.NDArray[np.int64], *, timeout_s: float) -> None:
        """Deletes rows, and frees their memory in the units. Ignores handles of rows that do not exist.

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

        def request(unit: Peer, token: str, chunk: _wire.Chunk) -> Request:
            return Request(
                functools.partial(_wire.delete_request, unit.name, token, chunk.handles),
                lambda reply: _wire.check_delete_reply(unit.name, reply, chunk),
            )

        what = f"delete_rows({len(handles)} rows)"
        deadline = time.monotonic() + timeout_s
        lives = self._places.lives_of(handles, timeout_s)
        while len(handles):
            alive = self._places.alive(lives)  # the rows of other units went with them
            handles, lives = handles[alive], lives[alive]
            try:
                self._run(what, _wire.plan_by_rows(lives, handles, 100_000), request, deadline)
                return
            except UnitsGoneError:
                if time.monotonic() + UNIT_PATIENCE_S >= deadline:
                    raise
                if self._places.alive(lives).all():  # the unit itself said it, and the book does not know it yet
                    time.sleep(UNIT_PATIENCE_S)
                    self._places.refresh(deadline - time.monotonic())

    def _run(
        self,
        what: str,
        plans: list[list[_wire.Chunk]],
        request: Callable[[Peer, str, _wire.Chunk], Request],
        deadline: float,
    ) -> None:
        work = []
        for plan in plans:
            unit, token = self._places.peer(plan[0].unit), self._places.token(plan[0].unit)
            work.append((unit, [request(unit, token, chunk) for chunk in plan]))
        self._exchange.run(what, work, timeout_s=deadline - time.monotonic(), patience_s=UNIT_PATIENCE_S)
