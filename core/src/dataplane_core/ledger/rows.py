"""The rows of a partition and their groups, which the ledger's claims hand out."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from dataplane_core.errors import InvalidRequestError
from dataplane_core.spec import TagValue

if TYPE_CHECKING:
    from dataplane_core.ledger.commands import Write
    from dataplane_core.ledger.ready import ReadyView

#: Names the payload of one row of one put: ``(write_id, pos)``.
Ref: TypeAlias = tuple[int, int]


def group_of(sample_id: str) -> str:
    """The group of an id: the part before the last ``_g``.

    Raises:
        InvalidRequestError: The id holds no ``_g``.
    """
    group, mark, _ = sample_id.rpartition("_g")
    if not mark:
        raise InvalidRequestError(
            f"sample id '{sample_id}' holds no '_g', but the partition has a GRPO group size. "
            "Expected ids such as 'prompt7_g0'."
        )
    return group


def too_many_samples(what: str, count: int, num_samples: int) -> InvalidRequestError:
    """The error of a put that would write more samples than were registered.

    Args:
        what: The put, as ``put_samples('train')``.
        count: The distinct ids that would have been written then, cleared ones included.
        num_samples: Of the registration.
    """
    return InvalidRequestError(
        f"{what} refused: {count} distinct samples would have been written. Expected at most {num_samples}, the "
        "partition's num_samples; cleared ones count. Nothing was written.",
        hint="Register the partition with as many as will come; or with None, and call finish_partition at the end.",
    )


class Join(NamedTuple):
    """How the cells of a row follow from those before a put and those of the put. The same for all rows of a put.

    Attributes:
        fields: The fields of the row -> the write among those that it has then.
        sources: Each write that it has then, by its number among those that it had, followed by those of the put.
        dropped: The writes of which it has no cell any longer, by their number among those that it had.
    """

    fields: dict[str, int]
    sources: tuple[int, ...]
    dropped: tuple[int, ...]


@lru_cache(maxsize=4096)
def join(before: tuple[tuple[str, int], ...], num_before: int, writes: tuple[tuple[str, ...], ...]) -> Join:
    """Joins cells that a row has with those of a put.

    Cached, so that the rows of many puts share what they have in common.

    Args:
        before: Each field that the row has, with the number of its write.
        num_before: How many writes these are.
        writes: The fields of each write of the put.
    """
    source = dict(before)
    for number, names in enumerate(writes, num_before):
        source.update(dict.fromkeys(names, number))
    sources = tuple(dict.fromkeys(source.values()))
    places = {number: place for place, number in enumerate(sources)}
    return Join(
        fields={name: places[number] for name, number in source.items()},
        sources=sources,
        dropped=tuple(number for number in range(num_before) if number not in places),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The produced cells that rows have in common: those of the same writes.

    Attributes:
        fields: Field -> the number of its write, in the order of production. Shared with other cells, never changed.
        write_ids: The writes.
    """

    fields: dict[str, int]
    write_ids: tuple[int, ...]

    def joined(self, writes: Sequence[tuple[int, tuple[str, ...]]]) -> tuple[Cells, Join]:
        """The cells of the same rows after a put, whose writes are given by their ids and fields."""
        joint = join(tuple(self.fields.items()), len(self.write_ids), tuple([names for _, names in writes]))
        ids = [*self.write_ids, *(write_id for write_id, _ in writes)]
        return Cells(joint.fields, tuple([ids[number] for number in joint.sources])), joint


#: What rows without cells have.
NO_CELLS: Final = Cells({}, ())


@dataclass(frozen=True, slots=True)
class Hold:
    """A task's hold on rows: a lease until ``expires_at``, or for good (``done``). The rows of a claim share it.

    ``held_since`` is None after a restart of the ledger.
    """

    token: str
    holder: str
    expires_at: float
    done: bool
    held_since: float | None = None


#: What rows without tags and rows without holds have.
NO_TAGS: Final[dict[str, TagValue]] = {}
_NO_HOLDS: Final[dict[str, Hold]] = {}


def packed_positions(positions: Sequence[int]) -> int | tuple[int, ...]:
    """A row's positions in its writes, as `Row.positions`."""
    first = positions[0] if positions else 0
    return first if positions.count(first) == len(positions) else tuple(positions)


def positions_in(numbers: Sequence[int], rows: Sequence[int | tuple[int, ...]]) -> list[int]:
    """The positions of rows, each as `Row.positions`, in some of their writes: row by row."""
    if len(numbers) == 1 and len(same := [each for each in rows if isinstance(each, int)]) == len(rows):
        return same
    return [each if isinstance(each, int) else each[number] for each in rows for number in numbers]


