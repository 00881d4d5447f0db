"""`BufferState`: what a `ReplayBuffer` records, its form in a save, and the steps of which its operations consist."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from base64 import b64decode, b64encode
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dataplane_core.codec import decode_item, encode_item, plain
from dataplane_core.errors import DataPlaneError, InvalidRequestError, preview, printable
from dataplane_core.ledger import group_of
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.attach import DataPlaneClientMixin, DataPlaneSource
from dataplane_integrations.errors import CollectorFailedError, ReplayClosedError, ReservationLostError
from dataplane_integrations.replay._ids import Reservation, group_name
from dataplane_integrations.replay._policies import BufferView, GroupView, StalenessPolicy
from dataplane_integrations.rollout import mint_sample_ids

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class BufferCounts:
    """How many groups went through each step so far.

    Attributes:
        reserved: Reservations handed out.
        committed: Groups committed.
        trained: Groups consumed.
        discarded: Groups that the trainer selected but did not train on.
        evicted: Groups that became too stale; their rows were cleared.
        abandoned: Reservations given up, including those of dead collectors.
        lost: Groups that were left out of a selection, mostly because the store had lost a row of them.
        given_up: Prompts given up, mostly after ``max_attempts`` failures.
    """

    reserved: int = 0
    committed: int = 0
    trained: int = 0
    discarded: int = 0
    evicted: int = 0
    abandoned: int = 0
    lost: int = 0
    given_up: int = 0


@dataclass(slots=True)
class Group:
    """A group in the buffer: being generated (``meta`` is None), ready, or in training."""

    reservation: Reservation
    view: GroupView
    meta: KVBatchMeta | None = None

    def state(self, meta: KVBatchMeta) -> dict[str, Any]:
        """A committed group as values of JSON; it is ready after a restore. ``meta`` is its meta, not None.

        Raises:
            InvalidTypeError: As for an object column: the meta's ``extra_info`` holds what cannot be saved.
        """
        reservation = dataclasses.asdict(self.reservation)
        del reservation["sample_ids"]  # the meta has them
        values = {field.name: getattr(meta, field.name) for field in dataclasses.fields(meta)}
        values["extra_info"] = b64encode(encode_item(plain(meta.extra_info), "extra_info")).decode()
        view = {name: getattr(self.view, name) for name in ("committed", "end_weight_version")}
        return {"reservation": reservation, **view, "meta": values}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Group:
        """Makes a group from what `state` returned."""
        reservation = Reservation(**{**state["reservation"], "sample_ids": tuple(state["meta"]["sample_ids"])})
        view = GroupView(
            group=reservation.group,
            weight_version=reservation.weight_version,
            order=reservation.order,
            committed=state["committed"],
            target_step=reservation.target_step,
            end_weight_version=state.get("end_weight_version"),
        )
        values = dict(state["meta"])
        values["extra_info"] = decode_item(b64decode(values["extra_info"]))
        return cls(reservation, view, KVBatchMeta(**values))


class BufferState(DataPlaneClientMixin):
    """The base of `ReplayBuffer`, which has the arguments. One lock guards all of it."""

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
        self.setup_data_plane(source)
        self.partition_id: Final = partition_id
        self.group_size: Final = group_size
        self.task_name: Final = task_name
        self._policy = policy
        self._num_prompts = num_prompts
        self._spare_prompts = spare_prompts
        self._max_attempts = max_attempts
        self._requeue_evicted = requeue_evicted
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # all below: guarded by _lock
        self._weight_version = weight_version
        self._trained_since = 0
        self._num_late = 0  # groups dropped since the last version because they came too late
        self._groups: dict[str, Group] = {}
        self._left_out: dict[str, set[str]] = {}  # a group that left a selection -> those that are still in it
        self._next_prompt = 0
        self._next_order = 0
        self._next_commit = 0
        self._again: deque[tuple[int, int]] = deque()  # (prompt, attempt) to generate before further prompts
        self._failed: dict[int, int] = {}  # prompt -> how often its rollout failed, if it is to be generated again
        self._given_up: Counter[int] = Counter()  # target step -> prompts given up, from this version on
        self._incarnations: dict[str, int] = {}
        self._counts = BufferCounts()
        self._to_clear: dict[str, None] = {}
        self._snapshots = 0
        self._closed = False
        self._running: set[str] = set()  # enlisted collectors that have not ended
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

    @property
    def finished(self) -> bool:
        """Whether the prompts are used up, and no group is left: `select` has nothing to return any more."""
        return self.view().finished

    def view(self) -> BufferView:
        """The groups in the buffer, as the rule sees them."""
        with self._lock:
            return BufferView(
                weight_version=self._weight_version,
                trained_since=self._trained_since,
                groups=tuple(each.view for each in self._groups.values()),
                given_up=dict(self._given_up),
                drained=self._drained(),
            )

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

    def load_state(self, state: Mapping[str, Any]) -> list[str]:
        """Replaces the state of this buffer by one of `snapshot`.

        If the state has more groups than the staleness rule admits, the buffer keeps those that `StalenessPolicy.keep`
        names. The others count as evicted, and their prompts are generated again, before all others.

        Returns:
            The sample ids of the groups that it does not keep.

        Raises:
            InvalidRequestError: The state has another group size or partition.
        """
        for name, own in (("partition_id", self.partition_id), ("group_size", self.group_size)):
            if state[name] != own:
                raise InvalidRequestError(
                    f"load_state refused: {name} is {state[name]!r} in the state and {own!r} in the buffer."
                )
        groups = [Group.from_state(each) for each in state["groups"]]
        with self._lock:
            self._check_open()
            self._weight_version = state["weight_version"]
            self._trained_since = state["trained_since"]
            self._next_prompt = state["next_prompt"]
            self._next_order = state["next_order"]
            self._next_commit = state["next_commit"]
            self._again = deque((prompt, attempt) for prompt, attempt in state["again"])
            self._failed = dict(state.get("failed", ()))
            self._given_up = Counter(dict(state.get("given_up", ())))
            self._incarnations = dict(state["incarnations"])
            self._counts = BufferCounts(**state["counts"])
            self._groups = {each.reservation.group: each for each in groups}
            self._left_out, self._to_clear = {}, {}
            cut = self._cut()
            self._changed.notify_all()
        return cut

    def _cut(self) -> list[str]:
        """Gives up the groups for which a buffer with this rule has no room."""
        room = self._policy.capacity(weight_version=self._weight_version, trained_since=self._trained_since)
        if len(self._groups) <= room:
            return []
        kept = self._checked(self._policy.keep(self.view(), room), room, "keep")
        cut = [self._groups.pop(name).reservation for name in self._groups.keys() - kept]
        cut.sort(key=lambda each: each.order)
        self._again.extendleft((each.prompt, each.attempt + 1) for each in reversed(cut))
        self._counts.evicted += len(cut)
        _log.warning(
            "'%s': the save holds %d groups, and %r has room for %d. %d are generated again.",
            printable(self.partition_id),
            len(kept) + len(cut),
            self._policy,
            room,
            len(cut),
        )
        return [sample_id for each in cut for sample_id in each.sample_ids]

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
            "failed": [list(each) for each in self._failed.items()],
            "given_up": [list(each) for each in self._given_up.items()],
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

    def _prompts_left(self, at_most: int) -> int:
        """Number of prompts left, to generate again or for the first time; ``at_most`` if there is no end."""
        if self._num_prompts is None:
            return at_most
        end = self._num_prompts + min(self._spare_prompts, self._counts.given_up)
        return len(self._again) + max(0, end - self._next_prompt)  # a save may have drawn more than this buffer has

    def _for_a_call(self, num_groups: int) -> int:
        """Number of prompts for the next call of a rollout. One that has failed is alone, so that it fails no other."""
        before = next((at for at, (prompt, _) in enumerate(self._again) if prompt in self._failed), num_groups)
        return min(num_groups, self._prompts_left(num_groups), max(1, before))

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
        step = self._policy.target_step(self.view())
        reservation = Reservation(
            group=name,
            prompt=prompt,
            attempt=attempt,
            weight_version=self._weight_version,
            sample_ids=tuple(mint_sample_ids([name], self.group_size)),
            collector=collector,
            incarnation=self._incarnations.setdefault(collector, 0),
            order=self._next_order,
            target_step=step,
        )
        view = GroupView(group=name, weight_version=self._weight_version, order=self._next_order, target_step=step)
        self._next_order += 1
        self._groups[name] = Group(reservation, view)
        self._counts.reserved += 1
        return reservation

    def _give_up(self, reservations: Sequence[Reservation], *, requeue: bool) -> None:
        given_up = [each for each in reservations if self._is_held(each)]
        lost = [each for each in reservations if each.group not in self._groups]
        self._to_clear.update(dict.fromkeys(sample_id for each in lost for sample_id in each.sample_ids))
        self._drop([each.group for each in given_up])
        self._counts.abandoned += len(given_up)
        if requeue:
            self._generate_again(given_up)
        self._changed.notify_all()

    def _retried(
        self, reservations: Sequence[Reservation], *, requeue: bool, failed: bool, alone: bool
    ) -> list[Reservation]:
        """Those whose prompts are to be generated again. The others are given up.

        A prompt that failed together with others may be innocent: it is generated again, alone.
        """
        if failed and self._max_attempts is not None:
            for each in reservations:
                self._failed[each.prompt] = self._failed.get(each.prompt, 0) + 1
        most = self._max_attempts if failed and alone else None
        again = [each for each in reservations if requeue and (most is None or self._failed.get(each.prompt, 0) < most)]
        for each in reservations:
            if each not in again:
                failures = self._failed.pop(each.prompt, 0)
                self._counts.given_up += 1
                if each.target_step is not None and each.target_step >= self._weight_version:
                    self._given_up[each.target_step] += 1
                _log.warning(
                    "'%s': prompt %d is given up after %d failures.",
                    printable(self.partition_id),
                    each.prompt,
                    failures,
                )
        return again

    def _generate_again(self, reservations: Iterable[Reservation]) -> None:
        self._again.extend((each.prompt, each.attempt + 1) for each in reservations)

    def _evict(self) -> list[str]:
        names = list(self._policy.evict(self.view()))
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
        self._num_late += len(names)
        return names

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

    def _checked(self, names: Sequence[str], wanted: int, method: str = "select") -> list[str]:
        wrong = [name for name in names if name not in self._groups or not self._groups[name].view.ready]
        if wrong or len(set(names)) != wanted or len(names) != wanted:
            raise InvalidRequestError(
                f"{type(self._policy).__name__}.{method} named {len(names)} groups, {len(set(names))} of them "
                f"different, and not ready: {preview(wrong) or 'none'}. Expected {wanted} ready groups, or None."
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
        """The groups of a selection, without those that have left it."""
        groups = dict.fromkeys(group_of(sample_id) for sample_id in meta.sample_ids)
        names = [name for name in groups if name not in self._left_out]
        wrong = [name for name in names if name not in self._groups or not self._groups[name].view.selected]
        if wrong:
            raise InvalidRequestError(
                f"{operation} refused: not in training: {preview(wrong)}. Expected groups of a select() that were not "
                "consumed, discarded or put back since."
            )
        return names

    def _ended(self, meta: KVBatchMeta, operation: str) -> list[str]:
        """As `_selected`, for an operation that ends the selection. Forgets the groups that had left it."""
        names = self._selected(meta, operation)
        named = {group_of(sample_id) for sample_id in meta.sample_ids}
        self._left_out = {
            name: rest.difference(names)
            for name, rest in self._left_out.items()
            if name not in named and not (rest and rest.issubset(names))
        }
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

    def _has_ended(self, collector: str, incarnation: int | None) -> bool:
        """Notes that a collector runs no more. False if this start of it is not the newest."""
        if incarnation is not None and incarnation != self._incarnations.get(collector, 0):
            return False
        self._running.discard(collector)
        self._changed.notify_all()
        return True

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
