"""`Backend`: the class that a storage author subclasses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict

from dataplane_core.backends.diagnosis import Finding
from dataplane_core.spec import CONTRACT_VERSION, Capability, Scope, WireFormat

__all__ = ["REQUIRED_OPERATIONS", "Backend", "NoOptions", "required_operations"]


class NoOptions(BaseModel):
    """The options of a backend that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Backend:
    """Stores and moves the bytes of one store, for one client.

    A subclass implements the operations of `dataplane_core.spec.hooks.DataPlaneSpec` as plain methods, each with one
    argument named ``request``: always `REQUIRED_OPERATIONS`, and those that its capabilities call for
    (`required_operations`). Core checks names and signatures when the backend is registered. Backends whose control
    plane can host a `Ledger` start from `dataplane_core.backends.ledger_backend.LedgerBackend`, plain blob stores from
    `BlobStore`: both bring every operation along.

    Attributes:
        wire: What the cells handed to the hooks may be.
        capabilities: Operations and guarantees declared.
        scope: How far apart two clients of one store may be.
        why_not_declared: Capability that is not declared, or ``scope`` -> what in the engine rules it out. Shown in
            reports.
        deviations: Test of the conformance kit that this backend fails -> what in the engine is the reason. The kit
            expects these tests to fail, and shows the reasons.
        opens_in_forks: Whether a process that was forked from one with an open client may open one of its own. False
            where the engine's library does not survive a fork; core then refuses at once, and says to spawn.
        contract_version: The contract's version that this class was written for.
        Config: A pydantic model of the backend's own options.
        name: The entry-point name that the config chose; set by core before `start`.
        allow_pickle: Whether the config allows object items that travel pickled; set by core before `start`.
        exclusive: Whether bootstrapping must fail where anything runs already, also of equal options: of several
            processes that connect with ``bootstrap="auto"``, one bootstraps; set by core before `start`.
        attach_wait_s: How long an attach may wait for an owner that is not there yet, in seconds; set by core before
            `start`. Core itself waits, by starting another object of this class again and again, so only a backend to
            which a try is costly needs to look at it.
    """

    wire: ClassVar[WireFormat] = WireFormat()
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    scope: ClassVar[Scope] = Scope.PROCESS
    why_not_declared: ClassVar[Mapping[str, str]] = MappingProxyType({})
    deviations: ClassVar[Mapping[str, str]] = MappingProxyType({})
    opens_in_forks: ClassVar[bool] = True
    contract_version: ClassVar[int] = CONTRACT_VERSION
    Config: ClassVar[type[BaseModel]] = NoOptions

    name: str = ""
    allow_pickle: bool = False
    exclusive: bool = False
    attach_wait_s: float = 0.0

    def __init__(self, config: Any) -> None:
        """Keeps the validated options; opens nothing.

        Args:
            config: An instance of this class's ``Config``.
        """
        self.config = config

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Connects. Called once, before any hook, in the process of the client.

        Args:
            bootstrap: Start what is needed (and own it), or attach to what runs.
            deadline: On `time.monotonic`'s clock, in seconds.

        Raises:
            BackendUnavailableError: Nothing to attach to; retryable, which it is unless said otherwise, where that may
                change, since its owner may be about to start.
            AlreadyRunningError: Bootstrapping over a running instance of other options, or over any where `exclusive`;
                retryable where another process was only faster, so that `connect("auto")` tries to attach again.
        """

    def stop(self) -> None:
        """Disconnects; ends what this client started, and nothing else. Called once, and also after a failed start."""

    @classmethod
    def diagnose(cls, config: Any, *, deadline: float) -> Iterable[Finding]:
        """What `dataplane doctor` reports of this machine, for these options; default: nothing to report.

        Looks at what `start` needs, and at what its operator should know: libraries, binaries, versions, addresses,
        settings of a server that runs. Starts nothing, and leaves everything as it is. It runs in a process of its own,
        also where `start` would fail, so libraries that may be missing are imported inside it.

        Args:
            config: An instance of this class's ``Config``.
            deadline: On `time.monotonic`'s clock, in seconds; every wait ends before it.

        Returns:
            Findings in the order to be read; also those that are as they should be.
        """
        return ()


#: Operations that every backend implements.
REQUIRED_OPERATIONS: Final[tuple[str, ...]] = (
    "register_partition",
    "describe_partition",
    "put_samples",
    "get_samples",
    "clear_samples",
)

_BY_CAPABILITY: Final[dict[Capability, tuple[str, ...]]] = {
    Capability.CLAIMS: ("claim", "check_consumption"),
    Capability.LEASES: ("ack", "nack", "renew"),
    Capability.LISTING: ("list_samples",),
}


def required_operations(capabilities: frozenset[Capability]) -> tuple[str, ...]:
    """The operations that a backend of these capabilities implements."""
    extra = [name for capability, names in _BY_CAPABILITY.items() if capability in capabilities for name in names]
    return (*REQUIRED_OPERATIONS, *extra)
