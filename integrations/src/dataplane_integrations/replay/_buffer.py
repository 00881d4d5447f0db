"""`ReplayBuffer`: the trainer's side of asynchronous training."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dataplane_core.batch import BatchedDataDict, read_columns
from dataplane_core.errors import DataPlaneError, InvalidRequestError, LostSamplesError
from dataplane_core.ledger import group_of
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.errors import ReplayTimeoutError
from dataplane_integrations.replay._state import RunState


class ReplayBuffer(RunState):
    """Puts prompts into the store, as a staleness rule admits them, and gives the trainer the groups of their answers.

    A group is reserved, then committed, then selected, then consumed. Only ready groups are evicted. A selected group
    cannot be evicted until it is consumed, discarded or put back, so nobody reads rows that are being cleared.

    All that the buffer knows is in the store, in the partition of the answers and in that of the prompts, besides which
    groups are selected. So collectors may be in any process (`PromptSource`, `serve`), and a new buffer goes on with
    ``resume``, after ``client.load(folder)`` of a `save`, or if the trainer alone has died. There is one buffer per
    run. It is also the source of collectors in its own process. Thread-safe.

    A call that removes groups has taken effect also where it raises because the store cannot be reached: do not call it
    again. The next call clears the rows.

    Args:
        source: The client of this process; or a config to attach with.
        partition_id: The partition of the answers. The caller registers it.
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
        resume: Go on with the prompts and answers that the store holds. Otherwise the run begins anew.
        lease_s: Seconds of lease of the prompts that are reserved in this process.
        task_name: The task in the metas.

    Raises:
        InvalidRequestError: A size below 1, or ``spare_prompts`` without ``num_prompts``; or, with ``resume``, another
            ``group_size`` than before.
        UnknownPartitionError: The partition of the answers is not registered.
    """

    def batches(self, num_groups: int, *, timeout_s: float = 60.0) -> Iterator[KVBatchMeta]:
        """Selections, until the prompts are used up. Each is consumed when the next one is asked for.

        The one that is in training when the loop is left, by a ``break`` or an error, is put back.

        Args:
            num_groups: As for `select`.
            timeout_s: As for `select`.
        """
        while not self.finished:
            meta = self.select(num_groups, timeout_s=timeout_s)
            if not meta.size:
                return
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
            return self._checked(names, fewest)

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
            for name in names:
                group = self._groups[name]
                view = dataclasses.replace(group.view, selected=True, selected_version=self._weight_version)
                self._selected[name] = self._groups[name] = dataclasses.replace(group, view=view)
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
            self._counts.trained += len(names)
            self._drop(names)
            self._settled()

    def discard(self, meta: KVBatchMeta, *, requeue: bool = False) -> None:
        """As `consume`, for selected groups that the trainer will not train on, such as those with equal rewards.

        Args:
            meta: As for `consume`. The rows need not be in the store any more.
            requeue: Generate their prompts again. Use it after a failed step whose rows are cleared, as they are when a
                call of `DataPlanePolicy` raised. With ``num_prompts``, a collector ends when no prompt is left: then
                start one again.
        """
        with self._lock:
            names = self._ended(meta, "discard")
            self._counts.discarded += len(names)
            self._drop(names, requeue=requeue)
            self._settled()

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
            selected = self._selected_of(meta, "leave_out")
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
            for name in self._ended(meta, "put_back"):
                del self._selected[name]
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
        """Saves the run: `DataPlaneClient.save` of the two partitions, which ``client.load(folder)`` loads.

        Rollouts may go on. In a buffer that is made with ``resume`` after the load, groups that are in training now are
        ready, and those that are being generated are generated again. To let that run continue exactly like this one,
        save between two steps, inside ``collector.quiet()``.

        Args:
            folder: As for `DataPlaneClient.save`.
            metadata: JSON values that ``load`` returns.

        Raises:
            SaveError: The save cannot be written. Like after any other error, the former save is unchanged.
        """
        with self._lock:  # the prompts first: answers that come meanwhile are made again, none are lost
            self._look()
            self._require_dp_client().save(folder, metadata, [self.prompts_id, self.partition_id])
