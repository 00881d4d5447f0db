"""The engine of ``tq_mooncake``: rows of bytes in the segments of an instance, by Mooncake.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from dataplane_core.backends import RefsGoneError
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    ClientClosedError,
    ConfigError,
)
from dataplane_mooncake._calls import Call, bounded
from dataplane_mooncake._cluster import MooncakeInstance, check_machine, this_nodes_address
from dataplane_mooncake._master import MasterWatch
from dataplane_mooncake._store import FULL, UNREACHABLE, EngineError, RowsMissing, Store, StoreSettings
from dataplane_mooncake.machine import available_memory_bytes
from dataplane_tq_simple._cluster import ActorWatch
from dataplane_tq_simple._queue import QueueEngine

__all__ = ["Engine"]

_MIB: Final = 1024 * 1024
#: How long a failed call looks for a dead storage unit to blame, in seconds.
_BLAME_S: Final = 3.0


class Engine(QueueEngine):
    """A `QueueEngine` that moves rows by Mooncake."""

    instance_class = MooncakeInstance

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store: Store | None = None
        self._master: MasterWatch | None = None

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """As `QueueEngine.call`; the ledger lives on without the master, but what it says of rows is void.

        Raises:
            BackendUnavailableError: Also where the master is dead.
        """
        if self._master is not None:
            self._master.check()
        return super().call(method, *args, timeout_s=timeout_s, **kwargs)

    def _join(self, deadline: float) -> None:
        config = self.config.model_copy(update=self.own.own_options())
        check_machine(config)
        available = available_memory_bytes()
        if config.local_buffer_size_bytes > available:
            raise ConfigError(
                f"local_buffer_size_bytes is {config.local_buffer_size_bytes // _MIB} MiB, but this node has "
                f"{available // _MIB} MiB available.",
                hint="Lower local_buffer_size_bytes, or run fewer processes here.",
            )
        master = self._instance.details["master"]
        settings = StoreSettings(
            master, this_nodes_address(config), config.protocol, config.rdma_devices, config.local_buffer_size_bytes
        )
        watch = MasterWatch(self.config.instance, master)
        watch.check()
        self._store = Store.acquire(settings, self._instance.details["listening"], deadline=deadline)
        self._master = watch

    def _leave(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.release()

    # --- rows --------------------------------------------------------------------------------------------------------

    def put_rows(self, handles: Sequence[int], buffer: Any, offsets: npt.NDArray[np.int64], *, deadline: float) -> None:
        """Stores rows; returns when Mooncake has confirmed every one.

        If it raises, some of the rows may be stored: delete them. Of a put that ran out of time, its own thread
        deletes what it stores later.

        Args:
            handles: N integers, each used once in the life of the instance.
            buffer: The bytes; the caller must not change them, even after an error.
            offsets: (N + 1,): row i is ``buffer[offsets[i]:offsets[i + 1]]``; no row is empty.
            deadline: On `time.monotonic`'s clock, in seconds.

        Raises:
            CapacityExceededError: No segment has room for the rows; some may be stored, and are to be deleted.
            BackendError: Mooncake failed.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        keys = self._keys(handles)
        store = self._joined()
        segments = self._instance.details["segments"]
        self._run(
            store,
            f"put_rows({len(keys)} rows, {int(offsets[-1])} bytes)",
            lambda call: store.put(call, keys, buffer, offsets, segments=segments),
            deadline,
            undo=lambda _: store.delete(Call(), keys),
        )

    def get_rows(self, handles: Sequence[int], *, deadline: float) -> list[memoryview]:
        """Reads rows, in the order of the handles, none of which repeats.

        Returns:
            Views of one new buffer, aligned for no type but bytes.

        Raises:
            RefsGoneError: A row is not there (any more).
            BackendError: Mooncake failed.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        keys = self._keys(handles)
        store = self._joined()
        what = f"get_rows({len(keys)} rows)"
        try:
            rows: list[memoryview] = self._run(store, what, lambda call: store.get(call, keys), deadline)
            return rows
        except RowsMissing:
            raise RefsGoneError(f"{what}: some are not there.") from None

    def delete_rows(self, handles: Sequence[int], *, deadline: float) -> None:
        """Deletes rows; handles that are not there are ignored.

        Raises:
            BackendError: Mooncake failed.
            OperationTimeoutError, BackendUnavailableError, ClientClosedError: As for `call`.
        """
        keys = self._keys(handles)
        store = self._joined()
        self._run(store, f"delete_rows({len(keys)} rows)", lambda call: store.delete(call, keys), deadline)

    def _keys(self, handles: Sequence[int]) -> list[str]:
        prefix = self._instance.details["prefix"]
        return [f"{prefix}{handle}" for handle in handles]

    def _joined(self) -> Store:
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
        *,
        undo: Callable[[Any], None] | None = None,
    ) -> Any:
        try:
            return bounded(
                what,
                work,
                deadline,
                undo=undo,
                watch=self._watch,
                closed=lambda: self._closed,
                on_give_up=store.end_given_up,
            )
        except EngineError as error:
            self._explain(what, error, deadline)

    def _watch(self) -> _Watch:
        return _Watch(self._instance.watch(self._instance.units), self._master)

    def _explain(self, what: str, error: EngineError, deadline: float) -> NoReturn:
        """Raises the error that says why Mooncake failed."""
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
                hint="It stands still, or cannot be reached from here.",
            ) from error
        watch = self._instance.watch(self._instance.units)
        give_up = min(deadline, time.monotonic() + _BLAME_S)
        while True:
            watch.check()
            if watch.all_alive or time.monotonic() >= give_up:
                break
            time.sleep(0.02)
        raise BackendError(f"{what} failed: Mooncake's {error}.", hint=watch.describe()) from error


class _Watch:
    """Looks after the storage units and the master while a call takes long."""

    def __init__(self, units: ActorWatch, master: MasterWatch | None) -> None:
        self._units = units
        self._master = master

    def check(self) -> None:
        """Raises `BackendUnavailableError` if one of them is dead."""
        if self._master is not None:
            self._master.check(every_s=0.25)
        self._units.check()

    def describe(self) -> str:
        """What is known of the units, as a sentence."""
        return self._units.describe()
