"""`ReplayBuffer`: the trainer's side of asynchronous training. One long class, since all of it uses the newest look."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import sys
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dataplane_core.arguments import Count, Index, checked_as
from dataplane_core.batch import BatchedDataDict, read_columns
from dataplane_core.client import common_fields
from dataplane_core.codec import decode_item
from dataplane_core.errors import DataPlaneError, InvalidRequestError, LostSamplesError, preview, printable
from dataplane_core.ledger import group_of
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import WEIGHT_VERSION_TAG
from dataplane_core.spec import TagValue
from dataplane_integrations.attach import DataPlaneSource
from dataplane_integrations.errors import CollectorFailedError, ReplayTimeoutError
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
    prompt_name,
)
from dataplane_integrations.rollout import mint_sample_ids

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group(GroupView):
    """A group with its prompt: the id of its row, its number, the attempt of its next start, and its failures."""

    row: str
    prompt: int
    attempt: int
    failures: int


class ReplayBuffer(PromptSource):
    """Puts prompts into the store, as a staleness rule admits them, and gives the trainer the groups of their answers.

    A group is reserved, then committed, then selected, then consumed. Only ready groups are evicted. A selected group
    cannot be evicted until it is consumed, discarded or put back, so nobody reads rows that are being cleared.

    All that the buffer knows is in the store, in the partition of the answers and in that of the prompts, besides which
    groups are selected. So collectors may be in any process (`PromptSource`, `serve`), and a new buffer goes on with
    ``resume``, after ``client.load(folder)`` of a `save`, or if the trainer alone has died. There is one buffer per
    run. It is also the source of collectors in its own process. Thread-safe.

    Example:
        A trainer; in each rollout process, `serve` runs::

            rule = InOrderPolicy(max_staleness=1, groups_per_version=32)
            buffer = ReplayBuffer(client, "replay", rule, group_size=8, num_prompts=3200)
            for step, meta in enumerate(buffer.batches(32)):  # waits; a KVBatchMeta of 32 whole groups
                train(meta)  # its rows are cleared when the next is asked for
                buffer.set_weight_version(step + 1)  # after the rollout side has got the weights of this version

    A call that removes groups has taken effect also where it raises because the store cannot be reached: do not call it
    again. The next call clears the rows.

    Args:
        source: The client of this process; or a config to attach with.
        partition_id: The partition of the answers. The caller registers it.
        policy: The staleness rule: decides what is admitted, selected and evicted.
        group_size: Answers per prompt. In a partition of rollouts, an answer may have several rows. The rollout then
            writes and seals them, and returns their meta; those of answers that failed may be left out.
        weight_version: The trainer's version at the start.
        num_prompts: Prompts to draw in total. After that `reserve` returns nothing, and `select` the remaining groups.
            None: no end.
        spare_prompts: So many further prompts are drawn, each only in place of one that was given up.
        max_attempts: A prompt whose rollout has failed so many times is given up, and the next one takes its place.
            After its first failure it is generated alone, so that it fails no other. Only a prompt that has failed
            alone is given up. None: no prompt is given up.
        requeue_evicted: Generate the prompts of evicted groups again.
        resume: Go on with the prompts and answers that the store holds. Otherwise the run begins anew.
        lease_s: Seconds of lease of the prompts that are reserved in this process.
        task_name: The task in the metas.

    Raises:
        InvalidRequestError: A size below 1, or ``spare_prompts`` without ``num_prompts``; or, with ``resume``, another
            ``group_size`` than before.
        InvalidTypeError: An argument has another type.
        UnknownPartitionError: The partition of the answers is not registered.
    """

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
        self.group_size: Final[int] = checked_as("ReplayBuffer: group_size", Count, group_size)
        self.task_name: Final = task_name
        self._policy = policy
        self._num_prompts: int | None = checked_as("ReplayBuffer: num_prompts", Count | None, num_prompts)
        self._spare_prompts: int = checked_as("ReplayBuffer: spare_prompts", Index, spare_prompts)
        self._max_attempts: int | None = checked_as("ReplayBuffer: max_attempts", Count | None, max_attempts)
        self._requeue_evicted = requeue_evicted
        if spare_prompts and num_prompts is None:
            raise InvalidRequestError(
                f"ReplayBuffer('{partition_id}') refused: spare_prompts is {spare_prompts}, num_prompts is None. "
                "Expected num_prompts too: without it any further prompt is a spare."
            )
        super().__init__(source, partition_id, lease_s=lease_s)
        # all below: guarded by _lock
        self._weight_version = weight_version
        self._trained_since = 0
        self._next_prompt = 0
        self._next_order = 0
        self._counts = BufferCounts()
        self._given_up: Counter[int] = Counter()  # target step -> prompts given up, from this version on
        self._written: dict[str, TagValue] = {}  # the newest tags of the row of the run
        # what the newest look showed
        self._groups: dict[str, _Group] = {}  # those that were started, in the order of their prompts
        self._waiting: dict[str, dict[str, Any]] = {}  # rows of prompts that were not, in the same order
        self._failures: dict[str, str] = {}  # collector -> why it failed
        self._num_running = 0
        # what only this process knows, besides which groups are selected
        self._left_out: set[str] = set()  # groups that have left a selection which goes on
        self._gone: dict[str, tuple[_Group, bool]] = {}  # not cleared yet, and whether to generate them again
        self._num_late = 0  # groups dropped since the last version because they came too late
        client = self._require_dp_client()
        client.register_partition(self.prompts_id, [], None, [ROLLOUT_TASK], if_exists="keep" if resume else "replace")
        with self._lock:
            if resume:
                self._go_on()
            self._look()

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
            held = sum(group.committed is not None for group in self._groups.values())
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

    def batches(self, num_groups: int, *, timeout_s: float = 60.0) -> Iterator[KVBatchMeta]:
        """Selections, until the prompts are used up. Each is consumed when the next one is asked for.

        The one that is in training when the loop is left, by a ``break`` or an error, is put back. Arguments and errors
        are those of `select`.
        """
        while (meta := self.select(num_groups, timeout_s=timeout_s)).size:
            try:
                yield meta
            except BaseException:
                self.put_back(meta)
                raise
            self.consume(meta)

    def select(self, num_groups: int, *, min_groups: int | None = None, timeout_s: float = 60.0) -> KVBatchMeta:
        """Selects groups to train on, by the staleness rule. Blocks until there are enough.

        They stay in the buffer, and cannot be evicted, until `consume`, `discard` or `put_back`.

        Args:
            num_groups: How many. Fewer only if the prompts are used up, with ``min_groups``, or where the rule has
                fewer left for the current weights (`TargetStepPolicy` with ``replacements``).
            min_groups: Do not wait for more than so many; take as many as the rule gives now, up to ``num_groups``.
                None: ``num_groups``.
            timeout_s: How long to wait, in seconds.

        Returns:
            The rows; those of a group are adjacent, in the order of their ids. No rows when all prompts are used up, or
            the rule has none left for the current weights; `finished` tells these apart.

        Raises:
            ReplayTimeoutError: There were not enough groups; the message says what there is.
            CollectorFailedError: There are too few groups, no collector is left, and one has failed.
            StepTooSmallError: So many prompts of the step were given up that it is smaller than the rule allows.
        """
        at_least = num_groups if min_groups is None else min_groups
        if not 1 <= at_least <= num_groups:
            raise InvalidRequestError(
                f"select refused: num_groups is {num_groups}, min_groups is {min_groups}. Expected 1 or more, and no "
                "more min_groups than num_groups."
            )

        def chosen() -> list[str] | None:
            most, fewest = num_groups, at_least
            view = self._view()
            if view.drained:
                most, fewest = min(most, sum(not group.selected for group in view.groups)), 1
            left = self._policy.left(view)
            if left is not None:
                most, fewest = min(most, left), min(fewest, left)
            if most < 1:
                return []
            names = self._policy.select(view, fewest)
            if names is None:
                self._check_collectors()
                return None
            while fewest < most:
                wanted = (fewest + most + 1) // 2
                more = self._policy.select(view, wanted)
                if more is None:
                    most = wanted - 1
                else:
                    names, fewest = more, wanted
            return self._ready("select", names, fewest)

        with self._lock:
            names = self._wait(chosen, timeout_s)
            if names is None:
                raise ReplayTimeoutError(
                    f"select('{self.partition_id}', {num_groups} groups) timed out after {timeout_s:g} s"
                    f"{self._describe()}.",
                    hint="Check that collectors run, that the store is not full, and that the staleness rule's "
                    "groups_per_version is what the trainer uses up.",
                )
            meta = self._meta_of(names)
            self._mark(names, self._weight_version)
            return meta

    def take(
        self,
        /,
        num_groups: int,
        select_fields: Sequence[str] | None = None,
        *,
        min_groups: int | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> tuple[KVBatchMeta, BatchedDataDict]:
        """Selects groups as `select` does, reads them into this process, and clears them.

        If the store fails at a clear, this does not raise: the next operation clears the rows.

        Args:
            select_fields: The columns; None: those that were committed.
            options: As for `dataplane_core.read_columns`.

        Returns:
            The meta, whose rows are cleared, and the columns. If the read fails, the groups are put back, except for
            those that the store has lost: they are generated again (see `leave_out`), and this selects anew.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, give_up - time.monotonic())
            meta = self.select(num_groups, min_groups=min_groups, timeout_s=left_s)
            if not meta.size:
                return meta, BatchedDataDict()
            try:
                columns = read_columns(self._require_dp_client(), meta, select_fields, **options)
                break
            except LostSamplesError as error:
                with suppress(DataPlaneError):
                    self.leave_out(meta, error.missing_samples)
                with suppress(DataPlaneError):
                    self.put_back(meta)
            except BaseException:
                self.put_back(meta)
                raise
        with suppress(DataPlaneError):
            self.consume(meta)
        return meta, columns

    def consume(self, meta: KVBatchMeta) -> None:
        """Reports that groups have been trained on: clears their rows and frees their room.

        Args:
            meta: What `select` returned, or a part of it. One row of a group stands for the whole group.

        Raises:
            InvalidRequestError: A group is not selected. Nothing has been changed.
        """
        with self._lock:
            names = self._selected_of(meta, "consume")
            version = self._weight_version
            self._trained_since += sum(self._groups[name].selected_version == version for name in names)
            self._counts.trained += len(names)
            self._drop(names)
            self._settled()

    def discard(self, meta: KVBatchMeta, *, requeue: bool = False) -> None:
        """As `consume`, for selected groups that the trainer will not train on, such as those with equal rewards. Their
        rows need not be in the store any more.

        Args:
            requeue: Generate their prompts again. Use it after a failed step whose rows are cleared, as they are when a
                call of `DataPlanePolicy` raised. With ``num_prompts``, a collector ends when no prompt is left: then
                start one again.
        """
        with self._lock:
            names = self._selected_of(meta, "discard")
            self._counts.discarded += len(names)
            self._drop(names, requeue=requeue)
            self._settled()

    def leave_out(self, meta: KVBatchMeta, lost: Sequence[str]) -> KVBatchMeta:
        """Takes groups of which the store has lost a row out of a selection, and has their prompts generated again.

        Later calls with ``meta`` mean what is left of it. This is what `DataPlanePolicy` needs as ``replace_lost``.
        Raises what `consume` raises.

        Args:
            meta: What `select` returned, or a part of it.
            lost: Samples of ``meta`` whose payload is gone, as `LostSamplesError.missing_samples` names them, or that
                have to go for another reason. One row of a group stands for the whole group.

        Returns:
            The rows of the other groups; maybe none.
        """
        gone = {group_of(sample_id) for sample_id in lost}
        with self._lock:
            selected = self._selected_of(meta, "leave_out", ends=False)
            names, left = [name for name in selected if name in gone], {name for name in selected if name not in gone}
            self._counts.lost += len(names)
            self._left_out.update(names)
            self._drop(names, requeue=True)
            self._settled()
        return meta.subset([row for row, sample_id in enumerate(meta.sample_ids) if group_of(sample_id) in left])

    def put_back(self, meta: KVBatchMeta) -> None:
        """Makes selected groups ready again, for example after a failed step. Raises what `consume` raises.

        Their rows must still be in the store. `DataPlanePolicy` clears the rows of a call that raises: then use
        `discard` with ``requeue``.
        """
        with self._lock:
            self._mark(self._selected_of(meta, "put_back"), None)
            self._settled()

    def wait_until_reserved(self, *, timeout_s: float = 60.0) -> None:
        """Waits until the rollout side has started all groups that the rule admits with the current weights.

        With an `InOrderPolicy`, and this before every `set_weight_version`, the weights that generate a group depend
        only on its number, not on timing. So runs can be repeated, interrupted and restored, bit for bit.

        Raises:
            ReplayTimeoutError: There was still room after ``timeout_s``.
            CollectorFailedError: There is room, no collector is left, and one has failed.
        """

        def full() -> bool | None:
            if not self._waiting:
                return True
            self._check_collectors()
            return None

        with self._lock:
            if self._wait(full, timeout_s) is None:
                raise ReplayTimeoutError(
                    f"wait_until_reserved('{self.partition_id}') timed out after {timeout_s:g} s, with room for "
                    f"{len(self._waiting)} more groups{self._describe()}."
                )

    def set_weight_version(self, weight_version: int) -> list[str]:
        """Reports that the trainer and the rollout side have new weights. Evicts groups that are too stale for them,
        and logs a warning if any were dropped since the last version.

        Returns:
            The names of the evicted groups.

        Raises:
            InvalidRequestError: The version is lower than the current one.
        """
        with self._lock:
            self._check_open()
            if weight_version < self._weight_version:
                raise InvalidRequestError(
                    f"set_weight_version({weight_version}) refused: the version is {self._weight_version}. Expected no "
                    "lower one; to go back, restore a save."
                )
            if weight_version > self._weight_version:
                self._weight_version = weight_version
                self._trained_since = 0
                self._given_up = Counter({step: n for step, n in self._given_up.items() if step >= weight_version})
            evicted = self._settled()
            self._log_late()
        return evicted

    def save(self, folder: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> None:
        """Saves the run as `DataPlaneClient.save` does, with its errors: the two partitions, which
        ``client.load(folder)`` loads, and ``metadata``, JSON values that ``load`` returns.

        Rollouts may go on. In a buffer that is made with ``resume`` after the load, groups that are in training now are
        ready, and those that are being generated are generated again. To let that run continue exactly like this one,
        save between two steps, inside ``collector.quiet()``.
        """
        with self._lock:  # the prompts first: answers that come meanwhile are made again, none are lost
            self._look()
            self._require_dp_client().save(folder, metadata, [self.prompts_id, self.partition_id])

    # --- what the store shows; the lock is held -----------------------------------------------------------------------

    def _look(self, *, must_clear: bool = False) -> list[str]:
        """Looks what became of the groups, and does what follows from it. Returns the groups that it evicted.

        The answers are listed before the prompts: so the prompt of an answer shows whether the answer still counts.
        """
        client = self._require_dp_client()
        self._write_run()  # what was trained on counts as such before it is cleared
        answers = client.list_samples(self.partition_id)
        listed = client.list_samples(self.prompts_id)
        rows = dict(zip(listed.sample_ids, listed.tags or (), strict=True))
        collectors = {row: rows.pop(row) for row in listed.sample_ids if row.startswith(COLLECTOR_ROW)}
        self._num_running = sum(bool(tags["running"]) for tags in collectors.values())
        self._failures = {
            row.removeprefix(COLLECTOR_ROW): tags["failed"] for row, tags in collectors.items() if tags.get("failed")
        }
        prompts = {row: tags for row, tags in rows.items() if "order" in tags}
        notes = rows.keys() - prompts.keys() - {RUN_ROW}  # of collectors, on prompts that were gone
        orphans = self._sort(prompts, answers)
        evicted = self._evict(prompts)
        removed = orphans | self._gone.keys()
        try:
            self._clear(prompts, notes, [answer for answer in answers.sample_ids if group_of(answer) in removed])
        except DataPlaneError:
            if must_clear:
                raise  # else the next look tries again
        self._admit()
        self._write_run()
        return evicted

    def _settled(self) -> list[str]:
        with self._lock:
            try:
                return self._look(must_clear=True)
            finally:
                self._changed.notify_all()

    def _sort(self, prompts: Mapping[str, dict[str, Any]], answers: KVBatchMeta) -> set[str]:
        """Sorts prompts into those that wait, those that are started, and those that ended.

        Returns the groups of no prompt, whose answers killed or late collectors have left.
        """
        members: dict[str, list[dict[str, Any]]] = {}  # group -> the tags of its answers
        for sample_id, tags in zip(answers.sample_ids, answers.tags or (), strict=True):
            members.setdefault(group_of(sample_id), []).append(tags)
        if self._has_rollouts:  # of a group that is committed, the others are of rollouts that failed
            members = {name: [tags for tags in rows if COMMITTED_TAG in tags] or rows for name, rows in members.items()}
        parts = {name: parse_sample_id(f"{name}_g0") for name in members if SAMPLE_ID.fullmatch(f"{name}_g0")}
        committed = [name for name in parts if all(COMMITTED_TAG in tags for tags in members[name])]
        latest = {parts[name]["prompt"]: name for name in sorted(committed, key=lambda name: parts[name]["attempt"])}
        # groups are ready in the order in which they were seen, and those of one look in that of their first writes
        places = {group.group: group.committed for group in self._groups.values() if group.committed is not None}
        numbers = itertools.count(max(places.values(), default=-1) + 1)
        places |= {name: next(numbers) for name in committed if name not in places}

        # a save, or a put whose answer was lost, may have more prompts than this buffer has noted
        self._next_order = max([self._next_order, *(tags["order"] + 1 for tags in prompts.values())])
        self._next_prompt = max([self._next_prompt, *(tags["prompt"] + 1 for tags in prompts.values())])
        groups, self._waiting = {name: group for name, group in self._groups.items() if group.selected}, {}
        settled = {group.row for group in (*groups.values(), *(group for group, _ in self._gone.values()))}
        starts: dict[int, int] = {}  # prompt -> the attempt that was noted last; answers of earlier ones do not count
        for row, tags in sorted(prompts.items(), key=lambda prompt: prompt[1]["order"]):
            if row in settled:
                continue
            if tags[WEIGHT_VERSION_TAG] is None:
                self._waiting[row] = tags
                continue
            version, prompt, attempt = tags[WEIGHT_VERSION_TAG], tags["prompt"], tags["attempt"] - 1
            starts[prompt] = attempt
            # a collector that stood still for longer than its lease may have noted its own start over that of another
            if prompt in latest and parts[latest[prompt]]["attempt"] >= attempt:
                version, attempt = (parts[latest[prompt]][part] for part in ("weight_version", "attempt"))
            name = group_name(version, prompt, attempt)
            whole = name in committed and (self._has_rollouts or len(members[name]) == self.group_size)
            group = _Group(
                group=name,
                weight_version=version,
                order=tags["order"],
                target_step=tags["target_step"],
                committed=places[name] if whole else None,
                end_weight_version=max(answer[END_WEIGHT_VERSION_TAG] for answer in members[name]) if whole else None,
                row=row,
                prompt=prompt,
                attempt=attempt + 1,
                failures=tags["failures"],
            )
            if tags["ended"] == "late":
                self._num_late += 1
                self._gone[name] = group, self._requeue_evicted
            elif tags["ended"]:
                self._give_up(group)
            else:
                groups[name] = group
        self._groups = dict(sorted(groups.items(), key=lambda named: named[1].order))
        return {
            name
            for name, part in parts.items()
            if name not in self._groups
            and name not in self._gone
            and not starts.get(part["prompt"], part["attempt"] + 1) <= part["attempt"]
        }

    def _give_up(self, group: _Group) -> None:
        self._gone[group.group] = group, False
        self._counts.given_up += 1
        step = group.target_step
        if step is not None and step >= self._weight_version:
            self._given_up[step] += 1
        _log.warning(
            "'%s': prompt %d is given up after %d failures.",
            printable(self.partition_id),
            group.prompt,
            group.failures,
        )

    def _evict(self, prompts: Mapping[str, dict[str, Any]]) -> list[str]:
        """Drops the ready groups that the rule names. Tells collectors which rollouts they may end."""
        view = self._view()
        names = self._ready("evict", self._policy.evict(view))
        rows = [self._groups[name].row for name in self._policy.abort(view) if name in self._groups]
        if in_vain := [row for row in rows if not prompts[row]["in_vain"]]:
            self._require_dp_client().put_samples(in_vain, self.prompts_id, tags=[{"in_vain": True}] * len(in_vain))
        self._counts.evicted += len(names)
        self._num_late += len(names)
        self._drop(names, requeue=self._requeue_evicted)
        return names

    def _clear(self, prompts: Container[str], notes: Iterable[str], answers: Sequence[str]) -> None:
        """Clears the prompts of removed groups, and these notes and answers. Has prompts generated again."""
        client = self._require_dp_client()
        again = [(group.prompt, group.attempt, group.failures) for group, requeue in self._gone.values() if requeue]
        # a put whose answer was lost is not made again: somebody may have started the prompt
        self._put_prompts([prompt for prompt in again if prompt_name(*prompt[:2]) not in prompts])
        self._gone = {name: (group, False) for name, (group, _) in self._gone.items()}
        # first the prompts: without its prompt an answer counts no more
        if rows := [*notes, *(group.row for group, _ in self._gone.values())]:
            client.clear_samples(rows, self.prompts_id)
        if answers:
            client.clear_samples(answers, self.partition_id)
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
        for order, (prompt, attempt, failures) in enumerate(prompts, self._next_order):
            rows[prompt_name(prompt, attempt)] = {
                "prompt": prompt,
                "attempt": attempt,
                "order": order,
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

    def _view(self) -> BufferView:
        return BufferView(
            weight_version=self._weight_version,
            trained_since=self._trained_since,
            groups=tuple(self._groups.values()),
            given_up=dict(self._given_up),
            drained=not self._undrawn()
            and not self._waiting
            and not any(requeue for _, requeue in self._gone.values())
            and all(group.committed is not None for group in self._groups.values()),
            first_waiting=min((tags["order"] for tags in self._waiting.values()), default=None),
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
            "drained": self._view().drained,
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
            run = self._run()
        except ReplayTimeoutError:
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
        self._next_order, self._next_prompt = run["next_order"], run["next_prompt"]
        collectors = [row for row in listed.sample_ids if row.startswith(COLLECTOR_ROW)]
        by_order = sorted(rows, key=lambda row: rows[row]["order"])
        newest = {rows[row]["prompt"]: row for row in by_order}  # prompt -> its row that was put last
        client.clear_samples([*(rows.keys() - newest.values()), *collectors], self.prompts_id)
        # of a prompt that is done, a save may lack the answers: they were written, or trained on, during the save
        self._sort({row: rows[row] for row in newest.values()}, client.list_samples(self.partition_id))
        done = set(client.list_consumed(self.prompts_id, ROLLOUT_TASK))
        for name, group in self._groups.items():
            if group.row in done and group.committed is None:
                self._gone[name] = group, True

    # --- inside; the lock is held -------------------------------------------------------------------------------------

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
        made = [group.group for group in self._groups.values() if group.committed is None]
        training = sum(group.selected for group in self._groups.values())
        text = (
            f": at version {self._weight_version}, of {len(self._groups)} groups {len(made)} are being made, "
            f"{len(self._groups) - len(made) - training} are ready, {training} are in training ({self._policy})"
        )
        if made:
            text += f"; the first being made is '{made[0]}'"
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

    def _ready(self, verb: str, names: Sequence[str], wanted: int | None = None) -> list[str]:
        """The groups that the rule named, which must be ready; of ``wanted``, so many."""
        wrong = [name for name in names if name not in self._groups or not self._groups[name].ready]
        if wrong or len(set(names)) != len(names) or wanted not in (None, len(names)):
            raise InvalidRequestError(
                f"{type(self._policy).__name__}.{verb} named {len(names)} groups, {len(set(names))} of them different, "
                f"and not ready: {preview(wrong) or 'none'}. Expected "
                f"{'ready groups' if wanted is None else f'{wanted} ready groups, or None'}."
            )
        return list(names)

    def _drop(self, names: Iterable[str], *, requeue: bool = False) -> None:
        self._gone.update({name: (self._groups.pop(name), requeue) for name in names})

    def _mark(self, names: Iterable[str], selected_version: int | None) -> None:
        for name in names:
            self._groups[name] = dataclasses.replace(self._groups[name], selected_version=selected_version)

    def _meta_of(self, names: Sequence[str]) -> KVBatchMeta:
        client = self._require_dp_client()
        rows = self._rows_of(mint_sample_ids(names, self.group_size))
        meta = client.list_samples(self.partition_id, sample_ids=rows)
        if self._has_rollouts:
            meta = meta.subset([row for row, tags in enumerate(meta.tags or ()) if COMMITTED_TAG in tags])
        extra_info: dict[str, Any] = {}
        for tags in meta.tags or ():
            del tags[COMMITTED_TAG]
            if (extra := tags.pop(EXTRA_TAG, None)) is not None:
                extra_info.update(decode_item(b64decode(str(extra))))
        fields = common_fields(client.list_fields(meta.sample_ids, self.partition_id)) if names else []
        return dataclasses.replace(meta, task_name=self.task_name, fields=fields, extra_info=extra_info)

    def _selected_of(self, meta: KVBatchMeta, operation: str, *, ends: bool = True) -> list[str]:
        """The groups of a selection, without those that have left it. These are forgotten when it ends."""
        groups = dict.fromkeys(group_of(sample_id) for sample_id in meta.sample_ids)
        names = [name for name in groups if name not in self._left_out]
        wrong = [name for name in names if name not in self._groups or not self._groups[name].selected]
        if wrong:
            raise InvalidRequestError(
                f"{operation} refused: not in training: {preview(wrong)}. Expected groups of a select() that were not "
                "consumed, discarded or put back since."
            )
        if ends:
            self._left_out.difference_update(groups)
        return names

    def _check_collectors(self) -> None:
        if self._failures and not self._num_running:
            message = list(self._failures.values())[-1]
            raise CollectorFailedError(message) from self._causes.get(message)
