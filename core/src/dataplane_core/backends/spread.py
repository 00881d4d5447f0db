"""`spread_over`: a backend whose partitions are spread over several stores, each with a ledger of its own.

A ledger is one process on one core. All stores are of the same backend, and have the same options but for the name that
keeps them apart. A partition lies in one of them, chosen by its name, so every client finds it without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from dataplane_core.backends.base import Backend, Finding
from dataplane_core.digests import fast_digest
from dataplane_core.errors import ConfigError
from dataplane_core.spec import AnnounceRequest, ListPartitionsRequest, ListUnitsRequest, UnitInfo
from dataplane_core.spec.operations import OPERATIONS, required_operations
from dataplane_core.spec.requests import ListClientsRequest

#: Between the number of a store and the name that a storage unit has there.
_SEPARATOR: Final = ":"


def ledger_of(partition_id: str, num_ledgers: int) -> int:
    """The number of the store that holds a partition, from 0. The same in every process."""
    # not `hash`: Python's differs from process to process
    return fast_digest(partition_id.encode()) % num_ledgers


def _routed(operation: str) -> Any:
    """An operation on one partition: its store does it."""

    def call(self: SpreadBackend, request: Any) -> Any:
        store = self._stores[ledger_of(request.partition_id, len(self._stores))]
        return getattr(store, operation)(request)

    call.__name__ = operation
    call.__doc__ = f"``{operation}`` of the store that holds the partition."
    return call


class SpreadBackend(Backend):
    """Several stores as one. `spread_over` makes the class for a backend."""

    store_class: ClassVar[type[Backend]] = Backend
    num_ledgers: ClassVar[int] = 1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._options = config.model_dump(exclude_unset=True)
        tags = [f"{number}of{self.num_ledgers}" for number in range(self.num_ledgers)]
        self._isolated = [self.isolated_options(self._options, tag) for tag in tags]
        configs = [self.store_class.Config.model_validate(options) for options in self._isolated]
        if any(other == configs[0] for other in configs[1:]):
            raise ConfigError(
                f"num_ledgers {self.num_ledgers} is refused: with these options, the names of the stores are too long "
                "to differ.",
                hint="Shorten the name in the options of the backend.",
            )
        self._stores: list[Any] = [self.store_class(own) for own in configs]
        self.narrow = all(store.narrow for store in self._stores)

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """As that of the backend's class."""
        isolate: Callable[[dict[str, Any], str], dict[str, Any]] | None = getattr(
            cls.store_class, "isolated_options", None
        )
        if isolate is None:
            raise ConfigError(
                f"num_ledgers {cls.num_ledgers} is refused: {cls.store_class.__name__} has no `isolated_options`, "
                "which keeps stores apart.",
                hint="Leave num_ledgers at 1.",
            )
        return isolate(options, tag)

    def attach_options(self) -> dict[str, Any]:
        """Options with which another process attaches to all stores, with the same ``num_ledgers``."""
        of_store: Callable[[], dict[str, Any]] | None = getattr(self._stores[0], "attach_options", None)
        if of_store is None:
            return dict(self._options)
        names = [key for key, value in self._isolated[0].items() if value != self._options.get(key)]
        options = {key: value for key, value in of_store().items() if key not in names}
        return options | {key: self._options[key] for key in names if key in self._options}

    @classmethod
    def first_of(cls, config: Any) -> Any:
        """The options of the first store, which tells for all."""
        options = cls.isolated_options(config.model_dump(exclude_unset=True), f"0of{cls.num_ledgers}")
        return cls.store_class.Config.model_validate(options)

    @classmethod
    def outlives_owner(cls, config: Any) -> bool:
        """As the backend's, of the first store."""
        return cls.store_class.outlives_owner(cls.first_of(config))

    @classmethod
    def diagnose(cls, config: Any, *, deadline: float) -> Iterable[Finding]:
        """As the backend's, of the first store."""
        return cls.store_class.diagnose(cls.first_of(config), deadline=deadline)

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Starts the stores, or attaches to them, one after the other."""
        for number, store in enumerate(self._stores):
            store.name, store.allow_pickle, store.moved_rows = self.name, self.allow_pickle, self.moved_rows
            # of several processes, the one that bootstraps the first store bootstraps all
            store.exclusive, store.attach_wait_s = self.exclusive and number == 0, self.attach_wait_s
            store.cache_bytes = self.cache_bytes // len(self._stores)
            store.start(bootstrap=bootstrap, deadline=deadline)

    def stop(self) -> None:
        """Stops all stores, the first one last: while it runs, nobody else bootstraps."""
        errors: list[Exception] = []
        for store in reversed(self._stores):
            store.stop_by = self.stop_by
            try:
                store.stop()
            except Exception as error:  # raised below, once the others are stopped
                errors.append(error)
        if errors:
            raise errors[0]

    def stop_waiting(self, token: str) -> None:
        """Tells all stores: any of them may be that of the claim."""
        for store in self._stores:
            store.stop_waiting(token)

    def list_partitions(self, request: ListPartitionsRequest) -> list[str]:
        """The partitions of all stores."""
        return [name for store in self._stores for name in store.list_partitions(copy(request))]

    def announce(self, request: AnnounceRequest) -> Any:
        """Lists the client in each store."""
        num_clients = [store.announce(copy(request)) for store in self._stores]
        return num_clients[0]

    def list_clients(self, request: ListClientsRequest) -> Any:
        """The clients of the first store: each is listed in all."""
        return self._stores[0].list_clients(request)

    def list_units(self, request: ListUnitsRequest) -> list[UnitInfo]:
        """The storage units of all stores. A name begins with the number of the store."""
        return [
            replace(unit, name=f"{number}{_SEPARATOR}{unit.name}")
            for number, store in enumerate(self._stores)
            for unit in store.list_units(copy(request))
        ]


def spread_over(cls: type[Backend], num_ledgers: int) -> type[SpreadBackend]:
    """The backend class whose partitions are spread over several stores of a class.

    Args:
        cls: The backend. It needs a classmethod ``isolated_options(options, tag)``, which gives options of a store that
            shares nothing with that of ``options``.
        num_ledgers: How many stores, at least 2.

    Returns:
        A class with the options, the capabilities and the wire format of ``cls``.

    Examples:
        >>> from dataplane_core.backends import spread_over
        >>> from dataplane_shm import ShmBackend
        >>> spread_over(ShmBackend, 4).num_ledgers
        4
    """
    same = (
        *("wire", "capabilities", "scope", "why_not_declared", "deviations"),
        *("opens_in_forks", "opens_anywhere", "contract_version", "Config"),
    )
    members = {name: getattr(cls, name) for name in same}
    members |= {name: _routed(name) for name in required_operations(cls.capabilities) if OPERATIONS[name].routed}
    return type(cls.__name__, (SpreadBackend,), {**members, "store_class": cls, "num_ledgers": num_ledgers})
