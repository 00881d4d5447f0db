"""The engine of ``tq_mooncake``: keeps rows of bytes in the Mooncake segments of an instance.

Importing this module imports Ray.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import ray
import ray.exceptions

from dataplane_core.backends import RefsGoneError
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    ClientClosedError,
    ConfigError,
    OperationTimeoutError,
)
from dataplane_core.host_memory import memory_limit
from dataplane_mooncake._calls import Call, bounded
from dataplane_mooncake._cluster import MooncakeInstance, this_nodes_address
from dataplane_mooncake._master import MasterWatch
from dataplane_mooncake._store import (
    FULL,
    NOT_FOUND,
    TRANSFER_FAILED,
    UNREACHABLE,
    EngineError,
    RowsMissing,
    Store,
    StoreSettings,
)
from dataplane_mooncake.machine import check_machine
from dataplane_tq_simple.engines import QueueEngine, UnitsGoneError, cause, check_head

_MIB: Final = 1024 * 1024
#: Seconds between two looks whether a master is back.
_COMES_BACK_S: Final = 0.1
#: Seconds to ask for the units' addresses, before connections to them are ended.
_REFRESH_S: Final = 5.0
#: Seconds that a failed call checks whether a dead storage unit is the cause.
_FIND_CAUSE_S: Final = 3.0


class Engine(QueueEngine):
    """A `QueueEngine` that moves rows with Mooncake."""

    instance_class = MooncakeInstance

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store: Store | None = None
        self._master: MasterWatch | None = None  # of a master that is not started again if it dies

    def call(self, request: Any, deadline: float, wake: Callable[[], object] | None = None) -> Any:
        """As `QueueEngine.call`, but first checks a master that is not started again: without it, the rows are lost.

        Raises:
            BackendUnavailableError: Also if that master is dead.
        """
        if self._master is not None:
            self._master.check()
        return super().call(request, deadline, wake)

    def _join(self, deadline: float) -> None:
        config = self.config.model_copy(update=self.own.own_options())
        if not self.bootstrapped:
            check_machine(config)
        available = memory_limit().available_bytes
        if config.client_buffer_bytes > available:
            raise ConfigError(
                f"local_buffer_size_bytes is {config.local_buffer_size_bytes // _MIB} MiB, but this node has "
                f"{available // _MIB} MiB available.",
                hint="Lower local_buffer_size_bytes, or run fewer processes here.",
            )
        master = self._instance.details["master"]
        settings = StoreSettings(
            master,
            this_nodes_address(config),
            config.protocol,
            config.rdma_devices,
            config.client_buffer_bytes,
            config.store_memcpy,
        )
        if not self._instance.details["owns_master"]:
            self._master = MasterWatch(self.config.instance, master)
            self._master.check()
        while self._store is None:
            try:
                self._store = Store.acquire(settings, self._listening(), deadline=deadline)
            except BackendUnavailableError:
                self._watch().check()
                if self._master is not None or time.monotonic() + _COMES_BACK_S >= deadline:
                    raise
                time.sleep(_COMES_BACK_S)

    def _listening(self) -> list[tuple[str, int]]:
        """Where the storage units listen for transfers."""
        return [place for segment in self._instance.segments for place in segment.listening]

    def _leave(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.release()

    # --- rows --------------------------------------------------------------------------------------------------------

    def put_rows(self, handles: Sequence[int], buffer: Any, offsets: npt.NDArray[np.int64], *, deadline: float) -> None:
        """As `RowStoreBackend.put_rows`. Each handle is used only once in the instance, and no row is empty.

        If it times out, its thread may store more rows later, and deletes these itself. So the caller must not change
        the bytes, even after an error.
        """
        keys = self._keys(handles)
        store = self._require_store()
        what = f"put_rows({len(keys)} rows, {int(offsets[-1])} bytes)"
        segments = self._instance.details["segments"]
        if not segments:
            self._refresh(deadline)
            raise UnitsGoneError(f"{what}: no storage unit has a segment at the moment. Nothing was stored.")
        # a master of our own without segments of dead units may place the rows as it likes
        shared = self._master is not None
        named = None
        if shared or self._instance.details["dead"]:
            named = {each.name: each.endpoint for each in self._instance.segments}

        def check_units() -> None:
            if self._instance.details["segments"] != segments:
                raise UnitsGoneError(f"{what}: a storage unit died, or was started again. Nothing was stored.")

        self._run(
            store,
            what,
            lambda call: store.put(call, keys, buffer, offsets, segments=named, shared=shared),
            deadline,
            check_units,
            undo=lambda _: store.delete(Call(), keys),
        )

    def get_rows(self, handles: Sequence[int], *, deadline: float) -> list[memoryview]:
        """As `RowStoreBackend.get_rows`. No handle may repeat. The views are of one new buffer."""
        keys = self._keys(handles)
        store = self._require_store()
        what = f"get_rows({len(keys)} rows)"

        def check_units() -> None:
            dead = self._instance.details["dead"]
            lost = set(self._bounded(store, what, lambda _: store.placed_in(keys, dead), deadline))
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

    def delete_rows(self, handles: Sequence[int], *, deadline: float) -> None:
        """As `RowStoreBackend.delete_rows`."""
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
        """Makes a call. Repeats it, but for a put, when the master has died meanwhile and is back.

        ``check_units`` raises if the death of a storage unit is the reason why a transfer failed, or a segment had no
        room.
        """
        while True:
            try:
                return self._bounded(
                    store, what, work, deadline, undo=undo, on_give_up=lambda: self._end_given_up(store)
                )
            except EngineError as error:
                if not self._master_came_back(store, what, error, deadline):
                    self._await_news(error, check_units, deadline)
                    self._raise_cause(what, error, deadline)
                if undo is not None:
                    raise UnitsGoneError(
                        f"{what}: the mooncake_master died, and was started again. Nothing was stored."
                    ) from error
                time.sleep(_COMES_BACK_S)

    def _master_came_back(self, store: Store, what: str, error: EngineError, deadline: float) -> bool:
        """Whether a call failed because the master had died. If so, waits until it is back and has its segments.

        False if the master does not say so in time: what made the call fail is then the better answer.

        Raises:
            BackendUnavailableError: It is not back by the deadline, or the instance is dead.
        """
        if self._master is not None:
            return False

        def there() -> bool:
            signs = [each.sign for each in self._instance.segments]
            found: bool = self._bounded(store, what, lambda _: store.there(signs), deadline)
            return found

        waits = False
        try:
            while not there():
                waits, watch = True, self._watch()
                check_head(self.config.instance)
                self._refresh(deadline)
                time.sleep(_COMES_BACK_S)
                watch.check()  # Ray has had the time to answer
        except OperationTimeoutError:
            if not waits:
                return False
            raise BackendUnavailableError(
                f"{what} failed: the mooncake_master at {self._instance.details['master']} of instance "
                f"{self.config.instance!r} died, and was not back by the deadline ({error}).",
                hint="The process that bootstrapped the instance starts it again: try again, or raise op_timeout_s.",
            ) from error
        # the first request to a new master may fail; and it does not know what a put began with the old one
        return waits or error.code in (NOT_FOUND, UNREACHABLE)

    def _end_given_up(self, store: Store) -> None:
        """Ends the connections of calls that were given up, in the background."""

        def end(_: Call) -> None:
            with contextlib.suppress(Exception):  # segments may have been mounted again
                self._refresh(time.monotonic() + _REFRESH_S)
                store.add_units(self._listening())
            store.end_given_up()

        Call().start(end)

    def _refresh(self, deadline: float) -> None:
        """Asks for the segments anew. If the controller does not answer, what is known stays."""
        with contextlib.suppress(OperationTimeoutError, BackendUnavailableError):
            self._instance.refresh(deadline=min(deadline, time.monotonic() + _REFRESH_S))

    def _bounded(self, store: Store, what: str, work: Callable[[Call], Any], deadline: float, **more: Any) -> Any:
        """As `bounded`, for a call of this engine."""
        held: dict[str, Any] = {"hold": store.in_call, "watch": self._watch, "closed": lambda: self._closed}
        return bounded(what, work, deadline, **held, **more)

    def _watch(self) -> _Watch:
        return _Watch(self._instance, self._master)

    def _await_news(self, error: EngineError, check_units: Callable[[], None], deadline: float) -> None:
        """Asks what is known about the units, a few times if a transfer failed: their death is soon known."""
        if error.code == FULL and self._master is None:
            return  # the master knows what has room
        give_up = min(deadline, time.monotonic() + _FIND_CAUSE_S)
        while error.code in (FULL, TRANSFER_FAILED):
            self._refresh(deadline)
            check_units()
            if error.code == FULL or time.monotonic() >= give_up:
                return
            time.sleep(_COMES_BACK_S)

    def _raise_cause(self, what: str, error: EngineError, deadline: float) -> NoReturn:
        """Finds out why Mooncake failed, and raises that error."""
        if error.code == FULL:
            raise CapacityExceededError(
                f"{what} refused: the {len(self._instance.units)} segments of "
                f"{self.config.segment_size_bytes // _MIB} MiB of instance {self.config.instance!r} have no room "
                f"({error}).",
                hint="Clear samples, or raise segment_size_bytes or num_storage_units.",
            ) from error
        if self._master is not None:
            self._master.check(every_s=0)
        if error.code == UNREACHABLE:
            raise BackendUnavailableError(
                f"{what} failed: the mooncake_master at {self._instance.details['master']} does not answer ({error}).",
                hint="It does not respond, or cannot be reached from here.",
            ) from error
        watch = self._watch()
        give_up = min(deadline, time.monotonic() + _FIND_CAUSE_S)
        while True:
            watch.check()
            if watch.all_alive or time.monotonic() >= give_up:
                break
            time.sleep(0.02)
        raise BackendError(f"{what} failed: Mooncake's {error}.", hint=watch.describe()) from error


class _Watch:
    """While a call takes long, asks Ray whether the storage units are alive, and looks at a master that nobody starts
    again."""

    def __init__(self, instance: MooncakeInstance, master: MasterWatch | None) -> None:
        self._instance: str = instance.config.instance
        self._master = master
        self._asked: dict[str, Any] = {}  # by the units' names
        self._alive: list[str] = []
        self._connected = ray.is_initialized()
        if self._connected:
            with contextlib.suppress(ray.exceptions.RayError):  # then only the deadline ends the wait
                self._asked = instance.ask_units()

    def check(self) -> None:
        """Raises `BackendUnavailableError` if one of them is dead, and not started again. Does not block for long."""
        if self._master is not None:
            self._master.check(every_s=0.25)
        if not self._asked or not ray.is_initialized():
            return
        answered, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        for name in [name for name, ref in self._asked.items() if ref in answered]:
            try:
                ray.get(self._asked.pop(name), timeout=0)
                self._alive.append(name)
            except ray.exceptions.ActorUnavailableError:
                continue  # it may come back before the deadline
            except ray.exceptions.RayActorError as error:
                raise BackendUnavailableError(
                    f"the {name} of instance {self._instance!r} is dead: {cause(error)}",
                    retryable=False,
                    hint="What it held is lost. Close this client and bootstrap the instance again.",
                ) from error
            except ray.exceptions.RayError:
                continue  # says nothing about the actor

    @property
    def all_alive(self) -> bool:
        """Whether all units have answered."""
        return self._connected and not self._asked

    def describe(self) -> str:
        """What is known about the master and the units, as a sentence."""
        if self._master is not None:
            try:
                self._master.check(every_s=0)
            except BackendUnavailableError as error:
                return f"{error.message[0].upper()}{error.message[1:]}"
        if not self._connected:
            return "This process is no longer connected to Ray, so it cannot tell whether they are alive."
        if self._asked:
            return f"The {', '.join(self._asked)} did not answer Ray either: stopped, overloaded, or not reachable."
        if not self._alive:
            return "Ray knows nothing about them at the moment."
        return (
            f"The {', '.join(self._alive)} is alive, but busy with other requests or not reachable from this process."
        )
