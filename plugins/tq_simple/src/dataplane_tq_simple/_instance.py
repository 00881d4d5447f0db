"""Instances: starts, finds and ends the actors of one.

An instance is one controller and its storage units: named Ray actors in the namespace ``dataplane``. The process that
bootstrapped owns the controller: Ray ends it when that process closes its client, exits or crashes, and the units end
with it. Other jobs reach the controller by name, which keeps a unit on each node. A package with another storage
derives from `Instance`, and starts what keeps its rows. Deadlines are on `time.monotonic`'s clock.

Importing this module imports Ray.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane_core.errors import (
    AlreadyRunningError,
    BackendError,
    BackendUnavailableError,
    ClientClosedError,
    ConfigError,
    DataPlaneError,
    OperationTimeoutError,
    preview,
)
from dataplane_core.host_memory import arena_bytes_for
from dataplane_core.hosting import HostGoneError, LedgerLink, Session, TcpAddress, Watch, failure_of
from dataplane_core.spec import new_id
from dataplane_tq_simple._controller import Controller
from dataplane_tq_simple._folders import JOURNAL, folder_of, unit_of
from dataplane_tq_simple._messages import MESSAGES
from dataplane_tq_simple._ray import (
    NAMESPACE,
    alive_nodes,
    cause,
    check_head,
    end_within,
    get_within,
    lookup,
    named_actors,
    nodes_for_units,
    remote,
)
from dataplane_tq_simple._storage_unit import UnitOptions
from dataplane_tq_simple.addresses import check_address
from dataplane_tq_simple.config import QueueConfig, TQSimpleConfig

# Environment variables of the processes that an instance starts, and of those that they start. A value in the
# bootstrapping client's environment wins.
# Ray runs its workers at low priority: calls would wait for any other work on the node.
_ACTOR_ENV: Final = {"RAY_worker_niceness": "0"}

# Seconds after the end of a process in which Ray may still count its CPUs or its name as used.
_SETTLE_S = 5.0

#: Seconds between two questions to the controller: one that it has, and one that Ray cannot bring to it.
_ASK_S: Final = 1.0
_ASK_AGAIN_S: Final = 0.1

# Seconds that Ray may take to end actors. After that, this process goes on without an answer: the calls would wait for
# a dead head node.
_END_ACTORS_S = 2 * _SETTLE_S


class Instance:
    """The actors of one instance, as seen from this process."""

    #: What the names of the actors start with, so that instances of different backends may have equal names.
    prefix: ClassVar[str]
    #: The distribution that must be installed on every node.
    distribution: ClassVar[str]
    #: A number that changes when clients of different versions of the distribution cannot share an instance.
    protocol: ClassVar[int]

    def __init__(self, config: Any, controller: Any = None):
        self.config = config  # that it was bootstrapped with
        self.controller = controller  # the actor
        self.details: dict[str, Any] = {}  # further values for attaching clients; of what msgpack has
        self._started: dict[str, Any] = {}  # the actors that this process started, by name: the controller is the first
        self._journal: Path | None = None  # that this process ends with the instance

    # --- what a subclass supplies -----------------------------------------------------------------------------------

    @classmethod
    def num_units(cls, config: Any) -> int:
        """How many storage units an instance on the cluster that this process is connected to starts with."""
        return int(config.num_storage_units)

    @classmethod
    def controller_arguments(cls, config: Any) -> Mapping[str, Any]:
        """Further keyword arguments of the controller."""
        return {}

    def prepare(self, deadline: float) -> None:
        """Called by the bootstrapping process while the controller starts."""

    # --- bootstrapping -----------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, config: Any, *, deadline: float) -> Self:
        """Starts the actors and waits until they run. Clients can attach only after `publish`. Raises as
        `QueueBackend.start`, what `prepare` raises, and `ConfigError` for an address that other nodes cannot reach."""
        check_cpus(config, cls.num_units(config), ray.cluster_resources().get("CPU", 0.0), "the Ray cluster")
        durable = getattr(config, "durable", None)
        journal = _journal_of(config, durable)
        instance, name = cls(config), cls.controller_name(config)
        instance._journal = journal if durable is None else None
        try:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            instance.controller = instance.start_actor(
                name,
                Controller,
                {
                    "journal": journal,
                    "capacity_bytes": config.capacity_bytes,
                    "sync": config.journal_sync if durable is None else config.sync == "commit",
                    "durable": durable is not None,
                    **cls.controller_arguments(config),
                },
                deadline,
                num_cpus=config.controller_num_cpus,
                max_restarts=-1 if journal else 0,
                # where its journal is
                scheduling_strategy=here if durable is not None and config.journal == durable else None,
            )
            started = instance.controller.start.remote(max(0.0, deadline - time.monotonic()))
            instance.prepare(deadline)
            address, units = instance.when_started([started], deadline)[0]
            num_nodes = len(alive_nodes())
            check_address(address.ip, num_nodes=num_nodes, of="the address of the controller")
            for unit in units:
                check_address(unit.ip, num_nodes=num_nodes, of=f"the address of the storage unit of node {unit.node}")
        except BaseException as error:
            instance.stop()
            if isinstance(error, DataPlaneError) or not isinstance(error, Exception):
                raise
            message = f"starting instance {config.instance!r} failed: {type(error).__name__}: {error}"
            raise BackendError(message) from error
        return instance

    def start_actor(
        self, name: str, actor_class: type, arguments: Mapping[str, Any], deadline: float, **options: Any
    ) -> Any:
        """Creates an actor, which ends with the instance. Waits a little while one that has just died still holds the
        name, which is that of the controller, or begins with it and ``/``. `AlreadyRunningError`: an instance of that
        name runs."""
        env = {"env_vars": {variable: os.environ.get(variable, value) for variable, value in _ACTOR_ENV.items()}}
        actor = remote(actor_class).options(name=name, namespace=NAMESPACE, runtime_env=env, **options)
        wait_until = min(deadline, time.monotonic() + _SETTLE_S)
        while True:
            try:
                self._started[name] = actor.remote(**arguments)
                return self._started[name]
            except ValueError as error:
                holder = lookup(name)
                if holder is None and not isinstance(error, ray.exceptions.ActorAlreadyExistsError):
                    raise
                if holder is not None and not _is_dead(holder, deadline):
                    raise AlreadyRunningError(
                        f"instance {self.config.instance!r} is already running on the Ray cluster at "
                        f"{ray.get_runtime_context().gcs_address!r}.",
                        retryable=True,
                        hint="Attach to it (bootstrap=False), close the client that bootstrapped it, or choose another "
                        "name for `instance`.",
                    ) from error
                if time.monotonic() >= wait_until:
                    raise AlreadyRunningError(
                        f"instance {self.config.instance!r} is broken: its controller is dead, but its storage units "
                        "or the process that bootstrapped it still run.",
                        hint="Close the client that bootstrapped it, or end its process; then bootstrap again.",
                    ) from error
                time.sleep(0.1)

    def when_started(self, answers: Sequence[Any], deadline: float) -> list[Any]:
        """What actors answer to their first calls. Raises as `get_within`."""
        hint = f"{self.distribution} must be installed, in this version, on every node of the Ray cluster. Free there: "
        what = f"start {preview(list(self._started))}"
        answered: list[Any] = get_within(list(answers), what, deadline, f"{hint}{ray.available_resources()}.")
        return answered

    def publish(self, *, deadline: float) -> None:
        """Makes the instance visible to attaching clients."""
        description = {
            "protocol": self.protocol,
            "config": self.config.model_dump(),
            "details": self.details,
        }
        get_within(self.controller.store_config.remote(description), "publish the instance", deadline)

    def link(self) -> LedgerLink:
        """A client's way to the controller."""
        return ControllerLink(self)

    def stop(self) -> None:
        """Ends the actors, and waits a little until Ray has freed their names. For the process that started them."""
        try:
            if self._started and ray.is_initialized():
                end_within(_END_ACTORS_S, f"end the actors {preview(list(self._started))}", self._kill)
        finally:
            if self._journal is not None:
                shutil.rmtree(self._journal, ignore_errors=True)

    def _kill(self) -> None:
        """Ends the actors, the controller first, and the units that this has started."""
        for actor in self._started.values():
            with contextlib.suppress(Exception):  # dead already
                ray.kill(actor, no_restart=True)
        units = named_actors(f"{self.controller_name(self.config)}/")
        for name in units:
            with contextlib.suppress(Exception):
                ray.kill(lookup(name), no_restart=True)
        give_up = time.monotonic() + _SETTLE_S
        for name in [*self._started, *units]:
            while lookup(name) is not None and time.monotonic() < give_up:
                time.sleep(0.02)

    # --- attaching ---------------------------------------------------------------------------------------------------

    @classmethod
    def find(cls, config: Any, *, deadline: float, wait_s: float = 0.0) -> Self:
        """Finds a running instance by its name, for which it waits if it does not exist yet.

        Raises:
            BackendUnavailableError: There is no such instance.
            OperationTimeoutError: Its controller does not answer, or never became ready.
        """
        name = cls.controller_name(config)
        what = f"attach to instance {config.instance!r}: ask its controller for the configuration"
        give_up = min(deadline, time.monotonic() + wait_s)
        while True:
            controller, exists = lookup(name), False
            if controller is not None:
                try:
                    description = get_within(controller.get_config.remote(), what, deadline)
                    if description is not None:
                        break
                    exists = True  # the bootstrapping client has not published it yet
                except BackendUnavailableError as error:  # Ray may start it again, or keeps its name a little longer
                    exists = isinstance(error.__cause__, ray.exceptions.ActorUnavailableError)
            if time.monotonic() >= (deadline if exists else give_up):
                raise cls._not_found(config, starting=exists)
            time.sleep(0.1)
        if description["protocol"] != cls.protocol:
            raise BackendUnavailableError(
                f"instance {config.instance!r} speaks version {description['protocol']} of the protocol. "
                f"Expected {cls.protocol}.",
                retryable=False,
                hint=f"Install the same version of {cls.distribution} everywhere.",
            )
        instance = cls(type(config)(**description["config"]), controller)
        instance.details = description["details"]
        return instance

    @classmethod
    def _not_found(cls, config: QueueConfig, *, starting: bool) -> DataPlaneError:
        where = f"the Ray cluster at {ray.get_runtime_context().gcs_address!r}"
        if starting:
            return OperationTimeoutError(f"instance {config.instance!r} on {where} was still starting at the deadline.")
        running = sorted(name.removeprefix(cls.prefix) for name in named_actors(cls.prefix) if "/" not in name)
        return BackendUnavailableError(
            f"no instance {config.instance!r} runs on {where}; there: {preview(running) or 'none'}.",
            hint="Bootstrap it first (bootstrap=True, in a process that stays), with the same `instance` and cluster.",
        )

    @classmethod
    def controller_name(cls, config: QueueConfig) -> str:
        """The name of the controller's actor, which no other instance of the cluster has. Those of its units begin
        with it and ``/``."""
        return f"{cls.prefix}{config.instance}"


