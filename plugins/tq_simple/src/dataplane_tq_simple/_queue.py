"""A client's connection to an instance: its life cycle, and calls into the service in TransferQueue's controller.

The engine does not know what the service does. It gives every call a deadline, and turns failures into clear errors.

Importing this module imports Ray and TransferQueue (`dataplane_tq_simple` itself does not).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar, Final, NoReturn, Self

import ray

from dataplane_core.hosting import CallId
from dataplane_core.errors import BackendUnavailableError, ClientClosedError, DataPlaneError, OperationTimeoutError
from dataplane_core.spec import new_id
from dataplane_tq_simple import _wire
from dataplane_tq_simple._cluster import Instance
from dataplane_tq_simple._exchange import Exchange, LineBrokenError, Peer, Request, Watch
from dataplane_tq_simple._sampler import PING, decode_reply, encode_call
from dataplane_tq_simple._session import RaySession

__all__ = ["QueueEngine"]

_logger = logging.getLogger(__name__)

#: Seconds before a call is repeated whose line broke.
_REPEAT_S: Final = 0.02
#: Seconds for which a call asks Ray whether the controller is dead whose line broke.
_BROKEN_S: Final = 5.0
#: Seconds, beyond its deadline, for which the controller keeps the outcome of a call.
_KEPT_S: Final = 30.0


class QueueEngine:
    """One client's connection to an instance. Thread-safe; not usable after a fork.

    Made by `bootstrap` or `attach`; a context manager that closes itself. A subclass names the class of the instance,
    and moves the rows.

    Attributes:
        config: The options of the running instance. For an attached engine they may differ from ``own``.
        own: The options that this client was given.
        bootstrapped: Whether this engine started the instance. If so, `close` ends it.
        ray_address: ``host:port`` of the Ray cluster, for clients in processes without Ray.
        node: The id of this process's node in it.
    """

    #: What `bootstrap` starts and `attach` finds.
    instance_class: ClassVar[type[Instance]]

    def __init__(self, instance: Any, own: Any, session: RaySession, *, bootstrapped: bool) -> None:
        self.config = instance.config
        self.own = own
        self.bootstrapped = bootstrapped
        self.ray_address: str = ray.get_runtime_context().gcs_address
        self.node: str = ray.get_runtime_context().get_node_id()
        self._instance = instance
        self._session = session
        self._exchange = Exchange(self._watch_peers)
        self._clock = _ControllerClock()
        self._line: Peer | None = None  # where the controller answers calls
        self._finding = threading.Lock()
        # a controller with a journal may die: calls are repeated, and it does each once
        self._lanes = None if self.config.journal is None else _Lanes()
        self._close_lock = threading.Lock()
        self._closed = False

    # --- life cycle --------------------------------------------------------------------------------------------------

    @classmethod
    def bootstrap(cls, config: Any, service_factory: Callable[[], object], *, timeout_s: float = 120.0) -> Self:
        """Starts an instance. Also starts a local Ray, if this process has no Ray and no address is configured.

        Args:
            config: The options.
            service_factory: Picklable. Called without arguments in the controller's process, it makes the service whose
                public methods `call` calls. One thread executes all calls, one after the other.
            timeout_s: For everything, in seconds. It does not interrupt the start of a local Ray.

        Raises:
            AlreadyRunningError: An instance of that name runs on the cluster.
            BackendUnavailableError: No Ray at the address, too few CPUs, or a process that failed to start.
            OperationTimeoutError: Not all processes started in time. Those that had started were ended.
            DataPlaneError: What ``service_factory`` raised; any other exception as a `BackendError`.
        """
        deadline = time.monotonic() + timeout_s
        session = RaySession.acquire(config, bootstrap=True, timeout_s=timeout_s)
        try:
            instance = cls.instance_class.start(config, service_factory, deadline=deadline)
        except BaseException:
            session.release()
            raise
        engine = cls(instance, config, session, bootstrapped=True)
        try:
            engine._open(deadline)
            engine._join(deadline)
            instance.publish(deadline=deadline)
        except BaseException:
            engine.close()
            raise
        _logger.info("instance %r runs on the Ray cluster at %s", config.instance, engine.ray_address)
        return engine

    @classmethod
    def attach(cls, config: Any, *, timeout_s: float = 30.0, wait_s: float = 0.0) -> Self:
        """Connects to a running instance.

        Args:
            config: Names the instance, and the cluster if this process is not connected to one.
            timeout_s: In seconds.
            wait_s: How long to wait for an instance that does not exist yet, in seconds, within ``timeout_s``.

        Raises:
            BackendUnavailableError: No Ray, no such instance, or a broken one.
            OperationTimeoutError: Its controller does not answer.
        """
        deadline = time.monotonic() + timeout_s
        session = RaySession.acquire(config, bootstrap=False, timeout_s=timeout_s)
        try:
            instance = cls.instance_class.find(config, deadline=deadline, wait_s=wait_s)
            engine = cls(instance, config, session, bootstrapped=False)
        except BaseException:
            session.release()
            raise
        try:
            engine.call(PING, timeout_s=max(0.0, deadline - time.monotonic()))
            engine._line = engine._line or instance.find_line(deadline=deadline)
            engine._join(deadline)
        except BaseException:
            engine.close()
            raise
        return engine

    def _watch_peers(self, peers: Sequence[Peer]) -> Watch:
        """Watches peers that an exchange waits for."""
        watch: Watch = self._instance.watch(peers)
        return watch

    def _join(self, deadline: float) -> None:
        """Connects to the storage, if that takes more than this class does."""

    def _leave(self) -> None:
        """Undoes `_join`, before a bootstrapping engine ends the instance. Also called where `_join` failed."""

    def _open(self, deadline: float) -> None:
        """Prepares a new controller for calls, and has it make the service."""
        name = self._instance.controller.name
        request = Request(
            functools.partial(_wire.open_partition_request, name),
            functools.partial(_wire.read_open_partition_reply, name),
        )
        self._exchange.run(
            "opening the controller", [(self._instance.controller, [request])], timeout_s=deadline - time.monotonic()
        )
        self.call(PING, timeout_s=deadline - time.monotonic())
        self._line = self._line or self._instance.find_line(deadline=deadline)

    def close(self) -> None:
        """Ends this connection. Idempotent.

        Running operations of other threads end with `ClientClosedError`. The bootstrapping engine also ends the
        instance's processes, after which all attached clients fail. The last engine to close in this process shuts down
        a Ray that one of them started. An attached engine leaves the instance running.
        """
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._exchange.close()
        if not self._exchange.forked:
            try:
                self._leave()
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

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls a method of the service in the controller. Atomic: calls of all clients run one after the other.

        A call is executed at most once. It is not repeated here after a failure, unless the controller keeps a journal:
        then it is repeated when the controller was started again, until ``timeout_s`` has passed. A call that the
        controller receives after that is not executed. The two clocks are compared to within a round trip.

        Args:
            method: Name of a public method.
            *args: Its arguments; they must pickle.
            timeout_s: In seconds.

        Returns:
            What the method returned.

        Raises:
            DataPlaneError: What the method raised; any other exception as a `BackendError` with its traceback.
            OperationTimeoutError: No answer in time. The call may have been executed or not.
            LineBrokenError: The connection broke. The call may have been executed or not.
            BackendUnavailableError: The controller is dead, or has died and was not back in time.
            ClientClosedError: This engine is closed.
        """
        deadline = time.monotonic() + timeout_s
        if self._lanes is None:
            return self._call(method, args, None, deadline, timeout_s)
        with self._lanes.lease(timeout_s) as call_id:
            while True:
                try:
                    return self._call(method, args, call_id, deadline, timeout_s)
                except LineBrokenError:  # Ray may start the controller again
                    if self._closed:
                        raise ClientClosedError(f"call {method!r}: this client is closed.") from None
                    if time.monotonic() + _REPEAT_S >= deadline:
                        raise
                    time.sleep(_REPEAT_S)

    def _call(
        self, method: str, args: tuple[Any, ...], call_id: CallId | None, deadline: float, timeout_s: float
    ) -> Any:
        while True:
            line = None if method == PING and call_id is None else self._find_line(deadline)
            clock = self._clock
            call = encode_call(method, args, clock.at_controller(deadline), call_id)
            reply = self._send_call(method, call, line, deadline)
            executed, result, controller_time_s = decode_reply(reply)
            clock.observe(controller_time_s)
            if executed:
                return result
            # The controller took the call for late. The reply has corrected our clock bound, so send the call again.
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(
                    f"call {method!r}: the controller received it only after {timeout_s:g} s, and did not execute it.",
                )

    def _find_line(self, deadline: float) -> Peer:
        """Where the controller answers calls. Only one thread asks Ray."""
        line = self._line
        if line is not None:
            return line
        if not self._finding.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BackendUnavailableError("the controller was not found by the deadline. Nothing was sent.")
        try:
            if self._line is None:
                found: Peer = self._instance.find_line(deadline=deadline, closed=lambda: self._closed)
                self._clock = _ControllerClock()  # it may be another process, on another node
                self._line = found
            return self._line
        finally:
            self._finding.release()

    def _check_controller(self, deadline: float) -> None:
        """Raises `BackendUnavailableError` if the controller is known to be dead, soon after its line broke."""
        try:
            self._find_line(min(deadline, time.monotonic() + _BROKEN_S))
        except DataPlaneError as error:
            if not error.retryable:
                raise

    def _send_call(self, method: str, call: bytes, line: Peer | None, deadline: float) -> bytes:
        """Sends a call, and returns the reply. Without a line, over TransferQueue's socket."""
        replies: list[list[Any]] = []
        what = f"call {method!r}"
        if line is None:
            peer = self._instance.controller
            request = Request(functools.partial(_wire.call_request, peer.name, call), replies.append)
            self._exchange.run(what, [(peer, [request])], timeout_s=deadline - time.monotonic())
            return _wire.read_call_reply(peer.name, replies[0])
        request = Request(lambda: [call], replies.append)
        try:
            self._exchange.run(what, [(line, [request])], timeout_s=deadline - time.monotonic())
        except BackendUnavailableError as error:
            if error.retryable and self._line is line:  # the controller may live, and answer elsewhere
                self._line = None
                self._exchange.forget([line])
            if isinstance(error, LineBrokenError) and self._lanes is None:
                self._check_controller(deadline)
            raise
        return bytes(replies[0][0])


