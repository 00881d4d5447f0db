"""`PromptSource`: prompts that a process claims from the store, generates and commits. Its ids and tags."""

from __future__ import annotations

import re
import threading
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

from dataplane_core.arguments import Count, PositiveSeconds, checked_as
from dataplane_core.client import RENEWED_AFTER, HeldMetas
from dataplane_core.codec import encode_item, plain
from dataplane_core.errors import (
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    LeaseExpiredError,
    UnknownPartitionError,
    preview,
)
from dataplane_core.ledger import group_of, rollout_of
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import INPUT_LENGTHS_TAG, WEIGHT_VERSION_TAG
from dataplane_core.spec import TagFilter, TagValue
from dataplane_integrations.attach import DataPlaneClientMixin, DataPlaneSource
from dataplane_integrations.errors import ReplayClosedError, ReplayTimeoutError, ReservationLostError
from dataplane_integrations.rollout import mint_sample_ids

#: The version of the weights with which a row's generation ended. `PromptSource.commit` adds it to rows without it.
END_WEIGHT_VERSION_TAG: Final = "end_weight_version"
#: The tag that a commit adds: the trainer may take the group.
COMMITTED_TAG: Final = "committed"
#: The tag of a row of the group that holds the ``extra_info`` of its meta.
EXTRA_TAG: Final = "extra_info"

#: The task of the prompts.
ROLLOUT_TASK: Final = "rollout"
#: The row with what the trainer tells the collectors, and the beginning of the rows of collectors.
RUN_ROW: Final = "run"
COLLECTOR_ROW: Final = "collector-"

