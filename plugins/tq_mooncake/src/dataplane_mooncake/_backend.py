"""`TQMooncakeBackend`: the ledger in a controller on Ray, the rows in Mooncake's segments."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from dataplane_core.backends import Finding, RefsGoneError, RowStoreBackend
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    ClientClosedError,
    ConfigError,
    OperationTimeoutError,
)
from dataplane_core.host_memory import memory_limit
from dataplane_core.spec import Capability
from dataplane_mooncake._calls import Call, bounded
from dataplane_mooncake._master import MasterWatch
from dataplane_mooncake._store import FULL, TRANSFER_FAILED, UNREACHABLE, EngineError, RowsMissing, Store, StoreSettings
from dataplane_mooncake.config import TQMooncakeConfig
from dataplane_mooncake.machine import check_distributions, check_library, check_machine, check_master, diagnose
from dataplane_tq_simple import QueueBackend, UnitsGoneError

if TYPE_CHECKING:
    from dataplane_mooncake._cluster import MooncakeInstance

_MIB: Final = 1024 * 1024
#: Seconds to ask for the units' addresses, before connections to them are ended.
_REFRESH_S: Final = 5.0
#: Seconds that a failed call checks whether the death of a process is the cause, and between two looks.
_FIND_CAUSE_S: Final = 3.0
_AGAIN_S: Final = 0.1


class TQMooncakeBackend(QueueBackend, RowStoreBackend):
    """All clients of an instance connect to one controller, and to Mooncake's segments on any node of the cluster."""

    Config = TQMooncakeConfig
    why_not_declared: ClassVar[Mapping[str, str]] = {
        **QueueBackend.why_not_declared,
        Capability.UNITS: "Mooncake's master places the rows, and does not say how many a storage unit holds",
    }

    def __init__(self, config: TQMooncakeConfig) -> None:
        super().__init__(config)
        self._store: Store | None = None
        self._master: MasterWatch | None = None

    @classmethod
    def instance_class(cls) -> type[MooncakeInstance]:
        from dataplane_mooncake._cluster import MooncakeInstance

        return MooncakeInstance

    @classmethod
    def diagnose(cls, config: TQMooncakeConfig, *, deadline: float) -> Iterable[Finding]:
        """Checks Mooncake on this node; then the engine's packages and the Ray cluster, as for ``tq_simple``."""
        yield from diagnose(config)
        yield from super().diagnose(config, deadline=deadline)

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Checks this machine, then starts the instance on Ray, or attaches to it."""
        if bootstrap:
            check_machine(self.config)
            check_master(mend=True)
        else:  # the rest when the options of the instance are known
            check_distributions()
            check_library()
        super().start(bootstrap=bootstrap, deadline=deadline)

    def call(self, request: Any, deadline: float, wake: Callable[[], object] | None = None) -> Any:
        """As `QueueBackend.call`. Raises `BackendUnavailableError` also if the master is dead: the rows are lost."""
        self._check_master()
        return super().call(request, deadline, wake)

    def _check_master(self) -> None:
        if self._master is not None:
            self._master.check()

    def join(self, deadline: float) -> None:
        config = self._instance.config.model_copy(update=self.config.own_options())
        if not self._bootstrapped:
            check_machine(config)
        from dataplane_mooncake._cluster import this_nodes_address

        available = memory_limit().available_bytes
        if config.client_buffer_bytes > available:
            raise ConfigError(
                f"local_buffer_size_bytes is {config.local_buffer_size_bytes // _MIB} MiB, but this node has "
                f"{available // _MIB} MiB available.",
                hint="Lower local_buffer_size_bytes, or run fewer processes here.",
            )
        master = self._instance.details["master"]
        address, buffer_bytes = this_nodes_address(config), config.client_buffer_bytes
        settings = StoreSettings(master, address, config.protocol, config.rdma_devices, buffer_bytes)
        self._master = MasterWatch(self.config.instance, master, deadline)
        self._store = Store.acquire(settings, self._listening(), deadline=deadline)

    def _listening(self) -> list[tuple[str, int]]:
        """Where the storage units listen for transfers."""
        return [place for segment in self._instance.segments for place in segment.listening]

    def leave(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.release()
        if self._master is not None:
            self._master.close()

    # --- rows --------------------------------------------------------------------------------------------------------

    def put_rows(self, handles: Sequence[int], buffer: Any, offsets: Any, deadline: float) -> None:
        """As `RowStoreBackend.put_rows`. If it times out, its thread may store more rows later, and deletes these
        itself. So the caller must not change the bytes, even after an error."""
        keys = self._keys(handles)
        store = self._require_store()
        what = f"put_rows({len(keys)} rows, {int(offsets[-1])} bytes)"
        segments = self._instance.details["segments"]
        if not segments:
            self._refresh(deadline)
            raise UnitsGoneError(f"{what}: no storage unit has a segment at the moment. Nothing was stored.")
        # without segments of dead units, the master may place the rows as it likes
        named = [segment.name for segment in self._instance.segments] if self._instance.details["dead"] else []

        def check_units() -> None:
            if self._instance.details["segments"] != segments:
                raise UnitsGoneError(f"{what}: a storage unit died, or was started again. Nothing was stored.")

        self._run(
            store,
            what,
            lambda call: store.put(call, keys, buffer, offsets, segments=named),
            deadline,
            check_units,
            undo=lambda _: store.delete(Call(), keys),
        )

    def get_rows(self, handles: Sequence[int], deadline: float) -> list[memoryview]:
        keys = self._keys(handles)
        store = self._require_store()
        what = f"get_rows({len(keys)} rows)"

        def check_units() -> None:
            dead = self._instance.details["dead"]
            lost = set(self._run(store, what, lambda _: store.placed_in(keys, dead), deadline))
            if lost:
                gone = [handle for handle, key in zip(handles, keys, strict=True) if key in lost]
                raise RefsGoneError(f"{what}: the storage unit of {len(gone)} rows died.", handles=gone)

        def get(call: Call) -> list[memoryview]:
            return store.get(call, keys, dead=self._instance.details["dead"])

        try:
            rows: list[memoryview] = self._run(store, what, get, deadline, check_units)
            return rows
        except RowsMissing:
            raise RefsGoneError(f"{what}: some rows do not exist.") from None

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        keys = self._keys(handles)
        store = self._require_store()
        self._run(store, f"delete_rows({len(keys)} rows)", lambda call: store.delete(call, keys), deadline)

    def _keys(self, handles: Sequence[int]) -> list[str]:
        prefix = self._instance.details["prefix"]
        return [f"{prefix}{handle}" for handle in handles]

    def _require_store(self) -> Store:
        store = self._store
        if store is None:
            raise ClientClosedError("this client is closed.")
        self._check_master()
        return store

    def _run(
        self,
        store: Store,
        what: str,
        work: Callable[[Call], Any],
        deadline: float,
        check_units: Callable[[], None] = lambda: None,
        *,
        undo: Callable[[Any], None] | None = None,
    ) -> Any:
        """Makes a call. Repeats it, but for a put, while the master lives and cannot be reached.

        ``check_units`` raises if the death of a storage unit is the reason why a transfer failed.
        """
        while True:
            try:
                return bounded(
                    what,
                    work,
                    deadline,
                    undo=undo,
                    hold=store.in_call,
                    watch=lambda: self._instance.watch_call(self._check_master).check,
                    closed=lambda: self._closed,
                    on_give_up=lambda: self._end_given_up(store),
                )
            except EngineError as error:
                self._check_master()
                if error.code != UNREACHABLE:
                    self._raise_cause(what, error, check_units, deadline)
                if undo is not None or time.monotonic() + _AGAIN_S >= deadline:  # the backend repeats puts
                    master = f"the mooncake_master at {self._instance.details['master']}"
                    raise UnitsGoneError(f"{what} failed: {master} does not answer ({error}).") from error
                time.sleep(_AGAIN_S)

    def _end_given_up(self, store: Store) -> None:
        """Ends the connections of calls that were given up, in the background."""

        def end(_: Call) -> None:
            with contextlib.suppress(Exception):  # a unit may have been started again
                self._refresh(time.monotonic() + _REFRESH_S)
                store.add_units(self._listening())
            store.end_given_up()

        Call().start(end)

    def _refresh(self, deadline: float) -> None:
        """Asks for the segments anew. If the controller does not answer, what is known stays."""
        with contextlib.suppress(OperationTimeoutError, BackendUnavailableError):
            self._instance.refresh(deadline=min(deadline, time.monotonic() + _REFRESH_S))

    def _raise_cause(self, what: str, error: EngineError, check_units: Callable[[], None], deadline: float) -> NoReturn:
        """Finds out why Mooncake failed, and raises that error. The death of a process is soon known."""
        if error.code == FULL:
            raise CapacityExceededError(
                f"{what} refused: the {len(self._instance.units)} segments of "
                f"{self._instance.config.segment_size_bytes // _MIB} MiB of instance {self.config.instance!r} have no "
                f"room ({error}).",
                hint="Clear samples, or raise segment_size_bytes or num_storage_units.",
            ) from error
        watch = self._instance.watch_call(self._check_master)
        give_up = min(deadline, time.monotonic() + _FIND_CAUSE_S)
        while True:
            watch.check()
            if error.code == TRANSFER_FAILED:
                self._refresh(deadline)
                check_units()
                if watch.asked:  # a unit is cut off, or dies: Ray will say which
                    give_up = min(deadline, time.monotonic() + _FIND_CAUSE_S)
            elif not watch.asked:
                break
            if time.monotonic() >= give_up:
                break
            time.sleep(_AGAIN_S)
        raise BackendError(f"{what} failed: Mooncake's {error}.", hint=watch.describe()) from error
