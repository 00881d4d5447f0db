"""`QueueBackend`: a client whose ledger is in a controller on Ray, with which it has a session.

It gives every call a deadline, and turns failures into clear errors. Ray is imported when it starts.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dataplane_core.backends import LEDGER_CAPABILITIES, Finding, LedgerBackend
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.hosting import LedgerLink, Request
from dataplane_core.ledger import Command, Reply
from dataplane_core.ownership import PrivateFolder
from dataplane_core.spec import Capability, Scope, WireFormat
from dataplane_tq_simple._diagnosis import diagnose
from dataplane_tq_simple.config import QueueConfig

if TYPE_CHECKING:
    from dataplane_tq_simple._instance import Instance
    from dataplane_tq_simple._ray import RayConnection

_logger = logging.getLogger(__name__)

_Reply = TypeVar("_Reply")


class QueueBackend(LedgerBackend):
    """A backend whose ledger runs in a controller on Ray. ``Config`` derives from `QueueConfig`.

    A subclass names the class of the instance and moves the rows. Thread-safe; not usable after a fork.
    """

    # not by content: an engine whose rows the book of units does not know may lose some unnoticed
    wire = WireFormat(bytes=True, shared_rows=True)
    capabilities = LEDGER_CAPABILITIES | {Capability.CLIENTS, Capability.WAKES}
    scope = Scope.CLUSTER
    opens_in_forks = False
    why_not_declared: ClassVar[Mapping[str, str]] = {
        Capability.DURABLE: "the payload is in memory; the option `journal` keeps only the ledger",
        Capability.NO_PICKLE: "Ray's messages carry pickles over sockets without authentication",
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._connection: RayConnection | None = None  # this process's, to Ray
        self._instance: Any = None
        self._bootstrapped = False  # whether this client started the instance, and so ends it
        self._link: LedgerLink | None = None  # to the controller
        self._pid = os.getpid()
        self._closed = False
        self._folders: list[PrivateFolder] = []  # by which others of this host find what this started

    # --- what a subclass supplies -------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def instance_class(cls) -> type[Instance]:
        """What is started or found. Imported only here, so that importing the backend does not import Ray."""

    @abstractmethod
    def join(self, deadline: float) -> None:
        """Connects to the storage of the instance."""

    @abstractmethod
    def leave(self) -> None:
        """Undoes `join`, before a bootstrapping client ends the instance. Also called where `join` failed."""

    # --- life ---------------------------------------------------------------------------------------------------------

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of an instance that shares nothing but the Ray cluster with that of ``options``."""
        name = options.get("instance", QueueConfig.model_fields["instance"].default)
        return {**options, "instance": f"{name}-{tag}"[:64]}

    @classmethod
    def outlives_owner(cls, config: Any) -> bool:
        """With ``durable``."""
        return getattr(config, "durable", None) is not None

    def attach_options(self) -> dict[str, Any]:
        """Options with which any process of the cluster attaches to this client's instance."""
        return {"instance": self.config.instance, "ray_address": self._ray().address}

    @classmethod
    def diagnose(cls, config: Any, *, deadline: float) -> Iterable[Finding]:
        """Ray itself, the Ray cluster that would be used, its CPUs and this node's address in it; or the
        instance that runs on this host."""
        return diagnose(cls, config, deadline)

    @classmethod
    def diagnose_storage(cls, config: Any, deadline: float, connected: bool) -> Iterable[Finding]:
        """Findings about where the rows are. ``connected``: this process is connected to the Ray cluster."""
        return ()

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Starts the instance on Ray, or attaches to it.

        Who bootstraps also starts a local Ray, if this process has no Ray and no address is configured. The deadline
        does not interrupt the start of a local Ray.

        Raises:
            AlreadyRunningError: An instance of that name runs on the cluster.
            BackendUnavailableError: No Ray at the address, no such instance, too few CPUs, or a process that failed to
                start.
            OperationTimeoutError: Not all processes started in time, and were ended; or the controller does not answer.
        """
        instance_class = self.instance_class()
        from dataplane_tq_simple import _owners
        from dataplane_tq_simple._ray import RayConnection

        config, name = self.config, instance_class.controller_name(self.config)
        try:
            if not _owners.cluster_is_known(config):
                if not bootstrap:
                    config = config.model_copy(update={"ray_address": _owners.find(config, name)})
                elif self.exclusive:
                    self._folders.append(_owners.claim_name(name, deadline))
            self._connection = RayConnection.acquire(config, bootstrap=bootstrap, deadline=deadline)
            if bootstrap:
                self._instance = instance_class.start(config, deadline=deadline)
                self._bootstrapped = True
            else:
                # it waits itself: each new try would connect this process to Ray again
                self._instance = instance_class.find(config, deadline=deadline, wait_s=self.attach_wait_s)
            self._link = self._instance.link()
            self._link.session(deadline)
            self.join(deadline)
            if bootstrap:
                self._instance.publish(deadline=deadline)
                address = self._connection.address
                _logger.info("instance %r runs on the Ray cluster at %s", config.instance, address)
                left = _owners.leave(name, address, deadline)
                self._folders += [left] if left is not None else []
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends this connection; who bootstrapped also ends the instance. Operations of other threads end with
        `ClientClosedError`. The last client to close in this process shuts down a Ray that one of them started."""
        self._closed = True
        connection, self._connection = self._connection, None
        if self._link is not None:
            self._link.close()
        try:
            if connection is not None and os.getpid() == self._pid:
                try:
                    if self._instance is not None:
                        self.leave()
                    if self._bootstrapped:
                        self._instance.stop()
                finally:
                    connection.release()
        finally:
            while self._folders:
                self._folders.pop().release()

    def _ray(self) -> RayConnection:
        if self._connection is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self._connection

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(
        self, request: Request[_Reply] | Command[_Reply], deadline: float, wake: Callable[[], object] | None = None
    ) -> _Reply:
        """Asks the controller, which answers the requests of all clients one after the other.

        Raises:
            DataPlaneError: As the request says, or as `LedgerLink.call`.
            OperationTimeoutError: No answer in time. It may have been executed or not.
            BackendUnavailableError: The controller is dead, or has died and was not back in time.
            ClientClosedError: This client is closed.
        """
        if self._link is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self._link.call(deadline, request, wake)

    def call_ledger(self, deadline: float, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        return self.call(command, deadline, wake)

    def stop_waiting(self, token: str) -> None:
        if self._link is not None:
            self._link.stop_waiting(token)

    def new_write_id(self, num_ids: int) -> None:
        """None: the controller numbers the writes. The number says where the rows go. No write outlives the ledger."""
