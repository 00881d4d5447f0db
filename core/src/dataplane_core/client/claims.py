"""Claims and leases: the part of `DataPlaneClient` that hands out samples and settles them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from dataplane_core._compiler_marks import with_methods_not_compiled
from dataplane_core.arguments import check_count, check_meta
from dataplane_core.client.announcing import Work, program_name
from dataplane_core.client.checks import (
    check_counts,
    check_name,
    check_names,
    check_sampler,
    check_seconds,
)
from dataplane_core.client.overview import PATIENCE_S, Overview
from dataplane_core.client.waiting import ClaimWait, Waiters, wait_for_claim
from dataplane_core.errors import (
    BackendError,
    ClaimTimeoutError,
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    Shortfall,
    UnknownPartitionError,
    UnknownTaskError,
    Verdict,
    preview,
    printable,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import (
    AckRequest,
    Capability,
    Claim,
    ClaimRequest,
    ConsumptionReply,
    ConsumptionRequest,
    DescribeRequest,
    InspectRequest,
    NackRequest,
    PartitionDescription,
    PartitionInfo,
    Question,
    RegisterRequest,
    RenewRequest,
    Replaced,
    Sampler,
    SettleReply,
    TagFilter,
    check_tag_filter,
    lengths_of,
    this_process,
)

#: How many registrations a client remembers.
_MOST_INFOS: Final = 1024
#: Seconds that a look at the registered fields may take. It is advice, which must not hold up a put or a claim.
ADVICE_S: Final = 1.0
#: Of how many ranks of tasks a client counts the batches. Beyond, it forgets those that it was given longest ago.
_MOST_COUNTED: Final = 4096
#: A claim that waits, or times out, asks why if it waited for so many seconds per client of the store, since all may do
#: so together. One that times out must have waited for so many seconds at least.
_EXPLAINED_AFTER_S: Final = 1.0
_PER_CLIENT_S: Final = 0.1
#: Seconds that an interrupted claim may take to give back what it was handed.
_GIVE_BACK_S: Final = 1.0


_log = logging.getLogger(__name__)


@with_methods_not_compiled
class Claims(Overview):
    """The part of `DataPlaneClient` that claims, acks, nacks and renews. Its examples continue those of
    `DataPlaneClient`.
    """

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        lease_s: float | None = None,
        tag_filter: TagFilter | None = None,
        sampler: Sampler = "first_write",
        dp_size: int | None = None,
        batch_index: int | None = None,
    ) -> KVBatchMeta:
        """Hands out samples whose required fields are all produced and that the task has not been given.

        No sample is given to a task twice, whichever clients and processes ask; with leases, no sample is held by two
        at once. A blocking claim waits until ``batch_size`` samples are ready. It also returns once the partition can
        give the task no more, with what remains, perhaps nothing. Samples leased to others count as given.

        Args:
            partition_id: A registered partition.
            task_name: A task named at its registration.
            required_fields: Fields that must be produced.
            batch_size: How many; a multiple of the group size where the partition has one.
            dp_rank: The data-parallel rank that claims. All claims of the task with this rank and ``batch_index`` give
                the same samples, so that the ranks of a replica can each claim (capability ``samplers``).
            blocking: Whether to wait. If not, what is ready now is returned, at most ``batch_size``.
            timeout_s: How long a blocking claim waits, in seconds.
            lease_s: Seconds after which samples that were neither acked nor nacked can be claimed again. None: there
                is no lease, and each sample is given to the task at most once.
            tag_filter: A condition on tags, such as ``{"weight_version": (">=", 7)}``.
            sampler: Which ready samples it gives (capability ``samplers``). ``first_write``: in order of first write.
                ``freshest``: the last written first. ``balanced``: in order of first write, and the ``dp_size`` ranks
                get about the same number
                of tokens (tag ``input_lengths``).
            dp_size: The number of ranks; ``balanced`` requires it. The first claim of a batch then chooses
                ``batch_size`` samples for each rank, or what is left, and all ranks get about as many, perhaps none.
                That there is no further batch is also said to all ranks. `stream` tells the two apart.
            batch_index: Which batch of ``dp_rank``, from 0. None: the first that this client was not given yet.

        Returns:
            A meta in order of first write (``freshest``: in the opposite order), with tags, and ``sequence_lengths``
            where all have the tag ``input_lengths``.

        Raises:
            ClaimTimeoutError: Says how many were ready, and what keeps the others back.
            UnknownPartitionError, UnknownTaskError: Not registered, or cleared while waiting.
            InvalidRequestError: A batch size below 1 or no multiple of the group size.

        Examples:
            >>> claimed = client.claim_meta("step-1", "trainer", ["input_ids", "reward"], 2, lease_s=60.0)
            >>> claimed.sample_ids
            ['p0_g0', 'p0_g1']
        """
        with self._operation("claim_meta", partition_id):
            request = ClaimRequest(
                partition_id=partition_id,
                task_name=task_name,
                required_fields=required_fields,  # type: ignore[arg-type] # `_checked_claim` makes a list of it
                batch_size=batch_size,
                all_or_nothing=blocking,
                lease_s=lease_s,
                tag_filter=tag_filter,  # type: ignore[arg-type] # and brings this into its full form
                sampler=sampler,
                dp_rank=dp_rank,
                dp_size=dp_size,
                deadline=math.inf,
            )
            self._checked_claim(request, timeout_s, batch_index)
            return self._claim_until(request, timeout_s if blocking else None, self._waiters)[0]

    def ack(self, meta: KVBatchMeta) -> None:
        """Says that the samples of a claim, or of a part of it, are consumed. Acks all of them, or none.

        Raises:
            LeaseExpiredError: Some leases are no longer held. It names their ids.
            InvalidRequestError: The meta has no lease tokens.

        Examples:
            >>> client.ack(claimed.slice(0, 1))
        """
        self._settle("ack", AckRequest, meta)

    def nack(self, meta: KVBatchMeta) -> None:
        """Gives leased samples back, so that they can be claimed again at once. Raises what `ack` raises.

        Examples:
            >>> client.nack(claimed.slice(1, 2))
        """
        self._settle("nack", NackRequest, meta)

    def renew(self, meta: KVBatchMeta, lease_s: float) -> None:
        """Extends leases: they end ``lease_s`` seconds from now. Raises what `ack` raises.

        Examples:
            >>> rest = client.claim_meta("step-1", "trainer", ["reward"], 3, lease_s=60.0)
            >>> client.renew(rest, lease_s=600.0)
            >>> client.ack(rest)
        """
        with self._operation():
            check_seconds("lease_s", lease_s)
        self._settle("renew", RenewRequest, meta, lease_s=lease_s)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether every task has consumed every sample that the partition holds: was given it, or acked its lease.

        If ``num_samples`` was registered, it is false until that many were written; those that were cleared since need
        not be consumed. Otherwise it says nothing of samples to come, and is false while the partition holds none: a
        loop asks `is_finished`. False for an unknown partition or task.

        Examples:
            >>> client.check_consumption_status("step-1", ["trainer"])
            True
        """
        with self._operation("check_consumption_status", partition_id, needs=Capability.CLAIMS):
            tasks = check_names("task_names", task_names)
            return self._call("check_consumption", ConsumptionRequest(partition_id, tasks), ConsumptionReply).consumed

    def is_finished(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether the tasks get no more samples: all are written, and each has consumed those that can be given.

        Unlike `check_consumption_status`, it is never true before the end is known: by ``num_samples`` of the
        registration, or by `DataPlaneClient.finish_partition`.

        Raises:
            UnknownPartitionError, UnknownTaskError: Not registered.

        Examples:
            >>> client.is_finished("step-1", ["trainer"])
            True
        """
        with self._operation("is_finished", partition_id, needs=Capability.CLAIMS):
            info = self._describe(partition_id)
            unknown = [name for name in check_names("task_names", task_names) if name not in info.consumer_tasks]
            if unknown:
                raise UnknownTaskError(
                    f"partition '{partition_id}' has no consumer task {preview(unknown)}.",
                    hint=f"Registered: {preview(info.consumer_tasks, limit=5) or 'none'}.",
                )
            return info.num_samples is not None and self.check_consumption_status(partition_id, task_names)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _checked_claim(self, request: ClaimRequest, timeout_s: float, batch_index: int | None) -> ClaimRequest:
        """Checks a request of the arguments of `claim_meta`, and completes it. Changes and returns it."""
        self._require(Capability.CLAIMS, "claim_meta")
        check_name("partition_id", request.partition_id)
        check_name("task_name", request.task_name)
        check_sampler(request.sampler, request.dp_rank, request.dp_size, batch_index)
        if request.sampler != "first_write" or request.dp_rank is not None:
            self._require(Capability.SAMPLERS, "claim_meta(sampler=..., dp_rank=...)")
        if batch_index is None:
            with self._state:
                key = (request.partition_id, request.task_name, request.dp_rank)
                request.batch_epoch, request.batch_index = self._batches.get(key, (None, 0))
        else:
            request.batch_index = batch_index
        request.required_fields = check_names("required_fields", request.required_fields)
        check_count("batch_size", request.batch_size)
        check_seconds("timeout_s", timeout_s, at_least_zero=True)
        if request.lease_s is not None:
            self._require(Capability.LEASES, "claim_meta(lease_s=...)")
            check_seconds("lease_s", request.lease_s)
        request.tag_filter = check_tag_filter(request.tag_filter)
        if request.tag_filter is not None:
            self._require(Capability.TAG_FILTERS, "claim_meta(tag_filter=...)")
        return request

    def _claim_until(
        self,
        request: ClaimRequest,
        timeout_s: float | None,
        waiters: Waiters,
        since: Callable[[], float] | None = None,
    ) -> tuple[KVBatchMeta, Claim]:
        """Claims, and waits up to ``timeout_s`` unless that is None, or until ``waiters`` are closed."""
        if self._must_prepare(request):
            self._prepare_claim(request)
        try:
            if timeout_s is None:
                self._begin_work(request)
                claim = self._claim_noted(request)
            else:
                wait = self._wait_of(request, timeout_s, since)

                try:
                    claim = wait_for_claim(wait, self._claim_noted, waiters, lambda: self._look(request, wait))
                except ClaimTimeoutError as error:
                    self._explain(error, request, wait)
                    raise
            if self._closes_after is not None:
                raise ClientClosedError("the client was closed while the store answered a claim.")
            return self._claimed(request, claim), claim
        except BaseException:  # an interrupt, or the client was closed
            self._give_back_claim(request.token)
            raise
        finally:
            self._handed.pop(request.token, None)

    def _claim_noted(self, request: ClaimRequest) -> Claim:
        claim = self._claim(request)
        if claim.lease_tokens and request.dp_rank is None:  # a batch of a rank is given to its next claim
            self._handed[request.token] = threading.get_ident(), request, claim
        return claim

    def _give_back_claims(self) -> None:
        this = threading.get_ident()
        for token, (thread_id, _, _) in list(self._handed.items()):
            if thread_id == this:
                self._give_back_claim(token)

    def _give_back_claim(self, token: str) -> None:
        handed = self._handed.pop(token, None)
        if handed is not None:
            _, request, claim = handed
            nack = NackRequest(
                partition_id=request.partition_id,
                task_name=request.task_name,
                sample_ids=list(claim.sample_ids),
                lease_tokens=list(claim.lease_tokens or ()),
                deadline=time.monotonic() + _GIVE_BACK_S,
            )
            with suppress(DataPlaneError):  # the leases end by themselves
                self._call("nack", nack, SettleReply)

    def _wait_of(self, request: ClaimRequest, timeout_s: float, since: Callable[[], float] | None) -> ClaimWait:
        wakes = Capability.WAKES in self._capabilities
        return ClaimWait(
            request,
            timeout_s,
            self._pacer,
            wakes=wakes,
            entrance=self._entrance,
            since=since,
            work=self._begin_work(request),
            warn_after_s=self._config.warn_after_s or (PATIENCE_S if timeout_s == math.inf else None),
        )

    def _work_of(self, request: ClaimRequest) -> Work:
        return self._work.of("claim_meta", request.partition_id, request.task_name, request.required_fields)

    def _begin_work(self, request: ClaimRequest) -> Work:
        """A claim begins."""
        work = self._work_of(request)
        work.began_at = time.monotonic()
        if work.unserved_since is None:
            work.unserved_since = work.began_at
        work.tag_filter, work.batch_size = request.tag_filter, request.batch_size
        if request.sampler == "balanced":
            work.batch_size *= request.dp_size or 1
        return work

    def _look(self, request: ClaimRequest, wait: ClaimWait) -> None:
        """Says why a claim waits, and ends it if those that it waits for have ended and it has no timeout."""
        verdict = self._warn(request, wait.waited_s, wait.gives_up_at)
        if verdict is not None and verdict.is_over:
            wait.give_up(verdict)

    def _warn(self, request: ClaimRequest, waited_s: float, until: float) -> Verdict | None:
        """Says why a claim waits, in the log and to middleware. Never raises what goes wrong with that."""
        if waited_s < self._worth_s():
            return None
        verdict = self._verdict_of(request, waited_s, until)
        if verdict is None or verdict.state not in ("waits", "starved") or self._config.warn_after_s is None:
            return verdict
        _log.log(logging.WARNING if verdict.state == "starved" else logging.INFO, "%s", verdict)
        for each in self._middleware:
            if hasattr(each, "note_verdict"):
                try:
                    each.note_verdict(verdict)
                except Exception:  # of a listener, say; the claim goes on
                    _log.exception("%s was not told why a claim waits.", type(each).__name__)
        return verdict

    def _explain(self, error: ClaimTimeoutError, request: ClaimRequest, wait: ClaimWait) -> None:
        """Says why a claim timed out. Not if that might cost the store much."""
        error.verdict, waited_s = wait.verdict, wait.waited_s
        if error.verdict is None and waited_s >= max(_EXPLAINED_AFTER_S, self._worth_s()):
            error.verdict = self._verdict_of(request, waited_s)
        if error.verdict is not None and error.verdict.state in ("waits", "starved"):
            error.message = f"{error.message} {error.verdict.text}"

    def _worth_s(self) -> float:
        """Seconds that a claim must have waited to be worth a look at the store."""
        return 0.0 if self._announcer is None else self._announcer.num_clients * _PER_CLIENT_S

    def _verdict_of(self, request: ClaimRequest, waited_s: float, until: float = math.inf) -> Verdict | None:
        """Why a claim of this client waits, or has waited until now, if that is soon found."""
        if not {Capability.LISTING, Capability.CLAIMS} <= self._capabilities:
            return None
        key = request.partition_id, request.task_name
        waits = self._work_of(request).waits
        is_over = request.token not in waits
        waits.setdefault(request.token, time.monotonic() - waited_s)
        try:
            return next(iter(self._judged(*key, min(until, time.monotonic() + ADVICE_S))), None)
        except DataPlaneError:  # the claim itself says what is wrong
            return None
        except Exception:  # of middleware, say; it must not take the place of the claim's own error
            _log.exception("It was not found out why claim_meta('%s', '%s') waits.", *key)
            return None
        finally:
            if is_over:
                waits.pop(request.token, None)

    def _must_prepare(self, request: ClaimRequest) -> bool:
        """Whether `_prepare_claim` has anything to do, which may take calls."""
        info = self._infos.get(request.partition_id)
        unknown = self._field_names.unknown("claim", request.required_fields, info)
        return self._config.open_partitions or bool(unknown)

    def _prepare_claim(self, request: ClaimRequest) -> None:
        if self._config.open_partitions:
            self._open_partition(request.partition_id, request.required_fields, [request.task_name], self._deadline())
        where = f"claim_meta('{request.partition_id}', '{request.task_name}')"
        self._check_fields("claim", where, request.partition_id, request.required_fields, self._deadline())

    def _check_fields(self, use: str, where: str, partition_id: str, names: Iterable[str], deadline: float) -> None:
        """Tells of names that are not registered; see `FieldNames`. Asks the store only if it does not know them."""
        found = self._field_names
        if not found.unknown(use, names, self._infos.get(partition_id)):
            return
        until = deadline if found.strict else min(deadline, time.monotonic() + ADVICE_S)
        try:
            info = self._remember(partition_id, self._describe(partition_id, until))
            unknown = found.unknown(use, names, info)
            written: Iterable[str] = ()
            if unknown and use == "claim":
                self._require(Capability.LISTING, "claim_meta with strict_fields")
                request = InspectRequest(partition_id, count_rows=False, deadline=until)
                written = self._call("inspect_partition", request, PartitionDescription).specs
        except DataPlaneError:
            if found.strict:
                raise
            return  # the put or the claim says it, if it matters
        found.tell(use, where, unknown, info, written)

    def _remember(self, partition_id: str, info: PartitionInfo) -> PartitionInfo:
        if len(self._infos) >= _MOST_INFOS:
            self._infos.clear()
        self._infos[partition_id] = info
        return info

    def _claimed(self, request: ClaimRequest, claim: Claim) -> KVBatchMeta:
        """The meta of a claim. Counts the batches of a rank."""
        if claim.sample_ids:
            self._work_of(request).end(len(claim.sample_ids))
        if request.dp_rank is not None and (claim.sample_ids or claim.num_ranks is not None):
            given = request.batch_index if request.batch_epoch in (None, claim.epoch) else 0
            key = (request.partition_id, request.task_name, request.dp_rank)
            with self._state:
                epoch, count = self._batches.pop(key, (None, 0))
                count = count if epoch == claim.epoch else 0
                self._batches[key] = (claim.epoch, count + (given == count))
                if len(self._batches) > _MOST_COUNTED:
                    del self._batches[next(iter(self._batches))]
        tags = [dict(row) for row in claim.tags]
        return KVBatchMeta(
            request.partition_id,
            request.task_name,
            list(claim.sample_ids),
            fields=list(request.required_fields),
            sequence_lengths=lengths_of(tags),
            tags=tags,
            lease_tokens=None if claim.lease_tokens is None else list(claim.lease_tokens),
        )

    def _claim(self, request: ClaimRequest) -> Claim:
        """Calls the hook with a copy, since middleware changes the requests that it is given."""
        copied = replace(
            request,
            required_fields=list(request.required_fields),
            tag_filter=None if request.tag_filter is None else dict(request.tag_filter),
        )
        claim = self._call("claim", copied, Claim)
        where = f"claim_meta('{request.partition_id}', '{request.task_name}')"
        counts = {"tags": len(claim.tags)}
        if request.lease_s is not None or claim.lease_tokens is not None:
            counts["lease tokens"] = len(claim.lease_tokens or ())
        check_counts(where, len(claim.sample_ids), **counts)
        if len(claim.sample_ids) > request.batch_size and request.dp_rank is None:  # a rank's batch has the size it got
            raise BackendError(
                f"{where}: the backend's reply holds {len(claim.sample_ids)} samples. Expected at most "
                f"{request.batch_size}."
            )
        return claim

    def _open_partition(self, partition_id: str, fields: Sequence[str], tasks: list[str], deadline: float) -> None:
        """Registers a partition, or adds tasks to it, as a config with ``open_partitions`` allows."""
        try:
            info = self._describe(partition_id, deadline)
        except UnknownPartitionError:
            group_size = None
        else:
            if set(tasks) <= set(info.consumer_tasks):
                return
            group_size = info.grpo_group_size
        self._register(
            partition_id,
            fields=list(fields),
            consumer_tasks=tasks,
            grpo_group_size=group_size,
            if_exists="keep",
            deadline=deadline,
        )

    def _register(self, partition_id: str, **registration: Any) -> PartitionInfo:
        """Registers a partition as a `RegisterRequest` says. A finished one may have any number of samples."""
        work = self._work.begin("register_partition", partition_id)
        by = f"{this_process()} ({self._config.role or program_name()})"
        request = RegisterRequest(partition_id, registered_by=by, registered_at=time.time(), **registration)
        info = self._remember(partition_id, self._call("register_partition", request, PartitionInfo))
        work.end(0)
        if (dropped := info.replaced) is not None and dropped.num_samples and dropped.epoch not in self._registered:
            _log.warning("%s", printable(_dropped(partition_id, dropped)))
        if info.epoch == request.epoch:
            self._registered.append(info.epoch)
        return info

    def _tell_new_registration(self, error: DataPlaneError, partition_id: str) -> None:
        """Adds to an error that samples or leases are gone because another client has registered the partition."""
        known = self._infos.get(partition_id)
        with suppress(DataPlaneError):
            info = self._describe(partition_id, time.monotonic() + ADVICE_S)
            is_new = info.registered_at > self._opened_at if known is None else known.epoch != info.epoch
            if is_new and info.registered_by and info.epoch not in self._registered:
                again, gone = ("", "") if known is None else (" again", ": what it held before is gone")
                ago_s = max(0.0, time.time() - info.registered_at)
                told = f"{info.registered_by} registered the partition{again} {ago_s:.0f} s ago{gone}."
                error.hint = f"{error.hint or ''} {told}".lstrip()

    def _tell_short_groups(self, partition_id: str, info: PartitionInfo) -> None:
        """Warns of groups that are not whole, if no more samples come."""
        questions = [Question(task_name=name, required_fields=[], explain=True) for name in info.consumer_tasks]
        with suppress(DataPlaneError):  # it is advice
            found = self._call("inspect_partition", InspectRequest(partition_id, questions), PartitionDescription)
            told = [each.shortfall for each in found.answers if each is not None and each.shortfall is not None]
            short = max(told, key=lambda each: each.num_incomplete, default=Shortfall())
            if found.is_complete and short.num_incomplete:
                groups = [f"'{name}' has {count}" for name, count in short.incomplete_groups.items()]
                text = f"groups that lack some of their {info.grpo_group_size} samples are never given"
                left = f"{', '.join(groups)}. Samples in such groups: {short.num_incomplete}."
                _log.warning("%s", printable(f"finish_partition('{partition_id}'): {text}: {left}"))

    def _describe(self, partition_id: str, deadline: float = math.inf) -> PartitionInfo:
        return self._call("describe_partition", DescribeRequest(partition_id, deadline=deadline), PartitionInfo)

    def _settle(self, operation: str, request_type: Callable[..., Any], meta: KVBatchMeta, **extra: Any) -> None:
        check_meta(f"{operation}: meta", meta)
        partition = filter(None, [meta.partition_id])  # an empty meta may have none
        with self._operation(operation, *partition, needs=Capability.LEASES):
            if not meta.sample_ids:
                return
            if meta.task_name is None or meta.lease_tokens is None:
                raise InvalidRequestError(
                    f"{operation}('{meta.partition_id}', {meta.size} samples) refused: the meta carries no "
                    f"{'task name' if meta.task_name is None else 'lease tokens'}. Expected a meta from "
                    "claim_meta(lease_s=...), or a part of one."
                )
            tokens = dict(zip(meta.sample_ids, meta.lease_tokens, strict=True))
            request = request_type(
                partition_id=meta.partition_id,
                task_name=meta.task_name,
                sample_ids=list(tokens),
                lease_tokens=list(tokens.values()),
                deadline=self._deadline(),
                **extra,
            )

            def copied() -> Any:
                return replace(request, sample_ids=list(tokens), lease_tokens=list(tokens.values()))

            reply = self._call_once(operation, copied, SettleReply, request.deadline)
            check_counts(f"{operation}('{meta.partition_id}')", len(tokens), rows=reply.num_samples)


def _dropped(partition_id: str, replaced: Replaced) -> str:
    """What a registration dropped that another client had made."""
    task, count = max(replaced.num_left.items(), key=lambda each: each[1], default=("", 0))
    left = f", {count} of them not consumed by '{task}'" if task else ""
    by, ago_s = replaced.registered_by or "another client", max(0.0, time.time() - replaced.registered_at)
    return (
        f"register_partition('{partition_id}') dropped {replaced.num_samples} samples{left}: {by} had registered it "
        f"{ago_s:.0f} s ago. Let one process register a partition, or pass if_exists='keep'."
    )
