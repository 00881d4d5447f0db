"""The Ray side of an instance: starts, names, finds, watches and ends its actors.

An instance is one controller and its storage units: named Ray actors in the namespace ``dataplane``. The process that
bootstrapped owns the controller: Ray ends it when that process closes its client, exits or crashes, and the units end
with it. Other jobs reach the actors by name. A subclass of `Instance` says what a storage unit is, so a package with
another storage can build on this one.

Importing this module imports Ray.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane_core.errors import (
    AlreadyRunningError,
    BackendError,
    BackendUnavailableError,
    ClientClosedError,
    DataPlaneError,
    OperationTimeoutError,
    preview,
)
from dataplane_core.spec import new_id
from dataplane_tq_simple._actors import (
    NAMESPACE,
    alive_nodes,
    check_head,
    controller_dead,
    data_plane_error,
    get_within,
    lookup,
    named_actors,
    nodes_for_units,
)
from dataplane_tq_simple._controller import Controller, Line
from dataplane_tq_simple._errors import LineBrokenError
from dataplane_tq_simple._folders import JOURNAL, folder_of
from dataplane_tq_simple._ray_calls import end_within
from dataplane_tq_simple.addresses import check_address
from dataplane_tq_simple.config import QueueConfig

# Environment variables of the processes that an instance starts. A value in the bootstrapping client's environment
# wins.
# Ray runs its workers at low priority: calls would wait for any other work on the node.
_ACTOR_ENV = {"RAY_worker_niceness": "0"}

# Seconds after the end of a process in which Ray may still count its CPUs or its name as used.
_SETTLE_S = 5.0

# Seconds that a controller which may be starting again has to answer, and between two questions to it.
_ASK_S = 1.0
_ASK_AGAIN_S = 0.1

# Seconds that Ray may take to end actors. After that, this process goes on without an answer: the calls would wait for
# a dead head node.
_END_ACTORS_S = 2 * _SETTLE_S


class Peer(NamedTuple):
    """A storage unit.

    Attributes:
        name: Its name in messages: ``storage unit-0``.
        actor: Its Ray actor name.
        ip: Its address.
    """

    name: str
    actor: str
    ip: str


class Instance:
    """The actors of one instance, as seen from this process.

    Attributes:
        config: The options that it was bootstrapped with.
        units: The storage units with which it was started.
        details: Further values for attaching clients; picklable.
    """

    #: What the names of the actors start with, so that instances of different backends may have equal names.
    prefix: ClassVar[str]
    #: The distribution that must be installed on every node.
    distribution: ClassVar[str]
    #: A number that changes when clients of different versions of the distribution cannot share an instance.
    protocol: ClassVar[int]
    #: The class of the units' actors. It must be importable, so that a worker reads its own environment. Its method
    #: ``describe`` says where a unit is: the answer has an ``ip``.
    unit_class: ClassVar[type]

    def __init__(self, config: Any, units: Sequence[Peer], handles: dict[str, Any]):
        self.config = config
        self.units = tuple(units)
        self.details: dict[str, Any] = {}
        self._handles = handles  # by name: the controller, and the units that this process has created
        self._controller = handles[self.controller_name(config)]
        self._journal: Path | None = None  # that this process ends with the instance

    # --- what a subclass supplies -----------------------------------------------------------------------------------

    @classmethod
    def num_units(cls, config: Any) -> int:
        """How many storage units an instance on the cluster that this process is connected to starts with."""
        return int(config.num_storage_units)

    @classmethod
    def _unit_arguments(cls, config: Any) -> Mapping[str, Any]:
        """Keyword arguments of a unit."""
        return {}

    @classmethod
    def _controller_arguments(cls, config: Any) -> Mapping[str, Any]:
        """Further keyword arguments of the controller."""
        return {}

    @classmethod
    def _create_units(cls, config: Any, deadline: float) -> dict[str, Any]:
        """Creates the units that this process is to own, on the nodes in turn. Returns their actors by their names."""
        nodes, units = nodes_for_units(), {}
        for index in range(cls.num_units(config)):
            name = f"{cls.unit_prefix(config)}unit-{index}"
            unit = ray.remote(cls.unit_class).options(
                **_actor_options(name),
                num_cpus=config.unit_num_cpus,
                # Ray starts an actor that reserves nothing on any node, unless the strategy is strict: reserve one byte
                memory=1,
                max_restarts=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=True),
            )
            create = functools.partial(unit.remote, **cls._unit_arguments(config))
            units[name] = _create_named(config, name, create, deadline)
        return units

    def _prepare(self, answers: Sequence[Any], deadline: float) -> None:
        """Called by the bootstrapping process when the actors run, with the units' answers."""

    # --- bootstrapping -----------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, config: Any, *, deadline: float) -> Self:
        """Starts the actors and waits until they run. Clients can attach only after `publish`.

        Args:
            config: The options.
            deadline: On `time.monotonic`'s clock, in seconds.

        Raises:
            AlreadyRunningError: An instance of that name runs.
            BackendUnavailableError: The cluster lacks the configured CPUs, or an actor failed to start.
            OperationTimeoutError: The actors did not start in time.
            ConfigError: A process announces an address that other nodes cannot reach.
            DataPlaneError: What `_prepare` raises.
        """
        check_cpus(config, cls.num_units(config), deadline)
        cls._refuse_if_running_or_broken(config, deadline)
        handles: dict[str, Any] = {}
        durable = getattr(config, "durable", None)
        journal = _journal_of(config, durable)
        try:
            name = cls.controller_name(config)
            controller = ray.remote(Controller).options(
                **_actor_options(name),
                num_cpus=config.controller_num_cpus,
                max_restarts=-1 if journal else 0,
                # where its journal is
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
                if durable is not None and config.journal == durable
                else None,
            )
            create = functools.partial(
                controller.remote,
                journal=journal,
                capacity_bytes=config.capacity_bytes,
                sync=config.journal_sync if durable is None else config.sync == "commit",
                durable=durable is not None,
                **cls._controller_arguments(config),
            )
            handles[name] = _create_named(config, name, create, deadline)
            refs = {name: handles[name].open.remote()}
            handles |= cls._create_units(config, deadline)
            refs |= {each: handle.describe.remote() for each, handle in handles.items() if each != name}
            line, *answers = cls._wait_for_start(config, refs, deadline)
            check_addresses({"controller": line[0]})
            units = [
                Peer(f"storage unit-{index}", actor, answer.ip)
                for index, (actor, answer) in enumerate(zip(list(handles)[1:], answers, strict=True))
            ]
            check_addresses({each.name: each.ip for each in units})
            instance = cls(config, units, handles)
            instance._journal = journal if durable is None else None
            instance._prepare(answers, deadline)
        except BaseException as error:
            _kill(handles, cls.unit_prefix(config))
            _delete(journal if durable is None else None)
            if isinstance(error, DataPlaneError) or not isinstance(error, Exception):
                raise
            message = f"starting instance {config.instance!r} failed: {type(error).__name__}: {error}"
            raise BackendError(message) from error
        return instance

    @classmethod
    def unit_prefix(cls, config: QueueConfig) -> str:
        """What the actor names of its units start with."""
        return f"{cls.controller_name(config)}/"

    @classmethod
    def _refuse_if_running_or_broken(cls, config: QueueConfig, deadline: float) -> None:
        """Raises if an instance of this name runs, or if its controller is dead but its units still run.

        They end within seconds after their owner or the controller. So this waits a little for them.
        """
        name = cls.controller_name(config)
        controller = lookup(name)
        if controller is not None and not _is_dead(controller, deadline):
            raise _already_running(config)
        wait_until = min(deadline, time.monotonic() + _SETTLE_S)
        while named_actors(f"{name}/"):
            if time.monotonic() >= wait_until:
                raise _broken(config)
            time.sleep(0.1)

    @classmethod
    def _wait_for_start(cls, config: QueueConfig, refs: dict[str, Any], deadline: float) -> list[Any]:
        """Waits for what actors say when they run. Returns it."""
        started, waiting = ray.wait(
            list(refs.values()), num_returns=len(refs), timeout=max(0.0, deadline - time.monotonic())
        )
        try:
            infos = {ref: ray.get(ref, timeout=0) for ref in started}
        except ray.exceptions.RayError as error:
            raise data_plane_error(error) or BackendUnavailableError(
                f"a process of instance {config.instance!r} failed to start: {str(error).strip()}",
                hint=f"{cls.distribution} must be installed, in this version, on every node of the Ray cluster.",
            ) from error
        if waiting:
            names = [name for name, ref in refs.items() if ref in waiting]
            raise OperationTimeoutError(
                f"instance {config.instance!r}: {preview(names)} of {len(refs)} processes did not start in time.",
                hint=f"Free on the cluster: {ray.available_resources()}.",
            )
        return [infos[ref] for ref in refs.values()]

    def publish(self, *, deadline: float) -> None:
        """Makes the instance visible to attaching clients."""
        description = {
            "protocol": self.protocol,
            "config": self.config.model_dump(),
            "units": [tuple(unit) for unit in self.units],
            "details": self.details,
        }
        get_within(self._controller.store_config.remote(description), "publish the instance", deadline)

    def stop(self) -> None:
        """Ends the actors, and waits a little until Ray has freed their names. For the process that started them."""
        try:
            if ray.is_initialized():
                _kill(self._handles, self.unit_prefix(self.config))
        finally:
            _delete(self._journal)

    # --- attaching ---------------------------------------------------------------------------------------------------

    def find_line(self, *, deadline: float, closed: Callable[[], bool]) -> Line:
        """Asks the controller, over Ray, where it answers calls over plain connections.

        Waits while Ray cannot reach it, as when a controller that keeps a journal is started again.

        Args:
            deadline: On `time.monotonic`'s clock, in seconds.
            closed: Whether nobody waits for the answer any more.

        Raises:
            BackendUnavailableError: The controller is dead, or this process is no longer connected to Ray: these are
                not retryable. Or it was not back in time.
            OperationTimeoutError: It does not answer in time.
            ClientClosedError: Nobody waits any more.
        """
        what = "ask the controller where it answers calls"
        while not closed():
            try:
                line: Line = get_within(self.ask_line(), what, min(deadline, time.monotonic() + _ASK_S))
                return line
            except (OperationTimeoutError, BackendUnavailableError) as error:
                if isinstance(error.__cause__, ray.exceptions.ActorDiedError):
                    raise controller_dead(self.config.instance, error.__cause__) from error.__cause__
                # with a journal, the controller comes back as soon as a head does that keeps its state
                if self.config.journal is None and ray.is_initialized():
                    check_head(self.config.instance)
                late = time.monotonic() + _ASK_AGAIN_S >= deadline
                if late and error.retryable and self.config.journal is not None:
                    raise BackendUnavailableError(
                        f"the controller of instance {self.config.instance!r} died, and was not back by the deadline. "
                        "It may have been done or not.",
                        hint="Ray starts it again, and it finds its ledger in its journal: try again, or raise "
                        "op_timeout_s.",
                    ) from error
                if late or not error.retryable:
                    raise
            time.sleep(_ASK_AGAIN_S)
        raise ClientClosedError(f"{what}: this client is closed.")

    def ask_line(self) -> Any:
        """Asks the controller where it answers. Returns a Ray reference to the answer."""
        if not ray.is_initialized():
            raise BackendUnavailableError("this process is no longer connected to Ray.", retryable=False)
        return self._controller.line.remote()

    @classmethod
    def find(cls, config: Any, *, deadline: float, wait_s: float = 0.0) -> Self:
        """Finds a running instance by name.

        Args:
            config: Names it.
            deadline: On `time.monotonic`'s clock, in seconds.
            wait_s: How long to wait for an instance that does not exist yet, in seconds.

        Raises:
            BackendUnavailableError: There is no such instance, or its storage units are gone for good.
            OperationTimeoutError: Its controller does not answer, or never became ready.
        """
        name = cls.controller_name(config)
        give_up = wait_until = min(deadline, time.monotonic() + wait_s)
        while True:
            controller = lookup(name)
            description = None
            if controller is not None:
                what = f"attach to instance {config.instance!r}: ask its controller for the configuration"
                try:
                    description = get_within(controller.get_config.remote(), what, deadline)
                    wait_until = deadline  # it exists: wait for the bootstrapping client to publish it
                except BackendUnavailableError as error:
                    if isinstance(error.__cause__, ray.exceptions.ActorUnavailableError):
                        wait_until = deadline  # Ray may start it again
                    else:
                        controller = None  # it has just died: Ray keeps its name a little longer
                        wait_until = give_up  # the bootstrapping client may be dead too
            if description is not None:
                break
            if time.monotonic() >= wait_until:
                raise cls._not_found(config, starting=controller is not None)
            time.sleep(0.1)
        if description["protocol"] != cls.protocol:
            raise BackendUnavailableError(
                f"instance {config.instance!r} speaks version {description['protocol']} of the engine's protocol. "
                f"Expected {cls.protocol}.",
                retryable=False,
                hint=f"Install the same version of {cls.distribution} everywhere.",
            )
        units = [Peer(*unit) for unit in description["units"]]
        handles = {name: controller, **{unit.actor: lookup(unit.actor) for unit in units}}
        gone = [unit.name for unit in units if handles[unit.actor] is None]
        if gone:
            raise BackendUnavailableError(
                f"instance {config.instance!r} is broken: {preview(gone)} of {len(units)} died.",
                retryable=False,
                hint="Close the client that bootstrapped it and bootstrap it again.",
            )
        found = cls(type(config)(**description["config"]), units, handles)
        found.details = description["details"]
        return found

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
        """The name of the controller's actor, which no other instance of the cluster has."""
        return f"{cls.prefix}{config.instance}"


