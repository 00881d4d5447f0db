"""`Backend`: the class that a storage author subclasses. `Finding`: what it says to `dataplane doctor`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from dataplane_core.spec import CONTRACT_VERSION, Capability, Scope, WireFormat


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """No problem."""
    WARNING = "warning"
    """It works, but an operator should know this."""
    ERROR = "error"
    """`connect` or an operation will fail; `dataplane doctor` exits with 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        level: How bad it is.
        what: What was found, in one sentence or more. If it is a problem, also what was expected. Never a secret.
        hint: How to fix it: a command, or an option to set. None if nothing needs to be done.
    """

    level: Level
    what: str
    hint: str | None = None

    @classmethod
    def ok(cls, what: str) -> Finding:
        return cls(Level.OK, what)

    @classmethod
    def warning(cls, what: str, hint: str | None = None) -> Finding:
        return cls(Level.WARNING, what, hint)

    @classmethod
    def error(cls, what: str, hint: str | None = None) -> Finding:
        return cls(Level.ERROR, what, hint)


_NO_LIBRARY = re.compile(r"([\w.+-]+\.so[\w.]*): cannot open shared object file")


def missing_library(error: BaseException) -> str | None:
    """The shared library that an import did not find, such as ``libibverbs.so.1``. None: it failed for another reason.

    Args:
        error: What the import raised. Its causes and contexts are searched too.
    """
    seen: BaseException | None = error
    while seen is not None:
        library = _NO_LIBRARY.search(str(seen))
        if library is not None:
            return library.group(1)
        seen = seen.__cause__ or seen.__context__
    return None


class NoOptions(BaseModel):
    """The options of a backend that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Backend:
    """Stores and moves the bytes of one store, for one client.

    A subclass implements operations of `dataplane_core.spec.OPERATIONS` as plain methods, each with one argument named
    ``request``: those that need no capability, and those whose capability it declares. Core checks names and signatures
    when the backend is registered. `LedgerBackend` (for an engine that can host a `Ledger`) and `RowStoreBackend` (for
    one that keeps rows of bytes) already implement every operation.

    Attributes:
        wire: The form in which the hooks take cells.
        capabilities: The declared operations and guarantees.
        scope: How far apart two clients of one store may be.
        why_not_declared: A capability that is not declared, or ``scope`` -> the reason, which lies in the engine. Shown
            in reports.
        deviations: A test of the conformance kit that this backend fails -> the reason, which lies in the engine. The
            kit expects these tests to fail, and shows the reasons.
        opens_in_forks: Whether a process may open a client if it was forked from one with an open client. False if the
            engine's library does not survive a fork: core then refuses, with the advice to spawn.
        opens_anywhere: Whether a client of any process may open it although its scope is ``process``: its options name
            all that it needs, such as a folder that it reads. ``bootstrap=False`` then opens it as ``True`` does.
        contract_version: The contract version that this class was written for.
        Config: A pydantic model of the backend's own options.
        name: The entry-point name in the config. Core sets this and the next three before `start`.
        allow_pickle: Whether the config allows pickled object items.
        exclusive: Whether bootstrapping must fail if the store runs already, even with equal options. Of several
            processes that connect with ``bootstrap="auto"``, exactly one then bootstraps.
        attach_wait_s: Seconds that an attach may wait for an owner that has not started yet. Only a backend with a
            costly `start` needs it: core itself starts new objects of this class until one attaches.
        cache_bytes: How many bytes of cells that are kept by content a client keeps, to read them again. Core sets it
            before `start`. A backend that reads them from memory of its host clears it before `start` returns.
        narrow: Whether core may send integers narrower than they were put, where the wire takes that. A backend whose
            reads are views of what was put clears it before `start` returns.
        moved_rows: Where rows go by several paths, how many this client has put and read by each: name of the path ->
            rows. Metrics show it.
        stop_by: When `stop` should be over, on `time.monotonic`'s clock, whether the store answers or not. Core sets it
            before `stop`.
    """

    wire: ClassVar[WireFormat] = WireFormat()
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    scope: ClassVar[Scope] = Scope.PROCESS
    why_not_declared: ClassVar[Mapping[str, str]] = MappingProxyType({})
    deviations: ClassVar[Mapping[str, str]] = MappingProxyType({})
    opens_in_forks: ClassVar[bool] = True
    opens_anywhere: ClassVar[bool] = False
    contract_version: ClassVar[int] = CONTRACT_VERSION
    Config: ClassVar[type[BaseModel]] = NoOptions

    name: str = ""
    allow_pickle: bool = False
    exclusive: bool = False
    attach_wait_s: float = 0.0
    narrow: bool = True
    cache_bytes: int = 0
    stop_by: float = math.inf

    def __init__(self, config: Any) -> None:
        """Keeps the validated options. Opens nothing.

        Args:
            config: An instance of this class's ``Config``.
        """
        self.config = config
        self.moved_rows: dict[str, int] = {}

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Connects. Called once, before any hook, in the process of the client.

        Args:
            bootstrap: True: start what is needed, and own it. False: attach to what runs.
            deadline: On `time.monotonic`'s clock, in seconds.

        Raises:
            BackendUnavailableError: There is nothing to attach to. Retryable (the default of this error) if an owner
                may still start.
            AlreadyRunningError: ``bootstrap`` is True, and an instance with other options runs, or any instance if
                `exclusive`. Retryable if a client can attach to it soon; `connect("auto")` then tries to attach again.
        """

    def stop(self) -> None:
        """Disconnects, and ends what this client started. Called once, also after a failed start."""

    def stop_waiting(self, token: str) -> None:
        """The claim with this token, which gave a ``wake``, waits no longer; or a put, see `LedgerBackend`. Called in
        any thread. It must not block."""

    @classmethod
    def class_for(cls, config: Any) -> type[Backend]:
        """The class of the stores with these options. Default: this one.

        For a backend whose options choose between engines with other capabilities or another wire format. All these
        classes have the same ``Config``. Here and below, ``config`` is an instance of it.
        """
        return cls

    @classmethod
    def outlives_owner(cls, config: Any) -> bool:
        """Whether a store with these options can be bootstrapped with the data of an earlier one. Default: no.

        Tools that look into a store then bootstrap it if it does not run.
        """
        return False

    @classmethod
    def diagnose(cls, config: Any, *, deadline: float) -> Iterable[Finding]:
        """What `dataplane doctor` reports about this machine for these options. Default: nothing.

        Checks what `start` needs and what an operator should know: libraries, binaries, versions, addresses, settings
        of a running server. Starts and changes nothing. It runs in its own process, even if `start` would fail, so it
        must import inside the method any library that may be missing. Every wait must end before the deadline, on
        `time.monotonic`'s clock.

        Returns:
            Findings in the order in which they are shown, including those without a problem.
        """
        return ()
