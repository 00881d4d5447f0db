"""The wire guard: stores a checksum with every cell, and every read compares it with the cell that came back.

A checksum covers the partition, the sample, the field, the field's dtype and shape, and the cell as the backend sees
it. So it detects flipped bits as well as rows or columns that were swapped, anywhere between the client that puts and
the one that gets. Checksums are XXH3-64: one of 2**64 random faults is not detected. They do not protect against
deliberate changes.

- Every client that puts into a partition must list ``wire_guard``, or none: a guarded read of cells without a checksum
  raises `ConfigError`. A client without it can read guarded cells, unchecked. If it overwrites them, their old
  checksums stay, and a guarded read reports corruption.
- Each field takes 8 more bytes per sample, in an extra column with a reserved name. They count for the capacity.
- With ``allow_pickle`` and a wire of native objects, an item outside the closed set has no bytes. Only its partition,
  sample, field and type are checked.

`python -m benchmarks settings` prints its cost.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from dataplane_core.codec.rows import num_rows
from dataplane_core.codec.wire import cell_digests, decode_columns, encode_columns
from dataplane_core.digests import fast_digest
from dataplane_core.errors import ConfigError, CorruptDataError, MissingDataError, preview
from dataplane_core.middleware.base import Middleware, MiddlewareContext
from dataplane_core.spec import (
    FieldSpec,
    GetRequest,
    PutRequest,
    SharedRows,
    WireBatch,
    WireColumn,
    WireFormat,
    hookimpl,
)

#: What a checksum column's name begins with; the name of the field follows.
_PREFIX: Final = "~xxh3."

_Sums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


class WireGuard(Middleware):
    """Writes a checksum per cell with every put, and verifies it on every get. May be used from several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._wire = WireFormat()

    def start(self, context: MiddlewareContext) -> None:
        """Keeps the backend's wire format."""
        self._wire = context.wire

    @hookimpl(wrapper=True)
    def put_samples(self, request: PutRequest) -> Generator[None, int, int]:
        """Adds a column of checksums per field."""
        # a retried put has the checksums already
        names = [name for name in request.columns if not name.startswith(_PREFIX)]
        if names:
            ids = _hashes(request.sample_ids)
            sums = {
                _PREFIX + name: _xxh3(request, ids, name, request.columns[name], request.specs[name], self._wire)
                for name in names
            }
            columns, specs = encode_columns(sums, len(request.sample_ids), self._wire)
            request.columns = {**request.columns, **columns}
            request.specs = {**request.specs, **specs}
        return (yield)

    @hookimpl(wrapper=True)
    def get_samples(self, request: GetRequest) -> Generator[None, WireBatch, WireBatch]:
        """Reads the checksums too, compares them, and returns only the fields. Raises `CorruptDataError`, whose
        ``cells`` are all that differ, and `ConfigError` if they were put by a client without this middleware."""
        names = list(request.fields)
        request.fields = [*names, *(_PREFIX + name for name in names)]
        try:
            batch = yield
        except MissingDataError as error:
            lacking = _lacking(error)
            if lacking is None:
                raise
            raise ConfigError(
                f"get_samples('{request.partition_id}') refused: cells were put without wire_guard and have no "
                f"checksum: '{lacking[0]}' in {preview(lacking[1])}.",
                hint="List wire_guard in the middleware of every client that puts, or read without it.",
            ) from error
        batch, wrong = self._verify(request, names, batch)
        if wrong:
            shown = "; ".join(f"'{sample_id}' in {preview(fields)}" for sample_id, fields in list(wrong.items())[:3])
            more = f"; and {len(wrong) - 3} more samples" if len(wrong) > 3 else ""
            raise CorruptDataError(
                f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples): what came back is not what "
                f"was put, by its checksums: {shown}{more}.",
                cells=wrong,
                hint="It was damaged or mistaken for another on the way or in the store, or overwritten by a client "
                "without wire_guard. Clear these samples and produce them again.",
            )
        return batch

    def _verify(
        self, request: GetRequest, names: Sequence[str], batch: WireBatch
    ) -> tuple[WireBatch, dict[str, list[str]]]:
        """The batch without checksums, and each sample with its wrong fields."""
        count = len(request.sample_ids)
        columns = {name: batch.columns[name] for name in names if name in batch.columns}
        specs = {name: batch.specs[name] for name in names if name in batch.specs}
        # the client refuses a wrong number of rows
        checked = [name for name in columns if name in specs and num_rows(columns[name]) == count]
        kept = [_PREFIX + name for name in checked if _PREFIX + name in batch.columns]
        sums = decode_columns(
            {name: batch.columns[name] for name in kept}, {name: batch.specs[name] for name in kept}, count, self._wire
        )
        wrong: dict[str, list[str]] = {}
        ids = _hashes(request.sample_ids)
        for name in checked:
            written = sums.get(_PREFIX + name)
            read = _xxh3(request, ids, name, columns[name], specs[name], self._wire)
            if written is None or written.shape != read.shape:
                wrong.update({sample_id: [*wrong.get(sample_id, ()), name] for sample_id in request.sample_ids})
                continue
            for row in torch.nonzero(written != read).flatten().tolist():
                wrong.setdefault(request.sample_ids[row], []).append(name)
        return WireBatch(columns=columns, specs=specs), wrong


def _lacking(error: MissingDataError) -> tuple[str, list[str]] | None:
    """The first sample that lacks checksums, and their fields. None if anything else is missing."""
    cells = error.missing_cells
    if not cells or error.missing_samples or not all(n.startswith(_PREFIX) for names in cells.values() for n in names):
        return None
    sample_id, names = next(iter(cells.items()))
    return sample_id, [name.removeprefix(_PREFIX) for name in names]


# --- checksums --------------------------------------------------------------------------------------------------------


def _hashes(sample_ids: Sequence[str]) -> _Sums:
    digests = [fast_digest(sample_id.encode(errors="surrogatepass")) for sample_id in sample_ids]
    return np.array(digests, dtype=np.uint64)


def _xxh3(
    request: PutRequest | GetRequest,
    ids: _Sums,
    name: str,
    column: WireColumn | SharedRows,
    spec: FieldSpec,
    wire: WireFormat,
) -> torch.Tensor:
    """One checksum per cell, (N,) int64, over its partition, sample, field and spec, and its bytes.

    For one sample and field, cells with different digests have different checksums, since `_mixed` is a bijection.
    """
    spec = spec.stored
    place = "\0".join((request.partition_id, name, spec.to_text())).encode(errors="surrogatepass")
    sums = _mixed(cell_digests(column, spec, wire) ^ _mixed(ids + np.uint64(fast_digest(place))))
    return torch.from_numpy(sums.view(np.int64))


def _mixed(words: _Sums) -> _Sums:
    """The finalizer of SplitMix64: a bijection in which each bit of a word changes about half of the result's."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
