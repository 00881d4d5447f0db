"""A client's connection to an instance: its life cycle, and its session with the host in its controller.

The engine gives every call a deadline, and turns failures into clear errors.

Importing this module imports Ray (`dataplane_tq_simple` itself does not).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar, cast

import ray
import ray.exceptions

from dataplane_core.errors import BackendUnavailableError, ClientClosedError, DataPlaneError, OperationTimeoutError
from dataplane_core.hosting import Request, Session, TcpAddress
from dataplane_core.ledger import Command
from dataplane_tq_simple._controller import Line
from dataplane_tq_simple._instance import Instance
from dataplane_tq_simple._messages import MESSAGES, LineBrokenError
from dataplane_tq_simple._ray import RayConnection, cause, check_head

_logger = logging.getLogger(__name__)

#: Seconds between two questions to the controller: one that it has, and one that Ray cannot bring to it.
_ASK_S: Final = 1.0
_ASK_AGAIN_S: Final = 0.1
#: Seconds before a call is repeated whose line broke.
_REPEAT_S: Final = 0.02
#: Seconds for which a call asks Ray whether the controller is dead whose line broke.
_BROKEN_S: Final = 5.0

_Reply = TypeVar("_Reply")


def _failure(what: str, error: Exception, connecting: bool) -> DataPlaneError:
    """What a failure of the line to the controller means."""
    if isinstance(error, TimeoutError):
        return OperationTimeoutError(
            f"{what}: no answer in time from the controller. It may have been executed or not.",
            hint=str(error) or None,
        )
    return LineBrokenError(
        f"{what} failed: the connection to the controller broke: {error}. It may have been executed or not."
    )


class _ControllerWatch:
    """Asks Ray where the controller is: to find it, and while a call waits for it.

    Args:
        instance: The instance.
        line: Where the call takes the controller to be.
    """

    def __init__(self, instance: Instance, line: Line | None = None) -> None:
        self._instance = instance
        self._line = line
        self._asked: Any = None
        self._ask_at = 0.0
        self._says = "The controller did not answer Ray either: stopped, overloaded, or on an unreachable node."

    def ask(self, within_s: float = 0.0) -> Line | None:
        """Where the controller says it is, if it answers. Raises `BackendUnavailableError` if it is dead for good."""
        now = time.monotonic()
        if self._asked is None and now >= self._ask_at:
            self._asked = self._instance.controller.line.remote()
        if self._asked is None or not ray.wait([self._asked], timeout=within_s)[0]:
            return None
        asked, self._asked, self._ask_at = self._asked, None, now + _ASK_S
        try:
            line: Line = ray.get(asked, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            self._ask_at = now + _ASK_AGAIN_S
            self._says = "Ray cannot reach the controller, or starts it again."
            return None
        except ray.exceptions.RayActorError as error:
            raise BackendUnavailableError(
                f"the controller of instance {self._instance.config.instance!r} is dead for good: {cause(error)}",
                retryable=False,
                hint="Close this client and bootstrap the instance again.",
            ) from error
        except ray.exceptions.RayError:
            return None  # says nothing about the controller
        self._says = "The process of the controller is alive, but busy with other requests."
        return line

    def check(self) -> None:
        """Does not block.

        Raises:
            LineBrokenError: The controller was started again, and is elsewhere.
            BackendUnavailableError: It is dead for good.
        """
        if ray.is_initialized() and self.ask() not in (None, self._line):
            raise LineBrokenError("the controller was started again, and is elsewhere.")

    def describe(self) -> str:
        """What is known, as a sentence."""
        return self._says


class QueueEngine(ABC):
    """One client's connection to an instance. Thread-safe; not usable after a fork.

    Made by `open`; a context manager that closes itself. A subclass names the class of the instance and moves the rows.

    Attributes:
        config: The options of the running instance. For an attached engine they may differ from ``own``.
        own: The options that this client was given.
        bootstrapped: Whether this engine started the instance. If so, `close` ends it.
        ray_address: ``host:port`` of the Ray cluster, for clients in processes without Ray.
        node: The id of this process's node in it.
    """

    #: What `open` starts or finds.
    instance_class: ClassVar[type[Instance]]

    def __init__(self, instance: Any, own: Any, connection: RayConnection, *, bootstrapped: bool) -> None:
        self.config = instance.config
        self.own = own
        self.bootstrapped = bootstrapped
        self.ray_address: str = ray.get_runtime_context().gcs_address
        self.node: str = ray.get_runtime_context().get_node_id()
        self._instance = instance
        self._ray = connection
        self._session: Session | None = None  # with the controller
        self._finding = threading.Lock()
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._closed = False

    # --- life cycle --------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, config: Any, *, bootstrap: bool, deadline: float, wait_s: float = 0.0) -> Self:
        """Starts an instance, or connects to one that runs.

        Who bootstraps also starts a local Ray, if this process has no Ray and no address is configured. The deadline
        does not interrupt the start of a local Ray.

        Args:
            config: The options. Who attaches needs only those that name the instance and the cluster.
            bootstrap: Whether to start it.
            deadline: On `time.monotonic`'s clock, in seconds.
            wait_s: How long an attach waits for an instance that does not exist yet, in seconds.

        Raises:
            AlreadyRunningError: An instance of that name runs on the cluster.
            BackendUnavailableError: No Ray at the address, too few CPUs, or a process that failed to start. To attach:
                no such instance, or a broken one.
            OperationTimeoutError: Not all processes started in time. Those that had started were ended. To attach: its
                controller does not answer.
        """
        connection = RayConnection.acquire(config, bootstrap=bootstrap, deadline=deadline)
        try:
            if bootstrap:
                instance = cls.instance_class.start(config, deadline=deadline)
            else:
                instance = cls.instance_class.find(config, deadline=deadline, wait_s=wait_s)
            engine = cls(instance, config, connection, bootstrapped=bootstrap)
        except BaseException:
            connection.release()
            raise
        try:
            engine._find_session(deadline)
            engine._join(deadline)
            if bootstrap:
                instance.publish(deadline=deadline)
                _logger.info("instance %r runs on the Ray cluster at %s", config.instance, engine.ray_address)
        except BaseException:
            engine.close()
            raise
        return engine

    @abstractmethod
    def _join(self, deadline: float) -> None:
        """Connects to the storage."""

    @abstractmethod
    def _leave(self) -> None:
        """Undoes `_join`, before a bootstrapping engine ends the instance. Also called where `_join` failed."""

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
        if self._session is not None:
            self._session.close()
        if os.getpid() == self._pid:
            try:
                self._leave()
                if self.bootstrapped:
                    self._instance.stop()
            finally:
                self._ray.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(
        self, request: Request[_Reply] | Command[_Reply], deadline: float, wake: Callable[[], object] | None = None
    ) -> _Reply:
        """Asks the host in the controller. Atomic: requests of all clients run one after the other.

        It is not repeated here after a failure, unless the controller has a log: then it is repeated when the
        controller was started again, until the deadline. The ledger does nothing twice. A request that was given up
        before the controller read it is not executed.

        Args:
            request: The request.
            deadline: On `time.monotonic`'s clock, in seconds.
            wake: For a claim or a put that waits: see `Session.call_waiting`.

        Raises:
            DataPlaneError: As the request says; any other exception of the host as a `BackendError`.
            OperationTimeoutError: No answer in time. It may have been executed or not.
            LineBrokenError: The connection broke. It may have been executed or not.
            BackendUnavailableError: The controller is dead, or has died and was not back in time.
            ClientClosedError: This engine is closed.
        """
        what = f"call {getattr(request, 'op', type(request).__name__)!r}"
        while True:
            session = None
            try:
                session = self._find_session(deadline)
                if wake is None:
                    return session.call(what, deadline, request)
                return session.call_waiting(what, deadline, cast("Command[_Reply]", request), wake)
            except LineBrokenError:  # the controller may live, and answer elsewhere; or Ray may start it again
                if self._closed:
                    raise ClientClosedError(f"{what}: this client is closed.") from None
                if session is not None and self._session is session:
                    self._session = None
                if self.config.journal is None:
                    self._refuse_dead(deadline)
                if self.config.journal is None or time.monotonic() + _REPEAT_S >= deadline:
                    raise
                time.sleep(_REPEAT_S)

    def stop_waiting(self, token: str) -> None:
        """What was called with ``wake`` waits no longer. Does not block for long."""
        if self._session is not None:
            self._session.end_waiting(token, tell=True)

    # --- how it is done ----------------------------------------------------------------------------------------------

    def _find_session(self, deadline: float) -> Session:
        """The session with the controller. Only one thread asks Ray where it is."""
        session = self._session
        if session is not None:
            return session
        if not self._finding.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BackendUnavailableError(  # it may be repeated: its first try was sent
                "the controller was not found by the deadline: another call of this client asks it over Ray where it "
                "is, and has no answer yet. It may have been done or not."
            )
        try:
            if self._session is None:
                line = self._find_line(deadline)
                watch = functools.partial(_ControllerWatch, self._instance, line)
                self._session = Session(TcpAddress(*line), MESSAGES, deadline, _failure, watch)
            return self._session
        finally:
            self._finding.release()

    def _refuse_dead(self, deadline: float) -> None:
        """Raises `BackendUnavailableError` if the controller is known to be dead, soon after its line broke."""
        try:
            self._find_session(min(deadline, time.monotonic() + _BROKEN_S))
        except DataPlaneError as error:
            if not error.retryable:
                raise

    def _find_line(self, deadline: float) -> Line:
        """Asks the controller, over Ray, where it answers. Waits while Ray cannot reach it, or starts it again. Raises
        as `call`."""
        watch, what = _ControllerWatch(self._instance), "ask the controller where it answers calls"
        while not self._closed:
            if not ray.is_initialized():
                raise BackendUnavailableError("this process is no longer connected to Ray.", retryable=False)
            line = watch.ask(max(0.0, min(_ASK_S, deadline - time.monotonic())))
            if line is not None:
                return line
            # with a journal, the controller comes back as soon as a head does that keeps its state
            if self.config.journal is None:
                check_head(self.config.instance)
            if time.monotonic() + _ASK_AGAIN_S < deadline:
                time.sleep(_ASK_AGAIN_S)
            elif self.config.journal is None:
                raise OperationTimeoutError(f"{what}: no answer in time.", hint=watch.describe())
            else:
                raise BackendUnavailableError(
                    f"the controller of instance {self.config.instance!r} died, and was not back by the deadline. "
                    "It may have been done or not.",
                    hint="Ray starts it again, and it finds its ledger in its journal: try again, or raise "
                    "op_timeout_s.",
                )
        raise ClientClosedError(f"{what}: this client is closed.")
