"""A client's connection to an instance: its life cycle, and calls into the service in TransferQueue's controller.

The engine does not know what the service does. It gives every call a deadline, and turns failures into clear errors.

Importing this module imports Ray and TransferQueue (`dataplane_tq_simple` itself does not).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

import ray

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_tq_simple import _wire
from dataplane_tq_simple._cluster import Instance
from dataplane_tq_simple._exchange import Exchange, Peer, Request, Watch
from dataplane_tq_simple._sampler import PING, decode_reply, encode_call
from dataplane_tq_simple._session import RaySession

__all__ = ["QueueEngine"]

_logger = logging.getLogger(__name__)


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
            engine._line = instance.find_line(deadline=deadline)
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
        self._line = self._instance.find_line(deadline=deadline)

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

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Calls a method of the service in the controller. Atomic: calls of all clients run one after the other.

        A call is executed at most once: it is not repeated after a failure. If ``timeout_s`` has passed when the
        controller receives the call, it does not execute it. The two clocks are compared to within a round trip.

        Args:
            method: Name of a public method.
            *args: Its arguments; they must pickle.
            timeout_s: In seconds.
            **kwargs: Its keyword arguments; they must pickle.

        Returns:
            What the method returned.

        Raises:
            DataPlaneError: What the method raised; any other exception as a `BackendError` with its traceback.
            OperationTimeoutError: No answer in time. The call may have been executed or not.
            BackendUnavailableError: The controller is dead.
            ClientClosedError: This engine is closed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            call = encode_call(method, args, kwargs, self._clock.at_controller(deadline))
            reply = self._send_call(method, call, deadline)
            executed, result, controller_time_s = decode_reply(reply)
            self._clock.observe(controller_time_s)
            if executed:
                return result
            # The controller took the call for late. The reply has corrected our clock bound, so send the call again.
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(
                    f"call {method!r}: the controller received it only after {timeout_s:g} s, and did not execute it.",
                )

    def _send_call(self, method: str, call: bytes, deadline: float) -> bytes:
        """Sends a call, and returns the reply."""
        replies: list[list[Any]] = []
        what = f"call {method!r}"
        if method == PING:
            peer = self._instance.controller
            request = Request(functools.partial(_wire.call_request, peer.name, call), replies.append)
            self._exchange.run(what, [(peer, [request])], timeout_s=deadline - time.monotonic())
            return _wire.read_call_reply(peer.name, replies[0])
        line = self._line = self._line or self._instance.find_line(deadline=deadline)
        request = Request(lambda: [call], replies.append)
        try:
            self._exchange.run(what, [(line, [request])], timeout_s=deadline - time.monotonic())
        except BackendUnavailableError as error:
            if error.retryable:  # the controller lives: it may answer elsewhere
                self._line = None
            raise
        return bytes(replies[0][0])


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