class ControllerWatch:
    """Asks Ray where the controller is, while a call waits for it.

    Args:
        instance: The instance.
        line: Where the call takes the controller to be; None: anywhere.
    """

    def __init__(self, instance: Instance, line: Line | None = None) -> None:
        self._instance = instance
        self._line = line
        self._asked: Any = None
        self._ask_at = time.monotonic()
        self._says = "The controller did not answer Ray either: stopped, overloaded, or on an unreachable node."

    def check(self) -> None:
        """Does not block.

        Raises:
            LineBrokenError: The controller was started again, and is elsewhere.
            BackendUnavailableError: It is dead for good.
        """
        now = time.monotonic()
        if self._asked is None:
            if now >= self._ask_at and ray.is_initialized():
                self._asked = self._instance.ask_line()
            return
        if not ray.wait([self._asked], timeout=0)[0]:
            return
        asked, self._asked, self._ask_at = self._asked, None, now + _ASK_S
        try:
            line = ray.get(asked, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            self._ask_at = now + _ASK_AGAIN_S
            self._says = "Ray cannot reach the controller, or starts it again."
        except ray.exceptions.RayActorError as error:
            raise controller_dead(self._instance.config.instance, error) from error
        except ray.exceptions.RayError:
            return  # says nothing about the controller
        else:
            self._says = "The process of the controller is alive, but busy with other requests."
            if self._line not in (None, line):
                raise LineBrokenError("the controller was started again, and is elsewhere.")

    def describe(self) -> str:
        """What is known, as a sentence."""
        return self._says


# --- helpers ---------------------------------------------------------------------------------------------------------


def _journal_of(config: QueueConfig, durable: str | None) -> Path | None:
    """The folder of the journal of an instance that is bootstrapped."""
    if config.journal is None:
        return None
    if durable is not None:
        return folder_of(config.journal, config.instance) / JOURNAL
    # of this instance alone: its units hold nothing of an earlier one
    return Path(config.journal, f"{config.instance}-{new_id()}")


def _delete(journal: Path | None) -> None:
    if journal is not None:
        shutil.rmtree(journal, ignore_errors=True)


def env_vars() -> dict[str, str]:
    """The environment variables that actors are given."""
    return {name: os.environ.get(name, value) for name, value in _ACTOR_ENV.items()}


def _actor_options(name: str) -> dict[str, Any]:
    """The options of an actor of this name that all have."""
    return {"name": name, "namespace": NAMESPACE, "runtime_env": {"env_vars": env_vars()}}


def check_addresses(addresses: Mapping[str, str]) -> None:
    """Refuses addresses that other nodes cannot reach, by what has them. Raises as `check_address`."""
    num_nodes = len(alive_nodes())
    for what, ip in addresses.items():
        check_address(ip, num_nodes=num_nodes, of=f"the address of the {what}")


def _create_named(config: QueueConfig, name: str, create: Callable[[], Any], deadline: float) -> Any:
    """Creates a named actor. Waits a little while an actor that has just died still holds the name."""
    wait_until = min(deadline, time.monotonic() + _SETTLE_S)
    while True:
        try:
            return create()
        except ValueError as error:
            holder = lookup(name)
            if holder is None and not isinstance(error, ray.exceptions.ActorAlreadyExistsError):
                raise
            if holder is not None and not _is_dead(holder, deadline):
                raise _already_running(config) from error
            if time.monotonic() >= wait_until:
                raise _broken(config) from error
            time.sleep(0.1)


def _already_running(config: QueueConfig) -> AlreadyRunningError:
    return AlreadyRunningError(
        f"instance {config.instance!r} is already running on the Ray cluster at "
        f"{ray.get_runtime_context().gcs_address!r}.",
        retryable=True,
        hint="Attach to it (bootstrap=False), close the client that bootstrapped it, or choose another name for "
        "`instance`.",
    )


def _broken(config: QueueConfig) -> AlreadyRunningError:
    return AlreadyRunningError(
        f"instance {config.instance!r} is broken: its controller is dead, but its storage units or the process that "
        "bootstrapped it still run.",
        hint="Close the client that bootstrapped it, or end its process; then bootstrap again.",
    )


def _is_dead(actor: Any, deadline: float) -> bool:
    timeout_s = max(0.0, min(_SETTLE_S, deadline - time.monotonic()))
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=timeout_s)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.RayError:
        return False
    return False


