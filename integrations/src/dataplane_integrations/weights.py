"""Weights through the data plane: a partition with a row per version, of which rollout processes take the newest.

The trainer opens the partition and publishes a version after each update. Any number of readers, in any process that
reaches the store, take the newest one or wait for it; a reader that is slow skips versions. A put is atomic, so nobody
sees half of an update, and the versions that readers may still be reading are kept.

This suits models whose weights fit a put: every reader reads all of them from the store. Weights that ranks hold in
shards are gathered first (`torch.distributed.checkpoint.state_dict.get_model_state_dict` with ``full_state_dict``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dataplane_core import DataPlaneClient
from dataplane_core.codec import object_column
from dataplane_core.errors import (
    ClaimTimeoutError,
    InvalidRequestError,
    LostSamplesError,
    MissingDataError,
    SchemaMismatchError,
    UnknownTaskError,
    preview,
)

__all__ = ["WEIGHTS", "WeightReader", "open_weights", "publish_weights"]

#: The partition that is used if none is named.
WEIGHTS: Final = "weights"
#: The field, and the tag, that hold the version of a row.
_VERSION: Final = "weight_version"


def open_weights(client: DataPlaneClient, partition_id: str = WEIGHTS) -> None:
    """Opens the partition of a run, without versions. What an earlier run left in it is gone.

    Readers may wait already; they go on. Blocks until the store has answered.
    """
    client.register_partition(partition_id, [_VERSION], None, [])


def publish_weights(
    client: DataPlaneClient,
    version: int,
    weights: Mapping[str, Any],
    *,
    partition_id: str = WEIGHTS,
    keep: int = 2,
) -> None:
    """Writes a version, and drops those that are older than the ``keep`` newest. Blocks until readers can see it.

    Args:
        client: The trainer's client.
        version: From 0, higher with each update. To publish the newest one again replaces it.
        weights: Name -> tensor of any shape, such as a ``state_dict``, with the names of the first version. The caller
            may change the tensors as soon as this returns. Values of another type, such as the None of an
            ``_extra_state``, are carried as objects; arrays of numbers arrive as tensors.
        partition_id: The partition, opened by `open_weights`.
        keep: How many versions the store holds. A reader may still read an older one than the newest, so at least 2.

    Raises:
        InvalidRequestError: A negative version, or one below the newest; ``keep`` below 2; no weights, or one named
            ``weight_version``.
        SchemaMismatchError: The names are not those of the first version, or a tensor has another dtype, number of
            dims, or size of a dim but the first.
        UnknownPartitionError: The partition is not open.

    Examples:
        >>> client = connect({"backend": "noop"})
        >>> open_weights(client)
        >>> publish_weights(client, 0, {"layer.weight": torch.ones(2, 3)})
        >>> WeightReader(client, "rollout 0").newest()["layer.weight"].shape
        torch.Size([2, 3])
    """
    if version < 0 or keep < 2 or not weights:
        raise InvalidRequestError(
            f"publish_weights(version={version}, keep={keep}, {len(weights)} tensors) refused. Expected a version of "
            "at least 0, to keep at least 2, and weights."
        )
    if _VERSION in weights:
        raise InvalidRequestError(f"publish_weights refused: a weight is named '{_VERSION}', which holds the version.")
    held = _versions(client, partition_id)
    if held and version < held[-1]:
        raise InvalidRequestError(
            f"publish_weights(version={version}) refused: version {held[-1]} is published. Expected none below it.",
            hint="A trainer that begins again opens the partition anew: open_weights.",
        )
    known = client.describe(partition_id).specs.keys() - {_VERSION}
    if known and known != weights.keys():
        lacking, added = sorted(known - weights.keys()), sorted(weights.keys() - known)
        found = [f"lack {preview(lacking)}"] * bool(lacking) + [f"add {preview(added)}"] * bool(added)
        raise SchemaMismatchError(
            f"publish_weights(version={version}) refused: the weights {' and '.join(found)}. Expected the names of the "
            "first version. Nothing was written."
        )
    columns: dict[str, Any] = {name: _one_row(value) for name, value in weights.items()}
    columns[_VERSION] = torch.tensor([version])
    client.put_samples([_row(version)], partition_id, columns, tags=[{_VERSION: version}])
    held = sorted({*held, version})
    client.clear_samples([_row(each) for each in held[:-keep]], partition_id)


class WeightReader:
    """Takes the newest weights from the partition of a run.

    Args:
        client: A client of this process.
        name: A name of this reader. Readers that exist at the same time have different names.
        partition_id: The partition.

    Attributes:
        version: The version that it took last. None: none yet.
    """

    def __init__(self, client: DataPlaneClient, name: str, partition_id: str = WEIGHTS) -> None:
        self.version: int | None = None
        self._client = client
        self._name = name
        self._partition_id = partition_id
        self._joined = False
        self._epoch: str | None = None  # the registration that `version` is of

    def newest(self) -> dict[str, Any] | None:
        """Takes the newest version. None if that is `version`, or if there is none yet. Does not wait for another.

        Raises:
            UnknownPartitionError: The partition is not open, or the run is over.
            LostSamplesError: The store has lost the weights.
        """
        while True:
            held = _versions(self._client, self._partition_id)
            if not held or held[-1] == self.version:
                return None
            try:
                epoch = self._client.describe(self._partition_id).info.epoch
                columns = self._client.get_samples([_row(held[-1])], self._partition_id, None)
            except LostSamplesError:
                raise
            except MissingDataError:  # newer versions have come meanwhile
                continue
            self.version, self._epoch = held[-1], epoch
            return {str(name): columns[name][0] for name in columns.keys() if name != _VERSION}

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Waits for a version that is newer than `version`, and takes the newest. The trainer may start later.

        If the trainer opens the partition again meanwhile, any version of that run is newer.

        Raises:
            ClaimTimeoutError: There was none within ``timeout_s`` seconds.
            OperationTimeoutError: The store did not answer.
            UnknownPartitionError: The run is over: its partition was dropped.
            UnsupportedOperationError: The backend does not declare ``claims``.
        """
        give_up = time.monotonic() + timeout_s
        if not self._joined:
            self._join()  # the trainer may open the partition later
        while True:
            found = self.newest()
            if found is not None:
                return found
            if time.monotonic() >= give_up:
                raise ClaimTimeoutError(
                    f"no weights newer than version {self.version} were published within {timeout_s} s."
                )
            try:
                # the claim waits without asking again and again; what it gives is not used
                left_s = max(0.0, give_up - time.monotonic())
                self._client.claim_meta(self._partition_id, self._name, [_VERSION], 1, timeout_s=left_s)
            except UnknownTaskError:  # the trainer has opened the partition anew
                if self._epoch != self._client.describe(self._partition_id).info.epoch:
                    self.version = None  # that of the run before
                self._join()

    def _join(self) -> None:
        """Adds a task of its own name to the partition."""
        self._client.register_partition(self._partition_id, [_VERSION], None, [self._name], if_exists="keep")
        self._joined = True


def _one_row(value: Any) -> Any:
    """A column with the value as its only row."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(value)
    return value.detach().unsqueeze(0) if isinstance(value, Tensor) else object_column([value])


def _row(version: int) -> str:
    return f"v{version}"


def _versions(client: DataPlaneClient, partition_id: str) -> list[int]:
    """The versions in the store, ascending."""
    return sorted(int(tags[_VERSION]) for tags in client.list_samples(partition_id).tags or [])
