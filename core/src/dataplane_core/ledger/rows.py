"""The rows of a partition, the groups that they make, the tasks' holds on them, and what a claim may be given.

What rows refer to is shared: the rows of a put have their cells in common, those of a claim their holds. So it is
replaced, and never changed in place.

For each task and each set of required fields there is a view of the claimables that are ready. It is always exact, so
their number is known without looking at them. With a tag filter, it looks only at those that changed since the last
claim with this filter.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from dataplane_core.errors import InvalidRequestError, LeaseHolder, Shortfall
from dataplane_core.schema import INPUT_LENGTHS_TAG
from dataplane_core.spec import ClaimRequest, Question, Sampler, TagValue, group_matches, matches
from dataplane_core.spec.costs import Balance, divide_evenly
from dataplane_core.spec.replies import SampleState

#: Names the payload of one row of one put: ``(write_id, pos)``.
Ref: TypeAlias = tuple[int, int]
#: A row's position in each of its writes. A single number if it is the same in all of them.
Positions: TypeAlias = int | tuple[int, ...]


def group_of(sample_id: str) -> str:
    """The group of an id: the part before the last ``_g``. An id without one raises `InvalidRequestError`."""
    group, mark, _ = sample_id.rpartition("_g")
    if not mark:
        raise InvalidRequestError(
            f"sample id '{sample_id}' holds no '_g', so it is of no group. Expected ids such as 'prompt7_g0'."
        )
    return group


# --- cells ------------------------------------------------------------------------------------------------------------


class Join(NamedTuple):
    """How the cells of a row follow from those before a put and those of the put. The same for all rows of a put."""

    fields: dict[str, int]  # of the row -> the write among those that it has then
    sources: tuple[int, ...]  # these writes, by their number among those that it had, followed by those of the put
    dropped: tuple[int, ...]  # those of which it has no cell any longer, by their number among those that it had


@lru_cache(maxsize=4096)  # so that the rows of many puts share what they have in common
def join(before: tuple[tuple[str, int], ...], num_before: int, writes: tuple[tuple[str, ...], ...]) -> Join:
    """Joins cells that a row has, each with the number of its write, with those of the writes of a put."""
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
    """The produced cells that rows have in common: those of the same writes."""

    fields: dict[str, int]  # field -> the number of its write, in the order of production; shared with other cells
    write_ids: tuple[int, ...]


def packed_positions(positions: Sequence[int]) -> Positions:
    """A row's position in each of its writes, as `Row.positions`."""
    first = positions[0] if positions else 0
    return first if positions.count(first) == len(positions) else tuple(positions)


def positions_in(numbers: Sequence[int], rows: Sequence[Positions]) -> list[int]:
    """The positions of rows in some of their writes: row by row."""
    if len(numbers) == 1 and len(same := [positions for positions in rows if isinstance(positions, int)]) == len(rows):
        return same
    return [positions if isinstance(positions, int) else positions[number] for positions in rows for number in numbers]


# --- rows and groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """A task's hold on rows: a lease since ``held_since`` until ``expires_at``, or for good (``done``)."""

    token: str
    holder: str
    expires_at: float
    done: bool
    held_since: float = 0.0


#: What rows without cells, without tags, and without holds have.
NO_CELLS: Final = Cells({}, ())
NO_TAGS: Final[dict[str, TagValue]] = {}
NO_HOLDS: Final[dict[str, Hold]] = {}


@dataclass(slots=True, eq=False)
class Row:
    sample_id: str
    seq: int  # its number, in order of first write
    group: str | None
    written_at: float  # for the first time, on the ledger's clock
    cells: Cells
    positions: Positions  # where its cells are in the writes
    tags: Mapping[str, TagValue]
    holds: Mapping[str, Hold]  # by task

    @property
    def refs(self) -> list[Ref]:
        """The refs of its payload, one for each write of its cells."""
        write_ids, positions = self.cells.write_ids, self.positions
        if isinstance(positions, int):
            return [(write_id, positions) for write_id in write_ids]
        return list(zip(write_ids, positions, strict=True))

    def state(self) -> SampleState:
        """What a save keeps of it. A cell is named by the id of its write plus its row there: no other one has this."""
        refs = self.refs
        fields = {name: sum(refs[number]) for name, number in self.cells.fields.items()}
        return SampleState(fields, self.tags, sorted(name for name, hold in self.holds.items() if hold.done), self.seq)

    @property
    def rows(self) -> Collection[Row]:
        return (self,)

    def is_ready(self, required: frozenset[str], task_name: str) -> bool:
        """Whether it can be given to a task that requires these fields."""
        return required <= self.cells.fields.keys() and task_name not in self.holds

    def lease(self, task_name: str) -> Hold | None:
        """The lease that a task has on it. None: it was settled, or the row was cleared."""
        hold = self.holds.get(task_name)
        return None if hold is None or hold.done else hold