class TQSimpleInstance(Instance):
    """An instance of ``tq_simple``.

    With ``storage: memory``, the controller keeps a storage unit on each node. With ``storage: transfer_queue``,
    ``details`` has ``partition``, that of its rows in TransferQueue.
    """

    prefix = "tq-"
    distribution = "dataplane-tq-simple"
    protocol = 14

    @classmethod
    def find(cls, config: TQSimpleConfig, *, deadline: float, wait_s: float = 0.0) -> Self:
        """As `Instance.find`. Raises `ConfigError` if its storage is not that of ``config``."""
        instance = super().find(config, deadline=deadline, wait_s=wait_s)
        if instance.config.storage != config.storage:
            raise ConfigError(
                f"instance {config.instance!r} runs with storage: {instance.config.storage}, and this client has "
                f"storage: {config.storage}.",
                hint=f"Set storage: {instance.config.storage}.",
            )
        return instance

    @classmethod
    def num_units(cls, config: TQSimpleConfig) -> int:
        """One for each node, unless TransferQueue has the units."""
        return len(nodes_for_units()) if config.storage == "memory" else 0

    @classmethod
    def controller_arguments(cls, config: TQSimpleConfig) -> Mapping[str, Any]:
        if config.storage != "memory":
            return {}
        size_bytes = config.unit_bytes
        if size_bytes is None and config.capacity_bytes is not None:
            size_bytes = arena_bytes_for(config.capacity_bytes)
        units = UnitOptions(
            size_bytes=size_bytes,
            touch_ahead_bytes=config.touch_ahead_bytes,
            folder=None if config.durable is None else str(unit_of(config.durable, config.instance)),
            sync=config.sync == "commit",
            num_cpus=config.unit_num_cpus,
            detached=config.journal is not None,
            node_wait_s=config.node_wait_s,
        )
        return {"units": units}


