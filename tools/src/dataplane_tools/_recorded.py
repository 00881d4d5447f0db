"""The rows of a partition that a run recorded, for `dataplane read` and `export`, as a client of a store that has them.

All rows that were put are there, also those that the run cleared later. In memory are ids and tags. The cells stay in
the recording: a read reads the blocks of the puts that it needs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from pydantic import ConfigDict

from dataplane_core.backends import CapacityOptions, LedgerBackend, columns_of
from dataplane_core.client import DataPlaneClient
from dataplane_core.codec import Piece, encode_columns, merge_pieces
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import MissingDataError, SchemaMismatchError, printable
from dataplane_core.ledger import Command, LedgerService, Located, Ref, Reply, commands
from dataplane_core.spec import SharedRows, WireColumn, WireFormat
from dataplane_observe import Record, Recording

#: The tag that says after which rows a step ended.
_STEP: Final = "step"


@contextmanager
def opened_recording(folder: str, partition_id: str | None) -> Iterator[DataPlaneClient]:
    """A client of a store that has the rows that a run put in a partition, with their last cells and tags.

    Of rows that were put again after they were cleared, it has the newest. Rows that have no tag or field ``step`` get
    the tag: the number of the step that ended next after they were put. What a reader should know is printed. The other
    partitions are registered, and have no rows.
    """
    recording = Recording(folder)
    partitions = _registered(recording)
    blocks = _Blocks(recording)
    options = {"blocks": blocks}
    config = DataPlaneConfig(backend="recording", options=options, announce_s=None, op_timeout_s=3600.0)
    with connect_backend(_RecordedStore, config) as client:
        for name in partitions:
            client.register_partition(name, [], None, [])  # without fields, it takes all without a word
        chosen = next(iter(partitions)) if partition_id is None and len(partitions) == 1 else partition_id
        remarks = []
        if chosen is not None and chosen in partitions:
            remarks = _Load(client, blocks, chosen, has_step=partitions[chosen].puts_step).run()
        for name, registered in partitions.items():
            client.register_partition(name, list(registered.fields), None, [], if_exists="keep")
        if recording.dropped:
            until = datetime.fromtimestamp(max(segment.until for segment in recording.dropped), UTC)
            remarks.append(f"Segments were deleted to keep max_bytes: rows put before {until:%F %T} may be missing.")
        for remark in dict.fromkeys((*recording.remarks, *remarks)):
            print(printable(f"dataplane: {remark}"), file=sys.stderr)
        yield client


# --- what the run did -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Registered:
    """How a partition was registered, all times together. ``puts_step``: whether a field of that name was put."""

    fields: dict[str, None] = field(default_factory=dict)
    puts_step: bool = False


def _registered(recording: Recording) -> dict[str, _Registered]:
    partitions: dict[str, _Registered] = {}
    for record in recording.records():
        if record.status == "ok" and record.op in ("register_partition", "put_samples"):
            registered = partitions.setdefault(record.partition, _Registered())
            if record.op == "put_samples":
                registered.puts_step |= _STEP in record.fields
            else:
                registered.fields |= dict.fromkeys(record.fields)
    return partitions


class _Load:
    """Puts the rows of a partition once more, in the order of the run. Nothing is cleared but what is put again."""

    def __init__(self, client: DataPlaneClient, blocks: _Blocks, name: str, *, has_step: bool) -> None:
        self._client, self._blocks, self._name, self._has_step = client, blocks, name, has_step

    def run(self) -> list[str]:
        """Returns what a reader should know."""
        first = 0  # of the times that the run dropped all rows, those that are passed over
        while True:
            try:
                self._load(first)
                break
            except SchemaMismatchError:  # it was registered anew for other dtypes
                if self._num_drops == first:
                    raise
                first = self._num_drops
                self._client.register_partition(self._name, [], None, [])
        payloads = " and ".join(sorted(map(repr, self._unrecorded)))
        if self._unrecorded and not self._num_rows:
            raise MissingDataError(
                f"the recording in '{self._blocks.recording.folder}' has no rows of partition '{self._name}': its "
                f"clients recorded payload {payloads}.",
                hint="Record with payload: all, or the share of the samples that you want, such as 0.01.",
            )
        remarks = []
        if self._unrecorded:
            count = self._unrecorded.total()
            remarks.append(
                f"Rows that were put: {count + self._num_rows:,}. Not recorded, so not shown: {count:,} of them, by "
                f"clients that recorded payload {payloads}."
            )
        if self._left_out:
            remarks.append(f"Not recorded, since only pickle can keep them: {', '.join(sorted(self._left_out))}.")
        if self._num_replaced:
            remarks.append(
                f"Samples that were put again after they were cleared: {self._num_replaced:,}. The newest row of each "
                "is shown."
            )
        if first:
            remarks.append("Rows of earlier registrations, whose fields had other dtypes, are not shown.")
        return remarks

    def _load(self, first: int) -> None:
        self._alive: set[str] = set()
        self._cleared: set[str] = set()  # but still shown
        self._unmarked: dict[str, None] = {}  # put since the last step
        self._unrecorded, self._left_out = Counter[float | str](), set[str]()  # payload -> rows; fields
        self._num_rows = self._num_replaced = self._num_drops = 0
        for record in self._blocks.recording.records():
            if record.op == "step" and self._unmarked:
                ids = list(self._unmarked)
                self._client.put_samples(ids, self._name, {}, tags=[{_STEP: record.step}] * len(ids))
                self._unmarked.clear()
            elif record.partition != self._name or record.status != "ok":
                continue
            elif record.drops_all:
                self._num_drops += 1
                self._cleared |= self._alive
                self._alive.clear()
            elif record.op == "clear_samples":
                self._cleared.update(self._alive.intersection(record.ids))
                self._alive.difference_update(record.ids)
            elif record.op == "put_samples" and self._num_drops >= first:
                self._put(record)

    def _put(self, record: Record) -> None:
        self._left_out.update(record.left_out)
        ids: list[str] = []
        columns: dict[str, Any] = {}
        if record.block is not None:
            ids, columns = self._blocks.read(record)
        elif record.client.payload == "all":  # tags alone, or fields that are all left out
            ids = record.ids
        if set(record.fields).difference(record.left_out):
            self._unrecorded += Counter({record.client.payload: len(record.ids) - len(ids)})
            self._num_rows += len(ids)
        if again := [sample_id for sample_id in ids if sample_id in self._cleared]:
            self._client.clear_samples(again, self._name)
            self._cleared.difference_update(again)
            self._num_replaced += len(again)
        if not self._has_step:
            self._unmarked |= dict.fromkeys(sample_id for sample_id in ids if sample_id not in self._alive)
        self._alive.update(ids)
        written, tags = set(ids), dict(zip(record.ids, record.tags or (), strict=False))
        if ids:
            self._client.put_samples(
                ids, self._name, columns, tags=[tags.get(sample_id, {}) for sample_id in ids] if tags else None
            )
        # the tags of a put are there, also if its cells are not
        if others := [sample_id for sample_id in tags if sample_id in self._alive and sample_id not in written]:
            self._client.put_samples(others, self._name, {}, tags=[tags[sample_id] for sample_id in others])
        for sample_id, some in tags.items():
            if _STEP in some:
                self._unmarked.pop(sample_id, None)


# --- the store --------------------------------------------------------------------------------------------------------


class _Blocks:
    """The rows of puts, read from the recording. Of each set of fields, those that were read last are kept."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.record: Record | None = None  # the put that was read last
        self._kept: dict[tuple[str, ...], tuple[Record, dict[str, WireColumn | SharedRows]]] = {}

    def read(self, record: Record) -> tuple[list[str], dict[str, Any]]:
        """The ids and columns of a put."""
        self.record = msgspec.structs.replace(record, ids=[], tags=None, specs={}, digests={})  # little to keep
        return self.recording.rows(record)

    def encoded(self, record: Record, wire: WireFormat) -> dict[str, WireColumn | SharedRows]:
        """Its columns, encoded."""
        kept, columns = self._kept.get(tuple(record.fields), (None, {}))
        if kept is not record:
            ids, rows = self.recording.rows(record)
            columns = encode_columns(rows, len(ids), wire)[0]
            self._kept[tuple(record.fields)] = record, columns
        return columns


class _Options(CapacityOptions):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    blocks: _Blocks


class _RecordedStore(LedgerBackend):
    """The ledger is in this process, and the payload of each put where the recording has it."""

    wire = WireFormat(ragged="jagged", objects="native", shared_rows=True)
    Config = _Options

    def __init__(self, config: _Options) -> None:
        super().__init__(config)
        self._blocks = config.blocks
        self._service = LedgerService()
        self._writes: dict[int, tuple[Record, commands.Write]] = {}

    def call_ledger(self, deadline: float, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        return self._service.call(command)

    def store_writes(
        self, writes: Mapping[int, commands.Write], columns: Mapping[str, WireColumn | SharedRows], deadline: float
    ) -> None:
        record = self._blocks.record
        assert record is not None
        self._writes |= {write_id: (record, write) for write_id, write in writes.items()}

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        pieces: dict[str, list[Piece]] = {name: [] for name in located.specs}
        for part in located.parts:
            record, write = self._writes[part.write_id]
            columns = columns_of(write, self._blocks.encoded(record, self.wire))
            for name in part.fields:
                pieces[name].append(Piece(columns[name], part.positions, part.rows))
        return {name: merge_pieces(parts) for name, parts in pieces.items()}

    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> None:
        """The recording stays as it is."""
