"""A sample, a batch and a step of a recorded run, as `History` follows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dataplane_observe import Record, Writer
from dataplane_tools._prompts import Prompt

#: A tag: which weights generated a row. A value of a step: how many versions old its rows were.
WEIGHT_VERSION: Final = "weight_version"
STALENESS: Final = "staleness"
#: How long after its samples were used the record of a put may come.
_EARLY_S: Final = 600.0


class Put(NamedTuple):
    """A put: its number among all puts, when it ended, who did it, and field -> the text of its spec."""

    order: int
    at: float
    writer: Writer
    specs: Mapping[str, str]


class Cell(NamedTuple):
    """The value of a field of a sample: the newest put of it, its digest, if that is recorded, and when it was first
    put."""

    put: Put
    digest: int | None
    since: float


@dataclass(slots=True, eq=False)
class Batch:
    """What a claim handed out, or the claims of all ranks for one batch. ``step`` is that in which it was consumed."""

    task: str
    rows: dict[Row, int] = field(default_factory=dict)  # -> place: by rank, and by place in its claim
    step: Step | None = None
    is_shared: bool = False
    is_filtered: bool = False


@dataclass(slots=True)
class Given:
    """How far a task is with a row. ``batch`` is None if it was given back; ``before`` is a batch that consumed it."""

    batch: Batch | None = None
    consumed: bool = False
    before: Batch | None = None

    def give(self, row: Row, batch: Batch | None) -> None:
        """Hands the row out once more. None: it is given back."""
        if self.batch is not None and self.consumed:
            self.before = self.batch
        elif self.batch is not None:
            self.batch.rows.pop(row, None)
        self.batch, self.consumed = batch, False


@dataclass(slots=True, eq=False)
class Row:
    """A sample from its first put until it is cleared.

    Attributes:
        sample_id: Its id.
        partition: Its partition.
        put: Its first put. None: the recording does not have it.
        tags: Its tags.
        cells: Field -> its value, in the order of puts.
        given: Task -> how far it is.
        is_read: Whether it was read since it was put, or since a claim handed it out.
        is_lost: Whether its newest read failed, since the store had lost rows.
        last: Its newest operation.
        prompt: Its prompt.
        life: Which of the lives of its prompt it belongs to.
        step: The newest step that counts that trained on it, or "".
        trained_at: When a task that trains consumed it, or it was read where none does.
        early: Field -> when it was first claimed or read, if the record of its put comes later; ``by``: by whom.
    """

    sample_id: str
    partition: str
    put: Put | None = None
    tags: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    is_read: bool = False
    is_lost: bool = False
    last: str = ""
    prompt: Prompt | None = None
    life: int = 0
    step: str = ""
    trained_at: float = 0.0
    early: dict[str, float] = field(default_factory=dict)
    by: Writer | None = None

    @property
    def is_used(self) -> bool:
        """Whether a task consumed it, or it was read."""
        return self.is_read or any(given.consumed for given in self.given.values())

    def use(self, fields: Iterable[str], record: Record) -> None:
        """Notes that fields were claimed or read."""
        for name in fields:
            if name not in self.cells:
                self.early.setdefault(name, record.at)
                self.by = record.client

    def awaits(self, put: Record) -> bool:
        """Whether a put is that of fields that were used: it had begun by then, or clocks may differ."""
        if self.early.keys().isdisjoint(put.fields):
            return False
        used = max(self.early.values())
        return put.at - put.seconds <= used or (put.client != self.by and put.at <= used + _EARLY_S)


@dataclass(slots=True, eq=False)
class Step:
    """A step of training; without marks, a batch of a task.

    Attributes:
        number: Its number, by its mark. None: no mark says that it ended.
        batch: Without marks: which batch of ``task`` it is, from 1.
        task: Without marks: the task.
        after: The newest step before one that did not end.
        at: When it ended.
        values: What its mark says.
        is_undone: Whether the run went on from an earlier step later, or before it ended.
        rows: Its samples -> the task that consumed them, or "" for samples that were read.
    """

    number: int | None = None
    batch: int = 0
    task: str = ""
    after: int | None = None
    at: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    is_undone: bool = False
    rows: dict[Row, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int | None]:
        """What names it in two runs."""
        return self.task, self.batch or self.number

    def __str__(self) -> str:
        if self.batch:
            return f"batch {self.batch} of '{self.task}'"
        if self.number is None:
            return "the first step, which did not end" if self.after is None else f"after step {self.after}"
        return f"step {self.number}"

    def staleness(self) -> tuple[float, float] | None:
        """The least and the most number of weight versions that its rows are behind its newest, or as its mark says."""
        if STALENESS in self.values:
            return self.values[STALENESS], self.values[STALENESS]
        versions = self.versions()
        newest = max((*versions, self.values.get(WEIGHT_VERSION, -math.inf)))
        return (newest - max(versions), newest - min(versions)) if versions else None

    def versions(self) -> list[float]:
        """The weight versions of its rows."""
        found = {row.tags.get(WEIGHT_VERSION) for row in self.rows}
        return sorted(each for each in found if isinstance(each, int | float) and not isinstance(each, bool))