#: The longest wait for prompts before it looks whether more will come, in seconds.
_LOOK_S: Final = 0.2
#: A versioned id: its group, weight version, prompt, attempt and index.
SAMPLE_ID: Final = re.compile(
    r"(?P<group>v(?P<weight_version>\d+)_p(?P<prompt>\d+)(?:r(?P<attempt>\d+))?)_g(?P<index>\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A prompt that one collector has claimed, and room for the group of its answers.

    Attributes:
        group: ``v{weight_version}_p{prompt}``. A prompt that is generated again has ``r{attempt}`` after its number, so
            that no id is used twice.
        prompt: Number of the prompt, from 0, in the order in which prompts are drawn.
        attempt: How often this prompt was started before.
        weight_version: The version of the weights to generate with.
        sample_ids: The ids to write, one per answer.
        collector: Name of the collector.
        order: The prompt's place in the order of the run, from 0.
        target_step: The weight version that is to be trained on it; None if the staleness rule does not say.
        row: The id of the prompt's row in the store.
    """

    group: str
    prompt: int
    attempt: int
    weight_version: int
    sample_ids: tuple[str, ...]
    collector: str
    order: int
    target_step: int | None = None
    row: str = ""

    @property
    def tags(self) -> dict[str, TagValue]:
        """The tags that each of its rows must have."""
        return {WEIGHT_VERSION_TAG: self.weight_version, "prompt": self.prompt, "collector": self.collector}


def prompts_of(partition_id: str) -> str:
    """The partition of the prompts whose answers are in ``partition_id``."""
    return f"{partition_id}-prompts"


def prompt_name(prompt: int, attempt: int) -> str:
    """The row of a prompt: ``p17``, or ``p17r1`` if it was started once before."""
    return f"p{prompt}" + (f"r{attempt}" if attempt else "")


def group_name(weight_version: int, prompt: int, attempt: int) -> str:
    """The name of a group: ``v3_p17``, or ``v3_p17r1``."""
    return f"v{weight_version}_{prompt_name(prompt, attempt)}"


def parse_sample_id(sample_id: str) -> dict[str, Any]:
    """The parts of a versioned id: ``group``, ``weight_version``, ``prompt``, ``attempt`` and ``index`` in the group.

    Raises:
        InvalidRequestError: Not a versioned id.
    """
    match = SAMPLE_ID.fullmatch(sample_id)
    if match is None:
        raise InvalidRequestError(
            f"'{sample_id}' is not a versioned sample id. Expected v{{weight_version}}_p{{prompt}}_g{{i}}, such as "
            "'v3_p17_g0'."
        )
    return {name: part if name == "group" else int(part) for name, part in match.groupdict(default="0").items()}


class PromptSource(DataPlaneClientMixin):
    """The prompts of a run, for the process that generates their answers. Thread-safe.

    The trainer's `ReplayBuffer` puts prompts into the store; any number of processes claim them here. A claim is held
    on lease, which a thread renews. If the process dies, its prompts are handed out again when the lease ends, and the
    rows that it wrote are cleared.

    Args:
        source: The client of this process; or a config to attach with.
        partition_id: The partition of the answers.
        lease_s: Seconds after which the prompts of a process that died are handed out again.

    Raises:
        InvalidRequestError: A lease of 0 s or less, or without end.
        InvalidTypeError: An argument has another type.
    """

    def __init__(self, source: DataPlaneSource, partition_id: str, *, lease_s: float = 60.0) -> None:
        self._lease_s: float = checked_as(f"{type(self).__name__}: lease_s", PositiveSeconds, lease_s)
        self.setup_data_plane(source)
        self._held = HeldMetas(self._require_dp_client(), lease_s)
        self.partition_id: Final = partition_id
        self.prompts_id: Final = prompts_of(partition_id)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._ending = threading.Lock()  # taken before _lock: reservations end one call after the other
        # guarded by _lock
        self._claims: dict[str, KVBatchMeta] = {}  # group -> the claim of its prompt, as long as it is held
        self._renewer: threading.Thread | None = None
        self._causes: dict[str, BaseException] = {}  # of failures of collectors of this process, by their messages

    @property
    def weight_version(self) -> int:
        """The trainer's version."""
        version: int = self._run()[WEIGHT_VERSION_TAG]
        return version

    def wait_for_trainer(self, timeout_s: float = 60.0) -> None:
        """Waits until a trainer has begun the run.

        Raises:
            ReplayTimeoutError: There was none within ``timeout_s``.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            self._check_open()
            with suppress(UnknownPartitionError, ReplayTimeoutError):
                self._run()
                return
            if time.monotonic() >= give_up:
                raise ReplayTimeoutError(f"no trainer has begun a run on '{self.partition_id}' in {timeout_s:g} s.")
            self._closing.wait(_LOOK_S)

    def reserve(
        self,
        num_groups: int = 1,
        *,
        collector: str = "collector",
        at_least: int | None = None,
        timeout_s: float = 60.0,
    ) -> list[Reservation]:
        """Claims prompts, to generate with the newest weights. Blocks until the staleness rule admits them.

        Args:
            num_groups: How many, all at once. Fewer if fewer prompts are left, or if prompts have failed before, which
                are generated alone.
            collector: Name of the collector.
            at_least: After the timeout, claim what there is, if it is at least so many. None: all.
            timeout_s: How long to wait, in seconds.

        Returns:
            The reservations, each for another prompt. An empty list if no prompt is left, and none can be given back.

        Raises:
            ReplayTimeoutError: The rule admitted fewer groups, or the trainer has not begun. Nothing was claimed.
            ReplayClosedError: This source was closed.
            InvalidRequestError: A number is below 1, or larger than what the rule admits to an empty buffer.
            InvalidTypeError: An argument has another type.
            UnknownPartitionError: The partition of the prompts was dropped.
        """
        checked_as("reserve: num_groups", Count, num_groups)
        checked_as("reserve: at_least", Count | None, at_least)
        give_up = time.monotonic() + timeout_s
        while True:
            self._check_open()
            try:
                run = self._run()
            except ReplayTimeoutError:  # it begins just now
                if time.monotonic() >= give_up:
                    raise
                self._closing.wait(_LOOK_S)
                continue
            if num_groups > run["capacity"]:
                raise InvalidRequestError(
                    f"reserve('{self.partition_id}', {num_groups} groups) refused: the staleness rule admits "
                    f"{run['capacity']} to an empty buffer. Expected no more than that at a time."
                )
            left_s = give_up - time.monotonic()
            fewest = num_groups if run["left"] else 1  # no further prompts are drawn
            if left_s <= 0 and at_least is not None:
                fewest = min(fewest, at_least)
            meta = self._claim(fewest, num_groups, max(0.0, min(left_s, _LOOK_S)), alone=run["max_attempts"] > 0)
            if meta is not None:
                if reservations := self._reserved(meta, collector, run):
                    return reservations
            elif run["drained"]:
                return []
            elif left_s <= 0:
                raise ReplayTimeoutError(
                    f"reserve('{self.partition_id}', {num_groups} groups) found no room within {timeout_s:g} s"
                    f"{self._describe()}.",
                    hint="The trainer has to consume groups, or to set its weight version.",
                )

    def commit(self, reservations: Sequence[Reservation], meta: KVBatchMeta) -> None:
        """Reports that the rows of reservations are written. Their groups become ready.

        Args:
            reservations: Whole groups that were reserved here.
            meta: Exactly their rows, in any order, with ``fields``. In a partition of rollouts: those of the rollouts
                that did not fail. Its tags are written to the store. The tag ``end_weight_version`` says with which
                weights the generation ended; rows without it get the trainer's version.

        Raises:
            ReservationLostError: One of the reservations is no longer held. None has been committed.
            InvalidRequestError: ``meta`` has other rows than those reserved, no ``fields``, or an
                ``end_weight_version`` that is lower than that of the reservation.
            InvalidTypeError: ``extra_info`` of the meta holds what a store cannot hold without pickle.
        """
        reserved = {answer: reservation for reservation in reservations for answer in reservation.sample_ids}
        answers = [rollout_of(row) for row in meta.sample_ids] if self._has_rollouts else meta.sample_ids
        wrong = set(answers).symmetric_difference(reserved)
        if self._has_rollouts:  # some of a group may have failed
            made = {reserved[answer].group for answer in answers if answer in reserved}
            wrong = {answer for answer in wrong if answer not in reserved or reserved[answer].group not in made}
        if wrong or len(set(meta.sample_ids)) != meta.size or meta.partition_id != self.partition_id:
            raise InvalidRequestError(
                f"commit refused: {meta.size} rows of '{meta.partition_id}' for reservations of {len(reserved)} rows "
                f"in '{self.partition_id}'; only in one of both: {preview(sorted(wrong) or ['none'])}. Expected "
                "exactly the rows reserved."
            )
        if meta.fields is None:
            raise InvalidRequestError(
                f"commit refused: a meta of {meta.size} rows without fields. Expected the names of the columns, as in "
                "the meta that put_samples returns."
            )
        client = self._require_dp_client()
        version = self.weight_version
        first_of_group: dict[str, dict[str, TagValue]] = {}  # the tags of a row
        tags: list[dict[str, TagValue]] = []
        for row, (sample_id, answer) in enumerate(zip(meta.sample_ids, answers, strict=True)):
            reservation = reserved[answer]
            own = dict(meta.tags[row]) if meta.tags else {}
            if meta.sequence_lengths is not None:
                own.setdefault(INPUT_LENGTHS_TAG, meta.sequence_lengths[row])
            end = {END_WEIGHT_VERSION_TAG: _end_version(own, sample_id, reservation, version), COMMITTED_TAG: True}
            tags.append({**own, **reservation.tags, **end})
            first_of_group.setdefault(reservation.group, tags[-1])
        if meta.extra_info:
            extra = b64encode(encode_item(plain(meta.extra_info), "extra_info")).decode()
            for first in first_of_group.values():
                first[EXTRA_TAG] = extra
        with self._ending:
            claimed = self._claims_of(reservations)
            try:
                client.renew(claimed, self._lease_s)  # from here on no other process claims these prompts for a while
            except LeaseExpiredError as error:
                groups = {reservation.row: reservation.group for reservation in reservations}
                raise self._lost([groups[row] for row in error.sample_ids]) from error
            client.put_samples(meta.sample_ids, self.partition_id, tags=tags)
            with suppress(LeaseExpiredError):  # the trainer has taken them already
                client.ack(claimed)
            self._forget([reservation.group for reservation in reservations])
        self._settled()

    def abandon(self, reservations: Sequence[Reservation], *, requeue: bool = True, failed: bool = False) -> None:
        """Gives prompts back, and clears rows that were already written for them.

        If the store does not answer, this raises, and the prompts stay claimed: call it again.

        Args:
            reservations: If one is no longer held, only its rows are cleared. One that is committed stays so.
            requeue: Generate their prompts again. Otherwise they are given up.
            failed: The rollout of all of them, one call, failed: counts for ``max_attempts`` of the buffer.
        """
        most = 0  # no prompt is given up: none is of a run that is gone
        with suppress(UnknownPartitionError, ReplayTimeoutError):
            most = self._run()["max_attempts"] if failed else 0
        endings: list[dict[str, TagValue]] = []
        for reservation in reservations:
            claim = self._claims.get(reservation.group)
            failures = (claim.tags[0]["failures"] if claim is not None and claim.tags else 0) + (most > 0)
            # one that failed together with others may be innocent: it is generated again, alone
            again = requeue and not (most and len(reservations) == 1 and failures >= most)
            tags: dict[str, TagValue] = {WEIGHT_VERSION_TAG: None} if again else {"ended": "given up"}
            endings.append({**tags, "failures": failures})
        self._end(reservations, endings)

    def to_abort(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """Which rollouts are in vain: the staleness rule will not train on their groups, or they are not reserved.

        A rollout may ask this while it generates, and raise `RolloutAbortedError` if it gets all of its reservations.

        Args:
            reservations: What is being generated.
        """
        rows = [reservation.row for reservation in reservations if reservation.group in self._claims]
        listed = self._require_dp_client().list_samples(self.prompts_id, sample_ids=rows)
        tags = dict(zip(listed.sample_ids, listed.tags or (), strict=True))
        return [
            reservation
            for reservation in reservations
            if (row := tags.get(reservation.row)) is None
            or row["in_vain"]
            or row["attempt"] > reservation.attempt + 1
            or reservation.group not in self._claims
        ]

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """As `abandon`, after `to_abort`. Prompts of stale groups count as evicted: see ``requeue_evicted``.

        Args:
            reservations: Those of rollouts that were ended. The prompts of those that are not in vain are generated
                again.
        """
        in_vain = self.to_abort(reservations)
        self._end(in_vain, [{"ended": "late"}] * len(in_vain))
        self.abandon([reservation for reservation in reservations if reservation not in in_vain])

    def enlist(self, collector: str = "collector") -> None:
        """Tells the trainer that a collector of that name runs."""
        self._tell(collector, running=True, failed="")

    def withdraw(self, collector: str = "collector") -> None:
        """Tells the trainer that a collector has ended without a failure, until it is enlisted again."""
        self._tell(collector, running=False)

    def fail(self, message: str, cause: BaseException | None = None, *, collector: str = "collector") -> None:
        """Tells the trainer that a collector has failed and stopped, until it is enlisted again.

        When no collector is left, the trainer gets a `CollectorFailedError` with the message.

        Args:
            message: What happened.
            cause: The error that caused it. Only a trainer in this process gets it.
            collector: Name of the collector.
        """
        with self._lock:
            if cause is not None:
                self._causes[message] = cause
        self._tell(collector, running=False, failed=message)

    def close(self) -> None:
        """Ends all waiting calls with a `ReplayClosedError`, gives claims back, and detaches. Rows stay. Idempotent."""
        self._closing.set()
        with self._lock:
            self._changed.notify_all()
            self._claims = {}
        self._held.give_back()
        self.close_data_plane()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _run(self) -> dict[str, Any]:
        """What the trainer tells the collectors."""
        tags = self._require_dp_client().list_samples(self.prompts_id, sample_ids=[RUN_ROW]).tags
        if not tags:  # it has registered the partition, and says more in a moment
            raise ReplayTimeoutError(f"no trainer has begun a run on '{self.partition_id}' yet.")
        return dict(tags[0])

    @cached_property
    def _has_rollouts(self) -> bool:
        """Whether an answer is a rollout, which may have several rows."""
        return self._require_dp_client().describe(self.partition_id, count_rows=False).info.rollouts

    def _rows_of(self, answers: Sequence[str]) -> list[str]:
        """The ids of the rows of answers, in their order."""
        if not self._has_rollouts or not answers:
            return list(answers)
        rows: dict[str, list[str]] = {answer: [] for answer in answers}
        for sample_id in self._require_dp_client().list_sample_ids(self.partition_id):
            rows.get(rollout_of(sample_id), []).append(sample_id)
        return list(chain.from_iterable(rows.values()))

    def _settled(self) -> list[str]:
        """Called when reservations have ended. The trainer looks what became of them, and returns what it evicted."""
        return []

    def _describe(self) -> str:
        """What the timeout of `reserve` adds."""
        return ""

    def _claim(self, fewest: int, most: int, timeout_s: float, *, alone: bool) -> KVBatchMeta | None:
        """Claims prompts. With ``alone``, one that failed before is claimed by itself. None: there are too few."""
        client = self._require_dp_client()

        def claim(count: int, tag_filter: TagFilter, **wait: Any) -> KVBatchMeta:
            return client.claim_meta(
                self.prompts_id, ROLLOUT_TASK, [], count, lease_s=self._lease_s, tag_filter=tag_filter, **wait
            )

        # Rows that are no prompts have no order, nor has a note on a prompt that the trainer removed meanwhile.
        fit: TagFilter = {"order": (">=", 0), "failures": 0 if alone else (">=", 0)}
        if alone:
            meta = claim(1, {**fit, "failures": (">", 0)}, blocking=False)
            if meta.size:
                return meta
        try:
            meta = claim(fewest, fit, timeout_s=timeout_s)
        except ClaimTimeoutError:
            return None
        if 0 < meta.size < most:
            more = claim(most - meta.size, fit, blocking=False)
            meta = meta.concat(more) if more.size else meta
        return meta if meta.size else None

    def _reserved(self, meta: KVBatchMeta, collector: str, run: dict[str, Any]) -> list[Reservation]:
        """Notes in the store that claimed prompts are started. Returns none if their leases ended meanwhile."""
        client = self._require_dp_client()
        try:
            version = self.weight_version  # not from before the claim, which may have waited
            reservations = []
            for row_id, tags in zip(meta.sample_ids, meta.tags or (), strict=True):
                group = group_name(version, tags["prompt"], tags["attempt"])
                reservation = Reservation(
                    group=group,
                    prompt=tags["prompt"],
                    attempt=tags["attempt"],
                    weight_version=version,
                    sample_ids=tuple(mint_sample_ids([group], run["group_size"])),
                    collector=collector,
                    order=tags["order"],
                    target_step=tags["target_step"],
                    row=row_id,
                )
                reservations.append(reservation)
            client.put_samples(
                meta.sample_ids,
                self.prompts_id,
                tags=[
                    {"attempt": reservation.attempt + 1, WEIGHT_VERSION_TAG: version, "in_vain": False}
                    for reservation in reservations
                ],
            )
            client.renew(meta, self._lease_s)  # so nobody else had claimed them before they got these numbers
        except LeaseExpiredError:
            return []
        except BaseException:
            with suppress(DataPlaneError):  # then the lease ends
                client.nack(meta)
            raise
        with self._lock:
            for row, reservation in enumerate(reservations):
                claim = meta.subset([row])
                self._held.add(claim)
                self._claims[reservation.group] = claim
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._renew, name="prompt-leases", daemon=True)
                self._renewer.start()
        return reservations

    def _renew(self) -> None:
        """Renews the leases as long as there are any. Those that have ended are forgotten."""
        while not self._closing.wait(self._lease_s * RENEWED_AFTER):
            self._held.renew()
            with self._lock:
                self._claims = {group: claim for group, claim in self._claims.items() if self._held.holds(claim)}
                if not self._claims:
                    self._renewer = None
                    return

    def _claims_of(self, reservations: Sequence[Reservation]) -> KVBatchMeta:
        """The claims of reservations."""
        with self._lock:
            lost = [reservation.group for reservation in reservations if reservation.group not in self._claims]
            if lost:
                raise self._lost(lost)
            claims = [self._claims[reservation.group] for reservation in reservations]
        return claims[0].concat(*claims[1:])

    def _lost(self, groups: Sequence[str]) -> ReservationLostError:
        self._forget(groups)
        return ReservationLostError(
            f"commit refused: no longer reserved: {preview(groups)}. Their prompts were given up, or the lease ended.",
            groups=groups,
            hint="Clear the rows: abandon(reservations) does.",
        )

    def _forget(self, groups: Iterable[str]) -> None:
        with self._lock:
            for group in groups:
                if (claim := self._claims.pop(group, None)) is not None:
                    self._held.discard(claim)

    def _end(self, reservations: Sequence[Reservation], endings: Sequence[Mapping[str, TagValue]]) -> None:
        """Clears their rows, then gives their prompts back with these tags, or leaves them to the trainer."""
        client = self._require_dp_client()
        ids = [sample_id for reservation in reservations for sample_id in reservation.sample_ids]
        with self._ending:
            listed = client.list_samples(self.partition_id, sample_ids=self._rows_of(ids))
            rows = zip(listed.sample_ids, listed.tags or (), strict=True)
            # a commit whose answer was lost is a commit
            committed = {group_of(sample_id) for sample_id, tags in rows if tags.get(COMMITTED_TAG)}
            if written := [sample_id for sample_id in listed.sample_ids if group_of(sample_id) not in committed]:
                client.clear_samples(written, self.partition_id)
            for reservation, tags in zip(reservations, endings, strict=True):
                claim = self._claims.get(reservation.group)
                if claim is None:
                    continue
                with suppress(LeaseExpiredError):  # others have it already, or the trainer removed it
                    if reservation.group in committed:
                        client.ack(claim)
                    else:
                        client.renew(claim, self._lease_s)
                        client.put_samples(claim.sample_ids, self.prompts_id, tags=[tags])
                        settle = client.ack if tags.get("ended") else client.nack
                        settle(claim)
                self._forget([reservation.group])
        self._settled()

    def _tell(self, collector: str, **tags: TagValue) -> None:
        self._require_dp_client().put_samples([COLLECTOR_ROW + collector], self.prompts_id, tags=[tags])

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ReplayClosedError(f"the replay buffer of '{self.partition_id}' is closed.")


def _end_version(
    tags: Mapping[str, TagValue], sample_id: str, reservation: Reservation, weight_version: int
) -> TagValue:
    """With which weights the generation of a row ended, as its tag says; else ``weight_version``."""
    end = tags.get(END_WEIGHT_VERSION_TAG, weight_version)
    if not isinstance(end, int) or end < reservation.weight_version:
        raise InvalidRequestError(
            f"commit refused: tag {END_WEIGHT_VERSION_TAG} of '{sample_id}' is {end!r}. Expected an int, at least "
            f"{reservation.weight_version}, the version with which its generation began."
        )
    return end
