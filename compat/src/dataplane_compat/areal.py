"""AReaL on dataplane: tensors that its workers return are kept in the store, and read from there by who needs them.

AReaL sends an ``RTensor`` in place of a tensor. By itself, the worker that made the tensor keeps it, and serves it over
HTTP as base64 in JSON. With `activate`, its ``RTensorBackend`` is an `RTensorStore`. Every process of the job that
makes or reads such tensors calls it, or is started by ``python -m dataplane_compat.areal``; see docs/trainers.md.

Tried with AReaL 1.0.4. Importing this module does not import AReaL.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import runpy
import sys
import uuid
from collections.abc import Sequence
from typing import Any, Final

import torch

from dataplane_core import connect
from dataplane_core.codec import DTYPE_CODES, DTYPE_OF_CODE
from dataplane_core.config import ConfigSource
from dataplane_core.errors import ConfigError, InvalidTypeError, MissingDataError, UnknownPartitionError, preview

__all__ = ["MissingShardError", "RTensorStore", "activate", "main"]

#: Environment variable: the path of a config file. `main` reads it.
CONFIG_VARIABLE: Final = "DATAPLANE_CONFIG"
_SEAM: Final = "areal.infra.rpc.rtensor"
_PARTITION: Final = "areal"
#: A tensor is one row: its bytes, and a column of ints [dtype by `DTYPE_CODES`, *shape]. So any dtype and shape fits.
_BYTES, _FORM = "bytes", "dtype and shape"


class MissingShardError(MissingDataError, RuntimeError):
    """Shards were never stored, or were deleted. Also a `RuntimeError`, which AReaL's own backends raise."""


class RTensorStore:
    """AReaL's ``RTensorBackend`` over a client of dataplane. Its methods may be called from several threads.

    Attributes:
        client: The client underneath.

    Examples:
        >>> import asyncio, types, torch
        >>> from dataplane_compat.areal import RTensorStore
        >>> store = RTensorStore({"backend": "noop"}, bootstrap=True)
        >>> shard = types.SimpleNamespace(shard_id=store.store(torch.ones(2, 3)), node_addr="")
        >>> store.fetch([shard])[0].shape
        torch.Size([2, 3])
        >>> asyncio.run(store.delete("", [shard.shard_id]))
        >>> store.close()
    """

    def __init__(self, config: ConfigSource, *, bootstrap: bool) -> None:
        """Connects.

        Args:
            config: A config of dataplane, or the path of one.
            bootstrap: True in the process that starts the job: starts the store, without the tensors of an earlier run.
                False in all others: attaches to it.

        Raises:
            DataPlaneError: As `dataplane_core.connect`.
        """
        self.client = connect(config, bootstrap=bootstrap)
        if bootstrap:
            self.client.register_partition(_PARTITION, [_BYTES, _FORM], None, [])

    def store(self, tensor: torch.Tensor) -> str:
        """Stores a tensor of any dtype and shape. Returns its shard id once every process can fetch it.

        The caller may change the tensor afterwards. Blocks while the bytes are copied.

        Raises:
            TypeError: It is no dense tensor, or torch cannot show its bytes (quantized tensors).
            DataPlaneError: The store refused it, such as `CapacityExceededError`.
        """
        shard_id = str(uuid.uuid4())
        self.store_as(shard_id, tensor)
        return shard_id

    def store_as(self, shard_id: str, tensor: torch.Tensor) -> None:
        """As `store`, under an id that the caller chose. A shard of that id is replaced."""
        is_dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not is_dense or tensor.dtype not in DTYPE_CODES:
            held = f"a tensor of {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InvalidTypeError(f"store refused: got {held}. Expected a dense tensor of numbers or bools.")
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)  # B
        form = torch.tensor([[DTYPE_CODES[tensor.dtype], *tensor.shape]], dtype=torch.int64, device="cpu")
        self.client.put_samples([shard_id], _PARTITION, {_BYTES: flat.unsqueeze(0), _FORM: form})

    def fetch(self, shards: Sequence[Any]) -> list[torch.Tensor]:
        """Reads tensors, in one request.

        Args:
            shards: AReaL's ``TensorShardInfo``. Only ``shard_id`` is read; a shard may be named several times.

        Returns:
            A tensor for each shard, in their order: the caller's own, on the host, with dtype, shape and bits as they
            were stored. The memory of a fetch is freed when the last of its tensors is.

        Raises:
            MissingShardError: Some were never stored, or were deleted. No tensor is returned.
            DataPlaneError: The store failed.
        """
        ids = [shard.shard_id for shard in shards]
        if not ids:
            return []
        try:
            rows = self.client.get_samples(ids, _PARTITION, [_BYTES, _FORM])
        except (MissingDataError, UnknownPartitionError) as error:
            missing = getattr(error, "missing_samples", ()) or ids
            raise MissingShardError(
                f"Failed to fetch shard: {preview(missing)} of {len(ids)} shards asked for are not in the store.",
                partition_id=_PARTITION,
                missing_samples=missing,
                hint="They were never stored, or were deleted.",
            ) from error
        return [_tensor(*row) for row in zip(rows[_BYTES].unbind(), rows[_FORM].unbind(), strict=True)]

    async def delete(self, node_addr: str, shard_ids: Sequence[str]) -> None:
        """Frees tensors, in a thread: the event loop goes on. Shards that are not there are ignored.

        Args:
            node_addr: Not used: the store knows where it keeps them.
            shard_ids: The shards, perhaps repeated.
        """
        await asyncio.to_thread(self.client.clear_samples, list(dict.fromkeys(shard_ids)), _PARTITION)

    def close(self) -> None:
        """Ends the connection, and the store if this process started it. Idempotent."""
        self.client.close()


def _tensor(flat: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
    """The tensor in a row: its bytes ``flat`` (B,) in the form of `_FORM`."""
    code, *shape = form.tolist()
    dtype = DTYPE_OF_CODE[code]
    if flat.storage_offset() % dtype.itemsize:  # torch shows bytes as a dtype only where they are aligned for it
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def activate(config: ConfigSource, *, bootstrap: bool) -> RTensorStore:
    """Makes AReaL keep its tensors in the store, in this process. Imports AReaL.

    Args:
        config: A config of dataplane, or the path of one.
        bootstrap: True in the process that starts the job; False in its workers.

    Returns:
        The backend that AReaL now uses. Close it at the end of the job, where it was started.
    """
    backend = RTensorStore(config, bootstrap=bootstrap)
    importlib.import_module(_SEAM).set_backend(backend)
    return backend


def main() -> None:
    """``python -m dataplane_compat.areal SCRIPT ...`` starts a job and its store, ``... -m MODULE ...`` a worker of it.

    The environment variable ``DATAPLANE_CONFIG`` names the file of the config.
    """
    is_worker = sys.argv[1:2] == ["-m"]
    del sys.argv[: 2 if is_worker else 1]
    if not sys.argv:
        sys.exit("usage: python -m dataplane_compat.areal SCRIPT|-m MODULE [ARGUMENTS]")
    config = os.environ.get(CONFIG_VARIABLE)
    if not config:
        raise ConfigError("no config was found.", hint=f"Set {CONFIG_VARIABLE} to the path of a config file.")
    backend = activate(config, bootstrap=not is_worker)
    try:
        if is_worker:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        backend.close()


if __name__ == "__main__":
    importlib.import_module("dataplane_compat.areal").main()  # not the copy of this module that is __main__
