"""The rows of a partition and their groups, which the ledger's claims hand out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from dataplane_core.errors import InvalidRequestError
from dataplane_core.spec import TagValue

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
