"""The rows of a partition and their groups, which the ledger's claims hand out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dataplane_core.errors import InvalidRequestError
from dataplane_core.spec import TagValue

__all__ = ["Claimable", "Group", "Hold", "Ref", "Row", "group_of"]

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


@dataclass(slots=True)
class Hold:
    """A task's hold on a row: a lease until ``expires_at``, or for good (``done``).

    ``held_since`` is None after a restart of the ledger.
    """

    token: str
    holder: str
    expires_at: float
    done: bool
    held_since: float | None = None


#: What rows without tags and rows without holds have, so that they take no memory for it. Never changed in place.
_NO_TAGS: Final[dict[str, TagValue]] = {}
_NO_HOLDS: Final[dict[str, Hold]] = {}


@dataclass(slots=True, eq=False)
class Row:
    """A sample. Its dicts are replaced, not changed in place, but for a hold that is taken away.

    Attributes:
        sample_id: Its id.
        seq: Its number, in order of first write.
        group: The name of its group, or None.
        written_at: When it was first written, on the ledger's clock.
        cells: Produced field -> the ref of its payload.
        tags: Its tags.
        holds: Task -> its hold on the row.
    """

    sample_id: str
    seq: int
    group: str | None
    written_at: float
    cells: dict[str, Ref] = field(default_factory=dict)
    tags: dict[str, TagValue] = field(default_factory=lambda: _NO_TAGS)
    holds: dict[str, Hold] = field(default_factory=lambda: _NO_HOLDS)

    @property
    def rows(self) -> Collection[Row]:
        """The row alone, as `Group.rows`."""
        return (self,)


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
