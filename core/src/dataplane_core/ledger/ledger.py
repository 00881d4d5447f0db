"""The control plane as one pure state machine: which cells exist, which task holds which samples, tags, bytes held.

Plain Python with no I/O, no locks and no clock. Time is an argument; the host may use any clock, but always the same
one. A host applies one command at a time. noop hosts the ledger in its process, tq_simple and tq_mooncake in the
queue's controller, a `RowStoreBackend` with a log in its owner, and the conformance kit compares backends with it. The
ledger never iterates over a set of strings, so the same commands in the same order give the same state in every
process.

The ledger does not see payload. A put has one **write** or more, each with some of its fields. The ref ``(write_id,
pos)`` names the payload of row ``pos`` of a write. Samples with equal cells may share a row of a write; its payload is
then freed with the last of them. Write ids are integers that are never used again, spaced so that ``write_id + pos`` is
unique too.
Callers draw the epochs of registrations, lease tokens and write ids at random, since a counter in the ledger would
start again if the ledger's state were lost. The ledger may number the writes itself only if its state and the payload
are always lost together.

A put has two steps. `BeginPut` validates the put and reserves its bytes. The host then stores the payload. `CommitPut`
validates again what may have changed since, and makes the rows visible. A ref that no row uses any longer is returned
to the host. The ledger keeps it until `Collected` says that the host deleted its payload, so nothing leaks if the host
dies in between.

The commands are methods of one class, since each changes the same maps: that is why this module is long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, singledispatchmethod
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final, NoReturn

from dataplane_core.errors import (
    AlreadyDoneError,
    CapacityExceededError,
    InvalidRequestError,
    MissingDataError,
    OpenCellsError,
    SchemaMismatchError,
    StalePartitionError,
    UnknownPartitionError,
    UnsupportedOperationError,
    preview,
)
from dataplane_core.ledger import commands
from dataplane_core.ledger.commands import Located, Part, Reply
from dataplane_core.ledger.partition import Partition, Task
from dataplane_core.ledger.queues import DoneRequests, RoomQueue
from dataplane_core.ledger.rows import Cells, PutWrites, Ref, Row, group_of, positions_by_write, positions_in
from dataplane_core.spec import (
    Claim,
    Command,
    FieldList,
    PartitionDescription,
    PartitionInfo,
    PartitionList,
    PartitionState,
    Replaced,
    SampleList,
    matches,
)


@lru_cache(maxsize=4096)
def slots_of(fields: tuple[str, ...]) -> dict[str, int]:
    """The slots of a write with these fields, which all such writes share."""
    return {name: slot for slot, name in enumerate(fields)}


@dataclass(slots=True)
class LiveWrite:
    """A write of a committed put, kept while a sample still refers to its payload.

    Attributes:
        slots: Field -> its index among the fields of the write. Shared, never changed.
        row_bytes: Payload bytes per row.
        num_live: How many rows are referred to.
        num_sharers: Row -> how many samples refer to it, if more than one.
        lists: Of the fields that its put left open, what their cells are (`FieldSpec.lists`).
    """

    slots: dict[str, int]
    row_bytes: list[int]
    num_live: int = 0
    num_sharers: dict[int, int] = field(default_factory=dict)
    lists: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Pending:
    """A put that is begun and not yet committed.

    Attributes:
        put: The put, with memory of its own, and with its registration.
        version: That of the partition when the put began.
        known: Its rows that were there then.
        expires_at: When it counts as abandoned.
    """

    put: commands.BeginPut
    version: int
    known: list[Row | None]
    expires_at: float


@dataclass(slots=True)
class _Located:
    """Samples of a read whose fields are in the same writes.

    Attributes:
        rows: Their positions in the request.
        positions: Their positions in each of the writes, sample by sample.
    """

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


_CELLS_OF: Final = attrgetter("cells")
#: Write ids that are drawn elsewhere number the writes in so many bits.
_NUMBERS: Final = 1 << 40


class Ledger:
    """The state of one store.

    Args:
        capacity_bytes: Limit for the payload bytes held and reserved, or None.
        overwrite: Whether a put may replace cells that are already produced.

    Attributes:
        held_bytes: The payload bytes held and reserved.
        room: The puts that wait for room.
    """

    def __init__(self, *, capacity_bytes: int | None = None, overwrite: bool = True) -> None:
        self._capacity_bytes = capacity_bytes
        self._overwrite = overwrite
        self._partitions: dict[str, Partition] = {}
        self._pending: dict[int, Pending] = {}
        self._writes: dict[int, LiveWrite] = {}
        self._garbage: dict[Ref, int | None] = {}  # ref -> the first write of its put, if it was abandoned
        self.held_bytes = 0
        self.room = RoomQueue()
        self._done = DoneRequests()
        self._next_write = 1
        self._next_seq = 1

    def apply(self, command: Command[Reply], now: float) -> Reply:
        """Runs a command at the time ``now`` in seconds. Reply and errors are those of the command.

        A command that is cut off, as by a signal handler that raises, leaves half of what it does: see `LedgerThread`.
        """
        reply: Reply = _handler_of(type(command))(self, command, now)
        return reply

    @property
    def next_number(self) -> int:
        """No write id whose lower 40 bits are this number or a greater one was used."""
        return self._next_write % _NUMBERS

    def limit(self, capacity_bytes: int | None, first_write: int) -> None:
        """Sets the limit of a ledger that ran without one, and the least write id that it may number from now on."""
        self._capacity_bytes = capacity_bytes
        self._next_write = max(self._next_write, first_write)

    def end_holds(self, now: float) -> None:
        """Ends all leases and all puts under way: those who hold them are gone."""
        for partition in self._partitions.values():
            partition.expire(math.inf)
        self._give_up(list(self._pending), now)

    def payload(self) -> dict[int, tuple[list[int] | None, list[int]]]:
        """Write id -> the bytes of all its rows, if known, and which of them the store may still hold, ascending."""
        held: dict[int, tuple[list[int] | None, set[int]]] = {
            write_id: (list(write.row_bytes), set()) for write_id, write in self._writes.items()
        }
        for partition in self._partitions.values():
            for write_id, positions in positions_by_write(partition.rows.values()):
                held[write_id][1].update(positions)
        for first, pending in self._pending.items():
            for write_id, write in pending.put.by_id(first).items():
                held[write_id] = (list(write.row_bytes), set(range(len(write.row_bytes))))
        for write_id, position in self._garbage:
            held.setdefault(write_id, (None, set()))[1].add(position)
        return {write_id: (row_bytes, sorted(kept)) for write_id, (row_bytes, kept) in held.items()}

    def recount(self) -> None:
        """Counts what follows from the rows and from the puts that are begun, of a ledger that was restored."""
        self.held_bytes = sum(pending.put.size_bytes for pending in self._pending.values())
        sharers: dict[int, Counter[int]] = {}
        for partition in self._partitions.values():
            partition.derive()
            for write_id, positions in positions_by_write(partition.rows.values()):
                counts = sharers.setdefault(write_id, Counter())
                row_bytes = self._writes[write_id].row_bytes
                partition.held_bytes += sum([row_bytes[each] for each in set(positions) if each not in counts])
                counts.update(positions)
            self.held_bytes += partition.held_bytes
        for write_id, write in self._writes.items():
            counts = sharers[write_id]
            write.num_live = len(counts)
            write.num_sharers = {position: count for position, count in counts.items() if count > 1}

    @singledispatchmethod
    def _apply(self, command: Command[Any], now: float) -> Any:
        raise TypeError(f"the ledger knows no command {type(command).__name__!r}")

    # --- registration -------------------------------------------------------------------------------------------------

    @_apply.register
    def _register(self, command: commands.RegisterRequest, now: float) -> tuple[PartitionInfo, list[Ref]]:
        known, info = self._partitions.get(command.partition_id), PartitionInfo.requested(command)
        request_id = f"register {command.partition_id} {command.epoch}"
        if request_id in self._done:  # whatever became of the partition since
            was = self._done.reply(request_id)
            return replace(info, replaced=None if was is None else Replaced(**was)), []
        if known is not None and command.if_exists == "keep":
            known.extend(command)
            return known.info, []
        replaced = None if known is None else known.replaced()
        self._note_done(request_id, command.left_s, now, None if replaced is None else asdict(replaced))
        _, freed = self._drop(command.partition_id, None, now)
        tasks = {name: Task() for name in command.consumer_tasks}
        self._partitions[command.partition_id] = Partition(command.partition_id, info, tasks)
        return replace(info, replaced=replaced), freed

    @_apply.register
    def _describe(self, command: commands.DescribeRequest, now: float) -> PartitionInfo:
        return self._partition(command.partition_id).info

    # --- production ---------------------------------------------------------------------------------------------------

    @_apply.register
    def _begin_put(self, command: commands.BeginPut, now: float) -> int:
        self._reap(now)
        begun = self._begun(command)
        if begun is not None:
            return begun
        partition, known = self._check_begin(command, now)
        size_bytes = command.size_bytes
        if size_bytes:
            # a ledger that runs the records of a log again does not know its capacity, so it counts all that went ahead
            free_bytes = 0 if self._capacity_bytes is None else self._capacity_bytes - self.held_bytes
            self.room.enter(command.ticket, size_bytes, free_bytes)
        write_id = command.write_id
        if write_id is None:
            write_id = self._next_write
            self._next_write += command.num_ids
        elif write_id in self._pending or write_id in self._writes:
            raise InvalidRequestError(f"put_samples('{command.partition_id}') refused: its write id is used already.")
        else:
            self._next_write = max(self._next_write, write_id % _NUMBERS + command.num_ids)
        self.held_bytes += size_bytes
        put = replace(
            command,
            sample_ids=list(command.sample_ids),
            specs=dict(command.specs),
            writes=list(command.writes),
            tags=None if command.tags is None else [dict(row) for row in command.tags],
            epoch=partition.info.epoch,
        )
        self._pending[write_id] = Pending(put, partition.version, known, expires_at=now + command.ttl_s)
        return write_id

    @_apply.register
    def _check_put_only(self, command: commands.CheckPut, now: float) -> None:
        self._reap(now)  # as the put does, which must then be answered alike
        if self._begun(command.put) is None:
            self._check_begin(command.put, now)

    def _begun(self, put: commands.BeginPut) -> int | None:
        """The write id of a put that comes again while it is begun."""
        known: Iterable[int] = self._pending if put.write_id is None else self._pending.keys() & {put.write_id}
        same = (each for each in known if self._pending[each].put.request_id == put.request_id)
        return None if put.request_id is None else next(same, None)

    @_apply.register
    def _wait_for_room(self, command: commands.WaitForRoom, now: float) -> None:
        self.room.wait(command.ticket, command.size_bytes, now, command.wait_s)

    @_apply.register
    def _commit_put(self, command: commands.CommitPut, now: float) -> list[Ref]:
        self._reap(now)
        write_id = command.write_id
        pending = self._pending.pop(write_id, None)
        if pending is None:
            if f"put {write_id}" in self._done:
                return []
            raise StalePartitionError(
                "put_samples refused at commit: the put took too long and counts as abandoned. Nothing was written."
            )
        put = pending.put
        partition = self._partitions.get(put.partition_id)
        if put.request_id in self._done:  # another begin of it was committed, which is as good
            self._note_done(f"put {write_id}", put.ttl_s, now)
        try:
            self._refuse_done(put.partition_id, put.request_id)
            if partition is None or partition.info.epoch != put.epoch:
                self._refuse_stale(put, "the partition was cleared or registered again")
            if partition.version != pending.version:
                for sample_id, row in zip(put.sample_ids, pending.known, strict=True):
                    if row is not None and partition.rows.get(sample_id) is not row:
                        self._refuse_stale(put, f"sample '{sample_id}' was cleared")
                current = [partition.rows.get(sample_id) for sample_id in put.sample_ids]
                self._check_put(partition, put, current)
        except Exception:
            self._abandon(write_id, put, now)
            raise
        partition.version += 1
        self._note_done(put.request_id, put.ttl_s, now)
        if put.writes:  # else it is one command, which has the id of the request
            self._note_done(f"put {write_id}", put.ttl_s, now)
        return self._apply_put(partition, write_id, put, now)

    @_apply.register
    def _abort_put(self, command: commands.AbortPut, now: float) -> list[Ref]:
        pending = self._pending.pop(command.write_id, None)
        if pending is not None:
            return self._abandon(command.write_id, pending.put, now)
        return [ref for ref, put in self._garbage.items() if put == command.write_id]

    @_apply.register
    def _put_tags(self, command: commands.PutTags, now: float) -> None:
        ids = command.sample_ids
        put = commands.BeginPut(
            *(command.partition_id, ids, {}, (), command.tags, command.epoch),
            ttl_s=max(1.0, command.left_s),
            request_id=command.request_id,
        )
        self._commit_put(commands.CommitPut(self._begin_put(put, now)), now)

    def _check_begin(self, put: commands.BeginPut, now: float) -> tuple[Partition, list[Row | None]]:
        self._refuse_done(put.partition_id, put.request_id)
        partition = self._partition(put.partition_id)
        if put.epoch is not None and put.epoch != partition.info.epoch:
            raise StalePartitionError(
                f"put_samples('{put.partition_id}', {len(put.sample_ids)} samples) refused: the partition was "
                "registered again since the put was checked. Nothing was written.",
            )
        known: list[Row | None] = [None] * len(put.sample_ids)
        if not partition.rows.keys().isdisjoint(put.sample_ids):  # the rows of the usual put are new
            known = [partition.rows.get(sample_id) for sample_id in put.sample_ids]
        self._check_put(partition, put, known)
        self._check_capacity(put, now)
        return partition, known

    def _check_put(self, partition: Partition, put: commands.BeginPut, rows: Sequence[Row | None]) -> None:
        partition_id, sample_ids, specs = put.partition_id, put.sample_ids, put.specs
        wrong = [
            (name, spec.describe(), kept.describe(), kept.to_text())
            for name, spec in specs.items()
            if (kept := partition.specs.get(name, spec)) is not spec and kept.after(spec) is None
        ]
        if wrong:
            raise SchemaMismatchError.for_fields(f"put_samples('{partition_id}', {len(sample_ids)} samples)", wrong)
        group_size = partition.info.grpo_group_size
        if group_size is not None:
            joining: dict[str, int] = {}
            for sample_id, row in zip(sample_ids, rows, strict=True):
                if row is None:
                    key = group_of(sample_id)
                    joining[key] = joining.get(key, 0) + 1
            for key, count in joining.items():
                group = partition.groups.get(key)
                present = 0 if group is None else len(group.members)
                if present + count > group_size:
                    raise InvalidRequestError(
                        f"put_samples('{partition_id}') refused: group '{key}' would have {present + count} members. "
                        f"Expected at most {group_size}, the partition's group size. Nothing was written."
                    )
        partition.check_num_samples(sample_ids)
        if not self._overwrite:
            for row in rows:
                clash = None if row is None else next((name for name in specs if name in row.cells.fields), None)
                if row is not None and clash is not None:
                    raise UnsupportedOperationError(
                        f"put_samples('{partition_id}') refused: field '{clash}' of sample '{row.sample_id}' is "
                        "already written, and this backend does not declare 'overwrite'. Nothing was written."
                    )

    def _check_capacity(self, put: commands.BeginPut, now: float) -> None:
        size_bytes, capacity_bytes = put.size_bytes, self._capacity_bytes
        if capacity_bytes is None or not size_bytes:  # tags take no room
            return
        held_bytes = self.held_bytes - sum(self._pending[each].put.size_bytes for each in self._abandoned(now))
        free_bytes = capacity_bytes - held_bytes
        num_ahead = 0
        if size_bytes <= free_bytes:
            num_ahead = self.room.num_ahead(put.ticket, size_bytes, free_bytes, capacity_bytes, now)
            if not num_ahead:
                return
        held = f"{held_bytes} of {capacity_bytes} bytes are held"
        where = f"put_samples('{put.partition_id}', {len(put.sample_ids)} samples) refused:"
        if num_ahead:
            raise CapacityExceededError(
                f"{where} {size_bytes} bytes would fit, {held}, but {num_ahead} "
                f"{'put waits' if num_ahead == 1 else 'puts wait'} for room before it.",
                hint="Puts get room in the order in which they came: try again.",
            )
        never = size_bytes > capacity_bytes
        raise CapacityExceededError(
            f"{where} {size_bytes} bytes do not fit, {held}.",
            retryable=not never,
            hint="Write smaller batches or raise capacity_bytes." if never else "Clear samples that are consumed.",
        )

    def _apply_put(self, partition: Partition, write_id: int, put: commands.BeginPut, now: float) -> list[Ref]:
        for name, spec in put.specs.items():
            before = partition.specs.get(name)
            partition.specs[name] = spec if before is None else before.after(spec) or spec
        lists = {name: spec.lists for name, spec in put.specs.items() if spec.lists}
        partition.held_bytes += put.size_bytes
        writes = put.by_id(write_id)
        for each, write in writes.items():
            num_sharers: dict[int, int] = {}
            if write.positions is not None:
                num_sharers = {pos: count for pos, count in Counter(write.positions).items() if count > 1}
            self._writes[each] = LiveWrite(
                slots_of(tuple(write.fields)), list(write.row_bytes), len(write.row_bytes), num_sharers, lists
            )
        freed = partition.write_rows(PutWrites(writes, len(put.sample_ids)), put, self._next_seq, now)
        self._next_seq += len(put.sample_ids)
        return self._free(partition, freed, now)

    def _refuse_done(self, partition_id: str, request_id: str | None) -> None:
        if request_id in self._done:
            raise AlreadyDoneError(f"put_samples('{partition_id}') is done already. Nothing was written again.")

    def _note_done(self, request_id: str | None, left_s: float, now: float, reply: Any = None) -> None:
        """Keeps the id of a request that was carried out, and what its repetition is answered from."""
        if request_id is not None:
            self._done.add(request_id, left_s, now, reply)
            self._done.forget(now)

    def _refuse_stale(self, put: commands.BeginPut, what: str) -> NoReturn:
        raise StalePartitionError(
            f"put_samples('{put.partition_id}', {len(put.sample_ids)} samples) refused at commit: {what} while "
            "the put ran. Nothing was written."
        )

    # --- reads --------------------------------------------------------------------------------------------------------

    @_apply.register
    def _locate(self, command: commands.Locate, now: float) -> Located:
        partition_id, sample_ids, fields = command.partition_id, command.sample_ids, command.fields
        partition = self._partition(partition_id)
        found: dict[Cells, tuple[_Located, list[int]]] = {}
        located: dict[tuple[int, ...], _Located] = {}
        start = 0
        try:
            rows = [partition.rows[sample_id] for sample_id in sample_ids]
            for cells, some in groupby(rows, _CELLS_OF):  # rows that lie side by side mostly have the same cells
                alike = [row.positions for row in some]
                if cells not in found:
                    numbers = [cells.fields[name] for name in fields]
                    each = located.setdefault(tuple([cells.write_ids[number] for number in numbers]), _Located())
                    found[cells] = (each, list(dict.fromkeys(numbers)))
                each, numbers = found[cells]
                each.rows += range(start, start + len(alike))
                each.positions += positions_in(numbers, alike)
                start += len(alike)
        except KeyError:
            self._refuse_missing(command, partition)
        parts: list[Part] = []
        specs = {name: partition.specs[name] for name in fields}
        forms: dict[tuple[tuple[str, Any], ...], list[list[int]]] = {}  # what is not stored as its spec says -> rows
        for pattern, each in located.items():
            write_ids = list(dict.fromkeys(pattern))
            form: list[tuple[str, Any]] = []
            for place, write_id in enumerate(write_ids):
                names = tuple([name for name, owner in zip(fields, pattern, strict=True) if owner == write_id])
                write = self._writes[write_id]
                for name, lists in write.lists.items():
                    if name in names and specs[name].reading(lists) is not specs[name]:
                        form.append((name, lists))
                slots = tuple([write.slots[name] for name in names])
                parts.append(Part(write_id, names, slots, each.rows, each.positions[place :: len(write_ids)]))
            forms.setdefault(tuple(sorted(form)), []).append(each.rows)
        if len(forms) > 1:
            raise OpenCellsError.of_groups(
                f"get_samples('{partition_id}', {len(sample_ids)} samples)",
                [[sample_ids[row] for row in sorted(chain.from_iterable(some))] for some in forms.values()],
            )
        for name, lists in next(iter(forms), ()):
            specs[name] = specs[name].reading(lists)
        return Located(parts, specs)

    def _refuse_missing(self, locate: commands.Locate, partition: Partition) -> NoReturn:
        what = f"get_samples('{locate.partition_id}', {len(locate.sample_ids)} samples)"
        absent = [sample_id for sample_id in locate.sample_ids if sample_id not in partition.rows]
        if absent:
            raise MissingDataError.for_samples(what, locate.partition_id, absent)
        lacking = (
            (sample_id, [name for name in locate.fields if name not in partition.rows[sample_id].cells.fields])
            for sample_id in locate.sample_ids
        )
        raise MissingDataError.for_cells(what, locate.partition_id, (each for each in lacking if each[1]))

    @_apply.register
    def _list_samples(self, command: commands.ListRequest, now: float) -> SampleList:
        partition = self._partition(command.partition_id)
        if command.sample_ids is None:
            rows = list(partition.rows.values())
        else:
            rows = [partition.rows[each] for each in command.sample_ids if each in partition.rows]
        rows = [row for row in rows if matches(row.tags, command.tag_filter)]
        return SampleList(sample_ids=[row.sample_id for row in rows], tags=[dict(row.tags) for row in rows])

    @_apply.register
    def _list_partitions(self, command: commands.ListPartitionsRequest, now: float) -> PartitionList:
        return PartitionList(partition_ids=list(self._partitions))

    @_apply.register
    def _inspect(self, command: commands.InspectRequest, now: float) -> PartitionDescription:
        return self._partition(command.partition_id).describe(now, command.questions)

    @_apply.register
    def _list_fields(self, command: commands.FieldsRequest, now: float) -> FieldList:
        rows = self._partition(command.partition_id).rows
        absent = [sample_id for sample_id in command.sample_ids if sample_id not in rows]
        if absent:
            what = f"get_samples('{command.partition_id}', {len(command.sample_ids)} samples)"
            raise MissingDataError.for_samples(what, command.partition_id, absent)
        patterns: dict[tuple[str, ...], int] = {}
        index = [
            patterns.setdefault(tuple(rows[sample_id].cells.fields), len(patterns)) for sample_id in command.sample_ids
        ]
        return FieldList(patterns=list(patterns), index=index)

    # --- cursors ------------------------------------------------------------------------------------------------------

    @_apply.register
    def _export(self, command: commands.ExportRequest, now: float) -> PartitionState:
        partition = self._partition(command.partition_id)
        return PartitionState(
            consumed=partition.consumed_ids(),
            cleared_ids=sorted(partition.seen.difference(partition.rows)),
            broken_groups=sorted(partition.broken_groups),
        )

    @_apply.register
    def _set_cursor(self, command: commands.SetCursorRequest, now: float) -> int:
        return self._partition(command.partition_id).set_cursor(command)

    # --- claims -------------------------------------------------------------------------------------------------------

    @_apply.register
    def _claim(self, command: commands.ClaimRequest, now: float) -> Claim:
        partition = self._partition(command.partition_id)
        request_id = f"claim {command.token} {partition.info.epoch}"
        if request_id in self._done:
            return partition.claim_again(command, *self._done.reply(request_id))
        claim = partition.claim(command, now)
        if claim.sample_ids and command.dp_rank is None:  # the batches of ranks are kept with the partition
            self._note_done(request_id, command.left_s, now, [list(claim.sample_ids), claim.exhausted])
        return claim

    @_apply.register
    def _may_claim(self, command: commands.MayClaim, now: float) -> bool:
        return self._partition(command.claim.partition_id).may_claim(command.claim, now)

    @_apply.register
    def _settle(self, command: commands.SettleRequest, now: float) -> None:
        if command.request_id not in self._done:
            self._partition(command.partition_id).settle(command, now)
            self._note_done(command.request_id, command.left_s, now)

    @_apply.register
    def _consumed(self, command: commands.ConsumptionRequest, now: float) -> bool:
        partition = self._partitions.get(command.partition_id)
        return partition is not None and partition.consumed(command.task_names)

    def num_ready(self, claim: commands.ClaimRequest, now: float) -> float:
        """How many samples are ready for a claim. Infinite if the claim would not wait. Raises as the claim."""
        return self._partition(claim.partition_id).num_ready(claim, now)

    def next_lease_check(self, partition_id: str) -> float:
        """No lease of a partition ends before this time. Infinite if there is none."""
        partition = self._partitions.get(partition_id)
        return math.inf if partition is None else partition.leases.next_check()

    def partition_of_put(self, write_id: int) -> str | None:
        """The partition of a put that is begun and not committed."""
        pending = self._pending.get(write_id)
        return None if pending is None else pending.put.partition_id

    # --- clearing -----------------------------------------------------------------------------------------------------

    @_apply.register
    def _clear(self, command: commands.ClearRequest, now: float) -> tuple[int, list[Ref]]:
        count = self._done.reply(command.request_id)
        if count is None:
            count, _ = self._drop(command.partition_id, command.sample_ids, now)
            self._note_done(command.request_id, command.left_s, now, count)
        return count, self.garbage(now)

    def _drop(self, partition_id: str, sample_ids: Sequence[str] | None, now: float) -> tuple[int, list[Ref]]:
        """As `Clear`, but returns only the refs that this call freed."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0, []
        if sample_ids is None:
            del self._partitions[partition_id]
            refs = [ref for row in partition.rows.values() for ref in row.refs]
            return len(partition.rows), self._free(partition, refs, now)
        gone: list[Ref] = []
        count = 0
        for sample_id in sample_ids:
            removed = partition.remove_row(sample_id)
            if removed is not None:
                count += 1
                gone.extend(removed)
        if count:
            partition.version += 1
            partition.tidy()
        return count, self._free(partition, gone, now)

    def garbage(self, now: float) -> list[Ref]:
        """Refs that are free and not yet reported as `Collected`, including those of abandoned puts."""
        self._reap(now)
        return list(self._garbage)

    @_apply.register
    def _collected(self, command: commands.Collected, now: float) -> None:
        self._reap(now)  # what came of puts that were given up may be among the refs
        for ref in command.refs:
            self._garbage.pop((ref[0], ref[1]), None)

    def _free(self, partition: Partition, refs: list[Ref], now: float) -> list[Ref]:
        """Gives up one reference per ref of a partition. Returns the refs that no sample refers to any longer."""
        freed: list[Ref] = []
        for ref in refs:
            write_id, pos = ref
            write = self._writes[write_id]
            if pos in write.num_sharers:
                write.num_sharers[pos] -= 1
                if write.num_sharers[pos] == 1:
                    del write.num_sharers[pos]
                continue
            self.held_bytes -= write.row_bytes[pos]
            partition.held_bytes -= write.row_bytes[pos]
            write.num_live -= 1
            if not write.num_live:
                del self._writes[write_id]
            self._garbage[ref] = None
            freed.append(ref)
        if freed:
            self.room.freed_at = now
        return freed

    def _abandon(self, write_id: int, put: commands.BeginPut, now: float) -> list[Ref]:
        self.room.freed_at = now
        self.held_bytes -= put.size_bytes
        refs = [(each, pos) for each, write in put.by_id(write_id).items() for pos in range(len(write.row_bytes))]
        self._garbage.update(dict.fromkeys(refs, write_id))
        return refs

    def _reap(self, now: float) -> None:
        self._give_up(self._abandoned(now), now)

    def _abandoned(self, now: float) -> list[int]:
        return [write_id for write_id, pending in self._pending.items() if pending.expires_at <= now]

    def _give_up(self, writes: Iterable[int], now: float) -> None:
        for write_id in writes:
            pending = self._pending.pop(write_id, None)
            if pending is not None:
                self._abandon(write_id, pending.put, now)

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def _partition(self, partition_id: str) -> Partition:
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise UnknownPartitionError(
                f"partition '{partition_id}' is not registered.",
                hint=f"Registered: {preview(self._partitions, limit=5) or 'none'}.",
            )
        return partition


#: Finds the handler of a command's type. `singledispatchmethod` would do so too, but makes a new function per call.
_handler_of: Final[Callable[[type], Callable[..., Any]]] = vars(Ledger)["_apply"].dispatcher.dispatch
