"""`TQSimpleBackend`: columns in the memory of the storage units of an instance.

Nodes and units come and go. The id of a write says which life of a unit has its rows (see `UnitBook`). The rows of a
life that has ended are gone. A process that a unit's Unix socket admits shares the unit's memory. All others reach the
same rows over TCP. The controller knows what the rows mean, which of them exist and who may have them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from msgspec.structs import replace

from dataplane_core.backends import (
    Backend,
    ExtentClient,
    Finding,
    RefsGoneError,
    StoredRows,
    columns_of,
    read_stored,
)
from dataplane_core.errors import BackendUnavailableError, CapacityExceededError, DataPlaneError, OperationTimeoutError
from dataplane_core.host_memory import in_threads
from dataplane_core.hosting import ExtentHost, Session, TcpAddress, UnixAddress, failure_of
from dataplane_core.ledger import Located, Ref, commands
from dataplane_core.spec import Capability, ListUnitsRequest, SharedRows, UnitInfo, WireColumn, WireFormat
from dataplane_tq_simple._backend import QueueBackend
from dataplane_tq_simple._diagnosis import unit_paths
from dataplane_tq_simple._messages import LIFE_BITS, BeginNear, Life, UnitRecords, UnitsGoneError, View, ViewUnits
from dataplane_tq_simple.config import TQSimpleConfig

if TYPE_CHECKING:
    from dataplane_tq_simple._instance import TQSimpleInstance

#: Seconds for which puts avoid a unit that had no room.
_FULL_S: Final = 1.0
#: Seconds that a listing waits for a unit, to say how rows get from there.
_PATH_S: Final = 1.0
_NEVER: Final = threading.Event()
#: The most units that one operation moves bytes to or from at the same time.
_AT_ONCE: Final = 16

#: Seconds between two tries of what met a unit that ended.
_PATIENCE_S: Final = 0.2
#: Seconds that the controller may take to say whether a unit has ended, while a reply of the unit may come.
_QUESTION_S: Final = 0.5

_Work = TypeVar("_Work")
_Result = TypeVar("_Result")


class TQSimpleBackend(QueueBackend):
    """All clients of an instance connect to one controller and its storage units, from any node of the Ray cluster."""

    wire = WireFormat(ragged="jagged", objects="encoded", shared_rows=True, by_content=True, narrow=True)
    Config = TQSimpleConfig
    capabilities = QueueBackend.capabilities | {Capability.UNITS}
    why_not_declared: ClassVar[Mapping[str, str]] = {
        **QueueBackend.why_not_declared,
        Capability.DURABLE: "the payload is in memory, unless the option `durable` is set",
    }

    @classmethod
    def class_for(cls, config: TQSimpleConfig) -> type[Backend]:
        """That of the option ``storage``."""
        from dataplane_tq_simple._transfer_queue import TransferQueueBackend

        return TransferQueueBackend if config.storage == "transfer_queue" else cls

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.narrow = not config.views  # a view has the dtype in which the cells lie in memory
        self._view = View(-1, {})  # the newest that this client has of the book of storage units
        self._view_lock = threading.Lock()
        self._units: dict[int, ExtentClient] = {}  # by the number of the life
        self._wire_cache_bytes = 0
        self._units_lock = threading.RLock()  # a signal handler may use the client
        self._full: dict[int, float] = {}  # lives that had no room -> until when puts avoid them
        self._current = threading.local()  # what a thread does with several units: whether it is to end

    @classmethod
    def instance_class(cls) -> type[TQSimpleInstance]:
        from dataplane_tq_simple._instance import TQSimpleInstance

        return TQSimpleInstance

    @classmethod
    def diagnose_storage(cls, config: Any, deadline: float, connected: bool) -> Iterable[Finding]:
        """How rows get from the storage units of a running instance to this process."""
        yield Finding.ok("Rows are kept in the memory of storage units, one on each node (storage: memory).")
        backend = cls(config)
        try:
            if connected:
                backend.start(bootstrap=False, deadline=deadline)
                units = backend.list_units(ListUnitsRequest(deadline=deadline))
                yield from unit_paths(units, backend._ray().node)
        except BackendUnavailableError:  # none runs
            return
        finally:
            backend.stop()

    def join(self, deadline: float) -> None:
        # what is read from memory of this node need not be kept
        self._wire_cache_bytes, self.cache_bytes = self.cache_bytes, 0
        self.refresh(deadline)

    def leave(self) -> None:
        with self._units_lock:
            units = list(self._units.values())
            self._units.clear()
        for unit in units:
            unit.session.close()

    # --- units --------------------------------------------------------------------------------------------------------

    def list_units(self, request: ListUnitsRequest) -> list[UnitInfo]:
        """The storage units, and how this process reaches their rows."""
        units = self.call(UnitRecords(), request.deadline)
        self.refresh(request.deadline)
        living = self.living()
        return [replace(unit, path=self._path(living.get(unit.name), request.deadline)) for unit in units]

    def refresh(self, deadline: float) -> None:
        """Gets the newest view. Raises as `call`."""
        view = self.call(ViewUnits(self._view.version), deadline)
        with self._view_lock:
            if view is None or view.version <= self._view.version:
                return
            ended = [number for number, life in self._view.lives.items() if life != view.lives.get(number)]
            self._view = view
        self._forget(ended)

    def _look_up(self, numbers: Iterable[int], deadline: float) -> None:
        """Asks the book if this client does not know one of these lives. One that is not known then has ended."""
        if any(number not in self._view.lives for number in numbers):
            self.refresh(deadline)

    def life(self, number: int) -> Life | None:
        """A life that has not ended, as far as this client knows; else None."""
        return self._view.lives.get(number)

    def living(self) -> dict[str, int]:
        """The units that run, as far as this client knows: name -> number of the life."""
        return {life.unit: number for number, life in self._view.lives.items() if life.served}

    def _path(self, number: int | None, deadline: float) -> Any:
        if number is None:
            return ""
        try:
            return self._unit(number, min(deadline, time.monotonic() + _PATH_S)).path
        except DataPlaneError:  # it ends now, or cannot be reached
            return ""

    # --- columns ------------------------------------------------------------------------------------------------------

    def begin_put(
        self, begin: commands.BeginPut, columns: Mapping[str, WireColumn | SharedRows], deadline: float
    ) -> int:
        return self.call(BeginNear(begin, self._ray().node, self._full_units()), deadline)

    def store_writes(
        self, writes: Mapping[int, commands.Write], columns: Mapping[str, WireColumn | SharedRows], deadline: float
    ) -> None:
        """As `LedgerBackend.store_writes`. The ids say which unit gets the rows. Raises `UnitsGoneError` if that
        unit has ended, and `CapacityExceededError` if it has no room."""
        stored = {write_id: columns_of(write, columns).values() for write_id, write in writes.items()}
        number = next(iter(writes)) >> LIFE_BITS
        self._look_up([number], deadline)

        def put(number: int, unit: ExtentClient, stored: Mapping[int, Iterable[WireColumn]]) -> None:
            try:
                unit.put(stored, deadline, self.config.copy_threads)
            except CapacityExceededError:
                with self._units_lock:
                    self._full[number] = time.monotonic() + _FULL_S
                raise
            self._count(unit, sum(len(write.row_bytes) for write in writes.values()))

        self._each({number: stored}, put, deadline)

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        """As `LedgerBackend.fetch_fields`, or with views where the options allow them."""

        def fetch() -> dict[str, WireColumn]:
            parts, units = self._get(self._reads(located, deadline), located, deadline)
            try:
                return read_stored(located.specs, parts, num_samples, self.config.copy_threads)
            finally:
                for unit in units:
                    unit.check("get_samples")

        return self._while_units_end(fetch, deadline)

    def _while_units_end(self, work: Callable[[], _Result], deadline: float) -> _Result:
        """Repeats what meets a unit that ended: the book knows soon which have."""
        while True:
            try:
                return work()
            except UnitsGoneError:
                if time.monotonic() + _PATIENCE_S >= deadline:
                    raise
                time.sleep(_PATIENCE_S)
                self.refresh(deadline)

    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> set[Ref]:
        """As `LedgerBackend.delete_refs`. Those are left that nobody serves now: a unit may bring them back."""

        def delete() -> set[Ref]:
            drops, left = self._drops(refs, deadline)
            if left:  # this client may not know that they are served again
                self.refresh(deadline)
                drops, left = self._drops(refs, deadline)
            self._each(drops, lambda _, unit, some: unit.drop(some, deadline), deadline)
            return left

        return self._while_units_end(delete, deadline)

    def _drops(self, refs: Sequence[Ref], deadline: float) -> tuple[dict[int, list[Ref]], set[Ref]]:
        """Which rows each life that is served is to drop; and those that nobody serves now. The rows of lives that have
        ended went with them."""
        drops: dict[int, list[Ref]] = {}
        left: set[Ref] = set()
        self._look_up({write_id >> LIFE_BITS for write_id, _ in refs}, deadline)
        for ref in refs:
            number = ref[0] >> LIFE_BITS
            life = self.life(number)
            if life is not None and life.served:
                drops.setdefault(number, []).append(ref)
            elif life is not None:
                left.add(ref)
        return drops, left

    def _reads(self, located: Located, deadline: float) -> dict[int, list[commands.Part]]:
        """What to read from which life. Raises `RefsGoneError` for rows of those that have ended."""
        reads: dict[int, list[commands.Part]] = {}
        gone: list[Ref] = []
        self._look_up({part.write_id >> LIFE_BITS for part in located.parts}, deadline)
        for part in located.parts:
            number = part.write_id >> LIFE_BITS
            if self.life(number) is None:
                gone += [(part.write_id, position) for position in part.positions]
            else:
                reads.setdefault(number, []).append(part)
        if gone:
            raise RefsGoneError(f"the storage units of {len(gone)} rows ended.", refs=gone)
        return reads

    def _get(
        self, reads: Mapping[int, list[commands.Part]], located: Located, deadline: float
    ) -> tuple[list[StoredRows], list[ExtentClient]]:
        """Where rows are, and the units that keep them there."""
        stored: list[StoredRows] = []
        units: list[ExtentClient] = []

        def get(number: int, unit: ExtentClient, parts: list[commands.Part]) -> None:
            stored.extend(unit.get(parts, located.specs, deadline))
            units.append(unit)
            self._count(unit, sum(len(part.rows) for part in parts))

        self._each(reads, get, deadline)
        return stored, units

    def _count(self, unit: ExtentClient, num_rows: int) -> None:
        with self._units_lock:
            self.moved_rows[unit.path] = self.moved_rows.get(unit.path, 0) + num_rows

    # --- connections to units -----------------------------------------------------------------------------------------

    def _full_units(self) -> list[int]:
        """The lives of units that had no room a moment ago, also for cleared rows that are still viewed."""
        now = time.monotonic()
        with self._units_lock:
            self._full = {number: until for number, until in self._full.items() if now < until}
            return list(self._full)

    def _each(
        self, work: Mapping[int, _Work], act: Callable[[int, ExtentClient, _Work], None], deadline: float
    ) -> None:
        """Does something with several units at the same time, by the numbers of their lives."""
        ends = threading.Event()

        def one(number: int, piece: _Work) -> None:
            self._current.ends = ends
            try:
                act(number, self._unit(number, deadline), piece)
            except UnitsGoneError:
                self._forget([number])
                raise

        if len(work) == 1:
            one(*next(iter(work.items())))
        elif work:
            in_threads([partial(one, *item) for item in work.items()], min(len(work), _AT_ONCE), ends.set)

    def _unit(self, number: int, deadline: float) -> ExtentClient:
        """The connection to a life of a unit."""
        unit = self._units.get(number)
        if unit is not None:
            return unit
        life = self.life(number)
        if life is not None and life.why:  # it may be mended by now
            self.refresh(deadline)
            life = self.life(number)
        if life is None:
            raise UnitsGoneError("a storage unit ended. What it held is lost.")
        if life.why:
            raise BackendUnavailableError(
                f"storage {life.unit} cannot bring its rows back: {life.why}",
                retryable=False,
                hint="They are not lost. It tries again until it can.",
            )
        if not life.served:
            raise UnitsGoneError(f"storage {life.unit} is being started again, and brings its rows back.")
        new = self._connect(number, life, deadline)
        with self._units_lock:
            unit = new if self._closed else self._units.setdefault(number, new)
        if self._closed or unit is not new:
            new.session.close()
        return unit

    def _connect(self, number: int, life: Life, deadline: float) -> ExtentClient:
        def watch() -> str:
            """Asks the book whether the unit has ended, while a call waits for it."""
            if getattr(self._current, "ends", _NEVER).is_set():  # another call of the operation failed
                raise BackendUnavailableError("the call was given up with another one of its operation.")
            if self.life(number) == life:
                try:
                    self.refresh(time.monotonic() + _QUESTION_S)
                except (OperationTimeoutError, BackendUnavailableError) as error:
                    if isinstance(error, BackendUnavailableError) and not error.retryable:
                        raise  # else the controller is busy, or is started again
            if self.life(number) != life:
                raise UnitsGoneError("a storage unit ended.")
            return "It has not ended: it is stopped, overloaded, or not reachable from this process."

        def open_at(address: UnixAddress | TcpAddress, views: bool) -> ExtentClient:
            failure = failure_of(f"storage {life.unit}", UnitsGoneError)
            session = Session(address, ExtentHost.messages, deadline, failure, lambda: watch)
            return ExtentClient(session, views=views)

        started = life.started
        if self.config.share_memory:
            # it does not run here, its socket is not for this process, or its memory cannot be mapped
            with suppress(BackendUnavailableError, OSError):
                return open_at(UnixAddress(started.socket, started.secret), self.config.views)
        self.cache_bytes = self._wire_cache_bytes
        return open_at(TcpAddress(started.ip, started.port, started.secret), False)

    def _forget(self, numbers: list[int]) -> None:
        """Gives up connections. What views refer to stays."""
        with self._units_lock:
            units = [self._units.pop(number) for number in numbers if number in self._units]
        for unit in units:
            unit.session.finish()
