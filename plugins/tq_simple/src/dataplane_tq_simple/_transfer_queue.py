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
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import psutil

from dataplane_core.backends import Finding, RefsGoneError, RowStoreBackend
from dataplane_core.errors import (
    BackendUnavailableError,
    CapacityExceededError,
    ClientClosedError,
    ConfigError,
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


class System:
    """The TransferQueue that runs on the Ray cluster of this process."""

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
        self.controller = config.controller.zmq_info  # where it listens
        self.storage = backend.SimpleStorage  # options
        self.units = [(unit.ip, unit.ports["put_get_socket"]) for unit in self.storage.zmq_info.values()]
        self._controller = (self.controller.ip, self.controller.ports["request_handle_socket"])

    def check(self, what: str, deadline: float) -> None:
        """Raises `BackendUnavailableError` if nothing listens where the controller or a storage unit was: TransferQueue
        starts none of them again, and places rows on each unit in turn."""
        hint = "Start TransferQueue again, then bootstrap this instance again."
        if _refuses(self._controller, deadline):
            message = f"{what}: the controller of TransferQueue died, and with it all rows."
            raise BackendUnavailableError(message, retryable=False, hint=hint)
        dead = [with_port(*unit) for unit in self.units if _refuses(unit, deadline)]
        if dead:
            message = f"{what}: storage units of TransferQueue died: {preview(dead)}, of {len(self.units)}."
            raise BackendUnavailableError(message, retryable=False, hint=hint)


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
        self._loop: Any = None  # of TransferQueue's client, in a thread of its own, until `_closing` is set

    @classmethod
    def instance_class(cls) -> type[Instance]:
        """As that of `QueueBackend`. Raises `ConfigError` if TransferQueue is not installed."""
        load_library()
        from dataplane_tq_simple._instance import TQSimpleInstance

        return TQSimpleInstance

    @classmethod
    def diagnose_storage(cls, config: Any, deadline: float, connected: bool) -> Iterator[Finding]:
        """TransferQueue here, and on the cluster."""
        version = metadata.version("TransferQueue")
        yield Finding.ok(f"Rows are kept by TransferQueue {version} (storage: transfer_queue).")
        if connected:
            system = System(deadline)
            system.check("look for TransferQueue", deadline)
            yield Finding.ok(f"TransferQueue runs on the cluster, with {len(system.units)} storage units.")

    def attach_options(self) -> dict[str, Any]:
        """As that of `QueueBackend`, and the storage."""
        return {**super().attach_options(), "storage": self.config.storage}

    def join(self, deadline: float) -> None:
        from transfer_queue.client import AsyncTransferQueueClient

        self._system = System(deadline)
        if self._bootstrapped:
            self._system.check("connect", deadline)
            self._instance.details = {"partition": f"{self._partitions()}{new_id()}"}
        self._partition = self._instance.details["partition"]
        runner, self._closing = asyncio.Runner(loop_factory=asyncio.new_event_loop), asyncio.Event()
        self._loop = runner.get_loop()
        self._thread = threading.Thread(
            target=self._serve, args=(runner,), name="dataplane-transfer-queue", daemon=True
        )
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
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_END_S)
        if self._client is not None:
            self._client.close()

    def _serve(self, runner: asyncio.Runner) -> None:
        with runner:  # at its end, it cancels what still runs
            runner.run(self._closing.wait())

    # --- rows ---------------------------------------------------------------------------------------------------------

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        from tensordict import NonTensorStack, TensorDict

        array, ends, rows = np.frombuffer(buffer, np.uint8), offsets.tolist(), []
        for handle, start, end in zip(handles, ends[:-1], ends[1:], strict=True):
            rows.append((handle, array[start:end] if end - start >= _ARRAY_BYTES else bytes(buffer[start:end])))
        columns = TensorDict({self._partition: NonTensorStack(*rows)}, batch_size=[len(rows)])

        async def put() -> None:
            await self._client.async_put(columns, await self._entries(handles, create=True))

        what = f"put_rows({len(rows)} rows)"
        try:
            self._run(what, put(), deadline)
        except RuntimeError as error:
            if "Storage capacity exceeded" not in str(error):
                raise
            raise CapacityExceededError(
                f"{what} refused: a storage unit of TransferQueue has no room ({error}).",
                hint="Clear samples, or raise TransferQueue's total_storage_size.",
            ) from error

    def get_rows(self, handles: Sequence[int], deadline: float) -> list[memoryview]:
        from transfer_queue import StorageKeyNotFoundError

        what = f"get_rows({len(handles)} rows)"

        async def get() -> list[tuple[int, Any]]:
            entries = await self._entries(handles)
            indexes = entries.global_indexes
            if len(indexes) < len(handles):
                raise RefsGoneError(f"{what}: {len(handles) - len(indexes)} of them do not exist.")
            columns = await self._client.async_get_data(self._at(indexes))
            rows: list[tuple[int, Any]] = columns[self._partition].tolist()
            return rows

        try:
            rows = self._run(what, get(), deadline)
        except StorageKeyNotFoundError as error:
            raise RefsGoneError(f"{what}: some of them do not exist.") from error
        others = [handle for handle, (stored, _) in zip(handles, rows, strict=True) if handle != stored]
        if others:
            raise RefsGoneError(f"{what}: {len(others)} of them were overwritten.", handles=others)
        return [memoryview(row) for _, row in rows]

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:

        async def delete() -> None:
            entries = await self._entries(handles)
            if entries.global_indexes:
                await self._client.async_clear_samples(self._at(entries.global_indexes))

        self._run(f"delete_rows({len(handles)} rows)", delete(), deadline)

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

    def _run(self, what: str, call: Coroutine[Any, Any, Any], deadline: float) -> Any:
        """Waits for a call of TransferQueue's client, which has no timeouts that are short enough."""
        import torch

        async def work(num_threads: int) -> Any:
            try:
                return await call
            finally:  # TransferQueue sets it at each put and get
                torch.set_num_threads(num_threads)

        waits = work(torch.get_num_threads())
        try:
            running = asyncio.run_coroutine_threadsafe(waits, self._loop)
        except RuntimeError:  # the loop is closed
            waits.close()
            call.close()
            raise ClientClosedError(f"{what}: this client is closed.") from None
        try:
            while not concurrent.futures.wait([running], min(_PATIENCE_S, max(0.0, deadline - time.monotonic()))).done:
                if time.monotonic() >= deadline:
                    raise OperationTimeoutError(
                        f"{what}: no answer in time from TransferQueue. It may have been executed or not."
                    )
                if not self._thread.is_alive():
                    raise ClientClosedError(f"{what}: this client is closed.")
                self._system.check(what, deadline)
            return running.result()
        except concurrent.futures.CancelledError:
            raise ClientClosedError(f"{what}: this client is closed.") from None
        finally:
            running.cancel()  # if it still runs: its connections are closed, so no answer of it meets another call


def _refuses(address: tuple[str, int], deadline: float) -> bool:
    return refuses(*address, max(0.0, min(_LISTENS_S, deadline - time.monotonic())))
