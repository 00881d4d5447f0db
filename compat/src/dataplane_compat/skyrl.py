"""SkyRL on dataplane: the driver stages batches in the store, and each worker reads its own rows from there.

By itself, SkyRL puts the chunk of each data-parallel rank into Ray's object store. With `activate`, the rows of a batch
are samples of a partition, and a worker is sent a `StagedChunk`, which is the batch that its method expects once Ray
unpickles it. So workers need no change; the process of the training loop calls `activate`. See docs/trainers.md.

Tried with SkyRL 0.3.0. Importing this module does not import SkyRL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
import sys
import threading
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, Final

import ray
import torch

from dataplane_core import DataPlaneClient, DataPlaneConfig, connect, errors
from dataplane_core.codec import object_column
from dataplane_core.config import ConfigSource, load_config
from dataplane_core.spec import Scope

__all__ = ["StagedChunk", "activate", "dispatch_class", "read_chunk"]

_SEAM: Final = "skyrl.backends.skyrl_train.distributed.dispatch"
_BATCHES: Final = "skyrl.backends.skyrl_train.training_batch"
#: How a value of a batch is stored: as a tensor, as a list of tensors that fit one column or of others, or not at all.
_TENSOR, _LIST, _OBJECTS, _NONE = "tensor", "list", "objects", "none"


class _Stage:
    """The rows of one staged batch, in a partition of their own, which is given to ``unused`` when no chunk is left."""

    def __init__(self, client: DataPlaneClient, batch: Any, unused: queue.SimpleQueue[str]) -> None:
        self.client = client
        self.partition_id = f"skyrl/{uuid.uuid4()}"
        self.kinds = {name: _kind(value) for name, value in batch.items()}
        self._written = 0
        client.register_partition(self.partition_id, [], None, [])
        # a finalizer may run in the middle of anything, so it makes no call of the client
        weakref.finalize(self, unused.put, self.partition_id).atexit = False

    def put(self, batch: Any) -> list[str]:
        """Writes the rows of a batch. Returns their ids."""
        ids = [str(self._written + row) for row in range(len(batch))]
        columns = {name: _column(batch[name], kind) for name, kind in self.kinds.items() if kind != _NONE}
        self.client.put_samples(ids, self.partition_id, columns)
        self._written += len(ids)
        return ids


class StagedChunk:
    """The rows of a rank: what SkyRL's driver holds and sends. Unpickled, it is the batch that SkyRL would have sent.

    The rows stay in the store until all chunks that were staged with this one are gone from the driver, and all calls
    that were dispatched with them have ended.
    """

    def __init__(self, stage: _Stage, ids: list[str], metadata: Any) -> None:
        self._stage = stage
        self._ids = ids
        self._metadata = metadata

    def __reduce__(self) -> tuple[Any, ...]:
        stage = self._stage
        config = stage.client.config.model_dump_json()
        return read_chunk, (config, stage.partition_id, self._ids, stage.kinds, self._metadata)


def read_chunk(config: str, partition_id: str, ids: list[str], kinds: Mapping[str, str], metadata: Any) -> Any:
    """A ``TrainingInputBatch`` from the store: what unpickling a `StagedChunk` calls. `KeyError`: they are gone."""
    batches = importlib.import_module(_BATCHES)
    columns = _client_of(config).get_samples(ids, partition_id, [name for name in kinds if kinds[name] != _NONE])
    values: dict[str, Any] = dict.fromkeys(kinds)
    for name, kind in kinds.items():
        if kind == _TENSOR:
            values[name] = columns[name]
        elif kind != _NONE:
            column = columns[name]
            values[name] = batches.TensorList(list(column.unbind() if kind == _LIST else column.tolist()))
    batch = batches.TrainingInputBatch(values)
    batch.metadata = metadata
    return batch


def activate(config: ConfigSource) -> DataPlaneClient:
    """Makes SkyRL stage its batches in the store. Call it once in the process of the training loop. Imports SkyRL.

    It registers `dispatch_class` as ``mesh``, and replaces ``MeshDispatch``, which ``stage_data`` calls directly.

    Takes a config of dataplane, or the path of one; its backend must be of scope host or cluster. Returns the client
    that started the store: close it at the end. Raises what `connect` raises.
    """
    theirs = importlib.import_module(_SEAM)
    client = connect(load_config(config))
    original, ours = theirs.MeshDispatch, dispatch_class(client)
    theirs.DispatchRegistry.register("mesh", ours)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "skyrl" and vars(module).get("MeshDispatch") is original:
            vars(module)["MeshDispatch"] = ours
    return client


def dispatch_class(client: DataPlaneClient) -> Any:
    """SkyRL's ``MeshDispatch``, except that batches are staged through a client. Imports SkyRL.

    Raises:
        errors.ConfigError: The backend lives in one process, so that no worker could read a batch.
    """
    if client.scope is Scope.PROCESS:
        raise errors.ConfigError(
            f"backend '{client.backend_name}' lives in one process, but SkyRL's workers are others.",
            hint="Choose a backend of scope host or cluster, such as shm_store.",
        )
    theirs = importlib.import_module(_SEAM)
    batches = importlib.import_module(_BATCHES)
    unused: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_clear, args=(client, unused), name="dataplane-skyrl-clear", daemon=True).start()

    class PlaneDispatch(theirs.MeshDispatch):  # type: ignore[misc, name-defined] # a class of a package not installed
        """`MeshDispatch`, with batches in the store of dataplane instead of Ray's object store."""

        @classmethod
        def dispatch(cls, actor_infos: list[Any], method: str, data: Any, **kwargs: Any) -> list[Any]:
            size = actor_infos[0].rank.dp_size
            if len(data) % size:
                raise errors.InvalidRequestError(f"dispatch refused: {len(data)} rows do not divide by {size} ranks.")
            (chunks,) = cls.stage_chunks(size, data, [(0, len(data))])
            return cls.dispatch_from_staged(actor_infos, method, chunks, **kwargs)

        @classmethod
        def stage_chunks(cls, dp_size: int, data: Any, mini_batch_boundaries: list[tuple[int, int]]) -> list[list[Any]]:
            stage, staged = _Stage(client, data, unused), []
            for start, end in mini_batch_boundaries:
                if not 0 <= start < end <= len(data):
                    raise errors.InvalidRequestError(f"rows {start} to {end} of {len(data)} are no mini-batch.")
                batch = data[start:end]
                if (end - start) % dp_size:
                    batch = batches.pad_training_input_batch(batch, -(end - start) % dp_size)
                ids = stage.put(batch)
                size = len(ids) // dp_size
                parts = [ids[rank * size : (rank + 1) * size] for rank in range(dp_size)]
                staged.append([StagedChunk(stage, part, batch.metadata) for part in parts])
            return staged

        @classmethod
        def dispatch_from_staged(cls, actor_infos: Any, method: str, chunk_refs: list[Any], **kwargs: Any) -> list[Any]:
            results: list[Any] = super().dispatch_from_staged(actor_infos, method, chunk_refs, **kwargs)
            threading.Thread(target=_hold, args=(list(chunk_refs), list(results)), daemon=True).start()
            return results

    return PlaneDispatch


