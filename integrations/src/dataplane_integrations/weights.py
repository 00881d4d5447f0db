"""Weights through the data plane: a partition with a row per version, of which rollout processes take the newest.

A row holds the weights, a column each; or, with ``delta``, their bytes (an anchor) or what has changed since the
version before. The tag `weight_anchor` of such a row names the anchor at which its chain begins, and `weight_digest` is
the digest of its weights. Bytes that are too many for a cell of some stores lie in several columns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dataplane_core import DataPlaneClient
from dataplane_core.arguments import Count, Index, check_dict, checked_as
from dataplane_core.codec import object_column
from dataplane_core.errors import (
    ClaimTimeoutError,
    CorruptDataError,
    InvalidRequestError,
    MissingDataError,
    SchemaMismatchError,
    UnknownTaskError,
    preview,
)
from dataplane_integrations._packed_weights import BYTES, HEADER, Version, next_version, read_version

__all__ = ["WEIGHTS", "WeightReader", "open_weights", "publish_weights"]

#: The partition that is used if none is named.
WEIGHTS: Final = "weights"
#: The field, and the tag, that hold the version of a row.
_VERSION: Final = "weight_version"
#: The tag that holds the anchor of a row. None: the row has a column for each weight.
_ANCHOR: Final = "weight_anchor"
#: The tag that holds the digest of the weights of a row with an anchor.
_DIGEST: Final = "weight_digest"
#: Without names, a partition takes all, also from clients with ``strict_fields``. Those of the weights come later.
_NO_FIELDS: Final = ()


#: The newest versions of clients that publish deltas, by partition. A client that is gone takes its versions along.
_bases: Final[WeakKeyDictionary[DataPlaneClient, dict[str, Version]]] = WeakKeyDictionary()


def open_weights(client: DataPlaneClient, partition_id: str = WEIGHTS) -> None:
    """Opens the partition of a run, without versions. What an earlier run left in it is gone.

    Readers may wait already; they go on. Blocks until the store has answered.
    """
    _bases.get(client, {}).pop(partition_id, None)
    client.register_partition(partition_id, _NO_FIELDS, None, [])


def publish_weights(
    client: DataPlaneClient,
    version: int,
    weights: Mapping[str, Any],
    *,
    partition_id: str = WEIGHTS,
    keep: int = 2,
    delta: bool = False,
    anchor_every: int = 20,
) -> None:
    """Writes a version, and drops those that are older than the ``keep`` newest. Blocks until readers can see it.

    With ``delta``, most versions hold only what has changed since the one before, bit for bit. The client keeps a copy
    of the last version in host memory for that, until it is gone, publishes without ``delta``, or opens the partition
    anew; so publish with the same client. A version is an *anchor*, which holds all bytes, if it is the first one of
    this client, the ``anchor_every``-th since the last anchor, or published again; if names, dtypes, shapes or which
    tensors share memory have changed; if the row of an earlier version of the chain is gone from the store or was
    published by another client meanwhile, or the last call raised; and if what has changed takes as many bytes.

    Args:
        client: The trainer's client.
        version: From 0, higher with each update. To publish the newest one again replaces it.
        weights: Name -> tensor or numpy array of any shape, such as a ``state_dict``, with the names of the first
            version (with ``delta``: any). Small values of other kinds, such as the ``_extra_state`` of a layer, go as
            `put_samples` takes objects: None, numbers, strings, bytes, and lists and dicts of these and of tensors. The
            caller may change the tensors as soon as this returns.
        partition_id: The partition, opened by `open_weights`.
        keep: How many versions the store holds. A reader may still read an older one than the newest, so at least 2.
            Versions that these build on are held too: with ``delta`` at most ``keep + anchor_every - 1`` in all, of
            which at most ``keep`` are anchors. There is one more while a version is written.
        delta: Whether to send what has changed. Readers find out by themselves.
        anchor_every: An anchor after at most so many versions, at least 1. A reader that joins late reads the anchor
            and all deltas after it.

    Raises:
        InvalidRequestError: A negative version, or one below the newest; ``keep`` below 2 or ``anchor_every`` below 1;
            no weights, or one named as a field of these partitions: ``weight_version``, ``weight_header``,
            ``weight_bytes``, ``weight_bytes.*``.
        SchemaMismatchError: The names are not those of the first version, or a tensor has another dtype, number of
            dims, or size of a dim but the first, or has become an object. Not with ``delta``.
        InvalidTypeError: An argument of another type, or a value that the store does not take. The error names it.
        UnknownPartitionError: The partition is not open.

    Examples:
        >>> client = connect({"backend": "noop"})
        >>> open_weights(client)
        >>> publish_weights(client, 0, {"layer.weight": torch.ones(2, 3)})
        >>> WeightReader(client, "rollout 0").newest()["layer.weight"].shape
        torch.Size([2, 3])
        >>> publish_weights(client, 1, {"layer.weight": torch.zeros(2, 3)}, delta=True)
    """
    version = checked_as("publish_weights: version", Index, version)
    keep = checked_as("publish_weights: keep", int, keep)
    anchor_every = checked_as("publish_weights: anchor_every", Count, anchor_every)
    check_dict("publish_weights: weights", weights)
    if keep < 2 or not weights:
        raise InvalidRequestError(
            f"publish_weights(keep={keep}, {len(weights)} weights) refused. Expected to keep at least 2, and weights."
        )
    if taken := sorted(name for name in weights if _is_own(name)):
        raise InvalidRequestError(
            f"publish_weights refused: a weight is named {preview(taken)}, a field of these partitions."
        )
    held = _held(client, partition_id)
    if held and version < max(held):
        raise InvalidRequestError(
            f"publish_weights(version={version}) refused: version {max(held)} is published. Expected none below it.",
            hint="A trainer that begins again opens the partition anew: open_weights.",
        )
    # taken out: a call that fails leaves none, and the next version is an anchor
    base = _bases.get(client, {}).pop(partition_id, None)
    tags: dict[str, Any] = {_VERSION: version, _ANCHOR: None, _DIGEST: None}
    cells = weights
    if delta:
        if base is not None and not (
            base.rows == {number: held[number][_DIGEST] for number in _rows_of(held, max(held, default=-1))}
            and len(base.rows) < anchor_every
            and version > base.number
        ):
            base = None
        base, cells = next_version(base, version, weights)
        tags |= {_ANCHOR: min(base.rows), _DIGEST: base.rows[version]}
    else:
        _check_names(client, version, weights, partition_id)
    columns = {name: _column(cell) for name, cell in cells.items()}
    columns[_VERSION] = torch.tensor([version], device="cpu")
    client.put_samples([_row(version)], partition_id, columns, tags=[tags])
    if delta and base is not None:
        _bases.setdefault(client, {})[partition_id] = base
    held[version] = tags
    oldest = min(_rows_of(held, number)[0] for number in sorted(held)[-keep:])
    client.clear_samples([_row(number) for number in held if number < oldest], partition_id)


def _check_names(client: DataPlaneClient, version: int, weights: Mapping[str, Any], partition_id: str) -> None:
    first = {name for name in client.describe(partition_id).specs if not _is_own(name)}
    if first and first != weights.keys():
        differs = {"lack": first - weights.keys(), "add": weights.keys() - first}
        raise SchemaMismatchError(
            f"publish_weights(version={version}) refused: the weights "
            f"{' and '.join(f'{verb} {preview(sorted(names))}' for verb, names in differs.items() if names)}. Expected "
            "the names of the first version. Nothing was written."
        )


class WeightReader:
    """Takes the newest weights from the partition of a run.

    Args:
        client: A client of this process.
        name: A name of this reader. Readers that exist at the same time have different names.
        partition_id: The partition.

    Attributes:
        version: The version that it took last. None: none yet.

    Of versions with ``delta`` it keeps the last one in host memory, beside what it returns, and reads only the deltas
    after it. If it has none that they build on, it reads their anchor first.
    """

    def __init__(self, client: DataPlaneClient, name: str, partition_id: str = WEIGHTS) -> None:
        self.version: int | None = None
        self._client = client
        self._name = name
        self._partition_id = partition_id
        self._joined = False
        self._epoch: str | None = None  # the registration that `version` is of
        self._base: Version | None = None  # the last one, to which deltas are applied

    def newest(self) -> dict[str, Any] | None:
        """Takes the newest version: name -> tensor, or object as it was published. Does not wait for another.

        None if the newest is `version`, or if there is none yet.

        Raises:
            UnknownPartitionError: The partition is not open, or the run is over.
            LostSamplesError: The store has lost the weights, or the anchor or a delta that they build on.
            CorruptDataError: The row, or one that it builds on, is not as `publish_weights` wrote it.
        """
        return self._newest(float("inf"))

    def _newest(self, give_up: float) -> dict[str, Any] | None:
        """As `newest`. Also None if versions are dropped while they are read, until ``give_up`` (monotonic)."""
        tried: dict[int, dict[str, Any]] | None = None
        while True:
            held = _held(self._client, self._partition_id)
            newest = max(held, default=None)
            if newest is None or newest == self.version:
                return None
            try:
                epoch = self._client.describe(self._partition_id).info.epoch
                weights = self._take(held, newest)
            except (MissingDataError, CorruptDataError):
                # rows were dropped or replaced meanwhile; or the base is of another run, and reading the anchor helps
                if held == tried:
                    raise
                if tried is not None and time.monotonic() >= give_up:
                    return None
                tried = held
                continue
            self.version, self._epoch = newest, epoch
            return weights

    def _take(self, held: Mapping[int, Mapping[str, Any]], version: int) -> dict[str, Any]:
        """Reads a version of the store, from the last one on if it builds on that."""
        base, rows = self._base, _rows_of(held, version)
        if base is not None and base.number in rows[:-1]:
            rows = rows[rows.index(base.number) + 1 :]
        for number in rows:
            columns = self._client.get_samples([_row(number)], self._partition_id, None)
            cells = {str(name): columns[name][0] for name in columns.keys()}
            self._base = None  # if what follows raises, the next call begins at the anchor
            if held[version][_ANCHOR] is None:
                return {name: cell for name, cell in cells.items() if not _is_own(name)}
            self._base = base = read_version(base, number, cells)
        assert base is not None
        self._base = None
        weights = base.weights()
        self._base = base
        return weights

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Waits for a version that is newer than `version`, and takes the newest. The trainer may start later.

        If the trainer opens the partition again meanwhile, any version of that run is newer.

        Raises:
            ClaimTimeoutError: There was none within ``timeout_s`` seconds.
            LostSamplesError, CorruptDataError: As `newest`, which may end the wait earlier.
            OperationTimeoutError: The store did not answer.
            UnknownPartitionError: The run is over: its partition was dropped.
            UnsupportedOperationError: The backend does not declare ``claims``.
        """
        give_up = time.monotonic() + timeout_s
        if not self._joined:
            self._join()  # the trainer may open the partition later
        while True:
            weights = self._newest(give_up)
            if weights is not None:
                return weights
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
        self._client.register_partition(self._partition_id, _NO_FIELDS, None, [self._name], if_exists="keep")
        self._joined = True


def _row(version: int) -> str:
    return f"v{version}"


def _column(value: Any) -> Any:
    """A weight as a column of one row."""
    if isinstance(value, Tensor):
        return value.detach().unsqueeze(0)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value[None]
    return object_column([value])


def _is_own(field: str) -> bool:
    """Whether a field is none of a weight."""
    return field in (_VERSION, HEADER, BYTES) or (isinstance(field, str) and field.startswith(f"{BYTES}."))


def _held(client: DataPlaneClient, partition_id: str) -> dict[int, dict[str, Any]]:
    """The versions in the store, with their tags."""
    return {int(tags[_VERSION]): dict(tags) for tags in client.list_samples(partition_id).tags or []}


def _rows_of(held: Mapping[int, Mapping[str, Any]], version: int) -> list[int]:
    """The versions in the store of which a version is made, ascending. None of them has to be there."""
    anchor = held[version].get(_ANCHOR) if version in held else None
    return sorted(number for number in held if (version if anchor is None else anchor) <= number <= version)