# --- the controller --------------------------------------------------------------------------------------------------


class ControllerLink(LedgerLink):
    """A client's way to the controller of an instance, which Ray may start again elsewhere."""

    def __init__(self, instance: Instance) -> None:
        super().__init__()
        self._instance = instance

    def connect(self, deadline: float) -> Session:
        """As `LedgerLink.connect`. Waits while Ray cannot reach the controller, or starts it again."""
        watch, config = ControllerWatch(self._instance), self._instance.config
        what = "ask the controller where it answers calls"
        while not self._closed:
            if not ray.is_initialized():
                raise BackendUnavailableError("this process is no longer connected to Ray.", retryable=False)
            address = watch.ask(max(0.0, min(_ASK_S, deadline - time.monotonic())))
            if address is not None:
                return Session(address, MESSAGES, deadline, failure_of("the controller"), partial(self._watch, address))
            # with a journal, the controller comes back as soon as a head does that keeps its state
            if config.journal is None:
                check_head(config.instance)
            if time.monotonic() + _ASK_AGAIN_S < deadline:
                time.sleep(_ASK_AGAIN_S)
            elif config.journal is None:
                raise OperationTimeoutError(f"{what}: no answer in time.", hint=watch.says)
            else:
                raise BackendUnavailableError(
                    f"the controller of instance {config.instance!r} died, and was not back by the deadline. "
                    "It may have been done or not.",
                    hint="Ray starts it again, and it finds its ledger in its journal: try again, or raise "
                    "op_timeout_s.",
                )
        raise ClientClosedError(f"{what}: this client is closed.")

    def _watch(self, address: TcpAddress) -> Watch:
        watch = ControllerWatch(self._instance)

        def check() -> str:
            if ray.is_initialized() and watch.ask() not in (None, address):
                raise HostGoneError("the controller was started again, and is elsewhere.")
            return watch.says

        return check