def check_cpus(config: QueueConfig, num_units: int, deadline: float) -> None:
    """Raises at once, with numbers, if the CPUs are missing. Ray itself would wait for them silently.

    Raises:
        BackendUnavailableError: The cluster that this process is connected to lacks them.
    """
    wait_until = min(deadline, time.monotonic() + _SETTLE_S)
    while True:
        total = ray.cluster_resources().get("CPU", 0.0)
        refused = cpu_error(config, num_units, ray.available_resources().get("CPU", 0.0), total, "the Ray cluster has")
        if refused is None:
            return
        if not refused.retryable or time.monotonic() >= wait_until:
            raise refused
        time.sleep(0.2)


def cpu_error(
    config: QueueConfig, num_units: int, free: float, total: float, whose: str
) -> BackendUnavailableError | None:
    """The error if an instance of so many storage units needs more logical CPUs than are free, else None."""
    needed = config.controller_num_cpus + num_units * config.unit_num_cpus
    if free >= needed:
        return None
    return BackendUnavailableError(
        f"instance {config.instance!r} needs {needed:g} CPUs (controller {config.controller_num_cpus:g}, "
        f"{num_units} storage units of {config.unit_num_cpus:g}), but {whose} {free:g} free "
        f"of {total:g}. Its processes would never be scheduled.",
        retryable=total >= needed,
        hint="Set controller_num_cpus and unit_num_cpus to 0, or give Ray more logical CPUs (ray_num_cpus).",
    )


def _kill(handles: dict[str, Any], prefix: str | None = None) -> None:
    """Ends actors, the first one first. ``prefix``: then also those that the first one has started since."""
    if handles:
        what = f"end the actors {preview(list(handles))}"
        end_within(_END_ACTORS_S, what, functools.partial(_kill_all, handles, prefix))


def _kill_all(handles: dict[str, Any], prefix: str | None) -> None:
    names = list(handles)
    for handle in handles.values():
        with contextlib.suppress(Exception):  # dead already
            ray.kill(handle, no_restart=True)
    if prefix is not None:
        for name in named_actors(prefix):
            with contextlib.suppress(Exception):
                ray.kill(lookup(name), no_restart=True)
            names.append(name)
    give_up = time.monotonic() + _SETTLE_S
    for name in names:
        while lookup(name) is not None and time.monotonic() < give_up:
            time.sleep(0.02)
