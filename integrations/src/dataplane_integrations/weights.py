"""Weights through the data plane: a partition with a row per version, of which rollout processes take the newest.

The trainer opens the partition and publishes a version after each update. Any number of readers, in any process that
reaches the store, take the newest one or wait for it; a reader that is slow skips versions. A put is atomic, so nobody
sees half of an update, and the versions that readers may still be reading are kept.

A row holds the weights, a column each; or, with ``delta``, their bytes (an anchor) or what has changed since the
version before. The tag `weight_anchor` of such a row names the anchor at which its chain begins, and `weight_digest` is
the digest of its weights. Bytes that are too many for a cell of some stores lie in several columns.

This suits models whose weights fit a put. Weights that ranks hold in
shards are gathered first (`torch.distributed.checkpoint.state_dict.get_model_state_dict` with ``full_state_dict``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dataplane_core import DataPlaneClient
from dataplane_core.arguments import check_dict, checked_as
from dataplane_core.errors import (
    ClaimTimeoutError,
    CorruptDataError,
    InvalidRequestError,
    LostSamplesError,
    MissingDataError,
    SchemaMismatchError,
    UnknownTaskError,
    preview,
)
from dataplane_integrations._packed_weights import Version, next_version, read_version

__all__ = ["WEIGHTS", "WeightReader", "open_weights", "publish_weights"]

#: The partition that is used if none is named.
WEIGHTS: Final = "weights"
#: The field, and the tag, that hold the version of a row.
_VERSION: Final = "weight_version"
#: The tag that holds the anchor of a row. None: the row has a column for each weight.
_ANCHOR: Final = "weight_anchor"
#: The tag that holds the digest of the weights of a row with an anchor.
_DIGEST: Final = "weight_digest"
#: The other fields of rows with an anchor: what the bytes are, and the bytes. Further columns of bytes have a number.
_HEADER: Final = "weight_header"
_BYTES: Final = "weight_bytes"
_FIELDS: Final = frozenset({_VERSION, _HEADER, _BYTES})
#: A column of bytes has at most so many in a row. Redis takes at most 512 MiB.
_PART_BYTES: Final = 128 << 20
#: Without names, a partition takes all, also from clients with ``strict_fields``. Those of the weights come later.
_NO_FIELDS: Final = ()


class _Row(NamedTuple):
    """What the tags of a version say. Both are None if it has a column for each weight."""

    anchor: int | None
    digest: str | None


@dataclass
class _Chain:
    """What the publisher of deltas keeps: the newest version, and of which rows it is made.

    Attributes:
        rows: The versions of the anchor and of the deltas after it, ascending, with the digest of each.
        newest: The last of these.
    """

    rows: dict[int, str | None]
    newest: Version


#: The chains of clients that publish deltas, by partition. A client that is gone takes its chains along.
_chains: Final[WeakKeyDictionary[DataPlaneClient, dict[str, _Chain]]] = WeakKeyDictionary()


def open_weights(client: DataPlaneClient, partition_id: str = WEIGHTS) -> None:
    """Opens the partition of a run, without versions. What an earlier run left in it is gone.

    Readers may wait already; they go on. Blocks until the store has answered.
    """
    _chains.get(client, {}).pop(partition_id, None)
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
    version, keep, anchor_every = (
        checked_as(f"publish_weights: {name}", int, number)
        for name, number in (("version", version), ("keep", keep), ("anchor_every", anchor_every))
    )
    check_dict("publish_weights: weights", weights)
    if version < 0 or keep < 2 or anchor_every < 1 or not weights:
        raise InvalidRequestError(
            f"publish_weights(version={version}, keep={keep}, anchor_every={anchor_every}, {len(weights)} tensors) "
            "refused. Expected a version of at least 0, to keep at least 2, an anchor every 1 or more, and weights."
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
    chain = _chains.get(client, {}).pop(partition_id, None)
    if delta:
        chain, columns = _next(held, chain, version, weights, anchor_every)
        held[version] = _Row(min(chain.rows), chain.rows[version])
    else:
        chain = None
        _check_names(client, version, weights, partition_id)
        columns = {name: _column(value) for name, value in weights.items()}
        held[version] = _Row(None, None)
    columns[_VERSION] = torch.tensor([version], device="cpu")
    tags = {_VERSION: version, _ANCHOR: held[version].anchor, _DIGEST: held[version].digest}
    client.put_samples([_row(version)], partition_id, columns, tags=[tags])
    if chain is not None:
        _chains.setdefault(client, {})[partition_id] = chain
    oldest = min(_rows_of(held, each)[0] for each in sorted(held)[-keep:])
    client.clear_samples([_row(each) for each in held if each < oldest], partition_id)


def _check_names(client: DataPlaneClient, version: int, weights: Mapping[str, Any], partition_id: str) -> None:
    known = {name for name in client.describe(partition_id).specs if not _is_own(name)}
    if known and known != weights.keys():
        differs = {"lack": known - weights.keys(), "add": weights.keys() - known}
        raise SchemaMismatchError(
            f"publish_weights(version={version}) refused: the weights "
            f"{' and '.join(f'{verb} {preview(sorted(names))}' for verb, names in differs.items() if names)}. Expected "
            "the names of the first version. Nothing was written."
        )


def _next(
    held: Mapping[int, _Row], chain: _Chain | None, version: int, weights: Mapping[str, Any], anchor_every: int
) -> tuple[_Chain, dict[str, Any]]:
    """The chain with one version more, and the columns of its row."""
    goes_on = (
        chain is not None
        and chain.rows == {each: held[each].digest for each in _rows_of(held, max(held, default=-1))}
        and len(chain.rows) < anchor_every
        and version > max(chain.rows)
    )
    base = None if chain is None else chain.newest
    newest, header, data = next_version(base, version, weights, anchor=not goes_on)
    parts = {
        f"{_BYTES}.{at}" if at else _BYTES: torch.from_numpy(data[at : at + _PART_BYTES])[None]
        for at in range(0, max(1, len(data)), _PART_BYTES)
    }
    rows = {} if chain is None or header["base"] is None else chain.rows
    columns = {_HEADER: _column(header | {"parts": list(parts)}), **parts}
    return _Chain({**rows, version: newest.digest.hex()}, newest), columns


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
            MissingDataError: The newest row lacks cells: something else than `publish_weights` wrote or changed it.
            CorruptDataError: What the deltas give has not the digest of what was published.
        """
        return self._newest(float("inf"))

    def _newest(self, give_up: float) -> dict[str, Any] | None:
        """As `newest`. Also None if versions are dropped while they are read, until ``give_up`` (monotonic)."""
        tried: dict[int, _Row] | None = None
        again = True
        while True:
            held = _held(self._client, self._partition_id)
            newest = max(held, default=None)
            if newest is None or newest == self.version:
                return None
            try:
                epoch = self._client.describe(self._partition_id).info.epoch
                found = self._whole(newest) if held[newest].anchor is None else self._by_deltas(held, newest)
            except LostSamplesError:
                raise
            except MissingDataError:  # newer versions have come meanwhile
                if held == tried:  # none have
                    raise
                if time.monotonic() >= give_up:
                    return None
                tried = held
                continue
            except CorruptDataError:
                # the row was replaced while it was read, or its base is of another run; then its anchor helps
                if not again:
                    raise
                again = False
                continue
            self.version, self._epoch = newest, epoch
            return found

    def _whole(self, version: int) -> dict[str, Any]:
        self._base = None
        columns = self._client.get_samples([_row(version)], self._partition_id, None)
        return {str(name): columns[name][0] for name in columns.keys() if not _is_own(name)}

    def _by_deltas(self, held: Mapping[int, _Row], version: int) -> dict[str, Any]:
        rows = _rows_of(held, version)
        base = self._base
        if base is not None and base.number in rows[:-1]:
            rows = rows[rows.index(base.number) + 1 :]
        for each in rows:
            header, parts = self._read(each)
            self._base = None  # if this raises, its bytes are those of no version
            self._base = base = read_version(base, each, header, parts)
        assert base is not None
        if not base.has_its_digest():
            self._base = None
            raise CorruptDataError(f"the weights of version {version} have not the digest of what was published.")
        return base.weights()

    def _read(self, version: int) -> tuple[Any, list[np.ndarray[Any, Any]]]:
        """The header of a row and its bytes, in parts."""
        columns = self._client.get_samples([_row(version)], self._partition_id, [_HEADER, _BYTES])
        header, parts = columns[_HEADER][0], [columns[_BYTES][0].numpy()]
        try:
            more = list(header["parts"])[1:]
        except (KeyError, TypeError) as error:
            raise CorruptDataError(f"the header of version {version} of the weights is damaged: {error!r}") from error
        if more:
            columns = self._client.get_samples([_row(version)], self._partition_id, more)
            parts += [columns[name][0].numpy() for name in more]
        return header, parts

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
            found = self._newest(give_up)
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
    column = np.empty(1, dtype=object)
    column[0] = value
    return column


def _is_own(field: str) -> bool:
    """Whether a field is none of a weight."""
    return field in _FIELDS or (isinstance(field, str) and field.startswith(f"{_BYTES}."))


def _held(client: DataPlaneClient, partition_id: str) -> dict[int, _Row]:
    """The versions in the store."""
    tags = client.list_samples(partition_id).tags or []
    return {int(each[_VERSION]): _Row(each.get(_ANCHOR), each.get(_DIGEST)) for each in tags}


def _rows_of(held: Mapping[int, _Row], version: int) -> list[int]:
    """The versions in the store of which a version is made, ascending. None of them has to be there."""
    anchor = held[version].anchor if version in held else None
    return sorted(each for each in held if (version if anchor is None else anchor) <= each <= version)
