"""The engine under the backend: calls into a service in TransferQueue's controller, and rows of bytes in its units.

What the rows mean, which of them exist and who may have them is the service's affair. The engine moves bytes, bounds
every operation in time, and turns what goes wrong into errors that say what happened.

Importing this module imports Ray and TransferQueue (`dataplane_tq_simple` itself does not).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import ray

from dataplane_core.errors import InvalidRequestError, OperationTimeoutError
from dataplane_tq_simple import _wire
from dataplane_tq_simple._cluster import Instance, RaySession
from dataplane_tq_simple._errors import BACKEND_NAME
from dataplane_tq_simple._exchange import Exchange, Peer, Request
from dataplane_tq_simple._sampler import PING, decode_reply, encode_call
from dataplane_tq_simple.config import TQSimpleConfig

__all__ = ["Engine"]

_logger = logging.getLogger(__name__)

# What a row is taken to hold until an engine has seen some, in bytes.
_USUAL_ROW_BYTES = 32 * 1024


class Engine:
    """One client's connection to an instance. Thread-safe; not for use after a fork.

    Made by `bootstrap` or `attach`; a context manager that closes itself.

    Attributes:
        config: The options of the running instance, which for an attached engine may differ from those given.
        bootstrapped: Whether this engine started the instance, and so ends it.
        ray_address: ``host:port`` of the Ray cluster, for clients in processes without Ray.
    """

    def __init__(self, instance: Instance, session: RaySession, *, bootstrapped: bool) -> None:
        self.config = instance.config
        self.bootstrapped = bootstrapped
        self.ray_address: str = ray.get_runtime_context().gcs_address
        self._instance = instance
        self._session = session
        self._exchange = Exchange(instance.watch)
        self._clock = _ControllerClock()
        self._row_bytes: float = _USUAL_ROW_BYTES
        self._close_lock = threading.Lock()
        self._closed = False

    # --- life cycle --------------------------------------------------------------------------------------------------

    @classmethod
    def bootstrap(
        cls, config: TQSimpleConfig, service_factory: Callable[[], object], *, timeout_s: float = 120.0
    ) -> Engine:
        """Starts an instance, and a local Ray if this process uses none and no address is configured.

        Args:
            config: The options.
            service_factory: Picklable, called without arguments in the controller's process; its public methods are
                what `call` reaches. One thread executes all calls, one after the other.
            timeout_s: For all of it, in seconds. Starting a local Ray is not cut short by it.

        Raises:
            AlreadyRunningError: An instance of that name runs on the cluster.
            BackendUnavailableError: No Ray at the address, too few CPUs, or a process that failed to start.
            OperationTimeoutError: The processes did not start in time. Those that had started were ended.
            DataPlaneError: What ``service_factory`` raised (wrapped in `BackendError` if it is another exception).
        """
        deadline = time.monotonic() + timeout_s
        session = RaySession.acquire(config, bootstrap=True, timeout_s=timeout_s)
        try:
            instance = Instance.start(config, service_factory, deadline=deadline)
        except BaseException:
            session.release()
            raise
        engine = cls(instance, session, bootstrapped=True)
        try:
            engine._open(deadline)
            instance.publish(deadline=deadline)
        except BaseException:
            engine.close()
            raise
        _logger.info("instance %r runs on the Ray cluster at %s", config.instance, engine.ray_address)
        return engine

    @classmethod
    def attach(cls, config: TQSimpleConfig, *, timeout_s: float = 30.0) -> Engine:
        """Connects to a running instance.

        Args:
            config: Names the instance, and the cluster where this process is not connected to one.
            timeout_s: In seconds. An instance that is not there is waited for no longer than ``attach_wait_s``.

        Raises:
            BackendUnavailableError: No Ray, no such instance, or a broken one.
            OperationTimeoutError: Its controller does not answer.
        """
        deadline = time.monotonic() + timeout_s
        session = RaySession.acquire(config, bootstrap=False, timeout_s=timeout_s)
        try:
            instance = Instance.find(config, deadline=deadline)
            engine = cls(instance, session, bootstrapped=False)
        except BaseException:
            session.release()
            raise
        try:
            engine.call(PING, timeout_s=max(0.0, deadline - time.monotonic()))
        except BaseException:
            engine.close()
            raise
        return engine

    def _open(self, deadline: float) -> None:
        """Prepares a fresh controller for calls, and has it build the service."""
        name = self._instance.controller.name
        request = Request(
            functools.partial(_wire.open_partition_request, name),
            functools.partial(_wire.read_open_partition_reply, name),
        )
        self._exchange.run(
            "opening the controller", [(self._instance.controller, [request])], timeout_s=deadline - time.monotonic()
        )
        self.call(PING, timeout_s=deadline - time.monotonic())

    def close(self) -> None:
        """Ends this connection; idempotent.

        Operations that other threads have running end with `ClientClosedError`. The bootstrapping engine also ends the
        instance's processes, which invalidates all attached clients, and shuts down the Ray that it started (once the
        last engine of this process that uses it is closed). An attached engine leaves everything running.
        """
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._exchange.close()
        if not self._exchange.forked:
            try:
                if self.bootstrapped:
                    self._instance.stop()
            finally:
                self._session.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine holds connections of its process and cannot be pickled: attach one where it is used")

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Calls a method of the service in the controller. Atomic: calls of all clients run one after the other.

        Not repeated on failure, so a call is executed at most once. A call that the controller gets to only after
        ``timeout_s`` is not executed any more (as far as the two clocks can be compared: to a network round trip).

        Args:
            method: Name of a public method.
            *args: Its arguments; they must pickle.
            timeout_s: In seconds.
            **kwargs: Its keyword arguments; they must pickle.

        Returns:
            What the method returned.

        Raises:
            DataPlaneError: The method's own; any other exception of it as a `BackendError` with its traceback.
            OperationTimeoutError: No answer in time; the call may have been executed or not.
            BackendUnavailableError: The controller is dead.
            ClientClosedError: This engine is closed.
        """
        controller = self._instance.controller
        deadline = time.monotonic() + timeout_s
        while True:
            call = encode_call(method, args, kwargs, self._clock.at_controller(deadline))
            replies: list[list[Any]] = []
            request = Request(functools.partial(_wire.call_request, controller.name, call), replies.append)
            remaining_s = deadline - time.monotonic()
            self._exchange.run(f"call {method!r}", [(controller, [request])], timeout_s=remaining_s)
            executed, result, controller_time_s = decode_reply(_wire.read_call_reply(controller.name, replies[0]))
            self._clock.observe(controller_time_s)
            if executed:
                return result
            # Thought to be late, by clocks that the reply has set right. It was not executed, so it may be sent again.
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(
                    f"call {method!r}: the controller got to it only after {timeout_s:g} s, and did not execute it.",
                    backend=BACKEND_NAME,
                )

    # --- rows --------------------------------------------------------------------------------------------------------

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

        If it raises, some of the rows may be stored, or may yet be (a unit that was stopped carries out what it had
        received when it goes on). Never commit their handles then; delete them.

        Args:
            handles: N integers of 0 and more, each used for one put only. Row h goes to unit ``h % num_storage_units``.
            buffer: The bytes: anything contiguous with the buffer protocol, such as a uint8 array. The caller may reuse
                it when this returns.
            offsets: Shape (N + 1,): row i is ``buffer[offsets[i]:offsets[i + 1]]``. Rows of length 0 are fine.
            column: The TransferQueue field to store under; handles of different columns must differ too.
            timeout_s: In seconds.

        Raises:
            InvalidRequestError: Sizes that do not add up.
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
                f"Expected {len(handles) + 1} ascending offsets within the buffer, and handles of 0 and more.",
                backend=BACKEND_NAME,
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
            N views, in the order of the handles, to be read only. Each is a part of a larger received message, which
            lives as long as any view of it: copy what is kept. They are not aligned for any type but bytes.

        Raises:
            RowsGoneError: A row is not there (any more).
            BackendError: A unit refused for another reason.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        handles = np.asarray(handles, dtype=np.int64)
        num_rows = len(handles)
        rows: list[Any] = [None] * num_rows
        if not num_rows:
            return rows
        # How large these rows are only their unit knows; those of the last read are the best guess.
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
        """Deletes rows, in all columns, and frees their memory in the units. Handles that are not there are ignored.

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


class _ControllerClock:
    """Translates this process's monotonic clock to the controller's, which may be another machine's.

    Each reply bounds the difference of the two clocks from below. The greatest such bound is used, so a deadline is
    never translated to a later one. It is lowered over time by more than clocks drift apart.
    """

    _DRIFT = 1e-4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bound_s: float | None = None
        self._observed_at = 0.0

    def observe(self, controller_time_s: float) -> None:
        """Takes the reading in a reply that has just come."""
        now = time.monotonic()
        with self._lock:
            bound_s = controller_time_s - now
            if self._bound_s is not None:
                bound_s = max(bound_s, self._bound_s - self._DRIFT * (now - self._observed_at))
            self._bound_s, self._observed_at = bound_s, now

    def at_controller(self, time_s: float) -> float | None:
        """The controller's reading at our ``time_s``, or a little before; None as long as nothing is known."""
        with self._lock:
            if self._bound_s is None:
                return None
            return time_s + self._bound_s - self._DRIFT * (time.monotonic() - self._observed_at)