@dataclass(slots=True, eq=False)
class Row:
    """A sample. What it refers to is shared with other rows: it is replaced, never changed in place.

    Attributes:
        sample_id: Its id.
        seq: Its number, in order of first write.
        group: The name of its group, or None.
        written_at: When it was first written, on the ledger's clock.
        cells: Its produced cells, shared by the rows of the same writes.
        positions: Its position in each write of the cells. A single number if it is the same in all of them.
        tags: Its tags.
        holds: Task -> its hold on the row.
    """

    sample_id: str
    seq: int
    group: str | None
    written_at: float
    cells: Cells = NO_CELLS
    positions: int | tuple[int, ...] = 0
    tags: Mapping[str, TagValue] = field(default_factory=lambda: NO_TAGS)
    holds: Mapping[str, Hold] = field(default_factory=lambda: _NO_HOLDS)

    @property
    def refs(self) -> list[Ref]:
        """The refs of its payload, one for each write of its cells."""
        write_ids, positions = self.cells.write_ids, self.positions
        if isinstance(positions, int):
            return [(write_id, positions) for write_id in write_ids]
        return list(zip(write_ids, positions, strict=True))

    def drop_hold(self, task_name: str) -> Hold:
        """Takes a task's hold away. Returns it."""
        dropped = self.holds[task_name]
        self.holds = {name: hold for name, hold in self.holds.items() if name != task_name} or _NO_HOLDS
        return dropped

    @property
    def rows(self) -> Collection[Row]:
        """The row alone, as `Group.rows`."""
        return (self,)


def positions_by_write(rows: Iterable[Row]) -> Iterator[tuple[int, list[int]]]:
    """The refs of rows, as write ids and positions in the write. A write may come several times."""
    grouped: dict[int, tuple[Cells, list[int | tuple[int, ...]]]] = {}
    for row in rows:
        grouped.setdefault(id(row.cells), (row.cells, []))[1].append(row.positions)
    for cells, positions in grouped.values():
        for number, write_id in enumerate(cells.write_ids):
            yield write_id, positions_in([number], positions)


class Holder:
    """Gives rows a hold of one task, in place of the one that the task may have. Rows with equal holds share them.

    Args:
        task_name: The task.
        make: Makes the hold, from the one that the task has.
    """

    __slots__ = ("_given", "_make", "_task_name")

    def __init__(self, task_name: str, make: Callable[[Hold | None], Hold]) -> None:
        self._task_name = task_name
        self._make = make
        # by identity: holds before and after. Those before are kept, so that no other object gets their identity.
        self._given: dict[int, tuple[Mapping[str, Hold], Mapping[str, Hold]]] = {}

    def give(self, row: Row) -> None:
        """Gives a row its hold."""
        holds = row.holds
        given = self._given.get(id(holds))
        if given is None:
            made = {**holds, self._task_name: self._make(holds.get(self._task_name))}
            given = self._given[id(holds)] = (holds, made)
        row.holds = given[1]


@dataclass(slots=True, eq=False)
class Group:
    """The present rows of a group.

    Attributes:
        seq: The number of its first row.
        members: Id -> row.
        num_held: Task -> the number of members that it holds.
    """

    seq: int
    members: dict[str, Row] = field(default_factory=dict)
    num_held: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> Collection[Row]:
        """All members, which are handed out together."""
        return self.members.values()


#: What a claim hands out as a whole: a row or a group. Its ``seq`` is unique in the ledger.
Claimable: TypeAlias = Row | Group


# --- what a put changes in them ---------------------------------------------------------------------------------------


class Change(NamedTuple):
    """What a put changes in all rows that have the same cells before.

    Attributes:
        cells: Their cells after it.
        sources, dropped: See `Join`.
        gained: The fields that they did not have before.
        ready: Tasks and their views whose fields the rows have since this put.
        satisfied: All views whose fields the rows have.
    """

    cells: Cells
    sources: tuple[int, ...]
    dropped: tuple[int, ...]
    gained: tuple[str, ...]
    ready: list[tuple[str, ReadyView]]
    satisfied: list[ReadyView]


class PutWrites:
    """The writes of a put that commits, and what it changes in the rows of one partition.

    Args:
        writes: Its writes by their ids.
        num_rows: Its rows.

    Attributes:
        writes: The id and the fields of each.
        changes: The cells that rows had -> what the put changes in these rows. None: in new rows.
    """

    __slots__ = ("_num_rows", "_positions", "_simple", "changes", "writes")

    def __init__(self, writes: Mapping[int, Write], num_rows: int) -> None:
        self.writes = [(write_id, tuple(write.fields)) for write_id, write in writes.items()]
        self.changes: dict[Cells | None, Change] = {}
        self._num_rows = num_rows
        self._positions = [write.positions for write in writes.values()]
        self._simple = all(each is None for each in self._positions)

    def positions(self, row: Row, index: int, sources: Sequence[int]) -> int | tuple[int, ...]:
        """The positions of a row of the put, as `Row.positions`, before the row gets its new cells."""
        before, num_before = row.positions, len(row.cells.write_ids)
        if self._simple and (not num_before or before == index):
            return index
        all_before = [before] * num_before if isinstance(before, int) else list(before)
        found = [*all_before, *(index if each is None else each[index] for each in self._positions)]
        return packed_positions([found[number] for number in sources])

    def new_positions(self, sources: Sequence[int]) -> Sequence[int | tuple[int, ...]]:
        """The positions of all rows of the put, if these have no other cells."""
        if self._simple:
            return range(self._num_rows)
        columns = [range(self._num_rows) if each is None else each for each in self._positions]
        if len(sources) == 1:
            return columns[sources[0]]
        return [packed_positions(each) for each in zip(*(columns[number] for number in sources), strict=True)]