class _Lanes:
    """Gives each call an id. Calls that are under way at a time have different lanes."""

    def __init__(self) -> None:
        self._client = new_id()
        self._lock = threading.Lock()
        self._idle: list[int] = []
        self._serials: list[int] = []  # of each lane

    @contextmanager
    def lease(self, timeout_s: float) -> Iterator[CallId]:
        """The id of a call that is repeated for at most ``timeout_s``."""
        with self._lock:
            if self._idle:
                lane = self._idle.pop()
            else:
                lane = len(self._serials)
                self._serials.append(0)
            self._serials[lane] += 1
            serial = self._serials[lane]
        try:
            yield CallId(self._client, lane, serial, timeout_s + _KEPT_S)
        finally:
            with self._lock:
                self._idle.append(lane)


class _ControllerClock:
    """Translates this process's monotonic clock to the controller's, which may run on another machine.

    Each reply gives a lower bound of the difference between the two clocks. The greatest bound is used, so a deadline
    is never translated to a later one. The bound shrinks over time by `_DRIFT`, which is more than clocks drift apart.
    """

    _DRIFT = 1e-4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bound_s: float | None = None
        self._observed_at = 0.0

    def observe(self, controller_time_s: float) -> None:
        """Learns from the controller's time in a reply that has just arrived."""
        now = time.monotonic()
        with self._lock:
            bound_s = controller_time_s - now
            if self._bound_s is not None:
                bound_s = max(bound_s, self._bound_s - self._DRIFT * (now - self._observed_at))
            self._bound_s, self._observed_at = bound_s, now

    def at_controller(self, time_s: float) -> float | None:
        """The controller's time at our ``time_s``, or a little earlier; None before the first reply."""
        with self._lock:
            if self._bound_s is None:
                return None
            return time_s + self._bound_s - self._DRIFT * (time.monotonic() - self._observed_at)
