"""Rollouts of several rows, and the groups that they make.

Tags seal: they say what is to be, so the order in which rows and seals come does not matter. What a group is follows
from its rows and their tags: it has no state of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger.rows import Group, Row
from dataplane_core.schema import GROUP_ROLLOUTS_TAG, ROLLOUT_ROWS_TAG


def rollout_of(sample_id: str) -> str:
    """The rollout of a row: the part of its id before ``/`` and the row's number. Another id is that of a rollout.

    Examples:
        >>> rollout_of("q0_g1/2"), rollout_of("math/7_g1")
        ('q0_g1', 'math/7_g1')
    """
    rollout, _, number = sample_id.rpartition("/")
    return rollout if number.isdecimal() and "_g" in rollout else sample_id


def _number_of(sample_id: str) -> int:
    number = sample_id.rpartition("/")[2]
    is_long = len(number) > 18  # no seal can say it; of thousands of digits, Python makes no int
    if rollout_of(sample_id) == sample_id or is_long or str(int(number)) != number:
        raise InvalidRequestError(
            f"sample id '{sample_id:.100}' is of no rollout. Expected ids such as 'prompt7_g0/0': the name of the "
            "rollout, with '_g', and the number of the row, from 0."
        )
    return int(number)


def _seals(rows: Iterable[Row], tag: str) -> Any:
    """What the tags of rows say. All say the same. None: nothing."""
    return next((row.tags[tag] for row in rows if tag in row.tags), None)


@dataclass(slots=True)
class _Rollout:
    rows: dict[str, Row] = field(default_factory=dict)  # by id
    num_rows: int | None = None  # that it is sealed with

    @property
    def is_whole(self) -> bool:
        return len(self.rows) == self.num_rows


@dataclass(slots=True, eq=False)
class RolloutGroup(Group):
    """Its members are all present rows, its rows those of whole rollouts. Its size is a number of rollouts; None: seals
    say it. It is broken once a whole rollout lost a row."""

    rollouts: dict[str, _Rollout] = field(default_factory=dict)  # by name
    num_rollouts: int | None = None  # that it is sealed with

    @property
    def rows(self) -> Collection[Row]:
        """The rows that are handed out together: those of a rollout one after another."""
        whole = [rollout.rows.values() for rollout in self.rollouts.values() if rollout.is_whole]
        return [row for rows in sorted(whole, key=lambda rows: next(iter(rows)).seq) for row in rows]

    @property
    def is_whole(self) -> bool:
        num_whole = sum([rollout.is_whole for rollout in self.rollouts.values()])
        return not self.is_broken and num_whole == (self.num_rollouts or self.size)

    def add(self, row: Row) -> None:
        """Adds a row, or notes that its tags changed."""
        self.members[row.sample_id] = row
        rollout = self.rollouts.setdefault(rollout_of(row.sample_id), _Rollout())
        rollout.rows[row.sample_id] = row
        rollout.num_rows = _seals((row,), ROLLOUT_ROWS_TAG) or rollout.num_rows
        self.num_rollouts = _seals((row,), GROUP_ROLLOUTS_TAG) or self.num_rollouts

    def remove(self, row: Row) -> None:
        """Drops a row, with what its tags said. If its rollout was whole, the group is broken."""
        name = rollout_of(row.sample_id)
        rollout = self.rollouts[name]
        self.is_broken |= rollout.is_whole
        del self.members[row.sample_id], rollout.rows[row.sample_id]
        if not rollout.rows:
            del self.rollouts[name]
        if self.members:
            self.seq = next(iter(self.members.values())).seq
        if ROLLOUT_ROWS_TAG in row.tags:
            rollout.num_rows = _seals(rollout.rows.values(), ROLLOUT_ROWS_TAG)
        if GROUP_ROLLOUTS_TAG in row.tags:
            self.num_rollouts = _seals(self.members.values(), GROUP_ROLLOUTS_TAG)

    def parts(self) -> tuple[tuple[str, ...], Mapping[str, int]]:
        """Its rollouts: those that are whole, and how many rows each of the others lacks; 0: it is not sealed."""
        rollouts = dict(sorted(self.rollouts.items()))
        lacks = {name: (of.num_rows or len(of.rows)) - len(of.rows) for name, of in rollouts.items() if not of.is_whole}
        return tuple(name for name in rollouts if name not in lacks), lacks

    def check_put(self, name: str, put: Mapping[str, Mapping[str, Any]], where: str) -> None:
        """Refuses rows for which it has no place, and tags that do not fit."""
        numbers: dict[str, set[int]] = {}
        sizes = {name: set[int]() if self.num_rollouts is None else {self.num_rollouts}}
        for sample_id, tags in put.items():
            number, of = _number_of(sample_id), rollout_of(sample_id)
            rollout = self.rollouts.get(of, _Rollout())
            numbers.setdefault(of, set(map(_number_of, rollout.rows))).add(number)
            sizes.setdefault(of, set() if rollout.num_rows is None else {rollout.num_rows})
            for tag, sealed in ((ROLLOUT_ROWS_TAG, of), (GROUP_ROLLOUTS_TAG, name)):
                if tag in tags:
                    if type(tags[tag]) is not int or tags[tag] < 1:
                        raise _refused(where, f"tag '{tag}' of '{sample_id}' is {tags[tag]!r}", "a number of 1 or more")
                    sizes[sealed].add(tags[tag])
        if self.is_broken:  # it is never given. A save may have rows of several attempts
            return
        for sealed, counts in sizes.items():
            if len(counts) > 1:
                raise _refused(where, f"'{sealed}' is sealed with {min(counts)} and with {max(counts)}", "one number")
        num_whole = sum([rollout.is_whole for of, rollout in self.rollouts.items() if of not in numbers])
        for of, there in numbers.items():
            if sizes[of] and max(there) >= min(sizes[of]):
                said = f"'{of}/{max(there)}' is no row of '{of}', which is sealed with {min(sizes[of])} rows"
                raise _refused(where, said, f"'{of}/{min(sizes[of]) - 1}' as the last")
            num_whole += {len(there)} == sizes[of]
        most = min([*sizes[name], *([] if self.size is None else [self.size])], default=num_whole)
        if max([num_whole, *sizes[name]]) > most:
            said = f"group '{name}' would have {max([num_whole, *sizes[name]])} sealed rollouts"
            raise _refused(where, said, f"at most {most}")


def _refused(where: str, said: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} refused: {said}. Expected {expected}. Nothing was written.")
