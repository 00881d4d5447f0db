"""`StreamingDataset` and `StreamingDataLoader`: claimed batches in a PyTorch ``DataLoader``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader, IterableDataset

from dataplane_compat.transfer_queue import _session
from dataplane_compat.transfer_queue._columns import jagged
from dataplane_compat.transfer_queue.client import TransferQueueClient
from dataplane_compat.transfer_queue.metadata import BatchMeta
from dataplane_core import DataPlaneConfig
from dataplane_core.backends import Backend
from dataplane_core.connecting import load_backend

#: Seconds until an empty partition is asked again.
_PAUSE_S: Final = 0.2

_Batch = tuple[TensorDict, BatchMeta]


class StreamingDataset(IterableDataset[Any]):
    """The rows that a task claims, in micro batches. Each process that iterates has a connection of its own."""

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Names what to read.

        Args:
            config: The config of the store, as for `init`. None, or TransferQueue's own: that of this process.
            batch_size: Rows per claim.
            micro_batch_size: Rows per item that the dataset yields.
            data_fields: The fields to wait for and to read.
            partition_id: The partition.
            task_name: The task.
            dp_rank: Processes with the same rank get the same rows, with a sampler that knows ranks.
            should_check_consumption_status: Whether to end when the task was given all rows of the partition. If not,
                the dataset never ends.
            fetch_batch_fn: Takes the place of `fetch_batch`.
            process_batch_fn: Takes the place of `micro_batches`.
        """
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be >= 1, got {micro_batch_size}")
        if len(data_fields) < 1:
            raise ValueError(f"data_fields must be a list with at least one field name, got {data_fields}")
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        super().__init__()
        self.config = config
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.data_fields, self.partition_id, self.task_name = data_fields, partition_id, task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or fetch_batch
        self.process_batch_fn = process_batch_fn or micro_batches
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        #: The batches fetched so far; `reset` begins with them again.
        self.buffer: list[_Batch] = []
        self.batch_index = 0
        session = _session.current()
        self._store_config = _for_workers(session.config if session is not None else _session.find_config(config))

    def __iter__(self) -> Iterator[_Batch]:
        """Yields (columns, rows) per micro batch."""
        client = _session.attached(self._store_config).client
        while True:
            if self.batch_index < len(self.buffer):
                batch = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)
                continue
            if self.should_check_consumption_status and client.check_consumption_status(
                self.task_name, self.partition_id
            ):
                return
            columns, meta = self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=self.batch_index,
            )
            if columns is None:
                time.sleep(_PAUSE_S)
            else:
                self.buffer.append((columns, meta))

    def reset(self) -> None:
        """Begins again with the first batch that was fetched."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Goes on with another partition."""
        self.buffer, self.batch_index, self.partition_id = [], 0, partition_id


class StreamingDataLoader(DataLoader[Any]):
    """A ``DataLoader`` that yields what a `StreamingDataset` yields."""

    dataset: StreamingDataset

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        """As ``DataLoader``. Workers are spawned if the backend cannot be used in forks."""
        if num_workers and multiprocessing_context is None and not _opens_in_forks(dataset):
            multiprocessing_context = "spawn"
        super().__init__(
            dataset=dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    def reset(self) -> None:
        """Begins again with the first batch that was fetched."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """Goes on with another partition."""
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[_Batch]:
        """The batches fetched so far, without workers."""
        return self.dataset.buffer


def _for_workers(config: DataPlaneConfig) -> DataPlaneConfig:
    """The config with the address of the Ray cluster, if the backend uses one: a spawned worker does not know it."""
    address = _session.cluster_address()
    if address is None or "ray_address" not in load_backend(config.backend).Config.model_fields:
        return config
    return config.model_copy(update={"options": {"ray_address": address, **config.options}})


def _as_it_is(data: Any) -> Any:
    return data


def _opens_in_forks(dataset: StreamingDataset) -> bool:
    backend: type[Backend] = load_backend(dataset._store_config.backend)
    return backend.opens_in_forks


def fetch_batch(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Claims a batch and reads it. The columns are None if there are not enough rows yet."""
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(data_fields, batch_size, partition_id, task_name=task_name, sampling_config=config)
    return (tq_client.get_data(meta) if meta.size else None), meta


def micro_batches(td: TensorDictBase, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[_Batch]:
    """A batch in parts of ``micro_batch_size`` rows; the last one may be smaller."""
    if not isinstance(td, TensorDictBase):
        raise TypeError(f"Expected TensorDict, got {type(td).__name__}")
    if not isinstance(micro_batch_size, int) or micro_batch_size <= 0:
        raise ValueError(f"micro_batch_size must be a positive integer, got {micro_batch_size}")
    if not td.batch_size:
        raise ValueError("Input TensorDict must have non-empty batch_size")
    size = td.batch_size[0]
    if micro_batch_size > size:
        raise ValueError(f"micro_batch_size ({micro_batch_size}) exceeds total batch size ({size})")
    rows = {
        name: column.unbind() if isinstance(column, torch.Tensor) and column.is_nested else column
        for name, column in td.items()
    }
    parts = []
    for start in range(0, size, micro_batch_size):
        stop = min(start + micro_batch_size, size)
        columns = {
            name: jagged(column[start:stop]) if isinstance(column, tuple) else column[start:stop]
            for name, column in rows.items()
        }
        parts.append((TensorDict(columns, batch_size=[stop - start]), batch_meta[start:stop]))
    return parts
