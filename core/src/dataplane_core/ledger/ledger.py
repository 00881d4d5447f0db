"""The control plane as one pure state machine: which cells exist, which task holds which samples, tags, bytes held.

It has no I/O, no locks and no clock: time is an argument, always of the same clock. It never iterates over a set of
strings, so the same commands in the same order give the same state in every process.

A put has one **write** or more, each with some of its fields. The ref ``(write_id, pos)`` names the payload of row
``pos`` of a write, which samples with equal cells may share. A write that is kept **by content** has a digest of each
row: samples of later puts, in any partition, may name such a row, and need not bring it. Of two puts that bring the
same digest, the second gets the row of the first. A probe does not tell whether rows are equal, so there the second is
refused, and is to ask again.

Write ids are integers that are never used again, spaced so that ``write_id + pos`` is unique too. Callers draw the
epochs of registrations, lease tokens and write ids at random, since a counter in the ledger would start again if the
ledger's state were lost. The ledger may number the writes itself only if its state and the payload are always lost
together.

A ref that no row uses any longer is returned to the host. The ledger keeps it until `Collected` says that the host
deleted its payload, so nothing leaks if the host dies in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final, NoReturn

from msgspec.structs import asdict, replace

from dataplane_core.errors import (
    AlreadyDoneError,
    CapacityExceededError,
    ContentGoneError,
    InvalidRequestError,
    MissingDataError,
    OpenCellsError,
    StalePartitionError,
    UnknownPartitionError,
    preview,
)
from dataplane_core.ledger import commands
from dataplane_core.ledger.commands import Located, Part, Reply
from dataplane_core.ledger.partition import Partition
from dataplane_core.ledger.queues import DoneRequests, RoomQueue
from dataplane_core.ledger.rows import Cells, Ref, positions_by_write, positions_in
from dataplane_core.spec import Claim, PartitionDescription, PartitionInfo, SampleList, matches
from dataplane_core.spec.replies import FieldList, PartitionState, Replaced
from dataplane_core.spec.requests import Command

#: Write ids that are drawn elsewhere number the writes in so many bits.
_NUMBERS: Final = 1 << 40


@lru_cache(maxsize=4096)
def slots_of(fields: tuple[str, ...]) -> dict[str, int]:
    """The slots of a write with these fields, which all such writes share."""
    return {name: slot for slot, name in enumerate(fields)}


@dataclass(slots=True)
class LiveWrite:
    """A write of a committed put, kept while a sample refers to its payload."""

    slots: dict[str, int]  # field -> its index among those of the write; shared, never changed
    row_bytes: list[int]
    lists: Mapping[str, Any] = field(default_factory=dict)  # of fields that its put left open: `FieldSpec.lists`
    num_holders: list[int] = field(default_factory=list)  # how many samples, and puts under way, refer to each row
    num_live: int = 0  # how many rows are referred to
    digests: list[bytes] = field(default_factory=list)  # of each row, if they are kept by content; empty: it is lost


@dataclass(slots=True)
class Pending:
    put: commands.BeginPut
    epoch: str  # that of the registration when it began
    seqs: dict[str, int]  # of its rows that were there then: id -> `Row.seq`
    expires_at: float  # when it counts as abandoned
    held: list[Ref]  # rows of other puts with the content that it does not bring: they stay until it ends


class Ledger:
    """The state of one store. ``overwrite``: whether a put may replace cells."""

    def __init__(self, *, capacity_bytes: int | None = None, overwrite: bool = True) -> None:
        self._capacity_bytes = capacity_bytes
        self._overwrite = overwrite
        self._partitions: dict[str, Partition] = {}
        self._pending: dict[int, Pending] = {}
        self._writes: dict[int, LiveWrite] = {}
        self._content: dict[bytes, Ref] = {}  # digest -> the row that has it, if it is kept by content
        self._garbage: dict[Ref, int | None] = {}  # ref -> the first write of its put, if it was abandoned
        self.held_bytes = 0  # payload bytes, held and reserved
        self.room = RoomQueue()
        self._done = DoneRequests()
        self._next_write = 1
        self._next_seq = 1

    def apply(self, command: Command[Reply], now: float) -> Reply:
        """Runs a command at the time ``now`` in seconds. One that is cut off, as by a signal handler that raises,
        leaves half of what it does: see `LedgerThread`."""
        run = getattr(self, f"_{getattr(command, 'op', '')}", None)
        if run is None:
            raise TypeError(f"the ledger knows no command {type(command).__name__!r}")
        reply: Reply = run(command, now)
        return reply

    # --- what its host asks -------------------------------------------------------------------------------------------

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
        self._end_puts(math.inf, now)

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
                if write.row_bytes:
                    held[write_id] = (list(write.row_bytes), set(range(len(write.row_bytes))))
            for write_id, position in pending.held:
                held[write_id][1].add(position)
        for write_id, position in self._garbage:
            held.setdefault(write_id, (None, set()))[1].add(position)
        return {write_id: (row_bytes, sorted(kept)) for write_id, (row_bytes, kept) in held.items()}

    def recount(self) -> None:
        """Counts what follows from the rows and from the puts that are begun, of a ledger that was restored."""
        self.held_bytes = sum(pending.put.size_bytes for pending in self._pending.values())
        holders: dict[int, Counter[int]] = {}
        for pending in self._pending.values():
            for write_id, pos in pending.held:
                holders.setdefault(write_id, Counter())[pos] += 1
        for partition in self._partitions.values():
            for write_id, positions in positions_by_write(partition.rows.values()):
                counts, write = holders.setdefault(write_id, Counter()), self._writes[write_id]
                if write.digests:
                    self._share(partition, [(write_id, pos) for pos in positions])
                else:
                    partition.held_bytes += sum([write.row_bytes[pos] for pos in set(positions) if pos not in counts])
                counts.update(positions)
        for write_id, write in self._writes.items():
            write.num_holders = [holders[write_id][pos] for pos in range(len(write.row_bytes))]
            write.num_live = len(holders[write_id])
            self.held_bytes += sum(write.row_bytes[pos] for pos in holders[write_id])
            for pos in holders[write_id] if write.digests else ():
                if write.digests[pos]:
                    self._content[write.digests[pos]] = write_id, pos

    def check_put(self, put: commands.BeginPut, now: float) -> int | None:
        """Raises what a put would raise now, and ends abandoned ones. Returns its write id if it is begun already."""
        self._end_puts(now, now)
        if put.request_id is not None:
            write_ids: Iterable[int] = self._pending if put.write_id is None else self._pending.keys() & {put.write_id}
            for write_id in write_ids:
                begun = self._pending[write_id].put
                if begun.request_id == put.request_id and begun.writes == list(put.writes):
                    return write_id
        self._refuse_done(put)
        partition = self._found_or_opened(put)
        partition.check_put(put, self._overwrite)
        self._rows_of(put)
        if self._capacity_bytes is not None and put.size_bytes:  # tags take no room
            self._check_capacity(put, self._capacity_bytes, now)
        return None

    def partition(self, partition_id: str) -> Partition:
        """A registered partition, else `UnknownPartitionError`."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise UnknownPartitionError(
                f"partition '{partition_id}' is not registered.",
                hint=f"Registered: {preview(self._partitions, limit=5) or 'none'}.",
            )
        return partition

    def may_claim(self, claim: commands.ClaimRequest, now: float) -> bool:
        """Whether a claim would change anything. Raises as the claim."""
        partition = self._partitions.get(claim.partition_id)
        if claim.opens is not None and (partition is None or claim.task_name not in partition.tasks):
            return True
        return self.partition(claim.partition_id).may_claim(claim, now)

    def next_lease_check(self, partition_id: str) -> float:
        """No lease of a partition ends before this time. Infinite if there is none."""
        partition = self._partitions.get(partition_id)
        return math.inf if partition is None else partition.leases.next_check()

    def partition_of_put(self, write_id: int) -> str | None:
        """The partition of a put that is begun and not committed."""
        pending = self._pending.get(write_id)
        return None if pending is None else pending.put.partition_id

    def forget_all_content(self) -> None:
        """As `commands.ForgetContent` of all `content_refs`."""
        self._forget_content(commands.ForgetContent(self.content_refs()), 0.0)

    def content_refs(self) -> list[Ref]:
        """The rows on which puts of the same content may rely."""
        return list(self._content.values())

    def garbage(self, now: float) -> list[Ref]:
        """Refs that are free and not yet reported as `Collected`, including those of abandoned puts."""
        self._end_puts(now, now)
        return list(self._garbage)

    # --- registration -------------------------------------------------------------------------------------------------

    def _register(self, command: commands.RegisterRequest, now: float) -> tuple[PartitionInfo, list[Ref]]:
        partition, info = self._partitions.get(command.partition_id), PartitionInfo.requested(command)
        request_id = _opening(command)
        if request_id in self._done:  # whatever became of the partition since
            dropped = self._done.reply(request_id)
            return replace(info, replaced=None if dropped is None else Replaced(**dropped)), []
        if partition is not None and command.if_exists == "keep":
            partition.extend(command)
            return partition.info, []
        replaced = None if partition is None else partition.replaced()
        self._done.add(request_id, command.left_s, now, None if replaced is None else asdict(replaced))
        _, freed = self._drop(command.partition_id, None, now)
        self._partitions[command.partition_id] = Partition(
            command.partition_id,
            info,
            seen=set(command.cleared_ids),
            broken_groups=set(command.broken_groups),
            num_cleared=len(command.cleared_ids),
        )
        return replace(info, replaced=replaced), freed

    def _found_or_opened(self, command: commands.BeginPut | commands.ClaimRequest) -> Partition:
        """The partition of a put or a claim. If it is unknown and to be opened, a new one, which `_open` keeps."""
        partition, opens = self._partitions.get(command.partition_id), command.opens
        if partition is None and opens is not None and _opening(opens) not in self._done:
            partition = Partition(command.partition_id, PartitionInfo.requested(opens))
        return partition or self.partition(command.partition_id)

    def _open(self, partition: Partition, opens: commands.RegisterRequest, now: float) -> None:
        if partition.partition_id not in self._partitions:
            self._partitions[partition.partition_id] = partition
            self._done.add(_opening(opens), opens.left_s, now)

    def _describe(self, command: commands.DescribeRequest, now: float) -> PartitionInfo:
        return self.partition(command.partition_id).info

    # --- production ---------------------------------------------------------------------------------------------------

    def _begin_put(self, command: commands.BeginPut, now: float) -> int:
        begun = self.check_put(command, now)
        if begun is not None:
            return begun
        partition = self._found_or_opened(command)
        if command.opens is not None:
            self._open(partition, command.opens, now)
        size_bytes, write_id = command.size_bytes, command.write_id
        if size_bytes and self.room.waiting:
            # a ledger that runs the records of a log again does not know its capacity, so it counts all that went ahead
            free_bytes = 0 if self._capacity_bytes is None else self._capacity_bytes - self.held_bytes
            self.room.enter(command.ticket, size_bytes, free_bytes)
        if write_id is None:
            write_id = self._next_write
            self._next_write += command.num_ids
        elif write_id in self._pending or write_id in self._writes:
            raise InvalidRequestError(f"put_samples('{command.partition_id}') refused: its write id is used already.")
        else:
            self._next_write = max(self._next_write, write_id % _NUMBERS + command.num_ids)
        self.held_bytes += size_bytes
        put = replace(
            command,  # with memory of its own
            sample_ids=list(command.sample_ids),
            specs=dict(command.specs),
            writes=list(command.writes),
            tags=None if command.tags is None else [dict(row) for row in command.tags],
        )
        seqs: dict[str, int] = {}
        if not partition.rows.keys().isdisjoint(put.sample_ids):  # the rows of the usual put are new
            seqs = {name: partition.rows[name].seq for name in put.sample_ids if name in partition.rows}
        held = self._rows_of(put)
        for ref in held:
            self._writes[ref[0]].num_holders[ref[1]] += 1
        self._pending[write_id] = Pending(put, partition.info.epoch, seqs, now + command.ttl_s, held)
        return write_id

    def _rows_of(self, put: commands.BeginPut) -> list[Ref]:
        """The rows of other puts that a put names. Raises `ContentGoneError` if one is gone, or if there is one with
        a probe of the put."""
        refs = [ref for write in put.writes for ref in write.known]
        probes = [digest for write in put.writes for digest in write.digests if len(digest) == commands.PROBE_BYTES]
        if not (all(map(self._is_kept, refs)) and self._content.keys().isdisjoint(probes)):
            raise ContentGoneError(
                f"put_samples('{put.partition_id}') refused: which of its cells the store has is no longer as it was. "
                "Nothing was written. Ask again."
            )
        return refs

    def _is_kept(self, ref: Ref) -> bool:
        """Whether puts may rely on a row."""
        write = self._writes.get(ref[0])
        return write is not None and ref in map(self._content.get, write.digests[ref[1] : ref[1] + 1])

    def _find_content(self, command: commands.FindContent, now: float) -> dict[bytes, Ref]:
        return {digest: self._content[digest] for digest in command.digests if digest in self._content}

    def _forget_content(self, command: commands.ForgetContent, now: float) -> None:
        for write_id, pos in command.refs:
            write = self._writes.get(write_id)
            if write is not None and 0 <= pos < len(write.digests):
                if self._content.get(write.digests[pos]) == (write_id, pos):
                    del self._content[write.digests[pos]]
                write.digests[pos] = b""

    def _check_capacity(self, put: commands.BeginPut, capacity_bytes: int, now: float) -> None:
        size_bytes = put.size_bytes
        free_bytes, num_ahead = capacity_bytes - self.held_bytes, 0
        if size_bytes <= free_bytes:
            num_ahead = self.room.num_ahead(put.ticket, size_bytes, free_bytes, capacity_bytes, now)
            if not num_ahead:
                return
        held = f"{self.held_bytes} of {capacity_bytes} bytes are held"
        where = f"put_samples('{put.partition_id}', {len(put.sample_ids)} samples) refused:"
        if num_ahead:
            raise CapacityExceededError(
                f"{where} {size_bytes} bytes would fit, {held}, but {num_ahead} "
                f"{'put waits' if num_ahead == 1 else 'puts wait'} for room before it.",
                hint="Puts get room in the order in which they came: try again.",
                ask_again_s=self.room.ask_again_s(put.ticket),
            )
        never = size_bytes > capacity_bytes
        raise CapacityExceededError(
            f"{where} {size_bytes} bytes do not fit, {held}.",
            retryable=not never,
            ask_again_s=0.0 if never else self.room.ask_again_s(put.ticket),
            hint="Write smaller batches or raise capacity_bytes." if never else "Clear samples that are consumed.",
        )

    def _commit_put(self, command: commands.CommitPut, now: float) -> list[Ref]:
        self._end_puts(now, now)
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
            self._done.add(f"put {write_id}", put.ttl_s, now)
        try:
            self._refuse_done(put)
            if partition is None or partition.info.epoch != pending.epoch:
                self._refuse_stale(put, "the partition was cleared or registered again")
            for sample_id, seq in pending.seqs.items():
                if sample_id not in partition.rows or partition.rows[sample_id].seq != seq:
                    self._refuse_stale(put, f"sample '{sample_id}' was cleared")
            partition.check_put(put, self._overwrite)
            self._rows_of(put)
        except Exception:
            self._abandon(write_id, pending, now)
            raise
        self._done.add(put.request_id, put.ttl_s, now)
        if put.writes:  # else it is one command, which has the id of the request
            self._done.add(f"put {write_id}", put.ttl_s, now)
        return self._write(partition, write_id, pending, now)

    def _write(self, partition: Partition, write_id: int, pending: Pending, now: float) -> list[Ref]:
        put = pending.put
        lists: dict[str, str] = {}
        for name, spec in put.specs.items():
            before = partition.spec_before(name, spec)
            partition.specs[name] = spec if before is None else before.after(spec) or spec
            if spec.lists:
                lists[name] = spec.lists
        writes = put.by_id(write_id)
        by_content: dict[int, list[Ref]] = {}  # write -> the row of each sample
        for id_of_write, write in writes.items():
            num_rows = len(write.row_bytes)
            num_holders = [1] * num_rows
            if write.by_content:
                by_content[id_of_write] = []
            elif write.positions is not None:
                counts = Counter(write.positions)
                num_holders = [counts[pos] for pos in range(num_rows)]
            if not write.by_content:
                partition.held_bytes += sum(write.row_bytes)
            if num_rows:
                self._writes[id_of_write] = LiveWrite(
                    slots_of(tuple(write.fields)),
                    list(write.row_bytes),
                    {} if write.digests else lists,
                    num_holders,
                    num_rows,
                    list(write.digests),
                )
        brought = self._keep_content(partition, writes, by_content) if by_content else []
        freed = partition.write_rows(writes, put, self._next_seq, now, by_content)
        self._next_seq += len(put.sample_ids)
        replaced = self._free(partition, freed, now) if freed else []
        return replaced + self._free(None, [*brought, *pending.held], now) if by_content else replaced

    def _keep_content(
        self, partition: Partition, writes: Mapping[int, commands.Write], by_content: dict[int, list[Ref]]
    ) -> list[Ref]:
        """Finds the rows of the samples in writes that are kept by content: of equal rows that which was committed
        first. Returns the rows that the put brought, which the caller gives up for the put."""
        brought: list[Ref] = []
        for write_id, refs in by_content.items():
            write = writes[write_id]
            own = [(write_id, pos) for pos in range(len(write.row_bytes))]
            for digest, ref in zip(write.digests, own, strict=True):
                self._content.setdefault(digest, ref)
            rows = [*(self._content[digest] for digest in write.digests), *write.known]
            refs += rows if write.positions is None else [rows[pos] for pos in write.positions]
            for row_write, pos in refs:
                self._writes[row_write].num_holders[pos] += 1
            self._share(partition, refs)
            brought += own
        return brought

    def _share(self, partition: Partition, refs: Iterable[Ref]) -> None:
        """Samples of a partition have these rows, which are kept by content: it counts each of them once."""
        for ref in refs:
            if not partition.content[ref]:
                partition.held_bytes += self._writes[ref[0]].row_bytes[ref[1]]
            partition.content[ref] += 1

    def _abort_put(self, command: commands.AbortPut, now: float) -> list[Ref]:
        pending = self._pending.pop(command.write_id, None)
        if pending is not None:
            return self._abandon(command.write_id, pending, now)
        return [ref for ref, put in self._garbage.items() if put == command.write_id]

    def _put_tags(self, command: commands.PutTags, now: float) -> None:
        put = commands.BeginPut(
            *(command.partition_id, command.sample_ids, {}, (), command.tags),
            ttl_s=max(1.0, command.left_s),
            request_id=command.request_id,
            opens=command.opens,
        )
        self._commit_put(commands.CommitPut(self._begin_put(put, now)), now)

    def _wait_for_room(self, command: commands.WaitForRoom, now: float) -> None:
        self.room.wait(command.ticket, command.size_bytes, now, command.wait_s)

    def _refuse_done(self, put: commands.BeginPut) -> None:
        if put.request_id in self._done:
            raise AlreadyDoneError(f"put_samples('{put.partition_id}') is done already. Nothing was written again.")

    def _refuse_stale(self, put: commands.BeginPut, what: str) -> NoReturn:
        raise StalePartitionError(
            f"put_samples('{put.partition_id}', {len(put.sample_ids)} samples) refused at commit: {what} while "
            "the put ran. Nothing was written."
        )

    # --- reads --------------------------------------------------------------------------------------------------------

    def _locate(self, command: commands.Locate, now: float) -> Located:
        partition = self.partition(command.partition_id)
        sample_ids, fields = command.sample_ids, command.fields
        # the samples of a read whose fields are in the same writes, which are given with their fields: their places in
        # the request, and their positions in each of the writes, sample by sample
        located: dict[tuple[tuple[int, tuple[str, ...]], ...], tuple[list[int], list[int]]] = {}
        by_cells: dict[Cells, tuple[tuple[list[int], list[int]], list[int]]] = {}
        start = 0
        try:
            rows = [partition.rows[sample_id] for sample_id in sample_ids]
            for cells, alike in groupby(rows, attrgetter("cells")):  # rows side by side mostly have the same cells
                where = [row.positions for row in alike]
                if cells not in by_cells:
                    names_in: dict[int, list[str]] = {}
                    for name in fields:
                        names_in.setdefault(cells.fields[name], []).append(name)
                    pattern = tuple([(cells.write_ids[number], tuple(names)) for number, names in names_in.items()])
                    by_cells[cells] = located.setdefault(pattern, ([], [])), list(names_in)
                place, numbers = by_cells[cells]
                place[0].extend(range(start, start + len(where)))
                place[1].extend(positions_in(numbers, where))
                start += len(where)
        except KeyError:
            self._refuse_missing(command, partition)
        parts: list[Part] = []
        specs = {name: partition.specs[name] for name in fields}
        forms: dict[tuple[tuple[str, Any], ...], list[list[int]]] = {}  # what is not stored as its spec says -> rows
        for pattern, (places, positions) in located.items():
            form: list[tuple[str, Any]] = []
            for number, (write_id, in_write) in enumerate(pattern):
                write = self._writes[write_id]
                for name, lists in write.lists.items():
                    if name in in_write and specs[name].reading(lists) is not specs[name]:
                        form.append((name, lists))
                # a row that is kept by content has one cell, and may be that of another field
                slots = (0,) if write.digests else tuple([write.slots[name] for name in in_write])
                at = positions[number :: len(pattern)]
                parts.append(Part(write_id, in_write, slots, places, at, bool(write.digests)))
            forms.setdefault(tuple(sorted(form)), []).append(places)
        if len(forms) > 1:
            raise OpenCellsError(
                f"get_samples('{command.partition_id}', {len(sample_ids)} samples): some cells were put before the "
                "type of their field was known.",
                groups=[[sample_ids[row] for row in sorted(chain.from_iterable(rows))] for rows in forms.values()],
            )
        for name, lists in next(iter(forms), ()):
            specs[name] = specs[name].reading(lists)
        return Located(parts, specs)

    def _refuse_missing(self, read: commands.Locate | commands.FieldsRequest, partition: Partition) -> NoReturn:
        what = f"get_samples('{read.partition_id}', {len(read.sample_ids)} samples)"
        absent = [sample_id for sample_id in read.sample_ids if sample_id not in partition.rows]
        if absent or isinstance(read, commands.FieldsRequest):
            raise MissingDataError.for_samples(what, read.partition_id, absent)
        lacking = (
            (sample_id, [name for name in read.fields if name not in partition.rows[sample_id].cells.fields])
            for sample_id in read.sample_ids
        )
        raise MissingDataError.for_cells(
            what, read.partition_id, ((name, fields) for name, fields in lacking if fields)
        )

    def _list_samples(self, command: commands.ListRequest, now: float) -> SampleList:
        rows = self.partition(command.partition_id).rows
        sample_ids = rows if command.sample_ids is None else command.sample_ids
        listed = [rows[name] for name in sample_ids if name in rows and matches(rows[name].tags, command.tag_filter)]
        return SampleList(sample_ids=[row.sample_id for row in listed], tags=[row.tags for row in listed])

    def _list_partitions(self, command: commands.ListPartitionsRequest, now: float) -> list[str]:
        return list(self._partitions)

    def _inspect(self, command: commands.InspectRequest, now: float) -> PartitionDescription:
        description = self.partition(command.partition_id).describe(now, command.questions)
        if self._capacity_bytes is None or not self.room.is_wanted(now):
            return description
        return replace(description, full=(self.held_bytes, self._capacity_bytes))

    def _list_fields(self, command: commands.FieldsRequest, now: float) -> FieldList:
        partition = self.partition(command.partition_id)
        patterns: dict[tuple[str, ...], int] = {}
        try:
            rows = [partition.rows[sample_id] for sample_id in command.sample_ids]
        except KeyError:
            self._refuse_missing(command, partition)
        index = [patterns.setdefault(tuple(row.cells.fields), len(patterns)) for row in rows]
        return FieldList(patterns=list(patterns), index=index)

    # --- cursors and claims -------------------------------------------------------------------------------------------

    def _export(self, command: commands.ExportRequest, now: float) -> PartitionState:
        partition = self.partition(command.partition_id)
        if command.sample_ids is not None:
            rows = [partition.rows[sample_id] for sample_id in command.sample_ids if sample_id in partition.rows]
            return PartitionState(samples={row.sample_id: row.state() for row in rows})
        return PartitionState(
            consumed=partition.consumed_ids(),
            cleared_ids=sorted(partition.seen.difference(partition.rows)),
            broken_groups=sorted(partition.broken_groups),
        )

    def _set_cursor(self, command: commands.SetCursorRequest, now: float) -> int:
        return self.partition(command.partition_id).set_cursor(command)

    def _claim(self, command: commands.ClaimRequest, now: float) -> Claim:
        partition = self._found_or_opened(command)
        if command.opens is not None:
            self._open(partition, command.opens, now)
            partition.add_task(command.task_name)
        request_id = f"claim {command.token} {partition.info.epoch}"
        if request_id in self._done:
            return partition.claim_again(command, *self._done.reply(request_id))
        claim = partition.claim(command, now)
        if claim.sample_ids and command.dp_rank is None:  # the batches of ranks are kept with the partition
            self._done.add(request_id, command.left_s, now, [list(claim.sample_ids), claim.exhausted])
        return claim

    def _settle(self, command: commands.SettleRequest, now: float) -> int:
        if command.request_id not in self._done:
            self.partition(command.partition_id).settle(command, now)
            self._done.add(command.request_id, command.left_s, now)
        return len(command.sample_ids)

    _ack = _nack = _renew = _settle

    def _consumed(self, command: commands.ConsumptionRequest, now: float) -> bool:
        partition = self._partitions.get(command.partition_id)
        return partition is not None and partition.consumed(command.task_names)

    # --- clearing -----------------------------------------------------------------------------------------------------

    def _clear(self, command: commands.ClearRequest, now: float) -> tuple[int, list[Ref]]:
        count = self._done.reply(command.request_id)
        if count is None:
            count, _ = self._drop(command.partition_id, command.sample_ids, now)
            self._done.add(command.request_id, command.left_s, now, count)
        return count, self.garbage(now)

    def _drop(self, partition_id: str, sample_ids: Sequence[str] | None, now: float) -> tuple[int, list[Ref]]:
        """As `ClearRequest`, but returns only the refs that this call freed."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0, []
        if sample_ids is None:
            del self._partitions[partition_id]
            refs = [ref for row in partition.rows.values() for ref in row.refs]
            return len(partition.rows), self._free(partition, refs, now)
        cleared = [freed for name in sample_ids if (freed := partition.remove_row(name)) is not None]
        if cleared:
            partition.tidy()
        return len(cleared), self._free(partition, chain.from_iterable(cleared), now)

    def _collected(self, command: commands.Collected, now: float) -> None:
        self._end_puts(now, now)  # what came of abandoned puts may be among the refs
        for ref in command.refs:
            self._garbage.pop((ref[0], ref[1]), None)

    def _free(self, partition: Partition | None, refs: Iterable[Ref], now: float) -> list[Ref]:
        """Gives up one reference per ref: those of samples of a partition, or of a put. Returns the refs that nothing
        refers to any longer."""
        freed: list[Ref] = []
        for ref in refs:
            write_id, pos = ref
            write = self._writes[write_id]
            write.num_holders[pos] -= 1
            if partition is not None:
                left = write.num_holders[pos]
                if write.digests:
                    left = partition.content[ref] = partition.content[ref] - 1
                if not left:
                    partition.held_bytes -= write.row_bytes[pos]
                    partition.content.pop(ref, None)
            if write.num_holders[pos]:
                continue
            if write.digests and self._content.get(write.digests[pos]) == ref:
                del self._content[write.digests[pos]]
            self.held_bytes -= write.row_bytes[pos]
            write.num_live -= 1
            if not write.num_live:
                del self._writes[write_id]
            self._garbage[ref] = None
            freed.append(ref)
        if freed:
            self.room.freed_at = now
        return freed

    def _abandon(self, write_id: int, pending: Pending, now: float) -> list[Ref]:
        put = pending.put
        self.room.freed_at = now
        self.held_bytes -= put.size_bytes
        refs = [(one, pos) for one, write in put.by_id(write_id).items() for pos in range(len(write.row_bytes))]
        self._garbage.update(dict.fromkeys(refs, write_id))
        return refs + self._free(None, pending.held, now)

    def _end_puts(self, until: float, now: float) -> None:
        """Abandons the puts under way whose time is over by then."""
        for write_id, pending in list(self._pending.items()):
            if pending.expires_at <= until:
                self._abandon(write_id, self._pending.pop(write_id), now)


def _opening(command: commands.RegisterRequest) -> str:
    """The id under which it is kept that a registration was carried out."""
    return f"register {command.partition_id} {command.epoch}"
