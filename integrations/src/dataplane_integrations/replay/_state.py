"""`RunState`: what the trainer knows of a run, which is what the store shows, and what it does about it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dataplane_core.client import common_fields
from dataplane_core.codec import decode_item
from dataplane_core.errors import (
    DataPlaneError,
    InvalidRequestError,
    UnknownPartitionError,
    preview,
    printable,
)
from dataplane_core.ledger import group_of
from dataplane_core.meta import KVBatchMeta, lengths_of
from dataplane_core.schema import WEIGHT_VERSION_TAG
from dataplane_core.spec import TagValue
from dataplane_integrations.attach import DataPlaneSource
from dataplane_integrations.errors import CollectorFailedError
from dataplane_integrations.replay._policies import BufferView, GroupView, StalenessPolicy
from dataplane_integrations.replay._prompts import (
    COLLECTOR_ROW,
    COMMITTED_TAG,
    END_WEIGHT_VERSION_TAG,
    EXTRA_TAG,
    ROLLOUT_TASK,
    RUN_ROW,
    SAMPLE_ID,
    PromptSource,
    group_name,
    parse_sample_id,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: The first and the longest pause between two looks at what other processes have done, in seconds.
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.25


@dataclass(slots=True, kw_only=True)
class BufferCounts:
    """How many groups went through each step so far.

    Attributes:
        committed: Groups that became ready.
        trained: Groups consumed.
        discarded: Groups that the trainer selected but did not train on.
        evicted: Groups that became too stale; their rows were cleared.
        lost: Groups that were left out of a selection, mostly because the store had lost a row of them.
        given_up: Prompts given up, mostly after ``max_attempts`` failures.
    """

    committed: int = 0
    trained: int = 0
    discarded: int = 0
    evicted: int = 0
    lost: int = 0
    given_up: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """A prompt that was started: its row, and the rows of its answers if they are committed."""

    view: GroupView
    row: str
    prompt: int
    attempt: int  # of the next start
    failures: int
    sample_ids: tuple[str, ...] = ()
    tags: tuple[dict[str, TagValue], ...] = ()


class RunState(PromptSource):
    """The base of `ReplayBuffer`, which has the arguments."""

    def __init__(
        self,
        source: DataPlaneSource,
        partition_id: str,
        policy: StalenessPolicy,
        *,
        group_size: int,
        weight_version: int = 0,
        num_prompts: int | None = None,
        spare_prompts: int = 0,
        max_attempts: int | None = None,
        requeue_evicted: bool = False,
        resume: bool = False,
        lease_s: float = 60.0,
        task_name: str = "train",
    ) -> None:
        if any(number is not None and number < 1 for number in (group_size, num_prompts, max_attempts)):
            raise InvalidRequestError(
                f"ReplayBuffer('{partition_id}') refused: group_size is {group_size}, num_prompts is {num_prompts}, "
                f"max_attempts is {max_attempts}. Expected 1 or more."
            )
        if spare_prompts < 0 or (spare_prompts and num_prompts is None):
            raise InvalidRequestError(
                f"ReplayBuffer('{partition_id}') refused: spare_prompts is {spare_prompts}, num_prompts is "
                f"{num_prompts}. Expected at least 0, and none without num_prompts: then any further prompt is a spare."
            )
        super().__init__(source, partition_id, lease_s=lease_s)
        self.group_size: Final = group_size
        self.task_name: Final = task_name
        self._policy = policy
        self._num_prompts = num_prompts
        self._spare_prompts = spare_prompts
        self._max_attempts = max_attempts
        self._requeue_evicted = requeue_evicted
        # all below: guarded by _lock
        self._weight_version = weight_version
        self._trained_since = 0
        self._next_prompt = 0
        self._next_order = 0
        self._counts = BufferCounts()
        self._given_up: Counter[int] = Counter()  # target step -> prompts given up, from this version on
        self._written: dict[str, TagValue] = {}  # the newest tags of the row of the run
        # what the newest look showed
        self._groups: dict[str, _Group] = {}  # those that were started
        self._waiting: dict[str, dict[str, Any]] = {}  # rows of prompts that were not
        self._failures: dict[str, str] = {}  # collector -> why it failed
        self._num_running = 0
        # what only this process knows
        self._selected: dict[str, _Group] = {}
        self._left_out: set[str] = set()  # groups that have left a selection which goes on
        self._gone: dict[str, tuple[_Group, bool]] = {}  # not cleared yet, and whether to generate them again
        self._looked_at = -math.inf
        self._num_late = 0  # groups dropped since the last version because they came too late
        client = self._require_dp_client()
        client.register_partition(self.prompts_id, [], None, [ROLLOUT_TASK], if_exists="keep" if resume else "replace")
        with self._lock:
            if resume:
                self._go_on()
            self._look()

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """The trainer's version."""
        with self._lock:
            return self._weight_version

    @property
    def counts(self) -> BufferCounts:
        """The counts so far; a copy."""
        with self._lock:
            counts = self._counts
            held = sum(group.view.committed is not None for group in self._groups.values())
            committed = counts.trained + counts.discarded + counts.evicted + counts.lost + held
            return dataclasses.replace(counts, committed=committed)

    @property
    def finished(self) -> bool:
        """Whether the prompts are used up, and no group is left: `select` has nothing to return any more."""
        return self.view().finished

    def view(self) -> BufferView:
        """The groups in the buffer, as the rule sees them."""
        with self._lock:
            self._look()
            return self._view()

    # --- what the store shows -----------------------------------------------------------------------------------------

    def _look(self) -> list[str]:
        """Looks what became of the groups, and does what follows from it. Returns the groups that it evicted.

        The answers are listed before the prompts: so the prompt of an answer shows whether the answer still counts.
        """
        client = self._require_dp_client()
        self._write_run()  # what was trained on counts as such before it is cleared
        answers = client.list_samples(self.partition_id)
        prompts = client.list_samples(self.prompts_id)
        rows = dict(zip(prompts.sample_ids, prompts.tags or (), strict=True))
        collectors = {name: tags for name, tags in rows.items() if name.startswith(COLLECTOR_ROW)}
        self._num_running = sum(bool(tags["running"]) for tags in collectors.values())
        self._failures = {
            name.removeprefix(COLLECTOR_ROW): tags["failed"] for name, tags in collectors.items() if tags.get("failed")
        }
        # notes of collectors on prompts that were gone
        notes = [row for row, tags in rows.items() if "order" not in tags and row not in {*collectors, RUN_ROW}]
        orphans = self._match(self._sort(rows, answers), answers)
        evicted = self._evict()
        self._mark_in_vain(rows)
        with suppress(DataPlaneError):  # the next look tries again
            self._clear(notes, orphans)
        self._admit()
        self._write_run()
        self._looked_at = time.monotonic()
        return evicted

    def _sort(self, rows: dict[str, dict[str, Any]], answers: KVBatchMeta) -> dict[str, _Group]:
        """Splits the rows of prompts into those that wait and those that are started; ended ones are given up."""
        self._waiting, started = {}, {}
        committed: dict[tuple[int, int], int] = {}  # prompt, attempt -> with which weights it was made
        for sample_id, tags in zip(answers.sample_ids, answers.tags or (), strict=True):
            if COMMITTED_TAG in tags and sample_id.endswith("_g0"):
                of = parse_sample_id(sample_id)
                committed[of["prompt"], of["attempt"]] = of["weight_version"]
        taken = {group.row for group in [*self._selected.values(), *(group for group, _ in self._gone.values())]}
        for row, tags in sorted(rows.items(), key=lambda item: item[1].get("order", -1)):
            if "order" not in tags or row in taken:
                continue
            version = tags[WEIGHT_VERSION_TAG]
            if version is None:
                self._waiting[row] = tags
                continue
            # a collector that stood still for longer than its lease may have noted its own version over the other's
            version = committed.get((tags["prompt"], tags["attempt"] - 1), version)
            name = group_name(version, tags["prompt"], tags["attempt"] - 1)
            view = GroupView(group=name, weight_version=version, order=tags["order"], target_step=tags["target_step"])
            group = _Group(view, row, tags["prompt"], tags["attempt"], tags["failures"])
            if tags["ended"] == "late":
                self._num_late += 1
                self._gone[name] = group, self._requeue_evicted
            elif tags["ended"]:
                self._give_up(group)
            else:
                started[name] = group
        return started

    def _give_up(self, group: _Group) -> None:
        self._gone[group.view.group] = group, False
        self._counts.given_up += 1
        step = group.view.target_step
        if step is not None and step >= self._weight_version:
            self._given_up[step] += 1
        _log.warning(
            "'%s': prompt %d is given up after %d failures.",
            printable(self.partition_id),
            group.prompt,
            group.failures,
        )

    def _match(self, started: dict[str, _Group], answers: KVBatchMeta) -> list[str]:
        """Finds the answers of started prompts. Returns those of no prompt, which killed or late collectors leave."""
        of_group: dict[str, dict[str, dict[str, Any]]] = {}
        for sample_id, tags in zip(answers.sample_ids, answers.tags or (), strict=True):
            of_group.setdefault(group_of(sample_id), {})[sample_id] = tags
        views = [group.view for group in self._groups.values()]
        order = {view.group: view.committed for view in views if view.committed is not None}
        newest = max(order.values(), default=-1)
        for number, (name, members) in enumerate(of_group.items(), newest + 1):  # in the order of their first write
            whole = len(members) == self.group_size and all(tags.get(COMMITTED_TAG) for tags in members.values())
            if name in started and whole:
                ids = sorted(members, key=lambda sample_id: int(sample_id.rpartition("_g")[2]))
                end = max(tags[END_WEIGHT_VERSION_TAG] for tags in members.values())
                group = started[name]
                view = dataclasses.replace(group.view, committed=order.get(name, number), end_weight_version=end)
                tags_of_rows = tuple(members[sample_id] for sample_id in ids)
                started[name] = dataclasses.replace(group, view=view, sample_ids=tuple(ids), tags=tags_of_rows)
        groups = {**started, **self._selected}
        self._groups = dict(sorted(groups.items(), key=lambda item: item[1].view.order))
        return [
            sample_id
            for name, members in of_group.items()
            if name not in self._groups and name not in self._gone
            for sample_id in members
            if SAMPLE_ID.fullmatch(sample_id)
        ]

    def _evict(self) -> list[str]:
        names = list(self._policy.evict(self._view()))
        for name in names:
            group = self._groups.get(name)
            if group is None or not group.view.ready:
                raise InvalidRequestError(
                    f"{type(self._policy).__name__}.evict named group '{name}', which is "
                    f"{'not held' if group is None else 'being made or in training'}. Expected ready groups."
                )
        self._counts.evicted += len(names)
        self._num_late += len(names)
        self._drop(names, requeue=self._requeue_evicted)
        return names

    def _mark_in_vain(self, rows: dict[str, dict[str, Any]]) -> None:
        """Tells collectors which rollouts they may end."""
        in_vain = [self._groups[name].row for name in self._policy.abort(self._view()) if name in self._groups]
        told = [row for row in in_vain if not rows[row]["in_vain"]]
        if told:
            self._require_dp_client().put_samples(told, self.prompts_id, tags=[{"in_vain": True}] * len(told))

    def _clear(self, notes: Sequence[str] = (), orphans: Sequence[str] = ()) -> None:
        """Clears the rows of removed groups, and these of prompts and answers. Has prompts generated again."""
        client = self._require_dp_client()
        again = [(group.prompt, group.attempt, group.failures) for group, requeue in self._gone.values() if requeue]
        self._put_prompts(again)
        self._gone = {name: (group, False) for name, (group, _) in self._gone.items()}
        # first the prompts: without its prompt an answer counts no more
        if rows := [*notes, *(group.row for group, _ in self._gone.values())]:
            client.clear_samples(rows, self.prompts_id)
        if ids := [*orphans, *(f"{name}_g{index}" for name in self._gone for index in range(self.group_size))]:
            client.clear_samples(ids, self.partition_id)
        self._gone = {}

    def _admit(self) -> None:
        """Puts the prompts that the rule admits, and says for which step those that wait are."""
        view = self._view()
        room = max(0, min(self._policy.admit(view) - len(self._waiting), self._undrawn()))
        self._put_prompts([(self._next_prompt + index, 0, 0) for index in range(room)])
        self._next_prompt += room
        changed: dict[str, int | None] = {}
        for row, tags in self._waiting.items():
            step = self._policy.target_step(view)
            if step != tags["target_step"]:
                changed[row] = tags["target_step"] = step
            if step is None:
                continue
            waiting = GroupView(group=row, weight_version=view.weight_version, order=tags["order"], target_step=step)
            view = dataclasses.replace(view, groups=(*view.groups, waiting))
        if changed:
            steps = [{"target_step": step} for step in changed.values()]
            self._require_dp_client().put_samples(list(changed), self.prompts_id, tags=steps)

    def _put_prompts(self, prompts: Sequence[tuple[int, int, int]]) -> None:
        """Puts rows of prompts: number, attempt and failures of each."""
        if not prompts:
            return
        rows: dict[str, dict[str, TagValue]] = {}
        for index, (prompt, attempt, failures) in enumerate(prompts):
            rows[f"p{prompt}" + (f"r{attempt}" if attempt else "")] = {
                "prompt": prompt,
                "attempt": attempt,
                "order": self._next_order + index,
                "target_step": None,
                WEIGHT_VERSION_TAG: None,
                "failures": failures,
                "in_vain": False,
                "ended": "",
            }
        self._require_dp_client().put_samples(list(rows), self.prompts_id, tags=list(rows.values()))
        self._next_order += len(prompts)
        self._waiting.update(rows)

    def _undrawn(self) -> int:
        """How many prompts were not drawn yet; a large number if there is no end."""
        if self._num_prompts is None:
            return sys.maxsize
        end = self._num_prompts + min(self._spare_prompts, self._counts.given_up)
        return max(0, end - self._next_prompt)  # a save may have drawn more than this buffer has

    def _drained(self) -> bool:
        """Whether no more groups will be committed."""
        return (
            not self._undrawn()
            and not self._waiting
            and not any(requeue for _, requeue in self._gone.values())
            and all(group.view.committed is not None for group in self._groups.values())
        )

    def _view(self) -> BufferView:
        return BufferView(
            weight_version=self._weight_version,
            trained_since=self._trained_since,
            groups=tuple(group.view for group in self._groups.values()),
            given_up=dict(self._given_up),
            drained=self._drained(),
        )

    def _write_run(self) -> None:
        """Tells the collectors, and a later start of the trainer, how far the run is."""
        tags: dict[str, TagValue] = {
            WEIGHT_VERSION_TAG: self._weight_version,
            "trained_since": self._trained_since,
            "next_prompt": self._next_prompt,
            "next_order": self._next_order,
            "group_size": self.group_size,
            "capacity": self._policy.capacity(weight_version=self._weight_version),
            "max_attempts": self._max_attempts or 0,
            "left": self._undrawn() > 0,
            "drained": self._drained(),
            "given_up": json.dumps(list(self._given_up.items())),
            "counts": json.dumps(dataclasses.asdict(self._counts)),
        }
        if tags != self._written:
            self._require_dp_client().put_samples([RUN_ROW], self.prompts_id, tags=[tags])
            self._written = tags

    def _go_on(self) -> None:
        """Takes over a run from the store."""
        client = self._require_dp_client()
        try:
            run = PromptSource._run(self)
        except UnknownPartitionError:
            return  # it was never begun
        if run["group_size"] != self.group_size:
            raise InvalidRequestError(
                f"ReplayBuffer('{self.partition_id}', resume=True) refused: group_size is {run['group_size']} in the "
                f"store and {self.group_size} here."
            )
        self._weight_version, self._trained_since = run[WEIGHT_VERSION_TAG], run["trained_since"]
        self._given_up = Counter(dict(json.loads(run["given_up"])))
        self._counts = BufferCounts(**json.loads(run["counts"]))
        listed = client.list_samples(self.prompts_id)
        rows = {row: tags for row, tags in zip(listed.sample_ids, listed.tags or (), strict=True) if "order" in tags}
        self._next_order = max([run["next_order"], *(tags["order"] + 1 for tags in rows.values())])
        self._next_prompt = max([run["next_prompt"], *(tags["prompt"] + 1 for tags in rows.values())])
        collectors = [row for row in listed.sample_ids if row.startswith(COLLECTOR_ROW)]
        newest: dict[int, str] = {}  # prompt -> its row that was put last
        for row, tags in rows.items():
            if tags["prompt"] not in newest or tags["order"] > rows[newest[tags["prompt"]]]["order"]:
                newest[tags["prompt"]] = row
        client.clear_samples([*(rows.keys() - newest.values()), *collectors], self.prompts_id)
        # of a prompt that is done, a save may lack the answers: they were written, or trained on, during the save
        rows = {row: rows[row] for row in newest.values()}
        answers = client.list_samples(self.partition_id)
        self._match(self._sort(rows, answers), answers)
        done = set(client.list_consumed(self.prompts_id, ROLLOUT_TASK))
        self._gone.update(
            (name, (group, True))
            for name, group in self._groups.items()
            if group.row in done and group.view.committed is None
        )

    # --- inside; the lock is held -------------------------------------------------------------------------------------

    def _run(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._written)

    def _newest_run(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._looked_at > _LONGEST_PAUSE_S:  # of this process it knows all
                self._look()
            return dict(self._written)

    def _settled(self) -> list[str]:
        with self._lock:
            try:
                evicted = self._look()
                self._clear()  # again, if it has failed in the look: now it raises
                return evicted
            finally:
                self._changed.notify_all()

    def _wait(self, question: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """Looks, and asks ``question``, until the answer is not None. None after the timeout."""
        give_up = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            self._check_open()
            self._look()
            if (answer := question()) is not None:
                return answer
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return None
            if self._changed.wait(min(left_s, pause_s)):
                pause_s = _FIRST_PAUSE_S
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _describe(self) -> str:
        views = [group.view for group in self._groups.values()]
        made = sum(view.committed is None for view in views)
        training = sum(view.selected for view in views)
        slow = next((view.group for view in views if view.committed is None), None)
        text = (
            f": at version {self._weight_version}, of {len(views)} groups {made} are being made, "
            f"{len(views) - made - training} are ready, {training} are in training ({self._policy})"
        )
        if slow is not None:
            text += f"; the first being made is '{slow}'"
        if self._waiting:
            text += f"; {len(self._waiting)} prompts wait for a collector"
        if self._failures:
            text += f"; collectors that failed: {preview(self._failures)}"
        return text

    def _log_late(self) -> None:
        """Says once per version how many groups came too late."""
        if self._num_late:
            _log.warning(
                "'%s': %d groups were dropped without being trained on. At weight version %d they are too old for %r. "
                "Their prompts are %s.",
                printable(self.partition_id),
                self._num_late,
                self._weight_version,
                self._policy,
                "generated again" if self._requeue_evicted else "not generated again (requeue_evicted=False)",
            )
        self._num_late = 0

    def _checked(self, names: Sequence[str], wanted: int) -> list[str]:
        wrong = [name for name in names if name not in self._groups or not self._groups[name].view.ready]
        if wrong or len(set(names)) != wanted or len(names) != wanted:
            raise InvalidRequestError(
                f"{type(self._policy).__name__}.select named {len(names)} groups, {len(set(names))} of them "
                f"different, and not ready: {preview(wrong) or 'none'}. Expected {wanted} ready groups, or None."
            )
        return list(names)

    def _drop(self, names: Iterable[str], *, requeue: bool = False) -> None:
        for name in names:
            self._selected.pop(name, None)
            self._gone[name] = self._groups.pop(name), requeue

    def _meta_of(self, names: Sequence[str]) -> KVBatchMeta:
        if not names:
            return KVBatchMeta(self.partition_id, self.task_name, [], fields=[], sequence_lengths=[], tags=[])
        groups = [self._groups[name] for name in names]
        ids = [sample_id for group in groups for sample_id in group.sample_ids]
        tags = [dict(row) for group in groups for row in group.tags]
        extra_info: dict[str, Any] = {}
        for row in tags:
            del row[COMMITTED_TAG]
            if (extra := row.pop(EXTRA_TAG, None)) is not None:
                extra_info.update(decode_item(b64decode(str(extra))))
        fields = common_fields(self._require_dp_client().list_fields(ids, self.partition_id))
        return KVBatchMeta(
            self.partition_id,
            self.task_name,
            ids,
            fields=fields,
            sequence_lengths=lengths_of(tags),
            extra_info=extra_info,
            tags=tags,
        )

    def _selected_of(self, meta: KVBatchMeta, operation: str) -> list[str]:
        """The groups of a selection, without those that have left it."""
        groups = dict.fromkeys(group_of(sample_id) for sample_id in meta.sample_ids)
        names = [name for name in groups if name not in self._left_out]
        wrong = [name for name in names if name not in self._selected]
        if wrong:
            raise InvalidRequestError(
                f"{operation} refused: not in training: {preview(wrong)}. Expected groups of a select() that were not "
                "consumed, discarded or put back since."
            )
        return names

    def _ended(self, meta: KVBatchMeta, operation: str) -> list[str]:
        """As `_selected_of`, for an operation that ends the selection. Forgets the groups that had left it."""
        names = self._selected_of(meta, operation)
        self._left_out.difference_update(group_of(sample_id) for sample_id in meta.sample_ids)
        return names

    def _check_collectors(self) -> None:
        if self._failures and not self._num_running:
            message = list(self._failures.values())[-1]
            raise CollectorFailedError(message) from self._causes.get(message)