def _hold(chunks: list[Any], results: list[Any]) -> None:
    """Keeps chunks until the calls that read them have ended, as Ray keeps the arguments of a call."""
    with contextlib.suppress(ray.exceptions.RaySystemError):  # Ray was shut down
        ray.wait(results, num_returns=len(results), fetch_local=False)
    chunks.clear()


def _clear(client: DataPlaneClient, unused: queue.SimpleQueue[str]) -> None:
    """Clears partitions until the client is closed. One whose clear failed is tried again at the next."""
    left: list[str] = []
    while True:
        left.append(unused.get())
        try:
            while left:
                client.clear_samples(None, left[-1])
                left.pop()
        except errors.ClientClosedError:
            return
        except errors.DataPlaneError:
            continue


def _kind(value: Any) -> str:
    if value is None or isinstance(value, torch.Tensor):
        return _NONE if value is None else _TENSOR
    return _LIST if len({(row.dtype, row.dim(), row.shape[1:]) for row in value.tensors}) == 1 else _OBJECTS


def _column(value: Any, kind: str) -> Any:
    """A value of a batch as the client takes it."""
    if kind == _OBJECTS:
        return object_column(value.tensors)
    return value if kind == _TENSOR else list(value.tensors)


@functools.cache
def _client_of(config: str) -> DataPlaneClient:
    """This process's connection to a store."""
    return connect(DataPlaneConfig.model_validate_json(config), bootstrap=False)