@dataclass(slots=True, eq=False)
class Group:
    seq: int  # that of its first row
    size: int | None  # how many members it has, as registered
    is_broken: bool  # whether it lost a member, for good
    members: dict[str, Row] = field(default_factory=dict)  # those that are present, by id
    num_held: dict[str, int] = field(default_factory=dict)  # task -> how many members it holds

    @property
    def rows(self) -> Collection[Row]:
        """What is handed out together."""
        return self.members.values()

    @property
    def is_whole(self) -> bool:
        """Whether it has all its members, and lost none."""
        return not self.is_broken and len(self.members) == self.size

    def is_ready(self, required: frozenset[str], task_name: str) -> bool:
        is_free = not self.num_held.get(task_name) and self.is_whole
        return is_free and all(required <= row.cells.fields.keys() for row in self.rows)

    def add(self, row: Row) -> None:
        self.members[row.sample_id] = row

    def remove(self, row: Row) -> None:
        del self.members[row.sample_id]
        self.is_broken = True

    def parts(self) -> tuple[tuple[str, ...], Mapping[str, int]]:
        """The members that are there; of rollouts, those that are whole, and the others, as `Shortfall.unsealed`."""
        return tuple(self.members), {}

    def check_put(self, name: str, put: Mapping[str, Mapping[str, Any]], where: str) -> None:
        """Refuses rows of a put, given as id -> tags, for which this group has no place."""
        count = len(self.members) + sum(sample_id not in self.members for sample_id in put)
        if self.size is not None and count > self.size:
            raise InvalidRequestError(
                f"{where} refused: group '{name}' would have {count} members. Expected at most {self.size}, the "
                "partition's group size. Nothing was written."
            )


#: What a claim hands out as a whole: a row or a group. Its ``seq`` is unique in the ledger.
Claimable: TypeAlias = Row | Group


def positions_by_write(rows: Iterable[Row]) -> Iterator[tuple[int, list[int]]]:
    """The refs of rows, as write ids and positions in the write. A write may come several times."""
    grouped: dict[int, tuple[Cells, list[Positions]]] = {}
    for row in rows:
        grouped.setdefault(id(row.cells), (row.cells, []))[1].append(row.positions)
    for cells, positions in grouped.values():
        for number, write_id in enumerate(cells.write_ids):
            yield write_id, positions_in([number], positions)


def hold_rows(rows: Iterable[Row], task_name: str, new: Hold | Callable[[Hold], Hold]) -> None:
    """Gives rows a hold of a task, or one made from that which it has. Rows that shared their holds share the new."""
    # by identity. The holds of before are kept, so that no other object gets their identity.
    made: dict[int, tuple[Mapping[str, Hold], Mapping[str, Hold]]] = {}
    for row in rows:
        holds = row.holds
        if id(holds) not in made:
            hold = new if isinstance(new, Hold) else new(holds[task_name])
            made[id(holds)] = holds, {**holds, task_name: hold}
        row.holds = made[id(holds)][1]


#: The heap is rebuilt when it has this many entries more than twice the running leases.
_SLACK: Final = 64


