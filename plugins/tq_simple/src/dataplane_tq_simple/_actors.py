"""Finds actors, asks them, and watches whether they live.

Importing this module imports Ray.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import ray
import ray.exceptions

from dataplane_core.errors import BackendUnavailableError, DataPlaneError, OperationTimeoutError
from dataplane_tq_simple._exchange import LineBrokenError, Peer

NAMESPACE: Final = "dataplane"
#: Seconds between two questions to a controller, and to one that does not run.
_ASK_S: Final = 1.0
_ASK_SOON_S: Final = 0.1
#: Seconds that Ray's head has to accept a connection.
_REACH_S: Final = 0.5


def cause(error: BaseException) -> str:
    """The line of a Ray error that gives the reason. The other lines repeat names and advice."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "error raised in its creation task" in str(error):
        return lines[-1]
    why = [line for line in lines if line.startswith("The actor is dead because")]
    return (why or lines or [type(error).__name__])[0]


def data_plane_error(error: BaseException) -> DataPlaneError | None:
    """The `DataPlaneError` that an actor's method raised, or None if it raised another exception."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, DataPlaneError) else None


def lookup(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def named_actors(prefix: str) -> list[str]:
    """The names of our actors that begin so."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in actors if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)]


def nodes_for_units() -> list[str]:
    """The nodes that get the units in turn, this node first. Without nodes that have no CPUs, if others have.

    Ray's own spread strategy looks at the reserved resources, but units reserve next to none.
    """
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    workers = [node["NodeID"] for node in alive if node["Resources"].get("CPU", 0) > 0]
    return sorted(workers or [node["NodeID"] for node in alive], key=lambda node: (node != here, node))


def get_within(ref: Any, what: str, deadline: float) -> Any:
    """``ray.get`` of one or several references before the deadline. Raises `DataPlaneError`s."""
    try:
        return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise OperationTimeoutError(f"{what}: no answer in time.") from error
    except ray.exceptions.RayError as error:
        raise data_plane_error(error) or BackendUnavailableError(f"{what}: {cause(error)}") from error


class ActorWatch:
    """Asks Ray whether actors are alive, while an exchange waits for their replies."""

    def __init__(self, instance: str, actors: Sequence[tuple[Peer, Any]]) -> None:
        self._instance = instance
        self._asked: dict[Peer, Any] = {}
        self._alive: list[Peer] = []
        self._connected = ray.is_initialized()
        if self._connected:
            with contextlib.suppress(ray.exceptions.RayError):  # then only the deadline ends the wait
                self._asked = {peer: handle.__ray_ready__.remote() for peer, handle in actors}

    def check(self) -> None:
        """Raises `BackendUnavailableError` if one of them is dead. Does not block."""
        if not self._asked or not ray.is_initialized():
            return
        answered, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        for peer in [peer for peer, ref in self._asked.items() if ref in answered]:
            try:
                ray.get(self._asked.pop(peer), timeout=0)
                self._alive.append(peer)
            except ray.exceptions.ActorUnavailableError:
                continue  # it may come back before the deadline
            except ray.exceptions.RayActorError as error:
                raise BackendUnavailableError(
                    f"the {peer.name} of instance {self._instance!r} is dead: {cause(error)}",
                    retryable=False,
                    hint="What it held is lost. Close this client and bootstrap the instance again.",
                ) from error
            except ray.exceptions.RayError:
                continue  # says nothing about the actor

    @property
    def all_alive(self) -> bool:
        """Whether all of them have answered."""
        return self._connected and not self._asked

    def close(self) -> None:
        """Nothing to give back."""

    def describe(self) -> str:
        """What is known, as a sentence."""
        if not self._connected:
            return "This process is no longer connected to Ray, so it cannot tell whether they are alive."
        if self._asked:
            names = ", ".join(peer.name for peer in self._asked)
            return f"The {names} did not answer Ray either: stopped, overloaded, or on an unreachable node."
        if not self._alive:
            return "Ray knows nothing about them at the moment."
        names = ", ".join(peer.name for peer in self._alive)
        return f"The process of the {names} is alive, but busy with other requests or not reachable from this process."


def check_head(instance: str) -> None:
    """For a process of the instance that does not answer: Ray, without its head, starts nothing again.

    Raises:
        BackendUnavailableError: Nothing listens where the head of this process's Ray was.
    """
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except ConnectionRefusedError as error:
        raise BackendUnavailableError(
            f"instance {instance!r} is dead, and so is the head of its Ray: nothing listens at {address}. A local Ray "
            "ends with the process that bootstrapped the instance.",
            retryable=False,
            hint="What it held is lost. Bootstrap it again in a new process: Ray ends those whose head is gone within "
            "a minute.",
        ) from error
    except OSError:
        return  # says nothing about the head


def controller_dead(instance: str, error: BaseException) -> BackendUnavailableError:
    """The error of a controller that Ray does not start again."""
    return BackendUnavailableError(
        f"the controller of instance {instance!r} is dead for good: {cause(error)}",
        retryable=False,
        hint="Close this client and bootstrap the instance again.",
    )


class Controlled(Protocol):
    """What a `ControllerWatch` uses of an instance."""

    config: Any
    controller: Peer

    def ask_line(self) -> Any:
        """Asks the controller where it answers. Returns a Ray reference to the answer, for `line_in`."""

    def line_in(self, answer: Any) -> Peer:
        """The line in that answer."""


class ControllerWatch:
    """Asks Ray where a controller that keeps a journal is, while an exchange waits for it.

    Args:
        instance: The instance.
        peers: Where the exchange takes the controller to be; other actors are not watched.
    """

    def __init__(self, instance: Controlled, peers: Sequence[Peer]) -> None:
        self._instance = instance
        self._peers = [peer for peer in peers if peer.actor == instance.controller.actor]
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
            line = self._instance.line_in(ray.get(asked, timeout=0))
        except ray.exceptions.ActorUnavailableError:
            self._ask_at = now + _ASK_SOON_S
            self._says = "The controller died, and Ray starts it again."
        except ray.exceptions.RayActorError as error:
            raise controller_dead(self._instance.config.instance, error) from error
        except ray.exceptions.RayError:
            return  # says nothing about the controller
        else:
            self._says = "The process of the controller is alive, but busy with other requests."
            here = (line, self._instance.controller)
            if any(peer not in here for peer in self._peers):
                raise LineBrokenError("the controller was started again, and is elsewhere.")

    def describe(self) -> str:
        """What is known, as a sentence."""
        return self._says

    def close(self) -> None:
        """Nothing to give back."""
