"""`QueueBackend`: the ledger in a controller on Ray. `TQSimpleBackend`: also the rows in its storage units.

`TransferQueueBackend`: the rows in those of TransferQueue, for ``storage: transfer_queue``.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from dataplane_core.backends import LEDGER_CAPABILITIES, Backend, Finding, LedgerBackend, Level, RowStoreBackend
from dataplane_core.errors import BackendUnavailableError, DataPlaneError
from dataplane_core.ledger import Command, Located, Ref, Reply, commands
from dataplane_core.ownership import PrivateFolder
from dataplane_core.spec import (
    Capability,
    ListUnitsRequest,
    PutRequest,
    Scope,
    SharedRows,
    UnitInfo,
    WireColumn,
    WireFormat,
)
from dataplane_tq_simple._diagnosis import diagnose, unit_paths
from dataplane_tq_simple._messages import BeginNear, UnitsGoneError
from dataplane_tq_simple.config import QueueConfig, TQSimpleConfig

if TYPE_CHECKING:
    from dataplane_tq_simple._client import QueueEngine
    from dataplane_tq_simple._engine import Engine
    from dataplane_tq_simple._transfer_queue import TransferQueueEngine

_Engine = TypeVar("_Engine", bound="QueueEngine")

#: Seconds after which a put is tried again whose storage unit ended.
_AGAIN_S = 0.1


class QueueBackend(LedgerBackend, Generic[_Engine]):
    """A backend whose ledger runs in a controller on Ray. ``Config`` derives from `QueueConfig`."""

    capabilities = LEDGER_CAPABILITIES | {Capability.CLIENTS, Capability.WAKES}
    scope = Scope.CLUSTER
    opens_in_forks = False
    why_not_declared: ClassVar[Mapping[str, str]] = {
        Capability.DURABLE: "the payload is in memory; the option `journal` keeps only the ledger",
        Capability.NO_PICKLE: "Ray's messages carry pickles over sockets without authentication",
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._engine: _Engine | None = None
        self._folders: list[PrivateFolder] = []  # by which others of this host find what this started

    @classmethod
    @abstractmethod
    def _engine_class(cls) -> type[_Engine]:
        """The engine's class. Imported only here, so that importing the backend does not import Ray."""

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
        return {"instance": self.config.instance, "ray_address": self._connected().ray_address}

    @classmethod
    def diagnose(cls, config: Any, *, deadline: float) -> Iterable[Finding]:
        """Ray itself, the Ray cluster that would be used, its CPUs and this node's address in it; or the
        instance that runs on this host."""
        return diagnose(config, deadline, lambda: cls._engine_class().instance_class)

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Starts the instance on Ray, or attaches to it."""
        engine_class = self._engine_class()
        from dataplane_tq_simple import _owners

        name = engine_class.instance_class.controller_name(self.config)
        known = _owners.cluster_is_known(self.config)
        if not bootstrap:
            config = self.config
            if not known:
                config = config.model_copy(update={"ray_address": _owners.find(config, name)})
            # the engine waits itself: each new try would connect this process to Ray again
            self._engine = engine_class.open(config, bootstrap=False, deadline=deadline, wait_s=self.attach_wait_s)
            return
        try:
            if self.exclusive and not known:
                self._folders.append(_owners.claim_name(name, deadline))
            self._engine = engine_class.open(self.config, bootstrap=True, deadline=deadline)
            left = _owners.leave(name, self._engine.ray_address, deadline)
            self._folders += [left] if left is not None else []
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the connection; also ends the instance if this client started it."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        finally:
            while self._folders:
                self._folders.pop().release()

    def call_ledger(self, deadline: float, command: Command[Reply]) -> Reply:
        return self._connected().call(command, deadline)

    def call_ledger_waking(self, deadline: float, command: Command[Reply], wake: Callable[[], bool]) -> Reply:
        return self._connected().call(command, deadline, wake)

    def stop_waiting(self, token: str) -> None:
        if self._engine is not None:
            self._engine.stop_waiting(token)

    def put_once(self, request: PutRequest, writes: Sequence[commands.Write], ticket: Any) -> Sequence[Ref]:
        """Tries a put again where storage units ended before it was committed: others take it, or they come back."""
        while True:
            try:
                return super().put_once(request, writes, ticket)
            except UnitsGoneError:
                if time.monotonic() + 2 * _AGAIN_S >= request.deadline:
                    raise
                time.sleep(_AGAIN_S)

    def new_write_id(self, num_ids: int) -> None:
        """None: the controller numbers the writes. The number says where the rows go. No write outlives the ledger."""

    def _connected(self) -> _Engine:
        if self._engine is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self._engine


class TQSimpleBackend(QueueBackend["Engine"]):
    """All clients of an instance connect to one controller and its storage units, from any node of the Ray cluster."""

    wire = WireFormat(ragged="jagged", objects="encoded", shared_rows=True, narrow=True)
    Config = TQSimpleConfig
    capabilities = QueueBackend.capabilities | {Capability.UNITS}
    why_not_declared: ClassVar[Mapping[str, str]] = {
        **QueueBackend.why_not_declared,
        Capability.DURABLE: "the payload is in memory, unless the option `durable` is set",
    }

    @classmethod
    def class_for(cls, config: TQSimpleConfig) -> type[Backend]:
        """That of the option ``storage``."""
        return TransferQueueBackend if config.storage == "transfer_queue" else cls

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.narrow = not config.views  # a view has the dtype in which the cells lie in memory

    @classmethod
    def _engine_class(cls) -> type[Engine]:
        from dataplane_tq_simple._engine import Engine

        return Engine

    @classmethod
    def diagnose(cls, config: Any, *, deadline: float) -> Iterable[Finding]:
        """As that of `QueueBackend`, and how rows get from the storage units of a running instance to this process, if
        its cluster is named: that of an owner on this host may hang."""
        found = list(super().diagnose(config, deadline=deadline))
        yield from found
        if any(each.level is Level.ERROR for each in found):
            return
        from dataplane_tq_simple import _owners

        if not _owners.cluster_is_known(config):
            return
        backend = cls(config)
        try:
            backend.start(bootstrap=False, deadline=deadline)
            units = backend.list_units(ListUnitsRequest(deadline=deadline))
            yield from unit_paths(units, backend._connected().node)
        except BackendUnavailableError:  # none runs
            return
        except DataPlaneError as error:
            yield Finding.error(f"The storage units cannot be asked: {error.message}", error.hint)
        finally:
            backend.stop()

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """As that of `QueueBackend`."""
        super().start(bootstrap=bootstrap, deadline=deadline)
        self._connected().moved_rows = self.moved_rows

    def begin_put(
        self, begin: commands.BeginPut, columns: Mapping[str, WireColumn | SharedRows], deadline: float
    ) -> int:
        engine = self._connected()
        return engine.call(BeginNear(begin, engine.node, engine.full_units()), deadline)

    def store_writes(
        self, writes: Mapping[int, commands.Write], columns: Mapping[str, WireColumn | SharedRows], deadline: float
    ) -> None:
        self._connected().store(writes, columns, deadline)

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        return self._connected().fetch(located, num_samples, deadline)

    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> set[Ref]:
        return self._connected().delete(refs, deadline)

    def list_units(self, request: ListUnitsRequest) -> list[UnitInfo]:
        """Asks the controller."""
        return self._connected().units(request.deadline)


class TransferQueueBackend(QueueBackend["TransferQueueEngine"], RowStoreBackend):
    """As `TQSimpleBackend`, with the rows in the storage units of the TransferQueue that runs on the Ray cluster."""

    Config = TQSimpleConfig
    why_not_declared: ClassVar[Mapping[str, str]] = {
        **QueueBackend.why_not_declared,
        Capability.UNITS: "TransferQueue places the rows, and does not say how many a storage unit holds",
    }

    @classmethod
    def _engine_class(cls) -> type[TransferQueueEngine]:
        from dataplane_tq_simple._transfer_queue import TransferQueueEngine

        return TransferQueueEngine

    @classmethod
    def diagnose(cls, config: Any, *, deadline: float) -> Iterable[Finding]:
        """As that of `QueueBackend`, and the TransferQueue of the cluster, if the cluster is named."""
        found = list(super().diagnose(config, deadline=deadline))
        yield from found
        if any(each.level is Level.ERROR for each in found):
            return
        from dataplane_tq_simple import _owners, _transfer_queue

        yield from _transfer_queue.diagnose(config, deadline, connect=_owners.cluster_is_known(config))

    def attach_options(self) -> dict[str, Any]:
        """As that of `QueueBackend`, and the storage."""
        return {**super().attach_options(), "storage": self.config.storage}

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """As that of `QueueBackend`. Raises `ConfigError` if TransferQueue is not installed."""
        from dataplane_tq_simple._transfer_queue import load_library

        load_library()
        super().start(bootstrap=bootstrap, deadline=deadline)

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        self._connected().put_rows(handles, buffer, offsets, deadline)

    def get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[memoryview]:
        return self._connected().get_rows(handles, deadline)

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        self._connected().delete_rows(handles, deadline)
