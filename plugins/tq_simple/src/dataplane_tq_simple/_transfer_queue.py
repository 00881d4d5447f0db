"""`TransferQueueBackend`: rows in the storage units of the TransferQueue that runs on the cluster.

It uses what runs, and neither starts nor ends any of it. A row is an entry of TransferQueue with its handle as the key,
in a partition and a field that only this instance has. TransferQueue gives the place of a cleared entry to another one,
and a put that was given up may still reach that place. So an entry is a row with its handle, which reads check. A row
that reaches a place which has been cleared stays there until another one of the instance takes it.

Importing this module imports neither Ray nor TransferQueue.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import psutil

from dataplane_core.backends import Finding, Level, RefsGoneError, RowStoreBackend
from dataplane_core.errors import (
    BackendUnavailableError,
    CapacityExceededError,
    ClientClosedError,
    ConfigError,
    DataPlaneError,
    OperationTimeoutError,
    preview,
)
from dataplane_core.spec import Capability, new_id
from dataplane_tq_simple._backend import QueueBackend
from dataplane_tq_simple.addresses import refuses, with_port
from dataplane_tq_simple.config import TQSimpleConfig

if TYPE_CHECKING:
    from dataplane_tq_simple._instance import Instance

#: Seconds between two looks of a waiting call whether the processes of TransferQueue listen, and that each may take.
_PATIENCE_S: Final = 1.0
_LISTENS_S: Final = 0.5
#: Seconds that the end of a connection may take.
_END_S: Final = 5.0
#: From this size on, a row is an array, which TransferQueue does not copy, but sends in a frame of its own. Of tensors,
#: it would make a nested one at each read, which takes several times as long.
_ARRAY_BYTES: Final = 32 << 10


class _UnitsDiedError(Exception):
    """Storage units were found dead that were taken to live."""


def load_library() -> None:
    """Imports TransferQueue. Raises `ConfigError` if it is not installed."""
    # as many as it uses anyway, but else it warns at every request where there are fewer cores than 8
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, psutil.cpu_count(logical=False) or 1)))
    try:
        import transfer_queue.client  # noqa: F401  (whether it can be; it is used where it is imported again)
    except ImportError as error:
        raise ConfigError(
            f"storage: transfer_queue is refused: TransferQueue cannot be imported ({error}).",
            hint='Run: pip install "dataplane-tq-simple[transfer_queue]"',
        ) from error


def diagnose(config: TQSimpleConfig, deadline: float, *, connect: bool) -> Iterator[Finding]:
    """For the doctor: TransferQueue here, and if it may ``connect`` to the Ray cluster, there."""
    try:
        load_library()
    except ConfigError as error:
        yield Finding.error(error.message, error.hint)
        return
    yield Finding.ok(f"Rows are kept by TransferQueue {metadata.version('TransferQueue')} (storage: transfer_queue).")
    if not connect:
        return
    from dataplane_tq_simple._ray import RayConnection

    connection = RayConnection.acquire(config, bootstrap=False, deadline=deadline)
    try:
        system = System(deadline)
        dead = system.dead_units(deadline)
        if dead:
            raise system.dead_error(dead)
        yield Finding.ok(f"TransferQueue runs on the cluster, with {len(system.units)} storage units.")
    except DataPlaneError as error:
        yield Finding.error(error.message, error.hint)
    finally:
        connection.release()


class System:
    """The TransferQueue that runs on the Ray cluster of this process.

    Attributes:
        controller: Where its controller listens, as TransferQueue says it.
        storage: The options of its storage.
        units: The address of each storage unit, by its id.

    Raises:
        BackendUnavailableError: None runs, or it is not ready yet.
        ConfigError: It keeps its rows elsewhere than in storage units of its own.
    """

    def __init__(self, deadline: float) -> None:
        import ray

        from dataplane_tq_simple._ray import get_within

        try:
            actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        except ValueError:
            raise BackendUnavailableError(
                f"no TransferQueue runs on the Ray cluster at {ray.get_runtime_context().gcs_address!r}.",
                hint="Start it by transfer_queue.init() in a process that stays, or leave out storage: transfer_queue.",
            ) from None
        config = get_within(actor.get_config.remote(), "ask TransferQueue for its configuration", deadline)
        if config is None:
            raise BackendUnavailableError("TransferQueue is starting, and has no storage units yet.")
        backend = config.backend
        if backend.storage_backend != "SimpleStorage":
            raise ConfigError(
                f"storage: transfer_queue is refused: the TransferQueue on the cluster keeps its rows in "
                f"{backend.storage_backend}. Expected storage units of its own (SimpleStorage).",
                hint="The backend tq_mooncake keeps rows in Mooncake's store.",
            )
        self.controller = config.controller.zmq_info
        self.storage = backend.SimpleStorage
        self.units = {unit.id: (unit.ip, unit.ports["put_get_socket"]) for unit in self.storage.zmq_info.values()}

    def controller_is_dead(self, deadline: float) -> bool:
        """Whether nothing listens where the controller was."""
        return _refuses((self.controller.ip, self.controller.ports["request_handle_socket"]), deadline)

    def dead_units(self, deadline: float) -> set[str]:
        """The storage units where nothing listens. TransferQueue starts none of them again."""
        return {each for each, address in self.units.items() if _refuses(address, deadline)}

    def dead_error(self, units: Iterable[str]) -> BackendUnavailableError:
        """The error for storage units that died."""
        where = preview(sorted(with_port(*self.units[each]) for each in units))
        return BackendUnavailableError(
            f"storage units of TransferQueue died: {where}, of {len(self.units)}. It places rows on each in turn.",
            retryable=False,
            hint="Start TransferQueue again, then bootstrap this instance again.",
        )


class TransferQueueBackend(QueueBackend, RowStoreBackend):
    """Rows are in the storage units of the TransferQueue that runs on the Ray cluster: ``storage: transfer_queue``."""

    Config = TQSimpleConfig
    why_not_declared: ClassVar[Mapping[str, str]] = {
        **QueueBackend.why_not_declared,
        Capability.UNITS: "TransferQueue places the rows, and does not say how many a storage unit holds",
    }

    def __init__(self, config: TQSimpleConfig) -> None:
        super().__init__(config)
        self._partition = ""
        self._client: Any = None  # TransferQueue's
        self._dead: set[str] = set()  # units
        self._loop: Any = None  # of TransferQueue's client, in a thread of its own

    @classmethod
    def instance_class(cls) -> type[Instance]:
        from dataplane_tq_simple._instance import TransferQueueInstance

        return TransferQueueInstance

    @classmethod
    def diagnose(cls, config: Any, *, deadline: float) -> Iterable[Finding]:
        """As that of `QueueBackend`, and the TransferQueue of the cluster, if the cluster is named."""
        findings = list(super().diagnose(config, deadline=deadline))
        yield from findings
        if any(finding.level is Level.ERROR for finding in findings):
            return
        from dataplane_tq_simple import _owners

        yield from diagnose(config, deadline, connect=_owners.cluster_is_known(config))

    def attach_options(self) -> dict[str, Any]:
        """As that of `QueueBackend`, and the storage."""
        return {**super().attach_options(), "storage": self.config.storage}

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """As that of `QueueBackend`. Raises `ConfigError` if TransferQueue is not installed."""
        load_library()
        super().start(bootstrap=bootstrap, deadline=deadline)

    def join(self, deadline: float) -> None:
        from transfer_queue.client import AsyncTransferQueueClient

        self._system = System(deadline)
        if self._bootstrapped:
            dead = self._system.dead_units(deadline)
            if dead:
                raise self._system.dead_error(dead)
            self._instance.details = {"partition": f"{self._partitions()}{new_id()}"}
        self._partition = self._instance.details["partition"]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dataplane-transfer-queue", daemon=True)
        self._thread.start()
        self._client = AsyncTransferQueueClient(f"dataplane-{new_id()}", self._system.controller)
        self._client.initialize_storage_manager("SimpleStorage", self._system.storage)  # it gives up after 4 s
        if self._bootstrapped:
            for name in self._run("list partitions", self._client.async_get_partition_list(), deadline):
                if name.startswith(self._partitions()):
                    self._run("clear a partition", self._clear(name), deadline)

    def leave(self) -> None:
        if self._loop is None:
            return
        if self._client is not None and self._bootstrapped:
            with contextlib.suppress(Exception):  # what is left, the next instance of this name clears
                self._run("clear the partition", self._clear(self._partition), time.monotonic() + _END_S)
        if self._thread.is_alive():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)
        if self._client is not None:
            self._client.close()
        if not self._thread.is_alive():
            self._loop.close()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        """As `RowStoreBackend.put_rows`."""
        from tensordict import NonTensorStack, TensorDict

        array, ends, rows = np.frombuffer(buffer, np.uint8), offsets.tolist(), []
        for handle, start, end in zip(handles, ends[:-1], ends[1:], strict=True):
            rows.append((handle, array[start:end] if end - start >= _ARRAY_BYTES else bytes(buffer[start:end])))
        columns = TensorDict({self._partition: NonTensorStack(*rows)}, batch_size=[len(rows)])

        async def put() -> None:
            entries = await self._entries(handles, create=True)
            if self._in_dead_units(entries.global_indexes):
                raise self._system.dead_error(self._dead)
            await self._client.async_put(columns, entries)

        what = f"put_rows({len(rows)} rows)"
        try:
            self._run(what, put(), deadline)
        except _UnitsDiedError:
            raise self._system.dead_error(self._dead) from None
        except RuntimeError as error:
            if "Storage capacity exceeded" not in str(error):
                raise
            raise CapacityExceededError(
                f"{what} refused: a storage unit of TransferQueue has no room ({error}).",
                hint="Clear samples, or raise TransferQueue's total_storage_size.",
            ) from error

    def get_rows(self, handles: Sequence[int], deadline: float) -> list[memoryview]:
        """As `RowStoreBackend.get_rows`."""
        from transfer_queue import StorageKeyNotFoundError

        what = f"get_rows({len(handles)} rows)"

        async def get() -> list[tuple[int, Any]]:
            entries = await self._entries(handles)
            indexes = entries.global_indexes
            if len(indexes) < len(handles):
                raise RefsGoneError(f"{what}: {len(handles) - len(indexes)} of them do not exist.")
            lost = [handles[position] for position in self._in_dead_units(indexes)]
            if lost:
                raise RefsGoneError(f"{what}: the storage units of {len(lost)} rows died.", handles=lost)
            found = await self._client.async_get_data(self._at(indexes))
            rows: list[tuple[int, Any]] = found[self._partition].tolist()
            return rows

        while True:
            try:
                rows = self._run(what, get(), deadline)
            except _UnitsDiedError:
                continue  # it is known now which rows are lost
            except StorageKeyNotFoundError as error:
                raise RefsGoneError(f"{what}: some of them do not exist.") from error
            others = [handle for handle, (found, _) in zip(handles, rows, strict=True) if handle != found]
            if others:
                raise RefsGoneError(f"{what}: {len(others)} of them were overwritten.", handles=others)
            return [memoryview(row) for _, row in rows]

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        """As `RowStoreBackend.delete_rows`. Those in units that died count as deleted."""

        async def delete() -> None:
            entries = await self._entries(handles)
            lost = set(self._in_dead_units(entries.global_indexes))
            indexes = [index for position, index in enumerate(entries.global_indexes) if position not in lost]
            if indexes:
                await self._client.async_clear_samples(self._at(indexes))

        while True:
            with contextlib.suppress(_UnitsDiedError):
                self._run(f"delete_rows({len(handles)} rows)", delete(), deadline)
                return

    # --- TransferQueue ------------------------------------------------------------------------------------------------

    async def _entries(self, handles: Sequence[int], *, create: bool = False) -> Any:
        """Where TransferQueue has these rows, in their order; without those that do not exist."""
        keys = [str(handle) for handle in handles]
        return await self._client.async_kv_retrieve_meta(keys, self._partition, create=create)

    def _partitions(self) -> str:
        """What the names of the partitions of an instance begin with, also those that killed ones of its name left."""
        return f"dataplane/{self.config.instance}/"

    async def _clear(self, partition: str) -> None:
        await self._client.async_kv_retrieve_meta("last", partition, create=True)  # else one without entries would stay
        await self._client.async_clear_partition(partition)

    def _at(self, indexes: Sequence[int]) -> Any:
        from transfer_queue import BatchMeta

        return BatchMeta(indexes, [self._partition] * len(indexes), {self._partition: {}})

    def _in_dead_units(self, indexes: Sequence[int]) -> list[int]:
        """The positions of those that are in units that died."""
        if not self._dead:
            return []
        routes: Mapping[str, Any] = self._client.storage_manager._group_by_hash(indexes)
        return sorted(position for unit in self._dead & routes.keys() for position in routes[unit].batch_positions)

    def _run(self, what: str, call: Coroutine[Any, Any, Any], deadline: float) -> Any:
        """Waits for a call of TransferQueue's client, which has no timeouts that are short enough.

        Raises:
            OperationTimeoutError: The deadline passed.
            BackendUnavailableError: TransferQueue's controller died.
            _UnitsDiedError: Storage units died, perhaps not those of this call. They are in ``_dead`` now.
            ClientClosedError: This client is closed.
            Exception: What the call raised.
        """
        import torch

        running = asyncio.run_coroutine_threadsafe(_with_threads(call, torch.get_num_threads()), self._loop)
        try:
            while not concurrent.futures.wait([running], min(_PATIENCE_S, max(0.0, deadline - time.monotonic()))).done:
                if time.monotonic() >= deadline:
                    raise OperationTimeoutError(
                        f"{what}: no answer in time from TransferQueue. It may have been executed or not."
                    )
                self._check(what, deadline)
            return running.result()
        except concurrent.futures.CancelledError:
            raise ClientClosedError(f"{what}: this client is closed.") from None
        finally:
            running.cancel()  # if it still runs: its connections are closed, so no answer of it meets another call

    def _check(self, what: str, deadline: float) -> None:
        if not self._thread.is_alive():
            raise ClientClosedError(f"{what}: this client is closed.")
        if self._system.controller_is_dead(deadline):
            raise BackendUnavailableError(
                f"{what}: the controller of TransferQueue died, and with it all rows.",
                retryable=False,
                hint="Start TransferQueue again, then bootstrap this instance again.",
            )
        newly = self._system.dead_units(deadline) - self._dead
        if newly:
            self._dead |= newly
            raise _UnitsDiedError


async def _with_threads(call: Coroutine[Any, Any, Any], num_threads: int) -> Any:
    """Awaits a call, and sets back how many threads torch uses: TransferQueue sets that at each put and get."""
    import torch

    try:
        return await call
    finally:
        torch.set_num_threads(num_threads)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _refuses(address: tuple[str, int], deadline: float) -> bool:
    return refuses(*address, max(0.0, min(_LISTENS_S, deadline - time.monotonic())))
