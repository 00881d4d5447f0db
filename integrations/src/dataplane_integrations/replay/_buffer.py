"""`ReplayBuffer`: records the groups between rollouts and training. It holds metas and states, never a tensor.

It is one class, since one lock guards the state of all operations. `_groups` has the record of a group, `_policies` the
staleness rules.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from dataplane_core.batch import BatchedDataDict, read_columns
from dataplane_core.errors import DataPlaneError, InvalidRequestError, preview
from dataplane_core.ledger import group_of
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.attach import DataPlaneClientMixin, DataPlaneSource
from dataplane_integrations.errors import (
    CollectorFailedError,
    ReplayClosedError,
    ReplayTimeoutError,
    ReservationLostError,
)
from dataplane_integrations.replay._groups import BufferCounts, Group
from dataplane_integrations.replay._ids import INCARNATION_TAG, Reservation, group_name
from dataplane_integrations.replay._policies import BufferView, GroupView, StalenessPolicy
from dataplane_integrations.rollout import mint_sample_ids

__all__ = ["ReplayBuffer"]

_T = TypeVar("_T")


class ReplayBuffer(DataPlaneClientMixin):
    """Records which groups are being generated, ready and in training. A staleness rule limits them. Thread-safe.

    A group is reserved, then committed, then selected, then consumed. Only ready groups are evicted. A selected group
    cannot be evicted until it is consumed, discarded or put back, so nobody reads rows that are being cleared.

    The rows of a removed group are cleared after the lock is released. If the store cannot be reached then, `commit`,
    `abandon`, `consume`, `discard`, `put_back`, `set_weight_version` and the end of `snapshot` raise the store's error
    although they have taken effect: do not call them again. The ids are kept, and the next operation clears them.

    Args:
        source: The client of this process; or, in an actor, a config to attach with.
        partition_id: The partition of the groups. The caller registers it.
        policy: The staleness rule: decides what is admitted, selected and evicted.
        group_size: Answers per prompt.
        weight_version: The trainer's version at the start.
        num_prompts: Prompts to draw in total. After that `reserve` returns nothing, and `select` the remaining groups.
            None: no end.
        requeue_evicted: Generate the prompts of evicted groups again.
        task_name: The task in the metas.

    Raises:
        InvalidRequestError: A size below 1.
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
        requeue_evicted: bool = False,
        task_name: str = "train",
    ) -> None:
        if group_size < 1 or (num_prompts is not None and num_prompts < 1):
            raise InvalidRequestError(
                f"ReplayBuffer('{partition_id}') refused: group_size is {group_size}, num_prompts is {num_prompts}. "
                "Expected 1 or more."
            )
        self.setup_data_plane(source)
        self.partition_id: Final = partition_id
        self.group_size: Final = group_size
        self.task_name: Final = task_name
        self._policy = policy
        self._num_prompts = num_prompts
        self._requeue_evicted = requeue_evicted
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # all below: guarded by _lock
        self._weight_version = weight_version
        self._trained_since = 0
        self._groups: dict[str, Group] = {}
        self._next_prompt = 0
        self._next_order = 0
        self._next_commit = 0
        self._again: deque[tuple[int, int]] = deque()  # (prompt, attempt) to generate before further prompts
        self._incarnations: dict[str, int] = {}
        self._counts = BufferCounts()
        self._to_clear: dict[str, None] = {}
        self._snapshots = 0
        self._closed = False
        self._running: set[str] = set()  # enlisted collectors that have not failed
        self._failures: dict[str, tuple[str, BaseException | None]] = {}  # of failed collectors, the newest last

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
            return dataclasses.replace(self._counts)

    def view(self) -> BufferView:
        """The groups in the buffer, as the rule sees them."""
        with self._lock:
            return self._view()

    # --- the rollout side ---------------------------------------------------------------------------------------------

    def enlist(self, collector: str = "collector") -> int:
        """Starts a collector of that name. Gives up what an earlier start of it had reserved.

        Also clears every row of collectors that belongs to no group in the buffer: a collector that was killed between
        a write and its commit leaves such rows.

        Returns:
            The number of this start, for `reserve`.
        """
        with self._lock:
            self._check_open()
            number = self._incarnations[collector] = self._incarnations.get(collector, 0) + 1
            self._running.add(collector)
            self._failures.pop(collector, None)
            left = [
                each.reservation
                for each in self._groups.values()
                if each.meta is None and each.reservation.collector == collector
            ]
            self._give_up(left, requeue=True)
        self.sweep()
        return number

    def reserve(
        self,
        num_groups: int = 1,
        *,
        collector: str = "collector",
        incarnation: int | None = None,
        at_least: int | None = None,
        timeout_s: float = 60.0,
    ) -> list[Reservation]:
        """Reserves room for groups, to generate with the newest weights. Blocks until the staleness rule admits them.

        Args:
            num_groups: How many, all at once. Fewer if fewer prompts are left.
            collector: Name of the collector.
            incarnation: What `enlist` returned; None: the newest.
            at_least: After the timeout, reserve what is admitted, if it is at least so many groups. None: all.
            timeout_s: How long to wait, in seconds.

        Returns:
            The reservations, each for another prompt: first prompts to be generated again, then new ones. An empty list
            if no prompt is left and no reservation can still be given up.

        Raises:
            ReplayTimeoutError: The rule admitted fewer groups. Nothing was reserved.
            ReservationLostError: The collector has been started again.
            InvalidRequestError: A number is below 1, or larger than what the rule admits to an empty buffer.
        """
        if num_groups < 1 or (at_least is not None and at_least < 1):
            raise InvalidRequestError(
                f"reserve refused: num_groups is {num_groups}, at_least is {at_least}. Expected 1 or more."
            )

        def admitted() -> int | None:
            self._check_incarnation(collector, incarnation)
            wanted = min(num_groups, self._prompts_left(num_groups))
            if wanted == 0:
                return 0 if self._drained() else None
            return wanted if self._policy.admit(self._view()) >= wanted else None

        with self._lock:
            self._check_open()
            most = self._policy.admit(BufferView(weight_version=self._weight_version, trained_since=0, groups=()))
            if num_groups > most:
                raise InvalidRequestError(
                    f"reserve('{self.partition_id}', {num_groups} groups) refused: {self._policy} admits {most} to an "
                    "empty buffer. Expected no more than that at a time."
                )
            found = self._wait(admitted, timeout_s)
            if found is None and at_least is not None:
                room = min(num_groups, self._prompts_left(num_groups), self._policy.admit(self._view()))
                found = room if room >= at_least else None
            if found is None:
                raise ReplayTimeoutError(
                    f"reserve('{self.partition_id}', {num_groups} groups) found no room within {timeout_s:g} s: "
                    f"{self._describe()}.",
                    hint="The trainer has to consume groups, or to set its weight version.",
                )
            reserved = [self._new_reservation(collector) for _ in range(found)]
            self._changed.notify_all()
            return reserved

    def commit(self, reservations: Sequence[Reservation], meta: KVBatchMeta) -> None:
        """Reports that the rows of reservations are written. Their groups become ready.

        Args:
            reservations: Whole groups of one collector.
            meta: Exactly their rows, in any order, with ``fields``. Its tags are kept with the groups, and `select`
                returns them, even those that are not in the store.

        Raises:
            ReservationLostError: One of the reservations is no longer held. None has been committed.
            InvalidRequestError: ``meta`` has other rows than those reserved.
        """
        at = {sample_id: row for row, sample_id in enumerate(meta.sample_ids)}
        wanted = [sample_id for each in reservations for sample_id in each.sample_ids]
        if len(at) != meta.size or set(at) != set(wanted) or meta.partition_id != self.partition_id:
            wrong = sorted(set(at).symmetric_difference(wanted)) or ["none"]
            raise InvalidRequestError(
                f"commit refused: {meta.size} rows of '{meta.partition_id}' for reservations of {len(wanted)} rows in "
                f"'{self.partition_id}'; only in one of both: {preview(wrong)}. Expected exactly the rows reserved."
            )
        with self._lock:
            self._check_open()
            self._check_held(reservations)
            for each in reservations:
                part = meta.subset([at[sample_id] for sample_id in each.sample_ids])
                part.task_name = self.task_name
                part.stamp_tags({name: [value] * part.size for name, value in each.tags.items()})
                group = self._groups[each.group]
                group.meta = part
                group.view = dataclasses.replace(group.view, committed=self._next_commit)
                self._next_commit += 1
            self._counts.committed += len(reservations)
            self._evict()
            self._changed.notify_all()
        self._clear_rows()

    def abandon(self, reservations: Sequence[Reservation], *, requeue: bool = True) -> None:
        """Gives reservations up: frees their room, then clears rows that were already written.

        Args:
            reservations: If one is no longer held, only its rows are cleared.
            requeue: Generate their prompts again, before new ones.
        """
        with self._lock:
            held = [each for each in reservations if self._is_held(each)]
            lost = [each for each in reservations if each.group not in self._groups]
            self._to_clear.update(dict.fromkeys(sample_id for each in lost for sample_id in each.sample_ids))
            self._give_up(held, requeue=requeue)
        self._clear_rows()

    def fail(
        self,
        message: str,
        cause: BaseException | None = None,
        *,
        collector: str = "collector",
        incarnation: int | None = None,
    ) -> None:
        """Reports that a collector has failed and stopped, until it is enlisted again.

        When no collector is left, callers that wait for groups get a `CollectorFailedError` with the last message.

        Args:
            message: What happened.
            cause: The error that caused it.
            collector: Name of the collector.
            incarnation: What `enlist` returned; None: the newest. An earlier start is ignored.
        """
        with self._lock:
            if incarnation is not None and incarnation != self._incarnations.get(collector, 0):
                return
            self._running.discard(collector)
            self._failures.pop(collector, None)
            self._failures[collector] = (message, cause)
            self._changed.notify_all()

    def sweep(self) -> int:
        """Clears the rows of collectors that belong to no group in the buffer. Returns their number."""
        client = self._require_dp_client()
        listed = client.list_samples(self.partition_id, tag_filter={INCARNATION_TAG: (">=", 0)})
        with self._lock:
            own = {each for group in self._groups.values() for each in group.reservation.sample_ids}
            orphans = [each for each in listed.sample_ids if each not in own]
            self._to_clear.update(dict.fromkeys(orphans))
        self._clear_rows()
        return len(orphans)

    # --- the trainer's side -------------------------------------------------------------------------------------------

    def select(self, num_groups: int, *, timeout_s: float = 60.0) -> KVBatchMeta:
        """Selects groups to train on, by the staleness rule. Blocks until there are enough.

        They stay in the buffer, and cannot be evicted, until `consume`, `discard` or `put_back`.

        Args:
            num_groups: How many. Fewer only if the prompts are used up.
            timeout_s: How long to wait, in seconds.

        Returns:
            The rows; those of a group are adjacent, in the order of their ids. No rows when all prompts are used up.

        Raises:
            ReplayTimeoutError: There were not enough groups; the message says what there is.
            CollectorFailedError: There are too few groups, and every collector has failed.
        """
        if num_groups < 1:
            raise InvalidRequestError(f"select refused: num_groups is {num_groups}. Expected 1 or more.")

        def chosen() -> list[str] | None:
            waiting = sum(not each.view.selected for each in self._groups.values())
            wanted = min(num_groups, waiting) if self._drained() else num_groups
            if wanted == 0:
                return []
            names = self._policy.select(self._view(), wanted)
            if names is None:
                self._check_collectors()
            return None if names is None else self._checked(names, wanted)

        with self._lock:
            self._check_open()
            names = self._wait(chosen, timeout_s)
            if names is None:
                raise ReplayTimeoutError(
                    f"select('{self.partition_id}', {num_groups} groups) timed out after {timeout_s:g} s: "
                    f"{self._describe()}.",
                    hint="Check that collectors run, that the store is not full, and that the staleness rule's "
                    "groups_per_version is what the trainer uses up.",
                )
            for name in names:
                group = self._groups[name]
                group.view = dataclasses.replace(group.view, selected=True)
            return self._meta_of(names)

    def take(
        self, num_groups: int, select_fields: Sequence[str] | None = None, *, timeout_s: float = 60.0, **options: Any
    ) -> tuple[KVBatchMeta, BatchedDataDict]:
        """Selects groups, reads them into this process, and clears them.

        If the store fails at the clear, this does not raise: the columns are read, and the next operation clears the
        rows.

        Args:
            num_groups: As for `select`.
            select_fields: The columns; None: those that were committed.
            timeout_s: As for `select`.
            options: As for `dataplane_core.read_columns`.

        Returns:
            The meta, whose rows are cleared, and the columns. If the read fails, the groups are put back.
        """
        meta = self.select(num_groups, timeout_s=timeout_s)
        if not meta.size:
            return meta, BatchedDataDict()
        try:
            columns = read_columns(self._require_dp_client(), meta, select_fields, **options)
        except BaseException:
            self.put_back(meta)
            raise
        self._note_trained(meta)
        with suppress(DataPlaneError):
            self._clear_rows()
        return meta, columns

    def consume(self, meta: KVBatchMeta) -> None:
        """Reports that groups have been trained on: clears their rows and frees their room.

        Args:
            meta: What `select` returned, or a part of it. One row of a group stands for the whole group.

        Raises:
            InvalidRequestError: A group is not selected. Nothing has been changed.
        """
        self._note_trained(meta)
        self._clear_rows()

    def _note_trained(self, meta: KVBatchMeta) -> None:
        with self._lock:
            names = self._selected(meta, "consume")
            self._drop(names)
            self._counts.trained += len(names)
            self._trained_since += len(names)
            self._changed.notify_all()

    def discard(self, meta: KVBatchMeta, *, requeue: bool = False) -> None:
        """As `consume`, for selected groups that the trainer will not train on, such as those with equal rewards.

        Args:
            meta: As for `consume`. The rows need not be in the store any more.
            requeue: Generate their prompts again, before new ones. Use it after a failed step whose rows are cleared,
                as they are when a call of `DataPlanePolicy` raised. With ``num_prompts``, a collector ends when no
                prompt is left: then start one again.
        """
        with self._lock:
            names = self._selected(meta, "discard")
            if requeue:
                self._generate_again(self._groups[name].reservation for name in names)
            self._drop(names)
            self._counts.discarded += len(names)
            self._changed.notify_all()
        self._clear_rows()

    def put_back(self, meta: KVBatchMeta) -> None:
        """Makes selected groups ready again, for example after a failed step. Raises what `consume` raises.

        Their rows must still be in the store. `DataPlanePolicy` clears the rows of a call that raises: then use
        `discard` with ``requeue``.
        """
        with self._lock:
            for name in self._selected(meta, "put_back"):
                group = self._groups[name]
                group.view = dataclasses.replace(group.view, selected=False)
            self._evict()
            self._changed.notify_all()
        self._clear_rows()

    def wait_until_reserved(self, *, timeout_s: float = 60.0) -> None:
        """Waits until the rollout side has started all groups that the rule admits with the current weights.

        With an `InOrderPolicy`, and this before every `set_weight_version`, the weights that generate a group depend
        only on its number, not on timing. So runs can be repeated, interrupted and restored, bit for bit.

        Raises:
            ReplayTimeoutError: There was still room after ``timeout_s``.
            CollectorFailedError: There is room, but every collector has failed.
        """

        def full() -> bool | None:
            if not self._prompts_left(1) or not self._policy.admit(self._view()):
                return True
            self._check_collectors()
            return None

        with self._lock:
            self._check_open()
            if self._wait(full, timeout_s) is None:
                raise ReplayTimeoutError(
                    f"wait_until_reserved('{self.partition_id}') timed out after {timeout_s:g} s, with room for "
                    f"{self._policy.admit(self._view())} more groups: {self._describe()}."
                )

    def set_weight_version(self, weight_version: int) -> list[str]:
        """Reports that the trainer and the rollout side have new weights. Evicts groups that are too stale for them.

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
            evicted = self._evict()
            self._changed.notify_all()
        self._clear_rows()
        return evicted

    def close(self) -> None:
        """Ends all waiting calls with a `ReplayClosedError`, and detaches. Rows stay. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self.close_data_plane()

    # --- saving -------------------------------------------------------------------------------------------------------

    @contextmanager
    def snapshot(self) -> Iterator[dict[str, Any]]:
        """Yields the state as plain values. Inside the block, none of its rows is cleared.

        In the state, groups in training are ready, and groups being generated are to be generated again: a process that
        loads the state has neither.
        """
        state = self.open_snapshot()
        try:
            yield state
        finally:
            self.close_snapshot()

    def open_snapshot(self) -> dict[str, Any]:
        """The first half of `snapshot`, for a caller in another process. `close_snapshot` must follow."""
        with self._lock:
            state = self._state()
            self._snapshots += 1
        return state

    def close_snapshot(self) -> None:
        """The second half of `snapshot`: clears the rows of groups that were removed in between."""
        with self._lock:
            self._snapshots -= 1
        self._clear_rows()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replaces the state of this buffer by one of `snapshot`.

        Raises:
            InvalidRequestError: The state has another group size or partition.
        """
        for name, own in (("partition_id", self.partition_id), ("group_size", self.group_size)):
            if state[name] != own:
                raise InvalidRequestError(
                    f"load_state refused: {name} is {state[name]!r} in the state and {own!r} in the buffer."
                )
        with self._lock:
            self._check_open()
            self._weight_version = state["weight_version"]
            self._trained_since = state["trained_since"]
            self._next_prompt = state["next_prompt"]
            self._next_order = state["next_order"]
            self._next_commit = state["next_commit"]
            self._again = deque((prompt, attempt) for prompt, attempt in state["again"])
            self._incarnations = dict(state["incarnations"])
            self._counts = BufferCounts(**state["counts"])
            groups = [Group.from_state(each) for each in state["groups"]]
            self._groups = {each.reservation.group: each for each in groups}
            self._changed.notify_all()

    def _state(self) -> dict[str, Any]:
        being_made = [each.reservation for each in self._groups.values() if each.meta is None]
        return {
            "partition_id": self.partition_id,
            "group_size": self.group_size,
            "weight_version": self._weight_version,
            "trained_since": self._trained_since,
            "next_prompt": self._next_prompt,
            "next_order": self._next_order,
            "next_commit": self._next_commit,
            "again": [[each.prompt, each.attempt + 1] for each in being_made] + [list(each) for each in self._again],
            "incarnations": dict(self._incarnations),
            "counts": dataclasses.asdict(self._counts),
            "groups": [each.state(each.meta) for each in self._groups.values() if each.meta is not None],
        }

    # --- inside; the lock is held -------------------------------------------------------------------------------------

    def _wait(self, question: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """Calls ``question`` at every change until the answer is not None. None after the timeout."""
        give_up = time.monotonic() + timeout_s
        while (answer := question()) is None:
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return None
            self._changed.wait(left_s)
            self._check_open()
        return answer

    def _view(self) -> BufferView:
        return BufferView(
            weight_version=self._weight_version,
            trained_since=self._trained_since,
            groups=tuple(each.view for each in self._groups.values()),
        )

    def _prompts_left(self, at_most: int) -> int:
        """Number of prompts left, to generate again or for the first time; ``at_most`` if there is no end."""
        if self._num_prompts is None:
            return at_most
        return len(self._again) + self._num_prompts - self._next_prompt

    def _drained(self) -> bool:
        """Whether no more groups will be committed."""
        return not self._prompts_left(1) and all(each.meta is not None for each in self._groups.values())

    def _describe(self) -> str:
        views = [each.view for each in self._groups.values()]
        made = sum(each.committed is None for each in views)
        training = sum(each.selected for each in views)
        slow = next((each.group for each in views if each.committed is None), None)
        text = (
            f"at version {self._weight_version}, of {len(views)} groups {made} are being made, "
            f"{len(views) - made - training} are ready, {training} are in training ({self._policy})"
        )
        if slow is not None:
            text += f"; the first being made is '{slow}'"
        if self._again:
            text += f"; {len(self._again)} prompts are to be generated again"
        if self._failures:
            text += f"; collectors that failed: {preview(self._failures)}"
        return text

    def _new_reservation(self, collector: str) -> Reservation:
        if self._again:
            prompt, attempt = self._again.popleft()
        else:
            prompt, attempt = self._next_prompt, 0
            self._next_prompt += 1
        name = group_name(self._weight_version, prompt, attempt)
        reservation = Reservation(
            group=name,
            prompt=prompt,
            attempt=attempt,
            weight_version=self._weight_version,
            sample_ids=tuple(mint_sample_ids([name], self.group_size)),
            collector=collector,
            incarnation=self._incarnations.setdefault(collector, 0),
            order=self._next_order,
        )
        view = GroupView(group=name, weight_version=self._weight_version, order=self._next_order)
        self._next_order += 1
        self._groups[name] = Group(reservation, view)
        self._counts.reserved += 1
        return reservation

    def _give_up(self, reservations: Iterable[Reservation], *, requeue: bool) -> None:
        given_up = list(reservations)
        self._drop([each.group for each in given_up])
        self._counts.abandoned += len(given_up)
        if requeue:
            self._generate_again(given_up)
        self._changed.notify_all()

    def _generate_again(self, reservations: Iterable[Reservation]) -> None:
        self._again.extend((each.prompt, each.attempt + 1) for each in reservations)

    def _evict(self) -> list[str]:
        names = list(self._policy.evict(self._view()))
        for name in names:
            group = self._groups.get(name)
            if group is None or not group.view.ready:
                raise InvalidRequestError(
                    f"{type(self._policy).__name__}.evict named group '{name}', which is "
                    f"{'not held' if group is None else 'being made or in training'}. Expected ready groups."
                )
        if self._requeue_evicted:
            self._generate_again(self._groups[name].reservation for name in names)
        self._drop(names)
        self._counts.evicted += len(names)
        return names

    def _checked(self, names: Sequence[str], wanted: int) -> list[str]:
        wrong = [name for name in names if name not in self._groups or not self._groups[name].view.ready]
        if wrong or len(set(names)) != wanted or len(names) != wanted:
            raise InvalidRequestError(
                f"{type(self._policy).__name__}.select named {len(names)} groups, {len(set(names))} of them different, "
                f"and not ready: {preview(wrong) or 'none'}. Expected {wanted} ready groups, or None."
            )
        return list(names)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            group = self._groups.pop(name)
            self._to_clear.update(dict.fromkeys(group.reservation.sample_ids))

    def _meta_of(self, names: Sequence[str]) -> KVBatchMeta:
        metas = [meta for name in names if (meta := self._groups[name].meta) is not None]
        if not metas:
            return KVBatchMeta(self.partition_id, self.task_name, [], fields=[], sequence_lengths=[], tags=[])
        return metas[0].concat(*metas[1:])

    def _selected(self, meta: KVBatchMeta, operation: str) -> list[str]:
        names = list(dict.fromkeys(group_of(sample_id) for sample_id in meta.sample_ids))
        wrong = [name for name in names if name not in self._groups or not self._groups[name].view.selected]
        if wrong:
            raise InvalidRequestError(
                f"{operation} refused: not in training: {preview(wrong)}. Expected groups of a select() that were not "
                "consumed, discarded or put back since."
            )
        return names

    def _is_held(self, reservation: Reservation) -> bool:
        group = self._groups.get(reservation.group)
        return group is not None and group.reservation == reservation and group.meta is None

    def _check_held(self, reservations: Sequence[Reservation]) -> None:
        lost = [each.group for each in reservations if not self._is_held(each)]
        if lost:
            raise ReservationLostError(
                f"commit refused: no longer reserved: {preview(lost)}. Their prompts were given up, or the collector "
                "was started anew.",
                groups=lost,
                hint="Clear the rows: abandon(reservations) does.",
            )

    def _check_incarnation(self, collector: str, incarnation: int | None) -> None:
        newest = self._incarnations.get(collector, 0)
        if incarnation is not None and incarnation != newest:
            raise ReservationLostError(
                f"reserve refused: collector '{collector}' was started {newest} times, this is start {incarnation}."
            )

    def _check_collectors(self) -> None:
        if self._failures and not self._running:
            message, cause = list(self._failures.values())[-1]
            raise CollectorFailedError(message) from cause

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayClosedError(f"the replay buffer of '{self.partition_id}' is closed.")

    # --- inside; without the lock -------------------------------------------------------------------------------------

    def _clear_rows(self) -> None:
        """Clears the rows of removed groups. If the store fails, the next call tries again."""
        with self._lock:
            if self._snapshots:
                return  # the end of the last snapshot clears them
            ids, self._to_clear = list(self._to_clear), {}
        if not ids:
            return
        try:
            self._require_dp_client().clear_samples(ids, self.partition_id)
        except DataPlaneError:
            with self._lock:
                self._to_clear.update(dict.fromkeys(ids))
            raise
