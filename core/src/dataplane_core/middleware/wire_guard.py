"""The wire guard: a checksum of every cell travels with it, and every read compares it with what came back.

A checksum is bound to the partition, the sample, the field, and the field's dtype and shape, so a flipped bit is caught
as well as a row or a column that belongs to another. It is made in the process that puts and compared in the process
that gets, over the cells as the backend sees them: whatever lies between the two clients is covered, the store's memory
and disk included. Checksums are CRC-32: a random fault goes unseen once in 4 billion cells; somebody who means to
deceive is another matter.

Rules:

- Every client of a partition lists ``wire_guard``, or none does. A guarded read of cells that were put without it is
  refused with a `ConfigError`: nothing is passed on unchecked. Other clients' reads need no guard and are not checked.
- A client without the guard that overwrites guarded cells leaves their old checksums behind, which a guarded read then
  reports as corruption.
- Each field takes 8 bytes more per sample, in a column of its own with a reserved name, which counts for the capacity.
- With ``allow_pickle``, an item outside the closed set that never leaves the process (a wire of native objects) has no
  bytes; only its place is checked.

`benchmarks/wire_guard.py` prints what it costs.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import torch

from dataplane_core.codec import (
    BytesLike,
    Ragged,
    byte_view,
    decode_columns,
    encode_columns,
    encode_item,
    host_tensor,
    num_rows,
    ragged_of_nested,
)
from dataplane_core.errors import ConfigError, CorruptDataError, InvalidTypeError, MissingDataError, preview
from dataplane_core.middleware.base import Middleware, MiddlewareContext
from dataplane_core.spec import FieldSpec, GetRequest, PutReply, PutRequest, WireBatch, WireColumn, WireFormat, hookimpl

__all__ = ["WireGuard"]

#: What a checksum column's name begins with; the name of the field follows.
_PREFIX: Final = "~crc32."


class WireGuard(Middleware):
    """Writes a checksum per cell with every put, and verifies it on every get. May be used from several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._wire = WireFormat()

    def start(self, context: MiddlewareContext) -> None:
        """Learns the form of the columns."""
        self._wire = context.wire

    @hookimpl(wrapper=True)
    def put_samples(self, request: PutRequest) -> Generator[None, PutReply, PutReply]:
        """Adds a column of checksums per field."""
        names = [name for name in request.columns if not name.startswith(_PREFIX)]  # a put may be asked again
        if names:
            sums = {
                _PREFIX + name: self._checksums(request, name, request.columns[name], request.specs[name])
                for name in names
            }
            columns, specs = encode_columns(sums, len(request.sample_ids), self._wire)
            request.columns = {**request.columns, **columns}
            request.specs = {**request.specs, **specs}
        return (yield)

    @hookimpl(wrapper=True)
    def get_samples(self, request: GetRequest) -> Generator[None, WireBatch, WireBatch]:
        """Asks for the checksums too, compares, and hands the fields alone on.

        Raises:
            CorruptDataError: Names the samples and fields that are not what was put; `CorruptDataError.cells` holds
                them all.
            ConfigError: The cells were put by a client without this middleware.
        """
        names = list(request.fields)
        request.fields = [*names, *(_PREFIX + name for name in names)]
        try:
            batch = yield
        except MissingDataError as error:
            _refuse_unguarded(request, names, error)
            raise
        columns = {name: batch.columns[name] for name in names if name in batch.columns}
        specs = {name: batch.specs[name] for name in names if name in batch.specs}
        self._verify(request, batch, [name for name in names if name in columns and name in specs])
        return WireBatch(columns=columns, specs=specs)

    def _verify(self, request: GetRequest, batch: WireBatch, names: Sequence[str]) -> None:
        count = len(request.sample_ids)
        # another number of rows is the client's to refuse
        names = [name for name in names if num_rows(batch.columns[name]) == count]
        kept = [_PREFIX + name for name in names if _PREFIX + name in batch.columns]
        sums = decode_columns(
            {name: batch.columns[name] for name in kept}, {name: batch.specs[name] for name in kept}, count, self._wire
        )
        wrong: dict[str, list[str]] = {}
        for name in names:
            found = self._checksums(request, name, batch.columns[name], batch.specs[name])
            written = sums.get(_PREFIX + name)
            if written is None or written.shape != found.shape:
                wrong.update({sample_id: [*wrong.get(sample_id, ()), name] for sample_id in request.sample_ids})
                continue
            for row in torch.nonzero(written != found).flatten().tolist():
                wrong.setdefault(request.sample_ids[row], []).append(name)
        if wrong:
            shown = "; ".join(f"'{sample_id}' in {preview(fields)}" for sample_id, fields in list(wrong.items())[:3])
            more = f"; and {len(wrong) - 3} more samples" if len(wrong) > 3 else ""
            raise CorruptDataError(
                f"get_samples('{request.partition_id}', {count} samples): what came back is not what was put, by its "
                f"checksums: {shown}{more}.",
                cells=wrong,
                hint="It was damaged or mistaken for another on the way or in the store, or overwritten by a client "
                "without wire_guard. Clear these samples and produce them again.",
            )

    def _checksums(
        self, request: PutRequest | GetRequest, name: str, column: WireColumn, spec: FieldSpec
    ) -> torch.Tensor:
        """(N,) int64: one checksum per cell, of where it belongs and of its bytes."""
        place = zlib.crc32("\0".join((request.partition_id, name, spec.to_text(), "")).encode(errors="surrogatepass"))
        ids = [sample_id.encode(errors="surrogatepass") + b"\0" for sample_id in request.sample_ids]
        rows = _row_bytes(column, spec, self._wire)
        return torch.tensor(
            [zlib.crc32(row, zlib.crc32(own, place)) for own, row in zip(ids, rows, strict=True)], dtype=torch.int64
        )


