"""Cells that a store keeps by content: which of them a put brings, and which a client need not fetch again."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from dataplane_core.ledger import Ref, commands
from dataplane_core.spec import FieldSpec, PutRequest, SharedRows, WireColumn

#: Of how many rows of the store a client keeps the digests.
_MOST_DIGESTS: Final = 10_000


def without_known(
    request: PutRequest, writes: Sequence[commands.Write], known: Mapping[bytes, Ref]
) -> tuple[PutRequest, list[commands.Write]]:
    """A put without the rows that the store has, by their digests. Writes that then bring no row come last, so that the
    rows of the others follow one another."""
    from dataplane_core.codec.rows import take_plain  # it imports torch

    columns, rest = dict(request.columns), []
    for write in writes:
        if any(digest in known for digest in write.digests):
            name, positions, digests = write.fields[0], write.positions or (), write.digests
            order = sorted(range(len(digests)), key=lambda row: digests[row] in known)
            brought = [row for row in order if digests[row] not in known]
            places = {row: place for place, row in enumerate(order)}
            column = columns[name]
            assert isinstance(column, SharedRows)
            if brought:
                columns[name] = SharedRows(take_plain(column.rows, brought), column.index)
            write = commands.Write(
                write.fields,
                [write.row_bytes[row] for row in brought],
                [places[row] for row in positions],
                [digests[row] for row in brought],
                [known[digests[row]] for row in order[len(brought) :]],
            )
        rest.append(write)
    return replace(request, columns=columns), sorted(rest, key=lambda write: not write.row_bytes)


class Probes:
    """Tells cells with the same probe apart (`WireFormat.by_probe`), by digests of whole cells. Thread-safe."""

    def __init__(self, kept_digests: Callable[[Sequence[commands.Part], FieldSpec, float], list[bytes]]) -> None:
        self._kept_digests = kept_digests
        self._digests: dict[Ref, bytes] = {}  # of rows of the store; refs are never used again

    def told_apart(
        self, request: PutRequest, writes: Sequence[commands.Write], known: Mapping[bytes, Ref]
    ) -> list[commands.Write]:
        """The writes of a put, of which no row has the digest of a different one, of the put or of ``known``: the rows
        of the store with digests of the put. Raises `RefsGoneError` if one of these is gone."""
        from dataplane_core.codec import column_digests  # it imports torch

        counts = Counter(digest for write in writes for digest in write.digests)
        names: dict[bytes, bytes] = {}  # digest of a whole cell -> the one that names it
        cells: list[list[bytes]] = []  # of each write: digests of whole cells, or probes that no other cell has
        for write in writes:
            whole = list(write.digests)
            alike = [
                row
                for row, digest in enumerate(whole)
                if len(digest) == commands.PROBE_BYTES and (digest in known or counts[digest] > 1)
            ]
            if alike:
                (name,) = write.fields
                column, spec = request.columns[name], request.specs[name]
                assert isinstance(column, SharedRows)
                stored = {whole[row]: known[whole[row]] for row in alike if whole[row] in known}
                names |= zip(self._of_store(list(stored.values()), name, spec, request.deadline), stored, strict=True)
                for row, digest in zip(alike, column_digests(column.rows, spec, alike), strict=True):
                    whole[row] = digest
            cells.append(whole)
        taken = set(names.values())
        named = []
        for write, whole in zip(writes, cells, strict=True):
            for digest, cell in zip(write.digests, whole, strict=True):
                if cell not in names:
                    names[cell] = cell if digest in taken else digest
                    taken.add(names[cell])
            named.append(replace(write, digests=[names[cell] for cell in whole]))
        return named

    def _of_store(self, refs: Sequence[Ref], field: str, spec: FieldSpec, deadline: float) -> list[bytes]:
        """The digests of whole cells of the store."""
        digests, by_write = self._digests, dict[int, list[int]]()
        for write_id, pos in refs:
            if (write_id, pos) not in digests:
                by_write.setdefault(write_id, []).append(pos)
        if by_write:
            parts = [
                commands.Part(write_id, (field,), (0,), places, places, True) for write_id, places in by_write.items()
            ]
            lacking = [(part.write_id, pos) for part in parts for pos in part.positions]
            digests |= zip(lacking, self._kept_digests(parts, spec, deadline), strict=True)
        if len(digests) > _MOST_DIGESTS:
            self._digests = {}
        return [digests[ref] for ref in refs]


class ReadCells:
    """The cells kept by content that a client has read last, up to some bytes. Refs are never used again, so what it
    has is never outdated. Thread-safe."""

    def __init__(self) -> None:
        self._cells: OrderedDict[Ref, tuple[WireColumn, int]] = OrderedDict()  # a column of the one row, and its bytes
        self._lock = threading.Lock()
        self._size = 0

    def fetch(
        self, refs: Sequence[Ref], spec: FieldSpec, most_bytes: int, fetch: Callable[[Sequence[Ref]], WireColumn]
    ) -> WireColumn:
        """A column of these rows, all different. It calls ``fetch`` for those that it has not read before, and keeps
        copies of them, of at most ``most_bytes`` in all."""
        from dataplane_core.codec import Piece, merge_pieces  # it imports torch

        cells = {ref: self._get(ref) for ref in refs}
        lacking = [ref for ref, cell in cells.items() if cell is None]
        if lacking:
            column = fetch(lacking)
            for place, ref in enumerate(lacking):
                frame = [bytes(column[place])] if isinstance(column, list) else None
                cell = cells[ref] = frame or merge_pieces([Piece(column, [place], [0])])
                self._add(ref, cell, most_bytes)
            if len(lacking) == len(refs):
                return column
        dtype = None if spec.kind == "object" else spec.stored.torch_dtype
        kept = [cell for cell in cells.values() if cell is not None]
        return merge_pieces([Piece(cell, [0], [row]) for row, cell in enumerate(kept)], dtype)

    def _get(self, ref: Ref) -> WireColumn | None:
        with self._lock:
            if ref not in self._cells:
                return None
            self._cells.move_to_end(ref)
            return self._cells[ref][0]

    def _add(self, ref: Ref, cell: WireColumn, most_bytes: int) -> None:
        from dataplane_core.codec.rows import row_nbytes  # it imports torch

        (size,) = row_nbytes({"": cell}, 1)
        with self._lock:
            if ref not in self._cells:
                self._cells[ref] = cell, size
                self._size += size
            while self._size > most_bytes:
                self._size -= self._cells.popitem(last=False)[1][1]