# --- leases and batches of them ---------------------------------------------------------------------------------------

#: Finds a lease that is neither settled nor cleared, by sample id, the row's ``seq`` and task.
_Find: TypeAlias = Callable[[str, int, str], "tuple[Row, Hold] | None"]
#: The heap is rebuilt when it has this many entries more than twice the running leases.
_SLACK: Final = 64


@dataclass(slots=True)
class Leases:
    """A heap of the times at which to check each lease. Every lease has an entry at or before its end.

    A renewal adds no entry. When the time of the old entry comes, the lease is found to end later, and its entry is
    moved. Entries of settled leases are dropped when their time comes, or when they are more than the others.
    """

    heap: list[tuple[float, int, str, str]] = field(default_factory=list)  # time, seq of the row, sample id, task

    def add(self, at: float, row: Row, task_name: str) -> None:
        """Adds a lease that ends at ``at``, unless it is renewed."""
        heapq.heappush(self.heap, (at, row.seq, row.sample_id, task_name))

    def next_due(self, find: _Find, now: float) -> tuple[Row, str] | None:
        """The row and task of the lease that ended first, or None. Drops and moves outdated entries."""
        while self.heap and self.heap[0][0] <= now:
            _, seq, sample_id, task_name = self.heap[0]
            found = find(sample_id, seq, task_name)
            if found is None:
                heapq.heappop(self.heap)
                continue
            row, hold = found
            if hold.expires_at <= now:
                return row, task_name
            heapq.heapreplace(self.heap, (hold.expires_at, seq, sample_id, task_name))
        return None

    def next_check(self) -> float:
        """No lease ends before this time. Infinite if there are none."""
        return self.heap[0][0] if self.heap else math.inf

    def tidy(self, find: _Find, num_running: int) -> None:
        """Rebuilds the heap with one entry per running lease, if most entries belong to none."""
        if len(self.heap) <= 2 * num_running + _SLACK:
            return
        running: dict[tuple[int, str], tuple[float, int, str, str]] = {}
        for _, seq, sample_id, task_name in self.heap:
            found = find(sample_id, seq, task_name)
            if found is not None:
                running[seq, task_name] = (found[1].expires_at, seq, sample_id, task_name)
        self.heap = list(running.values())
        heapq.heapify(self.heap)


#: How many of the batches that a rank was given before are looked at when it is given another one.
_LOOKED_AT: Final = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that were given to a rank, and are given to every claim that asks for the same batch.

    Attributes:
        sample_ids: The samples. Empty if none was left for this rank.
        token: The lease token, or None without a lease.
        exhausted: Whether the partition could give the task no more.
        last_seq: The greatest number of its rows. A row with a greater one was written anew after a clear.
        num_ranks: How many ranks have samples in it, if one claim chose for all ranks.
    """

    sample_ids: Sequence[str]
    token: str | None
    exhausted: bool
    last_seq: int
    num_ranks: int | None = None

    def present(self, rows: Mapping[str, Row]) -> Iterator[Row]:
        """Its rows that were not cleared, among those of the partition."""
        found = (rows.get(sample_id) for sample_id in self.sample_ids)
        return (row for row in found if row is not None and row.seq <= self.last_seq)


class Ranges(list[int]):
    """Numbers: the first of a range of them, the one after its last, the first of the next range, and so on."""

    def has(self, number: int) -> bool:
        """Whether the number is one of them."""
        return bisect_right(self, number) % 2 == 1

    def include(self, number: int) -> None:
        """Adds a number, unless it is there."""
        if self.has(number):
            return
        for bound in (number, number + 1):  # a bound that is there already joins two ranges
            at = bisect_left(self, bound)
            if self[at : at + 1] == [bound]:
                del self[at]
            else:
                self.insert(at, bound)


@dataclass(slots=True)
class RankBatches:
    """The batches that one rank was given.

    Attributes:
        kept: Index -> batch.
        gone: The indexes of batches that were forgotten, since their rows are all cleared.
        ended: The indexes of batches of which one claim found for all ranks that there are none.
    """

    kept: dict[int, Batch] = field(default_factory=dict)
    gone: Ranges = field(default_factory=Ranges)
    ended: Ranges = field(default_factory=Ranges)

    def give(self, index: int, batch: Batch, rows: Mapping[str, Row]) -> None:
        """Keeps a new batch, and looks at a few of the others in turn: forgets those whose rows are all cleared."""
        for each in list(islice(self.kept, _LOOKED_AT)):
            known = self.kept.pop(each)
            if known.sample_ids and not any(known.present(rows)):
                self.gone.include(each)
            else:
                self.kept[each] = known
        self.kept[index] = batch
