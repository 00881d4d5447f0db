"""One registered partition of a `Ledger`: its rows, and which of them each task was given. Pure, like the ledger.
One long file, since every rule reads and changes the same rows, holds and views.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from msgspec import structs

from dataplane_core.entry_points import nearest
from dataplane_core.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    LeaseHolder,
    SchemaMismatchError,
    Shortfall,
    UnknownTaskError,
    UnsupportedOperationError,
    preview,
)
from dataplane_core.ledger import commands
from dataplane_core.ledger.rollouts import RolloutGroup
from dataplane_core.ledger.rows import (
    NO_CELLS,
    NO_HOLDS,
    NO_TAGS,
    Batch,
    Cells,
    Claimable,
    Group,
    Hold,
    Join,
    Leases,
    RankBatches,
    ReadySet,
    ReadyView,
    Ref,
    Row,
    find_shortfall,
    fitting,
    group_of,
    hold_rows,
    join,
    packed_positions,
    ranks_of,
    shares,
)
from dataplane_core.spec import Claim, FieldSpec, PartitionDescription, PartitionInfo, Question, TaskDescription
from dataplane_core.spec.replies import Answer, Replaced
from dataplane_core.spec.requests import MOST_WORDS
from dataplane_core.spec.tags import TagValue


@dataclass(slots=True)
class Task:
    """The rows that a task was given, and those that are ready for it: a view for each set of required fields."""

    views: dict[frozenset[str], ReadyView] = field(default_factory=dict)
    num_held: int = 0  # rows that it holds, leased or for good
    num_done: int = 0  # rows that it holds for good


@dataclass(slots=True)
class _Change:
    """What a put changes in all rows that have the same cells before."""

    cells: Cells  # after it
    joint: Join | None  # how these follow from those before. None: the put has no writes
    gained: list[str]  # the fields that they did not have before
    satisfied: list[tuple[str, ReadyView]] = field(default_factory=list)  # tasks, views whose fields the rows have
    ready: list[tuple[str, ReadyView]] = field(default_factory=list)  # those of them that they have since this put
    num_rows: int = 0


class _Outcome(NamedTuple):
    ready: ReadySet  # the claimables that the task may be given
    num_claimables: int  # how many of them the claim can hand out
    hands_out: bool  # whether it hands them out
    exhausted: bool  # whether the partition can give the task no more
    ends_ranks: bool  # whether this says to all ranks that there is no such batch
    is_full: bool  # whether one more would exceed the limits of the claim


@dataclass(slots=True)
class Partition:
    """One registration: its rows, their schema and tags, and what each task was given."""

    partition_id: str
    info: PartitionInfo
    rows: dict[str, Row] = field(default_factory=dict)  # by sample id, in order of first write
    specs: dict[str, FieldSpec] = field(default_factory=dict)  # what each field keeps, fixed by its first write
    seen: set[str] = field(default_factory=set)  # ids ever written, cleared ones too; none while num_samples is None
    broken_groups: set[str] = field(default_factory=set)  # those that lost a member, for good
    num_cleared: int = 0
    batches: dict[tuple[str, int], RankBatches] = field(default_factory=dict)  # by task and rank
    group_size: int = field(init=False)  # what a claimable counts in a claim's size: its rows; a group of rollouts, 1
    declared: dict[str, FieldSpec] = field(init=False)
    tasks: dict[str, Task] = field(init=False)
    groups: dict[str, Group] = field(default_factory=dict, init=False)  # those that have members
    leases: Leases = field(default_factory=Leases, init=False)
    held_bytes: int = field(default=0, init=False)
    content: Counter[Ref] = field(default_factory=Counter, init=False)  # kept by content -> how many samples have it
    num_rows: Counter[str] = field(default_factory=Counter, init=False)  # field -> how many rows have it

    def __post_init__(self) -> None:
        """Counts what follows from the rows and their holds, of a partition that is restored."""
        self.group_size = 1 if self.info.rollouts else self.info.grpo_group_size or 1
        self.declared = {name: FieldSpec.from_text(text) for name, text in self.info.declared.items()}
        self.tasks = {name: Task() for name in self.info.consumer_tasks}
        for names, count in Counter([tuple(row.cells.fields) for row in self.rows.values()]).items():
            self.num_rows.update(dict.fromkeys(names, count))
        for row in self.rows.values():
            if row.group is not None:
                self._join_group(row, row.group)
            for task_name, hold in row.holds.items():
                self._count_hold(row, task_name, hold)

    def extend(self, command: commands.RegisterRequest) -> None:
        """Adds what a further registration names. Refuses what does not fit."""
        info = self.info
        added = {name: FieldSpec.from_text(text) for name, text in command.declared.items()}
        for name, spec in added.items():
            kept = self.specs.get(name, self.declared.get(name, spec))
            if kept != spec and kept.after(spec.for_first(kept)) is None:
                raise InvalidRequestError(
                    f"register_partition('{self.partition_id}') refused: field '{name}' is declared as "
                    f"{spec.describe()}. The partition that is kept has {kept.describe()}. Nothing was changed."
                )
        for option in ("grpo_group_size", "rollouts"):
            wanted, has = getattr(command, option), getattr(info, option)
            if wanted != has:
                raise InvalidRequestError(
                    f"register_partition('{self.partition_id}') refused: {option} is {wanted}. The partition that is "
                    f"kept has {has}. Nothing was changed."
                )
        fresh = {name: text for name, text in command.declared.items() if name not in self.declared}
        extended = info.extended(command.fields, command.consumer_tasks, command.enums, fresh)
        if max(map(len, extended.enums.values()), default=0) > MOST_WORDS:
            raise InvalidRequestError(
                f"register_partition('{self.partition_id}') refused: an enum would have more than {MOST_WORDS} "
                "strings. Nothing was changed."
            )
        for task_name in command.consumer_tasks:
            self.add_task(task_name)
        self.declared |= {name: added[name] for name in fresh}
        for name in fresh:
            if (before := self.specs.get(name)) is not None:  # if lists left it open, it is so no longer
                self.specs[name] = before.after(added[name].for_first(before)) or before
        self.info = extended
        if info.num_samples is None and command.num_samples is not None:
            self.seen.update(self.rows)
            self.info = structs.replace(extended, num_samples=max(command.num_samples, len(self.rows)))

    def add_task(self, task_name: str) -> None:
        if task_name not in self.tasks:
            self.tasks[task_name] = Task()
            self.info = self.info.extended((), (task_name,), {})

    def replaced(self) -> Replaced:
        """What a new registration of the partition drops."""
        return Replaced(
            epoch=self.info.epoch,
            registered_by=self.info.registered_by,
            registered_at=self.info.registered_at,
            num_samples=len(self.rows),
            num_left={name: len(self.rows) - task.num_done for name, task in self.tasks.items()},
        )

    # --- fields -------------------------------------------------------------------------------------------------------

    def spec_before(self, name: str, written: FieldSpec) -> FieldSpec | None:
        """What a field keeps before such cells are written. None: nothing is known of it."""
        declared = self.declared.get(name)
        return self.specs.get(name) or (None if declared is None else declared.for_first(written))

    def _check_fields(self, put: commands.BeginPut) -> None:
        """Refuses cells that do not fit their fields, fields that are not registered if the put is strict, and strings
        that are not in the enum of theirs."""
        where = f"put_samples('{self.partition_id}', {len(put.sample_ids)} samples)"
        wrong = []
        for name, spec in put.specs.items():
            kept = self.spec_before(name, spec)
            if kept is not None and kept.after(spec) is None:
                wrong.append((name, spec.describe(), kept.describe(), kept.to_text()))
        if wrong:
            raise SchemaMismatchError.for_fields(where, wrong)
        if put.strict:
            names = [name for name in put.specs if not name.startswith("~")]  # those are middleware's
            if advice := self._advice(names, self.info.fields, "not registered"):
                raise _not_strict(where, advice, " Nothing was written.")
        for name, strings in put.strings.items():
            words = self.info.enums.get(name)
            unknown = [] if words is None else [text for text in strings or () if text not in words]
            if unknown or (words is not None and strings is None):
                held = preview(unknown) if unknown else "more or longer strings than an enum can have"
                raise InvalidRequestError(
                    f"{where} refused: field '{name}' holds {held}. Expected strings of its enum: "
                    f"{preview(words or (), limit=8)}. Nothing was written."
                )

    def _advice(self, names: Iterable[str], good: Iterable[str], what: str) -> str:
        """What to say of fields that are not among the good ones. Empty: nothing. No registered ones: all are good."""
        wrong = [name for name in names if name not in good] if self.info.fields else []
        if not wrong:
            return ""
        near = dict.fromkeys(f"'{other}'" for name in wrong if (other := nearest(name, good)))
        meant = f"Did you mean {', '.join(near)}?" if near else f"Registered: {preview(self.info.fields, limit=8)}."
        return f"field {preview(wrong)} is {what}. {meant}"

    def _advice_of_strays(self, names: Iterable[str]) -> str:
        """What to say of fields that nobody wrote, while fields with similar names were that nobody registered."""
        strays = [name for name in self.specs if name not in self.info.fields] if self.info.fields else []
        for name in names if strays else ():
            if name not in self.specs and (stray := nearest(name, strays)):
                return f"field '{name}' is not written, and '{stray}' is, which is not registered."
        return ""

    # --- rows ---------------------------------------------------------------------------------------------------------

    def check_put(self, put: commands.BeginPut, overwrite: bool) -> None:
        """Refuses a put that does not fit the registration, or that replaces cells, unless ``overwrite``."""
        self._check_fields(put)
        sample_ids, num_samples = put.sample_ids, self.info.num_samples
        if num_samples is not None and len(self.seen) + len(sample_ids) > num_samples:
            count = len(self.seen) + len(set(sample_ids).difference(self.seen))
            if count > num_samples:
                raise InvalidRequestError(
                    f"put_samples('{self.partition_id}') refused: {count} distinct samples would have been written. "
                    f"Expected at most {num_samples}, the partition's num_samples; cleared ones count. Nothing was "
                    "written.",
                    hint="Register the partition with as many as will come; or with None, and call finish_partition at "
                    "the end.",
                )
        if not overwrite:
            rows = (self.rows[name] for name in sample_ids if name in self.rows)
            for row, field_name in ((row, name) for row in rows for name in put.specs if name in row.cells.fields):
                raise UnsupportedOperationError(
                    f"put_samples('{self.partition_id}') refused: field '{field_name}' of sample '{row.sample_id}' is "
                    "already written, and this backend does not declare 'overwrite'. Nothing was written."
                )
        if self.info.is_grouped:
            self._check_groups(put)

    def _check_groups(self, put: commands.BeginPut) -> None:
        tags = put.tags or [NO_TAGS] * len(put.sample_ids)
        by_group: dict[str, dict[str, Mapping[str, TagValue]]] = {}
        for sample_id, row_tags in zip(put.sample_ids, tags, strict=True):
            by_group.setdefault(group_of(sample_id), {})[sample_id] = row_tags
        for name, rows in by_group.items():
            group = self.groups.get(name) or self._new_group(name, 0)
            group.check_put(name, rows, f"put_samples('{self.partition_id}')")

    def write_rows(
        self,
        writes: Mapping[int, commands.Write],
        put: commands.BeginPut,
        seq: int,
        now: float,
        by_content: Mapping[int, Sequence[Ref]],
    ) -> list[Ref]:
        """Makes cells and tags of a put visible. Rows that do not exist are numbered from ``seq`` on. Returns refs that
        no cell uses any longer. ``by_content``: of such writes, the row of each sample, which may be of another put."""
        freed: list[Ref] = []
        # worked out once for all rows that are alike: the same cells before (None: new ones), and the same writes now
        changes: dict[Any, _Change] = {}
        columns = [
            [position for _, position in by_content[write_id]] if write_id in by_content else write.positions
            for write_id, write in writes.items()
        ]
        has_own_rows = columns.count(None) == len(columns)
        is_grouped = self.info.is_grouped
        ids = tuple(writes)
        for index, sample_id in enumerate(put.sample_ids):
            row = self.rows.get(sample_id)
            before = None if row is None else row.cells
            if by_content:
                ids = tuple([by_content[one][index][0] if one in by_content else one for one in writes])
            key = (before, ids) if by_content else before
            change = changes.get(key)
            if change is None:
                change = changes[key] = self._change(ids, writes.values(), before)
            change.num_rows += 1
            if row is None:
                row = self._new_row(sample_id, seq + index, now)
            if change.joint is not None:
                if change.joint.dropped:
                    refs = row.refs
                    freed += [refs[number] for number in change.joint.dropped]
                num_before = len(row.cells.write_ids)
                if has_own_rows and (not num_before or row.positions == index):
                    row.positions = index
                else:
                    places = [row.positions] * num_before if isinstance(row.positions, int) else [*row.positions]
                    places += [index if positions is None else positions[index] for positions in columns]
                    row.positions = packed_positions([places[number] for number in change.joint.sources])
                row.cells = change.cells
            tags = None if put.tags is None else put.tags[index]
            if tags:
                row.tags = {**row.tags, **tags} if row.tags else tags
            if not is_grouped:
                for task_name, view in change.ready if tags is None else change.satisfied:
                    if row.is_ready(view.required, task_name):
                        view.add(row)
        for change in changes.values():
            self.num_rows.update(dict.fromkeys(change.gained, change.num_rows))
        if is_grouped:
            self._offer_groups([self.rows[sample_id] for sample_id in put.sample_ids])
        return freed

    def _offer_groups(self, rows: Sequence[Row]) -> None:
        """Adds groups that are ready, now that these rows have changed."""
        groups: dict[str, Group] = {}
        for row in rows:
            assert row.group is not None
            groups[row.group] = self.groups[row.group]
            groups[row.group].add(row)  # its tags may seal
        for group in groups.values():
            self._offer(group)

    def _offer(self, claimable: Claimable, task_names: Iterable[str] = ()) -> None:
        """Adds a claimable to the views of these tasks, or of all, for which it is ready."""
        for task_name in task_names or self.tasks:
            for view in self.tasks[task_name].views.values():
                if claimable.is_ready(view.required, task_name):
                    view.add(claimable)

    def _change(self, ids: Sequence[int], writes: Iterable[commands.Write], before: Cells | None) -> _Change:
        """What a put changes in rows with these cells; None: in new rows. ``ids``: the writes that these rows have."""
        had = NO_CELLS if before is None else before
        cells, joint = had, None
        if ids:
            fields = tuple([tuple(write.fields) for write in writes])
            joint = join(tuple(had.fields.items()), len(had.write_ids), fields)
            cells = Cells(joint.fields, tuple(map((*had.write_ids, *ids).__getitem__, joint.sources)))
        change = _Change(cells, joint, [name for name in cells.fields if name not in had.fields])
        for task_name, task in self.tasks.items():
            for view in task.views.values():
                if view.required <= cells.fields.keys():
                    change.satisfied.append((task_name, view))
                    if before is None or not view.required <= had.fields.keys():
                        change.ready.append((task_name, view))
        return change

    def _new_row(self, sample_id: str, seq: int, now: float) -> Row:
        group = group_of(sample_id) if self.info.is_grouped else None
        row = self.rows[sample_id] = Row(sample_id, seq, group, now, NO_CELLS, 0, NO_TAGS, NO_HOLDS)
        if self.info.num_samples is not None:
            self.seen.add(sample_id)
        if group is not None:
            self._join_group(row, group)
        return row

    def _join_group(self, row: Row, name: str) -> None:
        if name not in self.groups:
            self.groups[name] = self._new_group(name, row.seq)
        self.groups[name].add(row)

    def _new_group(self, name: str, seq: int) -> Group:
        kind = RolloutGroup if self.info.rollouts else Group
        return kind(seq, self.info.grpo_group_size, name in self.broken_groups)

    def remove_row(self, sample_id: str) -> list[Ref] | None:
        """Returns its refs, or None if it does not exist."""
        row = self.rows.pop(sample_id, None)
        if row is None:
            return None
        self.num_cleared += 1
        for name in row.cells.fields:
            self.num_rows[name] -= 1
        claimable = self._claimable_of(row)
        for task in self.tasks.values():
            for view in task.views.values():
                view.discard(claimable.seq)
        for task_name, hold in row.holds.items():
            self._forget_hold(row, task_name, hold)
        row.holds = NO_HOLDS  # as `leases` see it
        if row.group is not None:
            group = self.groups[row.group]
            group.remove(row)
            if not group.members:
                del self.groups[row.group]
            if group.is_broken:
                # a member that is written again does not make it whole: the others may have been trained on already
                self.broken_groups.add(row.group)
            elif group.members:
                self._offer(group)
        return row.refs

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, command: commands.ClaimRequest, now: float) -> Claim:
        """Hands out ready samples to a task.

        Amortised cost: O(k log n) for k samples handed out of n. With a tag filter, it also looks at each claimable
        that changed since the filter was last used. Samples that are ready and not handed out cost nothing.
        """
        if self.leases.heap:
            self.expire(now)
        if command.dp_rank is not None and (batch := self._batch(command)) is not None:
            return batch
        outcome = self._outcome(command)
        advice = ""
        if not outcome.hands_out and not self.specs.keys() >= set(command.required_fields):
            good = dict.fromkeys((*self.info.fields, *self.specs))
            advice = self._advice(command.required_fields, good, "neither registered nor written")
            if advice and command.strict:
                raise _not_strict(f"claim_meta('{self.partition_id}', '{command.task_name}')", advice, "")
            advice = advice or self._advice_of_strays(command.required_fields)
        claimables: list[Claimable] = []
        if outcome.hands_out:
            claimables = outcome.ready.choose(command.sampler, outcome.num_claimables)
        rows = self._hold(command, claimables, now)
        for claimable in claimables:
            outcome.ready.discard(claimable.seq)
        if command.dp_rank is not None and (claimables or outcome.ends_ranks):
            self._keep_batches(command, shares(command, claimables), outcome.exhausted)
            batch = self._batch(command)
            assert batch is not None
            return batch
        return Claim(
            sample_ids=[row.sample_id for row in rows],
            tags=[row.tags for row in rows],
            lease_tokens=None if command.lease_s is None else [command.token] * len(rows),
            exhausted=outcome.exhausted,
            num_ready=min(outcome.num_claimables * self.group_size, command.batch_size),
            shortfall=self.shortfall(command, now) if command.explain and not rows else None,
            advice=advice,
            epoch=None if command.dp_rank is None else self.info.epoch,
            counts_groups=self.info.rollouts,
        )

    def claim_again(
        self, command: commands.ClaimRequest, sample_ids: Sequence[str], exhausted: bool, num_ranks: int | None = None
    ) -> Claim:
        """What was given before, with the tags of now. Samples that were cleared since have none."""
        rows = [self.rows.get(sample_id) for sample_id in sample_ids]
        return Claim(
            sample_ids=list(sample_ids),
            tags=[NO_TAGS if row is None else row.tags for row in rows],
            lease_tokens=None if command.lease_s is None else [command.token] * len(rows),
            exhausted=exhausted,
            num_ready=len(set(map(group_of, sample_ids))) if self.info.rollouts else len(sample_ids),
            epoch=None if command.dp_rank is None else self.info.epoch,
            num_ranks=num_ranks,
            counts_groups=self.info.rollouts,
        )

    def may_claim(self, command: commands.ClaimRequest, now: float) -> bool:
        """Whether `claim` would change anything, that is, hand out samples or end leases. Raises as `claim`."""
        if self._batch(command) is not None:
            return False
        outcome = self._outcome(command)
        return outcome.hands_out or outcome.ends_ranks or self.leases.next_due(now) is not None

    def num_ready(self, command: commands.ClaimRequest, now: float) -> float:
        """How many samples are ready for a claim. Infinite if the claim would not wait, however many are ready."""
        self.expire(now)
        if self._batch(command) is not None:
            return math.inf
        outcome = self._outcome(command)
        return math.inf if outcome.exhausted or outcome.is_full else len(outcome.ready.claimables) * self.group_size

    def _outcome(self, command: commands.ClaimRequest) -> _Outcome:
        task = self._task(command.task_name)
        wanted, rest = divmod(command.batch_size, self.group_size)
        least = ranks_of(command)
        # "balanced" claims for all ranks at once, so that each gets about as many tokens as the others
        wanted *= least
        if rest:
            raise InvalidRequestError(
                f"claim_meta('{self.partition_id}', '{command.task_name}') refused: batch_size {command.batch_size} "
                f"is not a multiple of the group size {self.group_size}."
            )
        view = self._view(command.task_name, task, command.required_fields)
        ready = view.of(command.tag_filter) if command.tag_filter else view.ready
        num_claimables, is_full = min(len(ready.claimables), wanted), False
        if command.max_rows is not None or command.max_tokens is not None:
            num_claimables, is_full = fitting(command, ready.first(command.sampler, num_claimables))
        exhausted = num_claimables < wanted and self._num_left(command, task) == num_claimables
        enough = wanted if command.all_or_nothing else least
        hands_out = num_claimables > 0 and (num_claimables >= enough or exhausted or is_full)
        ends_ranks = exhausted and not num_claimables and command.dp_rank is not None and command.dp_size is not None
        return _Outcome(ready, num_claimables, hands_out, exhausted, ends_ranks, is_full)

    def _num_left(self, command: commands.ClaimRequest, task: Task) -> int | None:
        """How many claimables the task can still be given, now or later. None if more samples may be written."""
        if self.info.num_samples is None or len(self.seen) < self.info.num_samples:
            return None
        if not command.tag_filter:
            return self._num_free(command.task_name, task)
        return len(self._view(command.task_name, task, ()).of(command.tag_filter).claimables)

    def _num_free(self, task_name: str, task: Task) -> int:
        """How many claimables are whole, and not held by the task."""
        if not self.info.is_grouped:
            return len(self.rows) - task.num_held
        return len(self._view(task_name, task, ()).ready.claimables)

    def shortfall(self, question: commands.ClaimRequest | Question, now: float) -> Shortfall:
        """Why a claim gets no more samples. Looks at every row."""
        return find_shortfall(self._claimables(), question, now)

    def _hold(self, command: commands.ClaimRequest, claimables: Sequence[Claimable], now: float) -> list[Row]:
        """Gives claimables to a task. Returns their rows."""
        task_name, lease_s = command.task_name, command.lease_s
        task, expires_at = self.tasks[task_name], now + (lease_s or 0.0)
        hold = Hold("", command.holder, 0.0, True)
        if lease_s is not None:
            hold = Hold(command.token, command.holder, expires_at, False, now)
        rows = [row for claimable in claimables for row in claimable.rows]
        hold_rows(rows, task_name, hold)
        for claimable in claimables:
            # from all views of the task: another claim, for other fields, must not hand it out again
            for view in task.views.values():
                view.discard(claimable.seq)
            if isinstance(claimable, Group):
                claimable.num_held[task_name] = len(claimable.rows)
        if lease_s is not None:
            for row in rows:
                self.leases.add(expires_at, row, task_name)
        task.num_held += len(rows)
        task.num_done += len(rows) if lease_s is None else 0
        return rows

    # --- the batches of ranks -----------------------------------------------------------------------------------------

    def _batch(self, command: commands.ClaimRequest) -> Claim | None:
        """The batch that was given to a rank, if it was. Refuses one of which samples were cleared."""
        if command.dp_rank is None:
            return None
        index = self._batch_index(command)
        batches = self.batches.get((command.task_name, command.dp_rank)) or RankBatches()
        if index in batches.ended:
            return self.claim_again(command, [], True, num_ranks=0)
        batch = batches.kept.get(index)
        if batch is None and index not in batches.gone:
            return None
        rows = [] if batch is None else list(batch.present(self.rows))
        if batch is None or len(rows) < len(batch.sample_ids):
            raise InvalidRequestError(
                f"claim_meta('{self.partition_id}', '{command.task_name}') refused: batch {index} of dp_rank "
                f"{command.dp_rank} was given before, and samples of it were cleared.",
                hint="Clear samples only after all ranks of the replica have claimed and read them.",
            )
        claim = self.claim_again(command, batch.sample_ids, batch.exhausted or not rows, batch.num_ranks)
        return structs.replace(claim, lease_tokens=None if batch.token is None else [batch.token] * len(rows))

    def _batch_index(self, command: commands.ClaimRequest) -> int:
        return command.batch_index if command.batch_epoch in (None, self.info.epoch) else 0

    def _keep_batches(
        self, command: commands.ClaimRequest, parts: Sequence[Sequence[Claimable]], exhausted: bool
    ) -> None:
        """Keeps what the ranks were given, or that there is no such batch."""
        assert command.dp_rank is not None
        token = None if command.lease_s is None else command.token
        num_ranks = None if command.dp_size is None else sum(map(bool, parts))
        # also for the ranks that have not asked yet: each gets its share of this claim, however late it asks
        ranks = (command.dp_rank,) if command.dp_size is None else range(command.dp_size)
        for rank, part in zip(ranks, parts, strict=True):
            batches = self.batches.setdefault((command.task_name, rank), RankBatches())
            if num_ranks == 0:
                batches.ended.add(self._batch_index(command))
                continue
            rows = [row for claimable in part for row in claimable.rows]
            last_seq = max((row.seq for row in rows), default=0)
            batch = Batch([row.sample_id for row in rows], token, exhausted, last_seq, num_ranks)
            batches.give(self._batch_index(command), batch, self.rows)

    # --- cursors ------------------------------------------------------------------------------------------------------

    def set_cursor(self, command: commands.SetCursorRequest) -> int:
        """Gives rows to a task for good, and takes back all others. Returns how many of the rows are there."""
        task_name = command.task_name
        if command.create:
            self.add_task(task_name)
        task = self._task(task_name)
        self.batches = {key: batches for key, batches in self.batches.items() if key[0] != task_name}
        for row in self.rows.values():
            if task_name in row.holds:
                self._give_back(row, task_name)
        rows = [self.rows[sample_id] for sample_id in dict.fromkeys(command.sample_ids) if sample_id in self.rows]
        hold_rows(rows, task_name, Hold("", "", 0.0, True))
        for row in rows:
            for view in task.views.values():
                view.discard(self._claimable_of(row).seq)
            self._count_hold(row, task_name, row.holds[task_name])
        self.tidy()
        return len(rows)

    def consumed_ids(self) -> dict[str, list[str]]:
        """Task -> the rows that it was given for good."""
        return {
            task_name: [row.sample_id for row in self.rows.values() if (hold := row.holds.get(task_name)) and hold.done]
            for task_name in self.tasks
        }

    def consumed(self, task_names: Sequence[str]) -> bool:
        """Whether every task was given every row, and has acked the leased ones. False before all are written; if it is
        not known how many that are, while there are none. Once all are written, groups that are not whole do not count:
        they are never given."""
        num_samples = self.info.num_samples
        if not task_names or (not self.rows if num_samples is None else len(self.seen) < num_samples):
            return False
        return all(self._has_consumed(name, self.tasks.get(name)) for name in task_names)

    def _has_consumed(self, task_name: str, task: Task | None) -> bool:
        if task is None or task.num_done < task.num_held:
            return False
        is_open = self.info.num_samples is None
        return not (len(self.rows) - task.num_held if is_open else self._num_free(task_name, task))

    def describe(self, now: float, questions: Sequence[Question] = ()) -> PartitionDescription:
        self.expire(now)
        tasks = {
            task_name: TaskDescription(
                num_ready=self._num_rows_of(self._view(task_name, task, self.info.fields).ready),
                num_leased=task.num_held - task.num_done,
                num_consumed=task.num_done,
                oldest_lease=self._oldest_lease(task_name, now) if task.num_held > task.num_done else None,
                is_consumed=self.consumed([task_name]),
            )
            for task_name, task in self.tasks.items()
        }
        oldest = next(iter(self.rows.values()), None)
        return PartitionDescription(
            info=self.info,
            specs=dict(self.specs),
            num_samples=len(self.rows),
            num_cleared=self.num_cleared,
            held_bytes=self.held_bytes,
            oldest_s=None if oldest is None else max(0.0, now - oldest.written_at),
            tasks=tasks,
            num_rows={name: self.num_rows[name] for name in self.specs},
            answers=[self._answer(question, now) for question in questions],
        )

    def _num_rows_of(self, ready: ReadySet) -> int:
        if self.info.rollouts:
            return sum([len(claimable.rows) for claimable in ready.claimables.values()])
        return len(ready.claimables) * self.group_size

    def _answer(self, question: Question, now: float) -> Answer | None:
        """What a claim would find. None: there is no such task."""
        task = self.tasks.get(question.task_name)
        if task is None:
            return None
        view = self._view(question.task_name, task, question.required_fields)
        ready = view.of(question.tag_filter) if question.tag_filter else view.ready
        shortfall = self.shortfall(question, now) if question.explain else None
        return Answer(num_ready=len(ready.claimables) * self.group_size, shortfall=shortfall)

    def _oldest_lease(self, task_name: str, now: float) -> LeaseHolder | None:
        """The sample that the task has held longest under its present lease."""
        leases = [
            (lease.held_since, seq, row.sample_id, lease)
            for _, seq, name, row in self.leases.heap
            if name == task_name and (lease := row.lease(name)) is not None
        ]
        if not leases:
            return None
        since, _, sample_id, lease = min(leases, key=lambda entry: entry[:2])
        return LeaseHolder(
            sample_id=sample_id,
            holder=lease.holder,
            left_s=max(0.0, lease.expires_at - now),
            held_s=max(0.0, now - since),
        )

    # --- leases -------------------------------------------------------------------------------------------------------

    def settle(self, command: commands.SettleRequest, now: float) -> None:
        task, rows = self._leased(command, now)
        task_name = command.task_name
        if isinstance(command, commands.NackRequest):
            for row in rows:
                self._give_back(row, task_name)
        elif isinstance(command, commands.RenewRequest):
            expires_at = now + command.lease_s
            for row in rows:
                if expires_at < row.holds[task_name].expires_at:  # a later end needs no entry: see `Leases`
                    self.leases.add(expires_at, row, task_name)
            hold_rows(rows, task_name, lambda hold: replace(hold, expires_at=expires_at))
        else:
            task.num_done += sum(not row.holds[task_name].done for row in rows)
            hold_rows(rows, task_name, lambda hold: replace(hold, done=True))
        self.tidy()

    def tidy(self) -> None:
        """Drops the entries of leases that were settled or cleared, if most entries are such."""
        self.leases.tidy(sum(task.num_held - task.num_done for task in self.tasks.values()))

    def expire(self, now: float) -> None:
        while (due := self.leases.next_due(now)) is not None:
            self._give_back(*due)

    def _leased(self, command: commands.SettleRequest, now: float) -> tuple[Task, list[Row]]:
        action, task_name, sample_ids = command.op, command.task_name, command.sample_ids
        task = self._task(task_name)
        self.expire(now)
        rows: dict[Row, None] = {}  # ids may repeat
        lost: list[str] = []
        for sample_id, token in zip(sample_ids, command.lease_tokens, strict=True):
            row = self.rows.get(sample_id)
            hold = None if row is None else row.holds.get(task_name)
            if row is None or hold is None or hold.token != token or (hold.done and action != "ack"):
                lost.append(sample_id)
            else:
                rows[row] = None
        if lost:
            raise LeaseExpiredError(
                f"{action}('{self.partition_id}', '{task_name}', {len(sample_ids)} samples) refused: the lease on "
                f"{preview(lost)} is no longer held. No row was changed.",
                sample_ids=lost,
                hint="The lease ran out, was settled, or the sample was cleared; another consumer may hold it now.",
            )
        for name, count in Counter([row.group for row in rows if row.group is not None]).items():
            held = self.groups[name].num_held[task_name]
            if count != held:
                raise InvalidRequestError(
                    f"{action} refused: it names {count} of the {held} samples held of group '{name}'. Groups are "
                    "handed out, settled and renewed as a whole. No row was changed."
                )
        return task, list(rows)

    def _give_back(self, row: Row, task_name: str) -> None:
        self._forget_hold(row, task_name, row.holds[task_name])
        row.holds = {name: hold for name, hold in row.holds.items() if name != task_name} or NO_HOLDS
        self._offer(self._claimable_of(row), (task_name,))

    def _forget_hold(self, row: Row, task_name: str, hold: Hold) -> None:
        task = self.tasks[task_name]
        task.num_held -= 1
        task.num_done -= hold.done
        if row.group is not None:
            self.groups[row.group].num_held[task_name] -= 1

    def _count_hold(self, row: Row, task_name: str, hold: Hold) -> None:
        task = self.tasks[task_name]
        task.num_held += 1
        task.num_done += hold.done
        if row.group is not None:
            num_held = self.groups[row.group].num_held
            num_held[task_name] = num_held.get(task_name, 0) + 1
        if not hold.done:
            self.leases.add(hold.expires_at, row, task_name)

    # --- what is ready ------------------------------------------------------------------------------------------------

    def _view(self, task_name: str, task: Task, fields: Iterable[str]) -> ReadyView:
        required = frozenset(fields)
        view = task.views.get(required)
        if view is None:
            view = task.views[required] = ReadyView(required)
            for claimable in self._claimables():
                if claimable.is_ready(required, task_name):
                    view.ready.add(claimable)
        return view

    def _claimables(self) -> Iterable[Claimable]:
        return self.groups.values() if self.info.is_grouped else self.rows.values()

    def _claimable_of(self, row: Row) -> Claimable:
        return row if row.group is None else self.groups[row.group]

    def _task(self, task_name: str) -> Task:
        task = self.tasks.get(task_name)
        if task is None:
            raise UnknownTaskError(
                f"partition '{self.partition_id}' has no consumer task '{task_name}'.",
                hint=f"Registered: {preview(self.tasks, limit=5) or 'none'}.",
            )
        return task


def _not_strict(where: str, advice: str, end: str) -> InvalidRequestError:
    hint = "Register the field, or leave strict_fields out of the config."
    return InvalidRequestError(f"{where} refused: {advice}{end}", hint=hint)
