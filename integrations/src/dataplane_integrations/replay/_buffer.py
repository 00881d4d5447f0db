"""`ReplayBuffer`: records the groups between rollouts and training. It holds metas and states, never a tensor.

Here are its operations. `_state` has what they work on, `_policies` the staleness rules.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dataplane_core.batch import BatchedDataDict, read_columns
from dataplane_core.errors import DataPlaneError, InvalidRequestError, LostSamplesError, preview
from dataplane_core.ledger import group_of
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.errors import ReplayTimeoutError
from dataplane_integrations.replay._ids import END_WEIGHT_VERSION_TAG, INCARNATION_TAG, Reservation
from dataplane_integrations.replay._state import BufferState


class ReplayBuffer(BufferState):
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
        spare_prompts: So many further prompts are drawn, each only in place of one that was given up.
        max_attempts: A prompt whose rollout has failed so many times is given up, and the next one takes its place.
            After its first failure it is generated alone, so that it fails no other. Only a prompt that has failed
            alone is given up. None: no prompt is given up.
        requeue_evicted: Generate the prompts of evicted groups again.
        task_name: The task in the metas.

    Raises:
        InvalidRequestError: A size below 1, or ``spare_prompts`` without ``num_prompts``.
    """

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
        try:
            self.sweep()
        except BaseException:
            self.withdraw(collector=collector, incarnation=number)
            raise
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
            num_groups: How many, all at once. Fewer if fewer prompts are left, or with ``max_attempts``.
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
            wanted = self._for_a_call(num_groups)
            if wanted == 0:
                return 0 if self._drained() else None
            return wanted if self._policy.admit(self.view()) >= wanted else None

        with self._lock:
            self._check_open()
            most = self._policy.capacity(weight_version=self._weight_version)
            if num_groups > most:
                raise InvalidRequestError(
                    f"reserve('{self.partition_id}', {num_groups} groups) refused: {self._policy} admits {most} to an "
                    "empty buffer. Expected no more than that at a time."
                )
            found = self._wait(admitted, timeout_s)
            if found is None and at_least is not None:
                room = min(self._for_a_call(num_groups), self._policy.admit(self.view()))
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
                returns them, even those that are not in the store. The tag ``end_weight_version`` says with which
                weights the generation ended; rows without it get the buffer's version.

        Raises:
            ReservationLostError: One of the reservations is no longer held. None has been committed.
            InvalidRequestError: ``meta`` has other rows than those reserved, no ``fields``, or an
                ``end_weight_version`` that is lower than that of the reservation.
        """
        at = {sample_id: row for row, sample_id in enumerate(meta.sample_ids)}
        wanted = [sample_id for each in reservations for sample_id in each.sample_ids]
        if len(at) != meta.size or set(at) != set(wanted) or meta.partition_id != self.partition_id:
            wrong = sorted(set(at).symmetric_difference(wanted)) or ["none"]
            raise InvalidRequestError(
                f"commit refused: {meta.size} rows of '{meta.partition_id}' for reservations of {len(wanted)} rows in "
                f"'{self.partition_id}'; only in one of both: {preview(wrong)}. Expected exactly the rows reserved."
            )
        if meta.fields is None:
            raise InvalidRequestError(
                f"commit refused: a meta of {meta.size} rows without fields. Expected the names of the columns, as in "
                "the meta that put_samples returns."
            )
        with self._lock:
            self._check_open()
            self._check_held(reservations)
            ends = {
                each.group: [_end_version(meta, at[one], each, self._weight_version) for one in each.sample_ids]
                for each in reservations
            }
            for each in reservations:
                part = meta.subset([at[sample_id] for sample_id in each.sample_ids])
                part.task_name = self.task_name
                tags = {name: [value] * part.size for name, value in each.tags.items()}
                part.stamp_tags({**tags, END_WEIGHT_VERSION_TAG: ends[each.group]})
                group = self._groups[each.group]
                group.meta = part
                group.view = dataclasses.replace(
                    group.view, committed=self._next_commit, end_weight_version=max(ends[each.group])
                )
                self._next_commit += 1
                self._failed.pop(each.prompt, None)
            self._counts.committed += len(reservations)
            self._evict()
            self._changed.notify_all()
        self._clear_rows()

    def abandon(self, reservations: Sequence[Reservation], *, requeue: bool = True, failed: bool = False) -> None:
        """Gives reservations up: frees their room, then clears rows that were already written.

        Args:
            reservations: If one is no longer held, only its rows are cleared.
            requeue: Generate their prompts again, before new ones. Otherwise they are given up.
            failed: The rollout of all of them, one call, failed: counts for ``max_attempts``.
        """
        with self._lock:
            held = [each for each in reservations if self._is_held(each)]
            self._give_up(reservations, requeue=False)
            alone = len(reservations) == 1
            self._generate_again(self._retried(held, requeue=requeue, failed=failed, alone=alone))
            self._changed.notify_all()
        self._clear_rows()

    def to_abort(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """Which rollouts are in vain: the staleness rule will not train on their groups, or they are not reserved.

        A rollout may ask this while it generates, and raise `RolloutAbortedError` if it gets all of its reservations.

        Args:
            reservations: What is being generated.
        """
        with self._lock:
            stale = set(self._policy.abort(self.view()))
            return [each for each in reservations if each.group in stale or not self._is_held(each)]

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """As `abandon`, after `to_abort`. Prompts of stale groups count as evicted: see ``requeue_evicted``.

        Args:
            reservations: Those of rollouts that were ended. The prompts of those that are not in vain are generated
                again.
        """
        with self._lock:
            in_vain = self.to_abort(reservations)
            self._num_late += len(in_vain)
            self._give_up(in_vain, requeue=self._requeue_evicted)
            self._give_up([each for each in reservations if each not in in_vain], requeue=True)
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

        When no collector is left, callers that wait for groups get a `CollectorFailedError` with the last message,
        also if other collectors have ended without a failure.

        Args:
            message: What happened.
            cause: The error that caused it.
            collector: Name of the collector.
            incarnation: What `enlist` returned; None: the newest. An earlier start is ignored.
        """
        with self._lock:
            if self._has_ended(collector, incarnation):
                self._failures.pop(collector, None)
                self._failures[collector] = (message, cause)

    def withdraw(self, *, collector: str = "collector", incarnation: int | None = None) -> None:
        """Reports that a collector has ended without a failure, until it is enlisted again.

        Args:
            collector: As for `fail`.
            incarnation: As for `fail`.
        """
        with self._lock:
            self._has_ended(collector, incarnation)

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
            view = self.view()
            if view.drained:
                most, fewest = min(most, sum(not each.selected for each in view.groups)), 1
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
            return self._checked(names, fewest)

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
                group.view = dataclasses.replace(group.view, selected=True, selected_version=self._weight_version)
            return self._meta_of(names)

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
        """Selects groups, reads them into this process, and clears them.

        If the store fails at a clear, this does not raise: the next operation clears the rows.

        Args:
            num_groups: As for `select`.
            select_fields: The columns; None: those that were committed.
            min_groups: As for `select`.
            timeout_s: As for `select`.
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
            names = self._ended(meta, "consume")
            version = self._weight_version
            self._trained_since += sum(self._groups[name].view.selected_version == version for name in names)
            self._drop(names)
            self._counts.trained += len(names)
            self._changed.notify_all()
        self._clear_rows()

    def discard(self, meta: KVBatchMeta, *, requeue: bool = False) -> None:
        """As `consume`, for selected groups that the trainer will not train on, such as those with equal rewards.

        Args:
            meta: As for `consume`. The rows need not be in the store any more.
            requeue: Generate their prompts again, before new ones. Use it after a failed step whose rows are cleared,
                as they are when a call of `DataPlanePolicy` raised. With ``num_prompts``, a collector ends when no
                prompt is left: then start one again.
        """
        with self._lock:
            names = self._ended(meta, "discard")
            if requeue:
                self._generate_again(self._groups[name].reservation for name in names)
            self._drop(names)
            self._counts.discarded += len(names)
            self._changed.notify_all()
        self._clear_rows()

    def leave_out(self, meta: KVBatchMeta, lost: Sequence[str]) -> KVBatchMeta:
        """Takes groups of which the store has lost a row out of a selection, and has their prompts generated again.

        Later calls with ``meta`` mean what is left of it. This is what `DataPlanePolicy` needs as ``replace_lost``.

        Args:
            meta: What `select` returned, or a part of it.
            lost: Samples of ``meta`` whose payload is gone, as `LostSamplesError.missing_samples` names them, or that
                have to go for another reason. One row of a group stands for the whole group.

        Returns:
            The rows of the other groups; maybe none.

        Raises:
            InvalidRequestError: A group is not selected. Nothing has been changed.
        """
        gone = {group_of(sample_id) for sample_id in lost}
        with self._lock:
            selected = self._selected(meta, "leave_out")
            names, left = [name for name in selected if name in gone], {name for name in selected if name not in gone}
            self._generate_again(self._groups[name].reservation for name in names)
            self._drop(names)
            for rest in self._left_out.values():
                rest.difference_update(names)
            self._left_out.update((name, set(left)) for name in names)
            self._counts.lost += len(names)
            self._changed.notify_all()
        self._clear_rows()
        return meta.subset([row for row, sample_id in enumerate(meta.sample_ids) if group_of(sample_id) in left])

    def put_back(self, meta: KVBatchMeta) -> None:
        """Makes selected groups ready again, for example after a failed step. Raises what `consume` raises.

        Their rows must still be in the store. `DataPlanePolicy` clears the rows of a call that raises: then use
        `discard` with ``requeue``.
        """
        with self._lock:
            for name in self._ended(meta, "put_back"):
                group = self._groups[name]
                group.view = dataclasses.replace(group.view, selected=False, selected_version=None)
            self._evict()
            self._changed.notify_all()
        self._clear_rows()

    def wait_until_reserved(self, *, timeout_s: float = 60.0) -> None:
        """Waits until the rollout side has started all groups that the rule admits with the current weights.

        With an `InOrderPolicy`, and this before every `set_weight_version`, the weights that generate a group depend
        only on its number, not on timing. So runs can be repeated, interrupted and restored, bit for bit.

        Raises:
            ReplayTimeoutError: There was still room after ``timeout_s``.
            CollectorFailedError: There is room, no collector is left, and one has failed.
        """

        def full() -> bool | None:
            if not self._prompts_left(1) or not self._policy.admit(self.view()):
                return True
            self._check_collectors()
            return None

        with self._lock:
            self._check_open()
            if self._wait(full, timeout_s) is None:
                raise ReplayTimeoutError(
                    f"wait_until_reserved('{self.partition_id}') timed out after {timeout_s:g} s, with room for "
                    f"{self._policy.admit(self.view())} more groups: {self._describe()}."
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
            evicted = self._evict()
            self._log_late()
            self._changed.notify_all()
        self._clear_rows()
        return evicted

    def close(self) -> None:
        """Ends all waiting calls with a `ReplayClosedError`, and detaches. Rows stay. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self.close_data_plane()


def _end_version(meta: KVBatchMeta, row: int, reservation: Reservation, weight_version: int) -> int:
    """With which weights the generation of a row ended, as its tag says; else ``weight_version``."""
    end = (meta.tags or [{}] * meta.size)[row].get(END_WEIGHT_VERSION_TAG, weight_version)
    if not isinstance(end, int) or end < reservation.weight_version:
        raise InvalidRequestError(
            f"commit refused: tag {END_WEIGHT_VERSION_TAG} of '{meta.sample_ids[row]}' is {end!r}. Expected an int, "
            f"at least {reservation.weight_version}, the version with which its generation began."
        )
    return end
