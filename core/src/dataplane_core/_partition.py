"""One registered partition inside a `Ledger`: its rows, and what each task was given of them. Pure, like the ledger."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dataplane_core.errors import InvalidRequestError, LeaseExpiredError, UnknownTaskError, preview
from dataplane_core.fields import FieldSpec
from dataplane_core.hookspecs import Claim, PartitionInfo
from dataplane_core.tags import TagValue, matches

__all__ = ["Partition", "Ref", "Row", "Task", "group_of"]

#: Names the payload of one row of one put: ``(write_id, pos)``.
Ref: TypeAlias = tuple[int, int]


def group_of(sample_id: str) -> str:
    """The group of an id: what stands before the last ``_g``.

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
    """What a task has of a row: a lease until ``expires_at``, or for good (``done``)."""

    token: str
    expires_at: float
    done: bool


@dataclass(slots=True)
class Row:
    sample_id: str
    seq: int
    group: str | None
    cells: dict[str, Ref] = field(default_factory=dict)
    tags: dict[str, TagValue] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)


@dataclass(slots=True)
class View:
    """Ready units of one task for one set of required fields: a lazily cleaned heap of (seq, id or group)."""

    required: frozenset[str]
    heap: list[tuple[int, str]] = field(default_factory=list)
    queued: set[int] = field(default_factory=set)
    ready_members: dict[str, int] = field(default_factory=dict)

    def push(self, seq: int, name: str) -> None:
        if seq not in self.queued:
            self.queued.add(seq)
            heapq.heappush(self.heap, (seq, name))

    def pop(self) -> tuple[int, str]:
        entry = heapq.heappop(self.heap)
        self.queued.discard(entry[0])
        return entry

    def keep(self, entries: list[tuple[int, str]]) -> None:
        self.heap = entries
        heapq.heapify(entries)
        self.queued = {seq for seq, _ in entries}


@dataclass(slots=True)
class Task:
    views: dict[frozenset[str], View] = field(default_factory=dict)
    num_held: int = 0
    num_done: int = 0


@dataclass(slots=True)
class Group:
    seq: int
    members: dict[str, Row] = field(default_factory=dict)


