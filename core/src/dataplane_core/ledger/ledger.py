"""The control plane as one pure state machine: which cells exist, who was given what until when, tags, bytes held.

Plain Python with no I/O, no locks and no clock: time is an argument, on any clock that the host keeps to. Whoever hosts
a ledger calls one method at a time. noop hosts it in process, the TransferQueue backends inside the queue's
controller, `BlobStore` backends replay a journal through it, and the conformance kit uses it as its oracle. It never
iterates over a set of strings, so that equal calls in equal order give equal states in every process.

The ledger does not see payload. Each put has a **write id**; the payload of its row ``pos`` is known as the ref
``(write_id, pos)``. Write ids are integers that are never used again, spaced so that ``write_id + pos`` is unique too.
What identifies something outlives what may be lost, so it is not counted here: callers draw the epochs of
registrations, lease tokens and write ids at random. Only a host that lives and dies with its payload may have the
ledger number the writes.
A put has two steps: `begin_put` validates and reserves, the host moves the payload, `commit_put` validates again what
may have changed meanwhile and makes the rows visible. Refs that no row names any longer are returned, and kept until
`collected` says that the host deleted them, so that a host which dies in between leaks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NoReturn

from dataplane_core.errors import (
    CapacityExceededError,
    InvalidRequestError,
    MissingDataError,
    SchemaMismatchError,
    StalePartitionError,
    UnknownPartitionError,
    UnsupportedOperationError,
    preview,
)
from dataplane_core.ledger.partition import Partition, Question, Task
from dataplane_core.ledger.room import RoomQueue
from dataplane_core.ledger.rows import Ref, Row, group_of
from dataplane_core.spec import Claim, FieldSpec, PartitionInfo, SampleList, TagValue, matches

__all__ = ["Due", "Ledger", "Located", "Part", "Ref", "group_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a read that lie in one write.

    Attributes:
        write_id: The write.
        fields: The fields to take from it.
        slots: Where each of ``fields`` stands among all fields of the write.
        rows: Positions in the request.
        positions: Positions in the write, aligned with ``rows``.
    """

    write_id: int
    fields: tuple[str, ...]
    slots: tuple[int, ...]
    rows: list[int]
    positions: list[int]


@dataclass(frozen=True, slots=True)
class Located:
    """Where the cells of a read lie."""

    parts: list[Part]
    specs: dict[str, FieldSpec]

    @property
    def refs(self) -> list[Ref]:
        """What is read, part by part."""
        return [(part.write_id, position) for part in self.parts for position in part.positions]


@dataclass(frozen=True, slots=True)
class Due:
    """What a ledger that is not self-expiring would end.

    Attributes:
        leases: Partition, task, token and sample ids of each.
        writes: Unfinished puts.
    """

    leases: list[tuple[str, str, str, list[str]]]
    writes: list[int]

    def __bool__(self) -> bool:
        return bool(self.leases or self.writes)


@dataclass(slots=True)
class Write:
    """A committed put's payload, while a row still names it."""

    slots: dict[str, int]
    row_bytes: list[int]
    num_live: int


@dataclass(slots=True)
class Pending:
    partition_id: str
    epoch: str
    version: int
    sample_ids: list[str]
    specs: dict[str, FieldSpec]
    row_bytes: list[int]
    tags: list[dict[str, TagValue]] | None
    known: list[Row | None]
    expires_at: float