class ControllerWatch:
    """Asks Ray where the controller of an instance is: to find it, and while a call waits for it."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._asked: Any = None
        self._ask_at = 0.0
        # what is known about it
        self.says = "The controller did not answer Ray either: stopped, overloaded, or on an unreachable node."

    def ask(self, within_s: float = 0.0) -> TcpAddress | None:
        """Where the controller says it is, if it answers. Raises `BackendUnavailableError` if it is dead for good."""
        now = time.monotonic()
        if self._asked is None and now >= self._ask_at:
            self._asked = self._instance.controller.address.remote()
        if self._asked is None or not ray.wait([self._asked], timeout=within_s)[0]:
            return None
        asked, self._asked, self._ask_at = self._asked, None, now + _ASK_S
        try:
            address: TcpAddress = ray.get(asked, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            self._ask_at = now + _ASK_AGAIN_S
            self.says = "Ray cannot reach the controller, or starts it again."
            return None
        except ray.exceptions.RayActorError as error:
            raise BackendUnavailableError(
                f"the controller of instance {self._instance.config.instance!r} is dead for good: {cause(error)}",
                retryable=False,
                hint="Close this client and bootstrap the instance again.",
            ) from error
        except ray.exceptions.RayError:
            return None  # says nothing about the controller
        self.says = "The process of the controller is alive, but busy with other requests."
        return address


# --- helpers ---------------------------------------------------------------------------------------------------------


def _journal_of(config: QueueConfig, durable: str | None) -> Path | None:
    """The folder of the journal of an instance that is bootstrapped."""
    if config.journal is None:
        return None
    if durable is not None:
        return folder_of(config.journal, config.instance) / JOURNAL
    # of this instance alone: its units hold nothing of an earlier one
    return Path(config.journal, f"{config.instance}-{new_id()}")


def _is_dead(actor: Any, deadline: float) -> bool:
    timeout_s = max(0.0, min(_SETTLE_S, deadline - time.monotonic()))
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=timeout_s)
    except ray.exceptions.RayError as error:
        return isinstance(error, ray.exceptions.RayActorError)
    return False


def check_cpus(config: QueueConfig, num_units: int, num_cpus: float, whose: str) -> None:
    """Refuses an instance that needs more logical CPUs than there are. Ray itself would wait for them silently."""
    needed = config.controller_num_cpus + num_units * config.unit_num_cpus
    if needed > num_cpus:
        raise BackendUnavailableError(
            f"instance {config.instance!r} needs {needed:g} CPUs (controller {config.controller_num_cpus:g}, "
            f"{num_units} storage units of {config.unit_num_cpus:g}), but {whose} has {num_cpus:g}.",
            retryable=False,
            hint="Set controller_num_cpus and unit_num_cpus to 0, or give Ray more logical CPUs (ray_num_cpus).",
        )