@dataclass(slots=True)
class Partition:
    """One registration: its rows, their schema and tags, and what each task was given.

    Attributes:
        partition_id: Its name.
        info: The registration.
        tasks: Task name -> what it was given.
        rows: Sample id -> row.
        specs: Field -> what it keeps, fixed by its first write.
        seen: Ids ever written, cleared ones included, up to ``num_samples`` of them; none where that is None.
        groups: Group -> its members, while it has any.
        poisoned: Names of the groups that lost a member, for good: the one thing that grows with what was cleared.
        expiries: A heap of (time, row's number, id, task): when to look at a lease.
        version: Grows with every change of ``rows``.
    """

    partition_id: str
    info: PartitionInfo
    tasks: dict[str, Task]
    rows: dict[str, Row] = field(default_factory=dict)
    specs: dict[str, FieldSpec] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    groups: dict[str, Group] = field(default_factory=dict)
    poisoned: set[str] = field(default_factory=set)
    expiries: list[tuple[float, int, str, str]] = field(default_factory=list)
    version: int = 0
    _next_token: int = 1

    # --- rows ---------------------------------------------------------------------------------------------------------

    def write_row(
        self, sample_id: str, seq: int, names: Sequence[str], ref: Ref, tags: Mapping[str, TagValue] | None
    ) -> list[Ref]:
        """Makes cells of one row produced, all at once, with its tags.

        Args:
            sample_id: The row; made if it is not there.
            seq: Its number, if it is made.
            names: The fields written, perhaps none.
            ref: Their payload.
            tags: Merged key by key into the row's, or None.

        Returns:
            Refs that no cell names any longer.
        """
        row = self.rows.get(sample_id)
        is_new = row is None
        if row is None:
            row = self._new_row(sample_id, seq)
        before = row.cells
        replaced: list[Ref] = []
        if names:
            row.cells = {**before, **dict.fromkeys(names, ref)}
            if not before.keys().isdisjoint(names):
                live = set(row.cells.values())
                replaced = [old for old in dict.fromkeys(before.values()) if old not in live]
        if tags is not None:
            row.tags.update(tags)
        for task in self.tasks.values():
            for view in task.views.values():
                if view.required <= row.cells.keys() and (is_new or not view.required <= before.keys()):
                    self._offer(view, row)
        return replaced

    def remove_row(self, sample_id: str) -> list[Ref] | None:
        """Drops a row with its tags and cursors.

        Returns:
            Its refs, or None where it was not there.
        """
        row = self.rows.pop(sample_id, None)
        if row is None:
            return None
        for task_name, hold in row.holds.items():
            task = self.tasks[task_name]
            task.num_held -= 1
            task.num_done -= hold.done
        views = [view for task in self.tasks.values() for view in task.views.values()]
        if row.group is not None:
            group = self.groups[row.group]
            del group.members[sample_id]
            if not group.members:
                del self.groups[row.group]
            self.poisoned.add(row.group)
            for view in views:
                view.ready_members.pop(row.group, None)
        for view in views:
            if len(view.heap) > 2 * len(self.rows):  # most entries are of rows that are gone
                view.keep([entry for entry in view.heap if self._is_there(entry)])
        return list(dict.fromkeys(row.cells.values()))

    def _new_row(self, sample_id: str, seq: int) -> Row:
        row = Row(sample_id, seq, None if self.info.grpo_group_size is None else group_of(sample_id))
        self.rows[sample_id] = row
        if self.info.num_samples is not None and len(self.seen) < self.info.num_samples:
            self.seen.add(sample_id)
        if row.group is not None:
            self.groups.setdefault(row.group, Group(seq)).members[sample_id] = row
        return row

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(
        self,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        all_or_nothing: bool,
        lease_s: float | None,
        tag_filter: Mapping[str, tuple[str, Any]] | None,
        explain: bool,
        now: float,
    ) -> Claim:
        """Hands out ready samples to a task, as the hook ``claim`` says.

        Amortised cost: O(k log n) for k samples handed out of n ready; with a tag filter, also the ready samples
        before them that do not match.
        """
        task = self._task(task_name)
        group_size = self.info.grpo_group_size or 1
        if batch_size % group_size:
            raise InvalidRequestError(
                f"claim_meta('{self.partition_id}', '{task_name}') refused: batch_size {batch_size} is not a "
                f"multiple of the group size {group_size}."
            )
        self._expire(now)
        view = self._view(task, frozenset(required_fields))
        units: list[list[Row]] = []
        taken: list[tuple[int, str]] = []
        passed: list[tuple[int, str]] = []
        while view.heap and len(units) < batch_size // group_size:
            entry = view.pop()
            unit = self._unit(task_name, view, entry)
            if unit is None:
                continue
            if tag_filter is None or all(matches(row.tags, tag_filter) for row in unit):
                units.append(unit)
                taken.append(entry)
            else:
                passed.append(entry)
        for entry in passed:
            view.push(*entry)
        num_ready = len(units) * group_size
        exhausted = num_ready < batch_size and self._is_exhausted(task_name, num_ready, tag_filter)
        if all_or_nothing and num_ready < batch_size and not exhausted:
            for entry in taken:
                view.push(*entry)
            missing = self._missing(task_name, view, tag_filter) if explain else {}
            return Claim(num_ready=num_ready, missing_cells=missing)
        rows = [row for unit in units for row in unit]
        tokens = self._hold(task, task_name, rows, lease_s, now)
        return Claim(
            sample_ids=[row.sample_id for row in rows],
            tags=[dict(row.tags) for row in rows],
            lease_tokens=tokens,
            exhausted=exhausted,
            num_ready=num_ready,
        )

    def may_claim(
        self,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        all_or_nothing: bool,
        tag_filter: Mapping[str, tuple[str, Any]] | None,
        now: float,
    ) -> bool:
        """Whether `claim` would change anything: hand out samples, end leases, refuse, or find the end."""
        task = self._task(task_name)
        group_size = self.info.grpo_group_size or 1
        if batch_size % group_size or (self.expiries and self.expiries[0][0] <= now):
            return True
        view = self._view(task, frozenset(required_fields))
        needed = batch_size // group_size if all_or_nothing else 1
        found = 0
        for entry in view.heap:
            unit = self._unit(task_name, view, entry)
            if unit is not None and all(matches(row.tags, tag_filter) for row in unit):
                found += 1
                if found >= needed:
                    return True
        return self._is_exhausted(task_name, found * group_size, tag_filter)

    def _hold(self, task: Task, task_name: str, rows: list[Row], lease_s: float | None, now: float) -> list[str] | None:
        task.num_held += len(rows)
        if lease_s is None:
            task.num_done += len(rows)
            for row in rows:
                row.holds[task_name] = Hold("", 0.0, True)
            return None
        if not rows:  # nothing may change: a journal does not record a claim that hands out nothing
            return []
        token = f"{self.info.epoch}.{self._next_token}"
        self._next_token += 1
        for row in rows:
            row.holds[task_name] = Hold(token, now + lease_s, False)
            heapq.heappush(self.expiries, (now + lease_s, row.seq, row.sample_id, task_name))
        return [token] * len(rows)

    def ack(self, task_name: str, sample_ids: Sequence[str], tokens: Sequence[str], now: float) -> None:
        """Settles leases for good; acking again with the same token is allowed, since a reply may be lost.

        Raises:
            LeaseExpiredError: Some token is no longer valid; nothing changed.
            InvalidRequestError: Part of a group.
        """
        task, rows = self._leased(task_name, sample_ids, tokens, now, "ack")
        for row in rows:
            hold = row.holds[task_name]
            if not hold.done:
                hold.done = True
                task.num_done += 1

    def nack(self, task_name: str, sample_ids: Sequence[str], tokens: Sequence[str], now: float) -> None:
        """Gives leased samples back to the pool; errors as `ack`."""
        _, rows = self._leased(task_name, sample_ids, tokens, now, "nack")
        for row in rows:
            self._give_back(row, task_name)

    def renew(
        self,
        task_name: str,
        sample_ids: Sequence[str],
        tokens: Sequence[str],
        lease_s: float,
        now: float,
    ) -> None:
        """Extends leases to ``lease_s`` from now; errors as `ack`."""
        _, rows = self._leased(task_name, sample_ids, tokens, now, "renew")
        for row in rows:
            row.holds[task_name].expires_at = now + lease_s
            heapq.heappush(self.expiries, (now + lease_s, row.seq, row.sample_id, task_name))

    def consumed(self, task_names: Sequence[str]) -> bool:
        """Whether every task was given (leased: has acked) every row; False while there is none."""
        if not self.rows or not task_names:
            return False
        tasks = [self.tasks.get(name) for name in task_names]
        return all(task is not None and task.num_done == len(self.rows) for task in tasks)

    def _leased(
        self,
        task_name: str,
        sample_ids: Sequence[str],
        tokens: Sequence[str],
        now: float,
        action: str,
    ) -> tuple[Task, list[Row]]:
        task = self._task(task_name)
        self._expire(now)
        rows: list[Row] = []
        lost: list[str] = []
        for sample_id, token in zip(sample_ids, tokens, strict=True):
            row = self.rows.get(sample_id)
            hold = None if row is None else row.holds.get(task_name)
            if row is None or hold is None or hold.token != token or (hold.done and action != "ack"):
                lost.append(sample_id)
            else:
                rows.append(row)
        if lost:
            raise LeaseExpiredError(
                f"{action}('{self.partition_id}', '{task_name}', {len(sample_ids)} samples) refused: the lease on "
                f"{preview(lost)} is no longer held. No row was changed.",
                sample_ids=lost,
                hint="The lease ran out, was settled, or the sample was cleared; another consumer may hold it now.",
            )
        if self.info.grpo_group_size is not None:
            self._check_whole_groups(task_name, rows, action)
        return task, rows

    def _check_whole_groups(self, task_name: str, rows: list[Row], action: str) -> None:
        counts: dict[str, int] = {}
        for row in rows:
            assert row.group is not None
            counts[row.group] = counts.get(row.group, 0) + 1
        for key, count in counts.items():
            held = sum(task_name in member.holds for member in self.groups[key].members.values())
            if count != held:
                raise InvalidRequestError(
                    f"{action} refused: it names {count} of the {held} samples held of group '{key}'. Groups are "
                    "handed out, settled and renewed as a whole. No row was changed."
                )

    def _expire(self, now: float) -> None:
        while self.expiries and self.expiries[0][0] <= now:
            _, seq, sample_id, task_name = heapq.heappop(self.expiries)
            row = self.rows.get(sample_id)
            if row is None or row.seq != seq:
                continue
            hold = row.holds.get(task_name)
            if hold is not None and not hold.done and hold.expires_at <= now:
                self._give_back(row, task_name)

    def _give_back(self, row: Row, task_name: str) -> None:
        del row.holds[task_name]
        task = self.tasks[task_name]
        task.num_held -= 1
        for view in task.views.values():
            if view.required <= row.cells.keys():
                self._queue(view, row)

    def _view(self, task: Task, required: frozenset[str]) -> View:
        view = task.views.get(required)
        if view is None:
            view = task.views[required] = View(required)
            for row in self.rows.values():
                if required <= row.cells.keys():
                    self._offer(view, row)
        return view

    def _is_exhausted(
        self,
        task_name: str,
        num_ready: int,
        tag_filter: Mapping[str, tuple[str, Any]] | None,
    ) -> bool:
        total = self.info.num_samples
        if total is None or len(self.seen) < total:
            return False
        if self.info.grpo_group_size is None:
            if tag_filter is None:
                return len(self.rows) - self.tasks[task_name].num_held == num_ready
            left = [row for row in self.rows.values() if task_name not in row.holds]
            return sum(matches(row.tags, tag_filter) for row in left) == num_ready
        left = [
            row
            for name, group in self.groups.items()
            if self._is_whole(name) and not any(task_name in row.holds for row in group.members.values())
            if all(matches(row.tags, tag_filter) for row in group.members.values())
            for row in group.members.values()
        ]
        return len(left) == num_ready

    def _missing(
        self, task_name: str, view: View, tag_filter: Mapping[str, tuple[str, Any]] | None
    ) -> dict[str, tuple[str, ...]]:
        missing: dict[str, tuple[str, ...]] = {}
        for row in self.rows.values():
            if task_name in row.holds or not matches(row.tags, tag_filter):
                continue
            lacking = tuple(sorted(view.required - row.cells.keys()))
            if lacking:
                missing[row.sample_id] = lacking
                if len(missing) == 3:
                    break
        return missing

    def _is_whole(self, name: str) -> bool:
        if name in self.poisoned:
            return False
        return len(self.groups[name].members) == self.info.grpo_group_size

    def _offer(self, view: View, row: Row) -> None:
        """A row became ready for a view: counts it, and queues it once its unit is complete."""
        if row.group is not None and row.group not in self.poisoned:
            view.ready_members[row.group] = view.ready_members.get(row.group, 0) + 1
        self._queue(view, row)

    def _queue(self, view: View, row: Row) -> None:
        if row.group is None:
            view.push(row.seq, row.sample_id)
            return
        group = self.groups[row.group]
        if self._is_whole(row.group) and view.ready_members.get(row.group, 0) == len(group.members):
            view.push(group.seq, row.group)

    def _is_there(self, entry: tuple[int, str]) -> bool:
        """Whether what a heap entry names may ever be claimed through it."""
        seq, name = entry
        if self.info.grpo_group_size is not None:
            return name not in self.poisoned
        row = self.rows.get(name)
        return row is not None and row.seq == seq

    def _unit(self, task_name: str, view: View, entry: tuple[int, str]) -> list[Row] | None:
        """The rows behind a heap entry, or None where it is no longer claimable."""
        if not self._is_there(entry):
            return None
        _, name = entry
        rows = [self.rows[name]] if self.info.grpo_group_size is None else list(self.groups[name].members.values())
        return None if any(task_name in row.holds for row in rows) else rows

    def _task(self, task_name: str) -> Task:
        task = self.tasks.get(task_name)
        if task is None:
            raise UnknownTaskError(
                f"partition '{self.partition_id}' has no consumer task '{task_name}'.",
                hint=f"Registered: {preview(self.tasks, limit=5) or 'none'}.",
            )
        return task