@dataclass(slots=True)
class Leases:
    """A heap of the times at which to check each lease. Every lease has an entry at or before its end.

    A renewal adds no entry. When the time of the old entry comes, the lease is found to end later, and its entry is
    moved. Entries of settled leases are dropped when their time comes, or when they are more than the others.
    """

    heap: list[tuple[float, int, str, Row]] = field(default_factory=list)  # time, seq of the row, task, row

    def add(self, at: float, row: Row, task_name: str) -> None:
        heapq.heappush(self.heap, (at, row.seq, task_name, row))

    def next_due(self, now: float) -> tuple[Row, str] | None:
        """The row and task of the lease that ended first, or None. Drops and moves outdated entries."""
        while self.heap and self.heap[0][0] <= now:
            _, seq, task_name, row = self.heap[0]
            lease = row.lease(task_name)
            if lease is None:
                heapq.heappop(self.heap)
            elif lease.expires_at <= now:
                return row, task_name
            else:
                heapq.heapreplace(self.heap, (lease.expires_at, seq, task_name, row))
        return None

    def next_check(self) -> float:
        """No lease ends before this time. Infinite if there are none."""
        return self.heap[0][0] if self.heap else math.inf

    def tidy(self, num_running: int) -> None:
        """Rebuilds the heap with one entry per running lease, if most entries belong to none."""
        if len(self.heap) > 2 * num_running + _SLACK:
            running = {(seq, task_name): (row, row.lease(task_name)) for _, seq, task_name, row in self.heap}
            self.heap = [(lease.expires_at, *key, row) for key, (row, lease) in running.items() if lease is not None]
            heapq.heapify(self.heap)


# --- the batches that data-parallel ranks were given ------------------------------------------------------------------