def _row_bytes(column: WireColumn, spec: FieldSpec, wire: WireFormat) -> Iterator[BytesLike]:
    """The bytes of each cell of a encoded column, whatever its container; without a copy where they are contiguous."""
    if isinstance(column, torch.Tensor):
        rows = ragged_of_nested(column, "a column") if column.is_nested else host_tensor(column, "a column")
        plain, cuts = (
            (rows.values, (rows.offsets * rows.itemsize).tolist())
            if isinstance(rows, Ragged)
            else (rows, range(0, rows.nbytes + 1, max(1, rows.nbytes // len(rows))))
        )
        if plain.nbytes == 0:
            yield from [b""] * num_rows(column)
            return
        data = byte_view(plain)
        for start, stop in pairwise(cuts):
            yield data[start:stop]
    elif wire.bytes:
        yield from column
    elif spec.kind == "object" and wire.objects == "native":
        for item in column if isinstance(column, list) else column.tolist():
            yield _item_bytes(item)
    else:
        for row in column:
            yield byte_view(host_tensor(row, "a row"))


def _item_bytes(item: Any) -> bytes:
    try:
        return encode_item(item)
    except InvalidTypeError:  # it is allowed, and would be pickled, if it travelled
        return b""


def _refuse_unguarded(request: GetRequest, names: Sequence[str], error: MissingDataError) -> None:
    """Where nothing but checksums is missing, says so."""
    lacking = {
        sample_id: [field.removeprefix(_PREFIX) for field in fields]
        for sample_id, fields in error.missing_cells.items()
        if all(field.startswith(_PREFIX) for field in fields)
    }
    if not lacking or len(lacking) < len(error.missing_cells) or error.missing_samples:
        return
    shown = "; ".join(f"'{sample_id}' in {preview(fields)}" for sample_id, fields in lacking.items())
    raise ConfigError(
        f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples) refused: cells were put without "
        f"wire_guard and have no checksum: {shown}.",
        hint="List wire_guard in the middleware of every client that puts, or read without it.",
    ) from error
