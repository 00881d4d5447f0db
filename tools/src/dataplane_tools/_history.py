"""What a recording says of a run: which samples each step was made of, and what became of the others.

The recording is read twice: `survey` comes first. `History` follows each sample (`Row`) from its first put until it is
cleared, the `Batch` in which a claim handed it out, and the `Step` that used it. Beside the samples that are held then,
it keeps each prompt.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dataplane_core.spec import matches
from dataplane_observe import Record, Recording, Writer
from dataplane_tools._survey import Prompt, Prompts, Survey, several

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
    """A sample from its first put until it is cleared."""

    sample_id: str
    partition: str
    put: Put | None = None  # its first one, if the recording has it
    tags: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)  # by field, in the order of puts
    given: dict[str, Given] = field(default_factory=dict)  # task -> how far it is
    is_read: bool = False  # since it was put, or since a claim handed it out
    is_lost: bool = False  # its newest read failed, since the store had lost rows
    last: str = ""  # its newest operation
    prompt: Prompt | None = None
    life: int = 0  # which of the lives of its prompt it belongs to
    step: str = ""  # the newest step that counts that trained on it
    trained_at: float = 0.0  # when a task that trains consumed it, or it was read where none does
    #: Field -> when it was first claimed or read, if the record of its put comes later; and by whom.
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
    """A step of training; without marks, a batch of a task."""

    number: int | None = None  # by its mark, if one says that it ended
    batch: int = 0  # without marks: which batch of ``task`` it is, from 1
    task: str = ""
    after: int | None = None  # the newest step before one that did not end
    at: float = 0.0  # when it ended
    values: Mapping[str, float] = field(default_factory=dict)  # of its mark
    is_undone: bool = False  # the run went on from an earlier step later, or before it ended
    rows: dict[Row, str] = field(default_factory=dict)  # -> the task that consumed them, or "": they were read

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


# --- samples, batches and steps ---------------------------------------------------------------------------------------


#: Claims of ranks for so many batches of a task before the newest one are still told to be of one batch.
_BATCHES_KEPT: Final = 64
#: Findings of one kind that are kept. The others are counted.
_MOST_FINDINGS: Final = 10
_MOST_EXAMPLES: Final = 3
#: Damaged samples of which it is told which step trained on them. The others are counted.
_MOST_DAMAGED: Final = 1000
#: Operations that tell something also if they fail: what was asked for, what is lost.
_TELLING: Final = frozenset(("claim", "get_samples"))
_UNREAD: Final = " without a read"
#: Samples that are gone, and are kept for records that come late.
_MOST_EARLY: Final = 1 << 16
#: By how much a put may seem to begin after its samples were used: the time of a record is taken a little late.
_LATE_S: Final = 1.0


@dataclass(slots=True)
class _Registration:
    """What a partition holds."""

    epoch: str = ""
    used_at: float = 0.0
    tasks: Iterable[str] = ()
    rows: dict[str, Row] = field(default_factory=dict)
    dropped: dict[str, Row] = field(default_factory=dict)  # by the registration
    required: dict[str, list[str]] = field(default_factory=dict)
    filters: dict[str, dict[str, tuple[dict[str, Any] | None, float, bool]]] = field(default_factory=dict)
    batches: dict[tuple[str, int], Batch] = field(default_factory=dict)


class History:
    """Follows the samples of a recording. ``check_rows``: whether to compare recorded rows with their digests."""

    def __init__(self, recording: Recording, found: Survey, *, check_rows: bool = True) -> None:
        self.survey = found
        #: What became of samples that were not trained on: ``count``, ``reason``, ``task`` ("" in a partition of which
        #: no task was given samples), ``by`` (who cleared them), ``last`` (their operation before), and ``examples``.
        self.untrained: dict[tuple[str, ...], dict[str, Any]] = {}
        #: Task -> seconds from the put that made a sample ready to the claim that was given it.
        self.latency_s: dict[str, array[float]] = {}
        #: How often a sample was used before its put began, or after its partition ended: the clocks of hosts differ.
        self.num_misplaced = 0
        self._recording, self._check_rows = recording, check_rows
        self._prompts = Prompts()
        self._found: dict[str, list[dict[str, Any]]] = {"trained twice": [], "damaged": []}
        self._num_found: Counter[str] = Counter()
        self._partitions: dict[str, _Registration] = {}
        self._num_puts = 0
        self._early: dict[tuple[str, str], Row] = {}  # cleared, but their puts are not recorded yet
        self._unused: dict[tuple[str, str], None] = {}  # not trained on at the end of their partition
        self._damaged: dict[Row, list[tuple[str, str, str]]] = {}
        self._again: list[tuple[Row, Batch, Batch]] = []
        self._newest: int | None = None  # the step that was marked last
        self._marker = ""
        self._undone = iter(found.undone)
        self._closing: Step | None = None  # is marked; what its batches consume late is still of it
        self._open = Step()
        self._batches: list[Batch] = []  # without marks: those that are not over
        self._counts: Counter[str] = Counter()
        self._now = 0.0

    def steps(self) -> Iterator[Step]:
        """The steps in the order of their ends. The attributes are complete when all were taken."""
        markers = {client for _, _, client in self.survey.marks}
        for record in self._recording.records():
            client = record.client.client
            known = self.survey.clients.get(client)
            if known is None or (record.segment, record.line) > known.until:
                continue  # it was written since, or says that its client was closed
            if client in markers and client != self._marker:
                if self._marker:
                    yield from self._resume()
                self._marker = client
            if record.op == "step" and client == self._marker:
                yield from self._mark(record)
            elif record.partition in self.survey.weights:
                continue
            elif record.op in _OPERATIONS and (record.status == "ok" or record.op in _TELLING):
                self._now = record.at
                held = self._partitions.setdefault(record.partition, _Registration())
                held.used_at = record.at
                _OPERATIONS[record.op](self, held, record)
            if not markers:
                yield from self._batches_over(_BATCHES_KEPT)
        if markers:
            yield from self._last()
        else:
            yield from self._batches_over(0)
        self._close()

    def wrong(self) -> Iterator[dict[str, Any]]:
        """What is wrong, when all steps were taken: ``kind``, ``text``, and what the text names."""
        if not self.num_misplaced:
            yield from self._prompts.skipped(self.survey.resumes, self.survey.blind_until)
        yield from self._prompts.repeated(self.survey.resumes)
        for kind, found in self._found.items():
            yield from found
            more = self._num_found[kind] - len(found)
            if more:
                yield {"kind": kind, "text": f"{more} more were {kind}.", "count": self._num_found[kind]}
        for fate in self.untrained.values():
            if fate["reason"] == "loss":
                text = f"{several(fate['count'], 'sample')} lost by the store and never trained on: "
                yield {"kind": "lost", "text": f"{text}{fate['examples'][0]}.", "count": fate["count"]}

    def _note(self, kind: str, **found: Any) -> None:
        self._num_found[kind] += 1
        if len(self._found[kind]) < _MOST_FINDINGS:
            self._found[kind].append({"kind": kind, **found})

    # --- steps --------------------------------------------------------------------------------------------------------

    def _mark(self, record: Record) -> Iterator[Step]:
        if self._closing is not None:
            yield self._ended(self._closing)
        step, self._open = self._open, Step()
        step.number, step.at, step.values = record.step, record.at, record.values
        step.is_undone = next(self._undone, False)
        self._newest = self._open.after = record.step
        self._closing = step

    def _resume(self) -> Iterator[Step]:
        """What was consumed since the last mark is of a step that never ended."""
        self._open.is_undone = True
        yield from self._last()
        self._closing, self._open = None, Step(after=self._newest)

    def _last(self) -> Iterator[Step]:
        if self._closing is not None:
            yield self._ended(self._closing)
        if self._open.rows:
            self._open.at = self.survey.end
            yield self._ended(self._open)

    def _batches_over(self, kept: int) -> Iterator[Step]:
        while len(self._batches) > kept or (self._batches and self._is_over(self._batches[0])):
            batch = self._batches.pop(0)
            rows = [row for row in sorted(batch.rows, key=batch.rows.__getitem__) if not self._is_under_way(batch, row)]
            if rows:
                self._counts[batch.task] += 1
                step = batch.step = Step(batch=self._counts[batch.task], task=batch.task, at=self._now)
                step.rows = dict.fromkeys(rows, batch.task)
                yield self._ended(step)

    def _is_over(self, batch: Batch) -> bool:
        return not batch.is_shared and not any(self._is_under_way(batch, row) for row in batch.rows)

    @staticmethod
    def _is_under_way(batch: Batch, row: Row) -> bool:
        given = row.given[batch.task]
        return given.batch is batch and not given.consumed

    def _ended(self, step: Step) -> Step:
        for row in step.rows:
            self._note_damage(row, str(step))
            if step.is_undone:
                if row.prompt is not None:
                    row.prompt.is_undone = True
                continue
            row.step = str(step)
            if row.prompt is not None and row.put is not None:
                row.prompt.train(row.life, row.put.at, row.step, row.trained_at)
        return step

    def _note_damage(self, row: Row, step: str | None) -> None:
        for name, writer, where in self._damaged.pop(row, ()):
            what = f"column '{name}'" if name else "an unknown column"
            used = "no step trained on it" if step is None else f"trained on in {step}"
            text = f"the rows of '{row.sample_id}' are damaged: {what}, put by {writer}, {used} ({where})."
            self._note("damaged", text=text, sample=row.sample_id, column=name, step=step)

    # --- operations ---------------------------------------------------------------------------------------------------

    def _register(self, held: _Registration, record: Record) -> None:
        if held.epoch != record.epoch:
            start = record.at - record.seconds  # what others put since may be of the new registration
            new = _Registration(record.epoch, record.at)
            for name, row in held.rows.items():
                if row.put is not None and row.put.at >= start:
                    new.rows[name] = row
                    continue
                self._clear(row, held, record, whole=True)
                if not row.is_used:
                    new.dropped[name] = row
            held = self._partitions[record.partition] = new
        held.tasks = {*held.tasks, *record.consumer_tasks}

    def _row(self, held: _Registration, record: Record, sample_id: str) -> Row:
        """The row of a sample. That of a put may be one that others have trained on and cleared before its record."""
        key, is_put = (record.partition, sample_id), record.op == "put_samples"
        row = self._early.get(key) if is_put else None
        if row is not None and row.awaits(record):
            if row.early.keys() <= set(record.fields):
                del self._early[key]
            return row
        row = held.rows.get(sample_id)
        if row is None:
            row = None if is_put else held.dropped.pop(sample_id, None)
            if row is None and key in self._unused:
                del self._unused[key]
                self.num_misplaced += not is_put
            row = held.rows[sample_id] = row or Row(sample_id, record.partition)  # its put seemed to be earlier
        return row

    def _put(self, held: _Registration, record: Record) -> None:
        put = Put(self._num_puts, record.at, record.client, record.specs)
        self._num_puts += 1
        columns: list[tuple[str, list[int] | None]] = []
        for name in record.fields:
            digests = record.digests_of(name)
            columns.append((name, None if digests is None else digests.tolist()))
        damaged: dict[str, list[str]] = {}
        if record.block is not None and self._check_rows:
            for name, column in self._recording.damage(record):
                damaged.setdefault(name, []).append(column)
        for place, sample_id in enumerate(record.ids):
            row = self._row(held, record, sample_id)
            if record.tags is not None:
                row.tags.update(record.tags[place])
            row.last = "put_samples"
            for name, of_cells in columns:
                digest = None if of_cells is None else of_cells[place]
                old = row.cells.get(name)
                used = row.early.pop(name, None)
                if used is not None and record.at - record.seconds > used + _LATE_S:
                    self.num_misplaced += 1
                row.cells[name] = Cell(put, digest, put.at if old is None else old.since)
            if row.put is None:
                row.put = put
                row.prompt, row.life = self._prompts.put(sample_id, record.partition, row.tags, put.at)
                if row.prompt is not None and row.step:
                    row.prompt.train(row.life, put.at, row.step, row.trained_at)
            for name in damaged.get(sample_id, ()):
                where = f"line {record.line} of segment {record.segment}"
                if row in self._damaged or len(self._damaged) < _MOST_DAMAGED:
                    self._damaged.setdefault(row, []).append((name, str(record.client), where))
                else:
                    self._num_found["damaged"] += 1

    def _get_samples(self, held: _Registration, record: Record) -> None:
        lost = record.error == "LostSamplesError"
        if record.status != "ok" and not lost:
            return
        is_claimed = record.partition in self.survey.claimed
        if not (lost or is_claimed or record.client.client in self.survey.readers):
            return
        for sample_id in record.ids:
            row = self._row(held, record, sample_id)
            row.use(record.fields if not lost else (), record)
            row.is_read, row.is_lost, row.last = not lost, lost, "get_samples" if not lost else row.last
            if self.survey.marks and not (is_claimed or lost):
                self._open.rows.setdefault(row, "")
                row.trained_at = record.at

    def _claim(self, held: _Registration, record: Record) -> None:
        task = record.task
        held.required[task] = record.required_fields
        filters = held.filters.setdefault(task, {})
        filters.pop(text := repr(record.tag_filter), None)
        filters[text] = (record.tag_filter, record.at, not record.ids)
        if record.status != "ok" or not record.ids:
            return
        key = (task, record.batch_index)
        batch = held.batches.get(key) if record.dp_rank is not None else None
        if batch is None:
            batch = Batch(task, is_shared=record.dp_rank is not None, is_filtered=record.tag_filter is not None)
            if not self.survey.marks and task in self.survey.tasks:
                self._batches.append(batch)
            if record.dp_rank is not None:
                held.batches[key] = batch
                held.batches.pop((task, record.batch_index - _BATCHES_KEPT), None)
        for place, sample_id in enumerate(record.ids):
            row = self._row(held, record, sample_id)
            if record.tags is not None:
                row.tags.update(record.tags[place])
            row.last = f"claim of '{task}'"
            row.use(record.required_fields, record)
            given = row.given.get(task)
            if given is None:
                since = [row.cells[name].since for name in record.required_fields if name in row.cells]
                latency_s = max(0.0, record.at - max(since, default=record.at))
                self.latency_s.setdefault(task, array("d")).append(latency_s)
                given = row.given[task] = Given()
            elif given.batch is batch:
                continue  # another process of a rank that was given it
            given.give(row, batch)  # if it was given before, that lease ended
            row.is_read &= record.tag_filter is None
            batch.rows[row] = (record.dp_rank or 0) * (1 << 32) + place
            if record.lease_s is None:
                self._consume(row, given)

    def _consume(self, row: Row, given: Given) -> None:
        batch = given.batch
        if given.consumed or batch is None:
            return
        given.consumed = True
        if batch.task not in self.survey.tasks:
            return
        row.trained_at = self._now
        if given.before is not None:
            self._again.append((row, given.before, batch))
        if self.survey.marks:
            if batch.step is None or batch.step not in (self._closing, self._open):
                batch.step = self._open
            batch.step.rows.setdefault(row, batch.task)

    def _settle(self, held: _Registration, record: Record) -> None:
        for sample_id in record.ids:
            row = self._row(held, record, sample_id)
            row.last = f"{record.op} of '{record.task}'"
            given = row.given.get(record.task)
            if given is None or given.batch is None or given.consumed:
                continue
            reads = self.survey.clients[record.client.client].counts["get_samples"]  # whether they are recorded
            if record.op == "ack" and given.batch.is_filtered and not row.is_read and reads:
                row.last += _UNREAD  # its consumer dropped it, such as for its age
            elif record.op == "ack":
                self._consume(row, given)
                continue
            given.give(row, None)

    def _set_cursor(self, held: _Registration, record: Record) -> None:
        ids = set(record.ids)
        for row in held.rows.values():
            given = row.given.setdefault(record.task, Given())
            given.give(row, None)
            given.consumed = row.sample_id in ids

    def _clear_samples(self, held: _Registration, record: Record) -> None:
        if record.drops_all:
            del self._partitions[record.partition]
        for sample_id in list(held.rows) if record.drops_all else record.ids:
            cleared = held.rows.pop(sample_id, None)
            if cleared is not None:
                self._clear(cleared, held, record, whole=record.drops_all)

    # --- ends of samples ----------------------------------------------------------------------------------------------

    def _clear(self, row: Row, held: _Registration, record: Record, *, whole: bool) -> None:
        """Notes what became of a sample that is cleared, if it was not trained on."""
        if row.early:
            _keep(self._early, row, row)
        for task, reason in self._not_trained(row, held):
            if whole:
                _keep(self._unused, row, None)
            self._note_untrained(row, task, reason or self._why_cleared(task, record, whole), record.client)
            if row.prompt is not None and row.put is not None:
                later = whole and self.survey.clients[record.client.client].first > row.put.at
                row.prompt.is_dropped_later |= later
                row.prompt.is_decided |= not later or reason == "filter"

    def _close(self) -> None:
        """Notes the samples that are held at the end."""
        for held in self._partitions.values():
            for row in held.rows.values():
                for task, reason in self._not_trained(row, held):
                    self._note_untrained(row, task, reason or ("ready" if task else "never read"), None)
                    if row.prompt is not None:  # if it was never used after a resume, it is gone with its store
                        row.prompt.is_decided |= reason == "filter"
                        row.prompt.is_dropped_later = True
                        row.prompt.latest = max(row.prompt.latest, held.used_at)
        for row in list(self._damaged):
            self._note_damage(row, None)
        for row, *batches in self._again:
            steps = [str(each.step) for each in batches if each.step is not None and not each.step.is_undone]
            if len(steps) == 2:
                text = f"'{row.sample_id}' was trained on twice: in {steps[0]} and in {steps[1]}."
                self._note("trained twice", text=text, sample=row.sample_id, steps=steps)

    def _why_cleared(self, task: str, record: Record, whole: bool) -> str:
        if whole:
            return "end of the partition"
        if not task:
            return "cleared without a read"
        return "cleared by a consumer" if record.client.client in self.survey.consumers else "evicted"

    def _not_trained(self, row: Row, held: _Registration) -> Iterator[tuple[str, str]]:
        """Each task that was not trained on a sample, and why, as far as that is known before it is cleared."""
        if row.partition not in self.survey.claimed:
            if not row.is_read and self.survey.marks:
                yield "", "loss" if row.is_lost else ""
            return
        for task in sorted(self.survey.tasks):
            given = row.given.get(task)
            if (given is not None and given.consumed) or not (task in held.tasks or task in held.required):
                continue
            required = held.required.get(task, ())
            missing = [name for name in required if name not in row.cells]
            if row.is_lost:
                yield task, "loss"
            elif row.last.endswith(_UNREAD):
                yield task, "dropped by its consumer"
            elif given is not None and given.batch is not None:
                yield task, "leased and not acked"
            elif missing:
                yield task, f"not ready: lacks {', '.join(missing)}"
            else:
                yield task, "filter" if self._is_filtered(row, task, held) else ""

    @staticmethod
    def _is_filtered(row: Row, task: str, held: _Registration) -> bool:
        """Whether claims came while a sample was ready, and it passed the filter of none."""
        ready = max((row.cells[name].since for name in held.required.get(task, ())), default=0.0)
        is_asked = False
        for place, (each, at, is_empty) in enumerate(reversed(held.filters.get(task, {}).values())):
            if at < ready and not (place == 0 and is_empty):  # claims that got nothing are recorded once
                break
            if matches(row.tags, each):
                return False
            is_asked = True
        return is_asked

    def _note_untrained(self, row: Row, task: str, reason: str, by: Writer | None) -> None:
        key = (reason, task, "" if by is None else by.client, row.last)
        about = {"reason": reason, "task": task, "by": None if by is None else str(by), "last": row.last}
        fate = self.untrained.setdefault(key, {"count": 0, **about, "examples": []})
        fate["count"] += 1
        if len(fate["examples"]) < _MOST_EXAMPLES:
            when = "" if self._newest is None or by is None else f" after step {self._newest}"
            fate["examples"].append(f"'{row.sample_id}' of '{row.partition}'{when}")


#: What an operation changes.
_OPERATIONS: Final[Mapping[str, Callable[[History, _Registration, Record], None]]] = {
    "register_partition": History._register,
    "put_samples": History._put,
    "get_samples": History._get_samples,
    "claim": History._claim,
    "ack": History._settle,
    "nack": History._settle,
    "set_cursor": History._set_cursor,
    "clear_samples": History._clear_samples,
}


def _keep(kept: dict[tuple[str, str], Any], row: Row, value: Any) -> None:
    """Keeps what is known of the newest samples that are gone."""
    kept.pop(key := (row.partition, row.sample_id), None)
    kept[key] = value
    if len(kept) > _MOST_EARLY:
        del kept[next(iter(kept))]