#: How many of the batches that a rank was given before are looked at when it is given another one.
_LOOKED_AT: Final = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that were given to a rank, and are given to every claim that asks for the same batch."""

    sample_ids: list[str]  # empty if none was left for this rank
    token: str | None  # of the lease, if there is one
    exhausted: bool  # whether the partition could give the task no more
    last_seq: int  # the greatest of its rows. A row with a greater one was written anew after a clear
    num_ranks: int | None = None  # how many ranks have samples in it, if one claim chose for all ranks

    def present(self, rows: Mapping[str, Row]) -> Iterator[Row]:
        """Its rows that were not cleared."""
        present = (rows.get(sample_id) for sample_id in self.sample_ids)
        return (row for row in present if row is not None and row.seq <= self.last_seq)


@dataclass(slots=True)
class Numbers:
    """A set of numbers, as ranges."""

    bounds: list[int] = field(default_factory=list)  # the first of a range, the one after its last, and so on

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.bounds, number) % 2 == 1

    def add(self, number: int) -> None:
        if number in self:
            return
        for bound in (number, number + 1):  # a bound that is there already joins two ranges
            at = bisect_left(self.bounds, bound)
            if self.bounds[at : at + 1] == [bound]:
                del self.bounds[at]
            else:
                self.bounds.insert(at, bound)


@dataclass(slots=True)
class RankBatches:
    kept: dict[int, Batch] = field(default_factory=dict)  # by index
    gone: Numbers = field(default_factory=Numbers)  # forgotten, since their rows are all cleared
    ended: Numbers = field(default_factory=Numbers)  # of which one claim found for all ranks that there are none

    def give(self, index: int, batch: Batch, rows: Mapping[str, Row]) -> None:
        """Keeps a new batch, and looks at a few of the others in turn: forgets those whose rows are all cleared."""
        for earlier in list(islice(self.kept, _LOOKED_AT)):
            batch_before = self.kept.pop(earlier)
            if batch_before.sample_ids and not any(batch_before.present(rows)):
                self.gone.add(earlier)
            else:
                self.kept[earlier] = batch_before
        self.kept[index] = batch


# --- what is ready for a task -----------------------------------------------------------------------------------------

#: So many filters a view has at most; and claimables that match them, all together, for each that is ready. The least
#: recently used filter is dropped, also if it has not seen changes of more than a share of them.
_MOST_FILTERS: Final = 128
_MOST_KEPT: Final = 4
_MOST_CHANGED: Final = 0.125
#: How many entries a heap may have beyond a multiple of its claimables.
_VIEW_SLACK: Final = 1024
#: How many samples of each kind a shortfall names.
_NUM_NAMED: Final = 3


@dataclass(slots=True)
class ReadySet:
    """Claimables in order of ``seq``."""

    claimables: dict[int, Claimable] = field(default_factory=dict)
    heap: list[int] = field(default_factory=list)  # the seq of each, and of some that were dropped

    def add(self, claimable: Claimable) -> None:
        if claimable.seq not in self.claimables:
            self.claimables[claimable.seq] = claimable
            heapq.heappush(self.heap, claimable.seq)

    def discard(self, seq: int) -> bool:
        """Drops a claimable. False if the set does not have it."""
        if self.claimables.pop(seq, None) is None:
            return False
        if len(self.heap) > 2 * len(self.claimables) + _VIEW_SLACK:
            self.heap = list(self.claimables)
            heapq.heapify(self.heap)
        return True

    def first(self, sampler: Sampler, count: int) -> list[Claimable]:
        """The first ``count`` claimables. Unlike `choose`, it looks at all of them, and changes nothing."""
        choose = heapq.nlargest if sampler == "freshest" else heapq.nsmallest
        return [self.claimables[seq] for seq in choose(count, self.claimables)]

    def choose(self, sampler: Sampler, count: int) -> list[Claimable]:
        """Chooses ``count`` claimables; there must be so many. The caller must discard them before the next call."""
        if sampler == "freshest":  # O(n log k) for k of n
            return [self.claimables[seq] for seq in heapq.nlargest(count, self.claimables)]
        first: list[Claimable] = []  # O(k log n)
        while len(first) < count:
            claimable = self.claimables.get(heapq.heappop(self.heap))
            if claimable is not None and not (first and first[-1] is claimable):
                first.append(claimable)
        return first


@dataclass(slots=True)
class _Matching:
    """The claimables of a view that match a filter, but for those that changed since a claim used it."""

    tag_filter: Mapping[str, tuple[str, Any]]
    changed: dict[int, None]  # seq of each that was added, dropped or tagged since then
    ready: ReadySet = field(default_factory=ReadySet)


@dataclass(slots=True)
class ReadyView:
    """The ready claimables of one task for one set of required fields."""

    required: frozenset[str]
    ready: ReadySet = field(default_factory=ReadySet)
    filters: dict[str, _Matching] = field(default_factory=dict)  # the least recently used first

    def add(self, claimable: Claimable) -> None:
        """Adds a claimable that became ready, or notes that its tags changed."""
        self.ready.add(claimable)
        if self.filters:
            self._note(claimable.seq)

    def discard(self, seq: int) -> None:
        """Drops a claimable that is no longer ready, if it was."""
        if self.ready.discard(seq) and self.filters:
            self._note(seq)

    def of(self, tag_filter: Mapping[str, tuple[str, Any]]) -> ReadySet:
        """The ready claimables that match a filter. Looks only at those that changed since the filter was last used."""
        key = repr([(name, symbol, operand) for name, (symbol, operand) in sorted(tag_filter.items())])
        matching = self.filters.pop(key, None)
        if matching is None:
            num_kept = sum(len(other.ready.claimables) for other in self.filters.values())
            while len(self.filters) >= _MOST_FILTERS or num_kept > _MOST_KEPT * len(self.ready.claimables):
                num_kept -= len(self.filters.pop(next(iter(self.filters))).ready.claimables)
            matching = _Matching(dict(tag_filter), dict.fromkeys(self.ready.claimables))
        self.filters[key] = matching
        for seq in matching.changed:
            claimable = self.ready.claimables.get(seq)
            if claimable is not None and group_matches([row.tags for row in claimable.rows], matching.tag_filter):
                matching.ready.add(claimable)
            else:
                matching.ready.discard(seq)
        matching.changed = {}
        return matching.ready

    def _note(self, seq: int) -> None:
        for matching in self.filters.values():
            matching.changed[seq] = None
        idle, matching = next(iter(self.filters.items()))
        if len(matching.changed) > _MOST_CHANGED * len(self.ready.claimables):
            del self.filters[idle]  # it is made again when a claim uses it


# --- data-parallel ranks ----------------------------------------------------------------------------------------------


def ranks_of(claim: ClaimRequest) -> int:
    """For how many ranks a claim chooses its batch."""
    return 1 if claim.dp_rank is None else claim.dp_size or 1


def shares(claim: ClaimRequest, claimables: Sequence[Claimable]) -> list[list[Claimable]]:
    """Divides claimables among the ranks, so that their numbers differ by at most one: into ranges, or balanced."""
    least, more = divmod(len(claimables), ranks_of(claim))
    sizes = [least + (rank < more) for rank in range(ranks_of(claim))]  # the first ranks get one more
    if claim.sampler != "balanced":
        left = iter(claimables)
        return [list(islice(left, size)) for size in sizes]
    parts = divide_evenly([_cost(claimable, claim.balance) for claimable in claimables], sizes)
    return [[claimables[position] for position in part] for part in parts]


def fitting(claim: ClaimRequest, claimables: Sequence[Claimable]) -> tuple[int, bool]:
    """How many of these, in their order, the limits of a claim allow, but at least one; and whether no more would."""
    most_rows, most_tokens = claim.max_rows or math.inf, claim.max_tokens or math.inf
    num_rows, num_tokens = 0, 0.0
    for count, claimable in enumerate(claimables):
        num_rows += len(claimable.rows)
        if claim.max_tokens is not None:  # a sample of unknown length may have any: it is given alone
            num_tokens += math.inf if None in map(_length, claimable.rows) else _cost(claimable, None)
        if num_rows >= most_rows or num_tokens >= most_tokens:
            exceeds = num_rows > most_rows or num_tokens > most_tokens
            return (count if count and exceeds else count + 1), True
    return len(claimables), False


def _length(row: Row) -> int | None:
    length = row.tags.get(INPUT_LENGTHS_TAG)
    return int(length) if isinstance(length, (int, float)) and math.isfinite(length) else None


def _cost(claimable: Claimable, balance: Balance | None) -> int:
    tokens = [length for row in claimable.rows if (length := _length(row)) is not None]
    return sum(tokens if balance is None else map(balance.of, tokens))


# --- why a claim gets no more -----------------------------------------------------------------------------------------


def find_shortfall(claimables: Iterable[Claimable], question: ClaimRequest | Question, now: float) -> Shortfall:
    """Counts and names the samples that the task cannot be given now. Looks at every row, in order of first write."""
    task_name, tag_filter, required = question.task_name, question.tag_filter, frozenset(question.required_fields)
    leased: list[tuple[float, int, Row]] = []
    passed: list[tuple[int, Collection[Row]]] = []
    num_not_matching = num_incomplete = num_lacking = 0
    groups: dict[str, int] = {}
    members: tuple[str, ...] = ()
    cells: dict[str, tuple[str, ...]] = {}
    unsealed: Mapping[str, int] = {}
    for claimable in claimables:
        free: list[Row] = []
        part = claimable if isinstance(claimable, Group) and not claimable.is_whole else None
        rows = claimable.rows if part is None else part.members.values()
        for row in rows:
            hold = row.holds.get(task_name)
            if hold is None:
                free.append(row)
            elif not hold.done:
                leased.append((hold.expires_at, row.seq, row))
        if not free:
            continue
        if tag_filter and not group_matches([row.tags for row in rows], tag_filter):
            num_not_matching += len(free)
            passed.append((claimable.seq, rows))
        elif part is not None:
            num_incomplete += len(free)
            parts, lacks = part.parts()
            members, unsealed = (members, unsealed) if groups else (parts, lacks)
            if len(groups) < _NUM_NAMED:
                groups[free[0].group or ""] = len(parts)
        elif not all(required <= row.cells.fields.keys() for row in free):
            num_lacking += len(free)
            if len(cells) < _NUM_NAMED:
                lacking = {row.sample_id: tuple(sorted(required - row.cells.fields.keys())) for row in free}
                cells.update((sample_id, names) for sample_id, names in lacking.items() if names)
    newest = [
        max((row for row in rows if not matches(row.tags, tag_filter)), key=lambda row: row.seq)
        for _, rows in heapq.nlargest(_NUM_NAMED, passed)
    ]
    return Shortfall(
        num_leased=len(leased),
        leased=tuple(
            LeaseHolder(sample_id=row.sample_id, holder=row.holds[task_name].holder, left_s=max(0.0, expires_at - now))
            for expires_at, _, row in heapq.nsmallest(_NUM_NAMED, leased)
        ),
        num_not_matching=num_not_matching,
        not_matching=tuple(row.sample_id for row in newest),
        newest_tags=dict(newest[0].tags) if newest else {},
        num_incomplete=num_incomplete,
        incomplete_groups=groups,
        members=members,
        unsealed=unsealed,
        num_lacking=num_lacking,
        missing_cells=dict(list(cells.items())[:_NUM_NAMED]),
    )
