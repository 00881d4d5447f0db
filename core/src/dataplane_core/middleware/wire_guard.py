"""The wire guard: stores a checksum with every cell, and every read compares it with the cell that came back.

A checksum covers the partition, the sample, the field, the field's dtype and shape, and the cell. So it detects flipped
bits as well as rows or columns that were swapped. The process that puts computes it, and the process that gets compares
it, both over the cells as the backend sees them. So everything between the two clients is covered, including the
store's memory and disk. Checksums are CRC-32: one of 4 billion random faults is not detected. They do not protect
against deliberate changes.

Rules:

- Every client that puts into a partition must list ``wire_guard``, or none. A guarded read of cells that were put
  without it raises `ConfigError`, since it cannot check them. A client without the guard can read guarded cells; its
  reads are not checked.
- If a client without the guard overwrites guarded cells, their old checksums stay, and a guarded read reports
  corruption.
- Each field takes 8 more bytes per sample, in an extra column with a reserved name. They count for the capacity.
- With ``allow_pickle`` and a wire of native objects, an item outside the closed set has no bytes. Only its partition,
  sample, field and type are checked.

`benchmarks/wire_guard.py` prints its cost.
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
from dataplane_core.spec import (
    FieldSpec,
    GetRequest,
    PutReply,
    PutRequest,
    SharedRows,
    WireBatch,
    WireColumn,
    WireFormat,
    hookimpl,
)

__all__ = ["WireGuard"]

#: What a checksum column's name begins with; the name of the field follows.
_PREFIX: Final = "~crc32."


class WireGuard(Middleware):
    """Writes a checksum per cell with every put, and verifies it on every get. May be used from several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._wire = WireFormat()

    def start(self, context: MiddlewareContext) -> None:
        """Keeps the backend's wire format."""
        self._wire = context.wire

    @hookimpl(wrapper=True)
    def put_samples(self, request: PutRequest) -> Generator[None, PutReply, PutReply]:
        """Adds a column of checksums per field."""
        names = [
            name for name in request.columns if not name.startswith(_PREFIX)
        ]  # a retried put has the checksums already
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
        """Reads the checksums too, compares them, and returns only the fields.

        Raises:
            CorruptDataError: Cells differ from what was put. The message names the first few; `CorruptDataError.cells`
                holds all of them.
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
        # the client refuses a wrong number of rows
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
        self, request: PutRequest | GetRequest, name: str, column: WireColumn | SharedRows, spec: FieldSpec
    ) -> torch.Tensor:
        """One checksum per cell, (N,) int64, over its partition, sample, field and spec, and its bytes."""
        place = zlib.crc32("\0".join((request.partition_id, name, spec.to_text(), "")).encode(errors="surrogatepass"))
        ids = [sample_id.encode(errors="surrogatepass") + b"\0" for sample_id in request.sample_ids]
        rows = _row_bytes(column, spec, self._wire)
        return torch.tensor(
            [zlib.crc32(row, zlib.crc32(own, place)) for own, row in zip(ids, rows, strict=True)], dtype=torch.int64
        )


def _row_bytes(column: WireColumn | SharedRows, spec: FieldSpec, wire: WireFormat) -> Iterator[BytesLike]:
    """The bytes of each cell of an encoded column in any container. No copy if they are contiguous."""
    if isinstance(column, SharedRows):
        cells = list(_row_bytes(column.rows, spec, wire))
        yield from (cells[row] for row in column.index)
    elif isinstance(column, torch.Tensor):
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
    except InvalidTypeError:  # allow_pickle is on, but a native object is not pickled
        return b""


def _refuse_unguarded(request: GetRequest, names: Sequence[str], error: MissingDataError) -> None:
    """Raises `ConfigError` if only checksums are missing."""
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