class Ledger:
    """The state of one store.

    Args:
        capacity_bytes: Bound on the payload bytes held and reserved, or None.
        overwrite: Whether a put may replace cells already produced.
        self_expiring: Whether leases and unfinished puts end by themselves once their time is over. A host that replays
            a journal says no: its processes see time differently, so one that finds something `due` records it, and
            all end it by `expire`.
    """

    def __init__(
        self, *, capacity_bytes: int | None = None, overwrite: bool = True, self_expiring: bool = True
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._overwrite = overwrite
        self._self_expiring = self_expiring
        self._partitions: dict[str, Partition] = {}
        self._pending: dict[int, Pending] = {}
        self._writes: dict[int, Write] = {}
        self._garbage: dict[Ref, None] = {}
        self._held_bytes = 0
        self._room = RoomQueue()
        self._next_write = 1
        self._next_seq = 1

    # --- registration -------------------------------------------------------------------------------------------------

    def register(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int | None,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None,
        enums: Mapping[str, Sequence[str]],
        epoch: str,
    ) -> tuple[PartitionInfo, list[Ref]]:
        """Opens a partition afresh.

        Returns:
            The registration, and the refs of the earlier one, now free.
        """
        _, freed = self.clear(partition_id, None)
        info = PartitionInfo(
            epoch=epoch,
            fields=tuple(fields),
            num_samples=num_samples,
            consumer_tasks=tuple(consumer_tasks),
            grpo_group_size=grpo_group_size,
            enums={name: tuple(words) for name, words in enums.items()},
        )
        tasks = {name: Task() for name in consumer_tasks}
        self._partitions[partition_id] = Partition(partition_id, info, tasks, self._self_expiring)
        return info, freed

    def describe(self, partition_id: str) -> PartitionInfo:
        """The registration.

        Raises:
            UnknownPartitionError: Not registered.
        """
        return self._partition(partition_id).info

    @property
    def held_bytes(self) -> int:
        """Payload bytes held and reserved."""
        return self._held_bytes

    # --- production ---------------------------------------------------------------------------------------------------

    def begin_put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        specs: Mapping[str, FieldSpec],
        row_bytes: Sequence[int],
        tags: Sequence[Mapping[str, TagValue]] | None,
        epoch: str | None,
        *,
        write_id: int | None = None,
        ticket: str | None = None,
        now: float,
        ttl_s: float,
    ) -> int:
        """Validates a put and reserves its bytes.

        Args:
            partition_id: The partition.
            sample_ids: Unique ids.
            specs: Field -> spec of the cells.
            row_bytes: Payload bytes per row.
            tags: One dict per row, or None.
            epoch: The registration that the caller means, or None.
            write_id: The write id, drawn at random; None: the ledger's next number.
            ticket: What the put is known by in the queue for room (`wait_for_room`), or None: it does not queue.
            now: The time in seconds.
            ttl_s: Seconds after which the put, if not committed, counts as abandoned.

        Returns:
            The write id.

        Raises:
            DataPlaneError: As the hook ``put_samples`` says: UnknownPartitionError, StalePartitionError,
                SchemaMismatchError, InvalidRequestError, UnsupportedOperationError, CapacityExceededError.
        """
        self._reap(now)
        partition, known = self._check_begin(partition_id, sample_ids, specs, epoch)
        size_bytes = sum(row_bytes)
        self._check_capacity(partition_id, len(sample_ids), size_bytes, self._capacity_bytes, ticket, now)
        if size_bytes:
            self._room.enter(ticket, size_bytes)
        if write_id is None:
            write_id = self._next_write
            self._next_write += max(len(sample_ids), 1)
        self._held_bytes += size_bytes
        self._pending[write_id] = Pending(
            partition_id=partition_id,
            epoch=partition.info.epoch,
            version=partition.version,
            sample_ids=list(sample_ids),
            specs=dict(specs),
            row_bytes=list(row_bytes),
            tags=None if tags is None else [dict(row) for row in tags],
            known=known,
            expires_at=now + ttl_s,
        )
        return write_id

    def check_put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        specs: Mapping[str, FieldSpec],
        row_bytes: Sequence[int],
        epoch: str | None,
        *,
        capacity_bytes: int | None,
        ticket: str | None = None,
        now: float,
    ) -> None:
        """Raises what `begin_put` would raise if ``capacity_bytes`` were the bound; itself changes nothing.

        A host that replays a journal judges a put by its own bound here, before it records the put: a record is then
        accepted in every process, whatever room each allows.
        """
        self._check_begin(partition_id, sample_ids, specs, epoch)
        self._check_capacity(partition_id, len(sample_ids), sum(row_bytes), capacity_bytes, ticket, now)

    def wait_for_room(self, ticket: str, size_bytes: int, *, now: float, wait_s: float) -> None:
        """A put that was refused for want of room queues, or says that it still waits.

        Puts that come later then leave it its room: see `RoomQueue`. Who does not say so again for some seconds, or
        reaches the end of ``wait_s``, has left the queue.

        Args:
            ticket: Random bits, the same for every question of one put.
            size_bytes: Its payload.
            now: The time in seconds.
            wait_s: Seconds until it gives up; 0: it has, and leaves the queue.
        """
        self._room.wait(ticket, size_bytes, now, wait_s)

    def place_in_queue(self, ticket: str) -> int:
        """How many puts wait for room before this one."""
        return self._room.place(ticket)

    def commit_put(self, write_id: int) -> list[Ref]:
        """Makes a begun put visible: cells, tags and production at once.

        Returns:
            Refs that the put replaced, now free.

        Raises:
            StalePartitionError: The partition or one of the samples was cleared meanwhile, or the put was abandoned.
                Nothing is visible, and the put's own refs are free.
            SchemaMismatchError, InvalidRequestError, UnsupportedOperationError: A put that committed meanwhile fixed
                another schema, filled the group, or wrote the cells. As above.
        """
        pending = self._pending.pop(write_id, None)
        if pending is None:
            raise StalePartitionError(
                "put_samples refused at commit: the put had been given up as abandoned. Nothing was written."
            )
        partition = self._partitions.get(pending.partition_id)
        try:
            if partition is None or partition.info.epoch != pending.epoch:
                self._refuse_stale(pending, "the partition was cleared or registered anew")
            if partition.version != pending.version:
                for sample_id, row in zip(pending.sample_ids, pending.known, strict=True):
                    if row is not None and partition.rows.get(sample_id) is not row:
                        self._refuse_stale(pending, f"sample '{sample_id}' was cleared")
                current = [partition.rows.get(sample_id) for sample_id in pending.sample_ids]
                self._check_put(pending.partition_id, partition, pending.sample_ids, pending.specs, current)
        except Exception:
            self._abandon(write_id, pending)
            raise
        partition.version += 1
        return self._apply_put(partition, write_id, pending)

    def abort_put(self, write_id: int) -> list[Ref]:
        """Gives a begun put up, unless it is committed; may be repeated.

        Returns:
            The put's refs that are free.
        """
        pending = self._pending.pop(write_id, None)
        if pending is not None:
            return self._abandon(write_id, pending)
        return [ref for ref in self._garbage if ref[0] == write_id]

    def _check_begin(
        self, partition_id: str, sample_ids: Sequence[str], specs: Mapping[str, FieldSpec], epoch: str | None
    ) -> tuple[Partition, list[Row | None]]:
        partition = self._partition(partition_id)
        if epoch is not None and epoch != partition.info.epoch:
            raise StalePartitionError(
                f"put_samples('{partition_id}', {len(sample_ids)} samples) refused: the partition was registered anew "
                "since the put was checked. Nothing was written.",
            )
        known = [partition.rows.get(sample_id) for sample_id in sample_ids]
        self._check_put(partition_id, partition, sample_ids, specs, known)
        return partition, known

    def _check_put(
        self,
        partition_id: str,
        partition: Partition,
        sample_ids: Sequence[str],
        specs: Mapping[str, FieldSpec],
        rows: Sequence[Row | None],
    ) -> None:
        for name, spec in specs.items():
            kept = partition.specs.get(name)
            if kept is not None and kept != spec:
                raise SchemaMismatchError(
                    f"put_samples('{partition_id}', {len(sample_ids)} samples) refused: field '{name}' holds "
                    f"{spec.describe()}. Expected {kept.describe()}, as fixed by its first write. Nothing was written."
                )
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
        if not self._overwrite:
            for row in rows:
                clash = None if row is None else next((name for name in specs if name in row.cells), None)
                if row is not None and clash is not None:
                    raise UnsupportedOperationError(
                        f"put_samples('{partition_id}') refused: field '{clash}' of sample '{row.sample_id}' is "
                        "already written, and this backend does not declare 'overwrite'. Nothing was written."
                    )

    def _check_capacity(
        self,
        partition_id: str,
        num_samples: int,
        size_bytes: int,
        capacity_bytes: int | None,
        ticket: str | None,
        now: float,
    ) -> None:
        if capacity_bytes is None or not size_bytes:  # tags take no room
            return
        abandoned = (pending for pending in self._pending.values() if pending.expires_at <= now)
        held_bytes = self._held_bytes - sum(sum(pending.row_bytes) for pending in abandoned)
        free_bytes = capacity_bytes - held_bytes
        num_ahead = 0
        if size_bytes <= free_bytes:
            num_ahead = self._room.num_ahead(ticket, size_bytes, free_bytes, capacity_bytes, now)
            if not num_ahead:
                return
        held = f"{held_bytes} of {capacity_bytes} bytes are held"
        where = f"put_samples('{partition_id}', {num_samples} samples) refused:"
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

    def _apply_put(self, partition: Partition, write_id: int, pending: Pending) -> list[Ref]:
        for name, spec in pending.specs.items():
            partition.specs.setdefault(name, spec)
        names = tuple(pending.specs)
        if names:
            slots = {name: slot for slot, name in enumerate(names)}
            self._writes[write_id] = Write(slots, pending.row_bytes, len(pending.sample_ids))
        freed: list[Ref] = []
        for pos, sample_id in enumerate(pending.sample_ids):
            tags = None if pending.tags is None else pending.tags[pos]
            freed.extend(partition.write_row(sample_id, self._next_seq, names, (write_id, pos), tags))
            self._next_seq += 1
        return self._free(freed)

    def _refuse_stale(self, pending: Pending, what: str) -> NoReturn:
        raise StalePartitionError(
            f"put_samples('{pending.partition_id}', {len(pending.sample_ids)} samples) refused at commit: {what} while "
            "the put ran. Nothing was written."
        )

    # --- reads --------------------------------------------------------------------------------------------------------

    def locate(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> Located:
        """Finds the cells of a read.

        Raises:
            UnknownPartitionError: Not registered.
            MissingDataError: A sample is not there, or a cell not yet produced.
        """
        partition = self._partition(partition_id)
        rows = partition.rows
        pick = itemgetter(*fields)
        single = len(fields) == 1
        patterns: dict[tuple[int, ...], tuple[list[int], list[tuple[Ref, ...]]]] = {}
        try:
            for index, sample_id in enumerate(sample_ids):
                picked = pick(rows[sample_id].cells)
                refs: tuple[Ref, ...] = (picked,) if single else picked
                first = refs[0]
                pattern = (first[0],) if refs.count(first) == len(refs) else tuple([ref[0] for ref in refs])
                entry = patterns.get(pattern)
                if entry is None:
                    entry = patterns[pattern] = ([], [])
                entry[0].append(index)
                entry[1].append(refs)
        except KeyError:
            self._refuse_missing(partition_id, partition, sample_ids, fields)
        parts: list[Part] = []
        for pattern, (indexes, ref_rows) in patterns.items():
            if len(pattern) == 1:
                parts.append(self._part(pattern[0], tuple(fields), indexes, [refs[0][1] for refs in ref_rows]))
                continue
            for write_id in dict.fromkeys(pattern):
                at = [i for i, each in enumerate(pattern) if each == write_id]
                names = tuple(fields[i] for i in at)
                parts.append(self._part(write_id, names, indexes, [refs[at[0]][1] for refs in ref_rows]))
        return Located(parts, {name: partition.specs[name] for name in fields})

    def _part(self, write_id: int, fields: tuple[str, ...], rows: list[int], positions: list[int]) -> Part:
        slots = self._writes[write_id].slots
        return Part(write_id, fields, tuple([slots[name] for name in fields]), rows, positions)

    def _refuse_missing(
        self, partition_id: str, partition: Partition, sample_ids: Sequence[str], fields: Sequence[str]
    ) -> NoReturn:
        what = f"get_samples('{partition_id}', {len(sample_ids)} samples)"
        absent = [sample_id for sample_id in sample_ids if sample_id not in partition.rows]
        if absent:
            raise MissingDataError.for_samples(what, partition_id, absent)
        lacking = (
            (sample_id, [name for name in fields if name not in partition.rows[sample_id].cells])
            for sample_id in sample_ids
        )
        raise MissingDataError.for_cells(what, partition_id, (each for each in lacking if each[1]))

    def list_samples(self, partition_id: str, tag_filter: Mapping[str, tuple[str, Any]] | None) -> SampleList:
        """Ids in order of first write, with copies of their tags.

        Raises:
            UnknownPartitionError: Not registered.
        """
        rows = [row for row in self._partition(partition_id).rows.values() if matches(row.tags, tag_filter)]
        rows.sort(key=lambda row: row.seq)
        return SampleList(sample_ids=[row.sample_id for row in rows], tags=[dict(row.tags) for row in rows])

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        all_or_nothing: bool,
        lease_s: float | None,
        tag_filter: Mapping[str, tuple[str, Any]] | None,
        explain: bool,
        token: str,
        holder: str = "",
        now: float,
    ) -> Claim:
        """Hands out ready samples to a task; arguments, order and errors as the hook ``claim`` says."""
        question = Question(task_name, frozenset(required_fields), batch_size, all_or_nothing, tag_filter)
        return self._partition(partition_id).claim(
            question, lease_s=lease_s, explain=explain, token=token, holder=holder, now=now
        )

    def may_claim(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        all_or_nothing: bool,
        tag_filter: Mapping[str, tuple[str, Any]] | None,
        now: float,
    ) -> bool:
        """Whether `claim` would change anything; itself changes nothing, so a journal need not record vain questions.

        Raises:
            UnknownPartitionError, UnknownTaskError: Not registered.
        """
        question = Question(task_name, frozenset(required_fields), batch_size, all_or_nothing, tag_filter)
        return self._partition(partition_id).may_claim(question, now)

    def ack(
        self, partition_id: str, task_name: str, sample_ids: Sequence[str], tokens: Sequence[str], *, now: float
    ) -> None:
        """Settles leases for good; see `Partition.ack`."""
        self._partition(partition_id).ack(task_name, sample_ids, tokens, now)

    def nack(
        self, partition_id: str, task_name: str, sample_ids: Sequence[str], tokens: Sequence[str], *, now: float
    ) -> None:
        """Gives leased samples back to the pool; errors as `ack`."""
        self._partition(partition_id).nack(task_name, sample_ids, tokens, now)

    def renew(
        self,
        partition_id: str,
        task_name: str,
        sample_ids: Sequence[str],
        tokens: Sequence[str],
        lease_s: float,
        *,
        now: float,
    ) -> None:
        """Extends leases to ``lease_s`` from now; errors as `ack`."""
        self._partition(partition_id).renew(task_name, sample_ids, tokens, lease_s, now)

    def consumed(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether every task was given (leased: has acked) every row held; False while none is held."""
        partition = self._partitions.get(partition_id)
        return partition is not None and partition.consumed(task_names)

    # --- time that is over --------------------------------------------------------------------------------------------

    def due(self, now: float) -> Due:
        """What `expire` should end; changes nothing that another call could see."""
        leases = [
            (partition.partition_id, *lease) for partition in self._partitions.values() for lease in partition.due(now)
        ]
        return Due(leases, [each for each, pending in self._pending.items() if pending.expires_at <= now])

    def expire(self, leases: Sequence[Sequence[Any]], writes: Sequence[int]) -> None:
        """Ends leases and gives up unfinished puts, as `due` named them; what is no longer there is passed over."""
        for partition_id, task_name, token, sample_ids in leases:
            partition = self._partitions.get(partition_id)
            if partition is not None and task_name in partition.tasks:
                partition.end_lease(task_name, token, sample_ids)
        for write_id in writes:
            pending = self._pending.pop(write_id, None)
            if pending is not None:
                self._abandon(write_id, pending)

    # --- clearing -----------------------------------------------------------------------------------------------------

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> tuple[int, list[Ref]]:
        """Drops rows, or the whole partition where ``sample_ids`` is None; what is not there is ignored.

        Returns:
            How many rows were there, and their refs, now free.
        """
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0, []
        if sample_ids is None:
            del self._partitions[partition_id]
            refs = [ref for row in partition.rows.values() for ref in dict.fromkeys(row.cells.values())]
            return len(partition.rows), self._free(refs)
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
        return count, self._free(gone)

    def garbage(self, now: float) -> list[Ref]:
        """Refs that are free and not yet reported as `collected`, those of abandoned puts among them."""
        self._reap(now)
        return list(self._garbage)

    def collected(self, refs: Sequence[Ref]) -> None:
        """Says that the payload of these refs was deleted."""
        for ref in refs:
            self._garbage.pop((ref[0], ref[1]), None)

    def _free(self, refs: list[Ref]) -> list[Ref]:
        self._room.freed |= bool(refs)
        for ref in refs:
            write_id, pos = ref
            write = self._writes[write_id]
            self._held_bytes -= write.row_bytes[pos]
            write.num_live -= 1
            if not write.num_live:
                del self._writes[write_id]
            self._garbage[ref] = None
        return refs

    def _abandon(self, write_id: int, pending: Pending) -> list[Ref]:
        self._room.freed = True
        self._held_bytes -= sum(pending.row_bytes)
        refs = [(write_id, pos) for pos in range(len(pending.sample_ids))] if pending.specs else []
        self._garbage.update(dict.fromkeys(refs))
        return refs

    def _reap(self, now: float) -> None:
        if self._self_expiring:
            self.expire((), [each for each, pending in self._pending.items() if pending.expires_at <= now])

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def _partition(self, partition_id: str) -> Partition:
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise UnknownPartitionError(
                f"partition '{partition_id}' is not registered.",
                hint=f"Registered: {preview(self._partitions, limit=5) or 'none'}.",
            )
        return partition
