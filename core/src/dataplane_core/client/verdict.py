"""Why a task gets no samples: from what the store knows to one cause, with names. Pure; `DataPlaneClient.why` asks.

A *fault* is what no waiting mends: a process that is gone, a filter that nothing passes. A task that waits for a
producer which is alive and works is not starved, however slow that is. What may be slow or may be a fault, such as a
group that is short of a sample, counts as a fault after five times ``patience_s``.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from dataplane_core.errors import Cause, LeaseHolder, Shortfall, Verdict, preview
from dataplane_core.spec import (
    ClientInfo,
    PartitionDescription,
    WorkInfo,
)
from dataplane_core.spec.replies import Answer

#: A client with something that it does.
_Worker: TypeAlias = tuple[ClientInfo, WorkInfo]
#: A partition and a task of it.
_Task: TypeAlias = tuple[str, str]

#: Seconds after which a put that has not ended counts as one that waits for room, if so much of the store is taken. If
#: it has not ended for the patience, less is enough.
_ROOM_S: Final = 3.0
_FULL: Final = 0.9
_FULL_FOR_LONG: Final = 0.5
#: A producer that was quiet for so many times its longest pause so far is silent, unless the patience is longer. What
#: may be slow or a fault is a fault after so many times the patience.
_PAUSES: Final = 5.0
#: How far a task is looked at; see `_Judge.of_task`.
_REACH: Final = 2
#: What numbers a name: ``step-3``, ``train_b``.
_PLACE: Final = r"\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])"
#: Operations that wait for other clients.
_WAITING: Final = ("claim_meta", "put_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a store.

    Attributes:
        partitions: Partition -> what it holds.
        answers: Partition and task -> what the claim that `question_of` finds would be given.
        finished: Partitions of groups and tasks that can be given no more, though samples may be left.
        clients: Those that announced themselves, also if they ended. Empty if the backend does not list them.
        tags: Partition and sample -> its tags, of those that a shortfall names.
        members: Partition and group -> the members that are there, of those that a shortfall names.
        held_bytes: Payload of all partitions. 0 if that was not asked for.
        capacity_bytes: How many the store may hold, or None.
        patience_s: See above.
        now: The time, in seconds since 1970.
    """

    partitions: Mapping[str, PartitionDescription]
    answers: Mapping[tuple[str, str], Answer | None] = field(default_factory=dict)
    finished: Collection[tuple[str, str]] = ()
    clients: Sequence[ClientInfo] = ()
    tags: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    members: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    held_bytes: int = 0
    capacity_bytes: int | None = None
    patience_s: float = 60.0
    now: float = 0.0


def question_of(clients: Iterable[ClientInfo], partition_id: str, task_name: str) -> WorkInfo | None:
    """What the clients of a task claim now, or claimed last. None: nobody has claimed for it."""
    wanted = ("claim_meta", partition_id, task_name)
    work = (each for client in clients for each in client.work)
    asked = [each for each in work if (each.operation, each.partition_id, each.task_name) == wanted]
    # claims without fields look after old samples, and are no stage's own
    return min(asked, key=lambda each: (each.waits_s is None, not each.fields, each.began_s), default=None)


def room_is_wanted(clients: Iterable[ClientInfo]) -> bool:
    """Whether a put may wait for room."""
    return any(_call_of(each, "put_samples", _ROOM_S) is not None for each in clients if each.state == "open")


def judge(facts: Facts, tasks: Iterable[_Task]) -> list[Verdict]:
    """How tasks fare. Raises `KeyError` if a partition has no such task."""
    judged = _Judge(facts)
    return [each for task in tasks if (each := judged.of_task(task, _REACH)) is not None]  # none is being judged


def _call_of(client: ClientInfo, operation: str | None, least_s: float) -> float | None:
    """The seconds for which a client has had an operation under way, if they are so many. None stands for all that do
    not wait for others."""
    for call in client.calls:
        wanted = call.operation == operation if operation else call.operation not in _WAITING
        # not since: most that were under way when it announced itself have ended
        if wanted and call.running_s >= least_s:
            return call.running_s + client.heard_s
    return None


def _ago_s(worker: _Worker) -> float | None:
    """Seconds since a client last put samples, or was given some."""
    client, work = worker
    return None if work.ended_s is None else work.ended_s + client.heard_s


def process_of(client: ClientInfo) -> str:
    """A client's process, for messages: ``process 4711 on host-a (reward)``."""
    return f"process {client.pid} on {client.host} ({client.role})"


def _phase_of(client: ClientInfo, group: str | None = None) -> str:
    """The phase that a client has been in longest, or that makes a group: `` in generate for 14 s``. Or nothing."""
    found = next((each for each in client.phases if group is None or group in each.groups), None)
    return "" if found is None else f" in {found.name} for {_seconds(found.running_s + client.heard_s)}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


def _count(number: int, what: str = "sample") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant by an unknown one. Not one that differs in a number or a lone
    letter only."""
    near = difflib.get_close_matches(name, set(known), n=1, cutoff=0.75)
    bare = [re.sub(_PLACE, "", each) for each in (name, *near)]
    return near[0] if len(set(bare)) > 1 else None


@dataclass(frozen=True, slots=True)
class _Reason:
    """What may keep a task waiting."""

    cause: Cause
    text: str
    is_fault: bool
    culprit: str = ""
    is_over: bool = False  # as of `Verdict`


class _Judge:
    """Judges each task at most once for each reach, so that its cost grows with the tasks and not with their paths."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._verdicts: dict[tuple[_Task, int], Verdict | None] = {}  # None: it is being judged
        self._path: list[_Task] = []  # those that are being judged
        self._starved: dict[tuple[str | None, int], list[Verdict]] = {}
        self._sourced: dict[str, list[_Worker]] = {}
        self._by_kind: dict[tuple[str, ...], list[_Worker]] = {}
        for client in facts.clients:
            for work in client.work:
                kind = (work.operation, work.partition_id, work.task_name)
                for some in {kind[:count] for count in (1, 2, 3)}:
                    self._by_kind.setdefault(some, []).append((client, work))
        self._are_listed = any(client.client_id for client in facts.clients)
        put = {client.client_id for client, _ in self._workers("put_samples")}
        # who has registered and says nothing of what it does does not count: registering is not writing
        register = {client.client_id for client, _ in self._workers("register_partition") if not client.phases}
        open_ones = {client.client_id for client in facts.clients if client.state == "open"}
        self._fresh = open_ones - put - register - {""}
        self._idle = any(each.client_id and not each.work for each in facts.clients if each.state == "open")
        self._roles = Counter(client.role for client in facts.clients if client.state == "open")
        self._claiming = {client.client_id for client, _ in self._workers("claim_meta")}

    # --- one task -----------------------------------------------------------------------------------------------------

    def of_task(self, task: _Task, reach: int) -> Verdict | None:
        """Judges a task. None: it is being judged, so that it waits for itself.

        ``reach``: 0: what it waits for itself; 1: also whether the store is full because of another task; 2: also
        whether another task is the reason why nobody has written a field. Others are judged with a smaller reach, so
        that no two are each other's reason.
        """
        if (task, reach) not in self._verdicts:
            self._verdicts[task, reach] = None
            self._path.append(task)
            found = self._judged(*task, reach)
            if found.state == "starved" and task[1] in self._facts.partitions[task[0]].info.followers:
                found = replace(found, state="idle")
            self._verdicts[task, reach] = found
            self._path.pop()
        return self._verdicts[task, reach]

    def _judged(self, partition_id: str, task_name: str, reach: int) -> Verdict:
        found = self._facts.partitions[partition_id]
        counts = found.tasks[task_name]
        backlog = found.num_samples - counts.num_consumed
        answer = self._facts.answers.get((partition_id, task_name))
        verdict = Verdict(
            partition_id=partition_id,
            task_name=task_name,
            state="moves",
            backlog=backlog,
            num_ready=counts.num_ready if answer is None else answer.num_ready,
        )
        if found.is_complete and backlog == 0:
            return replace(verdict, state="done", text="It was given all samples that were to come.")
        if (partition_id, task_name) in self._facts.finished:
            text = f"It was given all samples but {backlog}, which are never given: their groups are not whole."
            return replace(verdict, state="done", text=text)
        claimers = [each for each in self._claimers(partition_id, task_name) if each[1].fields or each[1].waits_s]
        if not claimers:
            return self._unclaimed(verdict)
        alive = [each for each in claimers if each[0].state == "open"]
        if not alive:
            return self._abandoned(verdict, claimers)
        waiting = [each for each in alive if self._wait_s(each) is not None]
        if not waiting or answer is None or answer.shortfall is None:
            return self._works(verdict, alive)
        # heard of a while ago: the claim that waited then waits no longer if it was given samples since
        given_s = min((ago_s for each in alive if (ago_s := _ago_s(each)) is not None), default=None)
        waited_s = max(self._wait_s(each) or 0.0 for each in waiting)
        waited_s = waited_s if given_s is None else min(waited_s, given_s)
        wanted = max(work.batch_size for _, work in waiting)
        if answer.num_ready >= wanted:
            text = f"{_count(answer.num_ready)} are ready, and its claim asks for {wanted}: it is answered now."
            return replace(verdict, text=text)
        reason = self._why(verdict, waiting, answer.shortfall, wanted, waited_s, reach)
        return replace(
            verdict,
            state="starved" if reason.is_fault else "waits",
            cause=reason.cause,
            waited_s=waited_s,
            culprit=reason.culprit,
            is_over=reason.is_over,
            text=f"It has {answer.num_ready} of {wanted} samples. {reason.text}",
        )

    def _unclaimed(self, verdict: Verdict) -> Verdict:
        """Nobody has claimed for the task."""
        others = self._workers("claim_meta", verdict.partition_id)
        near = _meant(verdict.task_name, (work.task_name for _, work in others))
        found = self._facts.partitions[verdict.partition_id]
        waited_s = found.oldest_s or 0.0
        may_begin = self._idle or not self._are_listed
        if near is None and found.is_complete and waited_s >= self._facts.patience_s and not may_begin:
            text = f"Nobody has claimed for it, and all of its samples are there, the oldest for {_seconds(waited_s)}."
            return replace(verdict, state="starved", cause="unclaimed", waited_s=waited_s, text=text)
        if near is None or not self._is_late(waited_s) or may_begin:
            return replace(verdict, state="idle", cause="unclaimed", text="Nobody has claimed for it so far.")
        claimer = next(client for client, work in others if work.task_name == near)
        return replace(
            verdict,
            state="starved",
            cause="name",
            culprit=process_of(claimer),
            waited_s=waited_s,
            text=f"Nobody has claimed for it, but {process_of(claimer)} claims for '{near}'. Is that a typing error?",
        )

    def _abandoned(self, verdict: Verdict, claimers: Sequence[_Worker]) -> Verdict:
        """All that claimed for the task have ended."""
        last, fate, told = self._ended(claimers)
        if not self._is_final(last) or (fate == "closed" and not verdict.backlog):
            return replace(verdict, state="idle", text=f"Nobody claims for it now: {told}")
        return replace(
            verdict,
            state="starved",
            cause=fate,
            culprit=process_of(last),
            waited_s=last.heard_s,
            text=f"{_count(verdict.backlog)} of it are left, and nobody claims them: {told}",
        )

    def _works(self, verdict: Verdict, alive: Sequence[_Worker]) -> Verdict:
        """Its clients are alive, and do not wait."""
        for client, _ in alive:
            stuck_s = _call_of(client, None, self._facts.patience_s)
            if stuck_s is not None:
                return replace(verdict, state="starved", waited_s=stuck_s, **self._stuck(client, stuck_s))
        last = min(alive, key=lambda each: each[1].began_s + each[0].heard_s)
        since_s = _ago_s(last)
        given = "was given none yet" if since_s is None else f"was last given samples {_seconds(since_s)} ago"
        return replace(verdict, text=f"{process_of(last[0])} works on it, and {given}.")

    # --- why a claim waits --------------------------------------------------------------------------------------------

    def _why(
        self,
        verdict: Verdict,
        waiting: Sequence[_Worker],
        shortfall: Shortfall,
        wanted: int,
        waited_s: float,
        reach: int,
    ) -> _Reason:
        """The one reason why a claim waits: the first fault, else the first that there is."""
        partition_id = verdict.partition_id
        is_late = self._is_late(waited_s)
        reasons: list[_Reason] = []
        coming = verdict.num_ready  # what the claim can count on if others do their work
        names = {f"process {each.pid} on {each.host}" for each, _ in waiting}
        # who holds samples and waits for more, such as a stream that reads ahead, does not wait for these
        own = bool(shortfall.leased) and all(each.holder in names for each in shortfall.leased)
        if shortfall.num_leased and not own:
            reasons.append(self._leased(shortfall))
            coming += 0 if reasons[-1].is_fault else shortfall.num_leased
        if shortfall.num_lacking or shortfall.missing_cells:
            reasons.append(self._lacking(partition_id, shortfall, is_late, reach))
            coming += shortfall.num_lacking
        # once all are written, the last claim waits for those that can still be given, however few
        if coming < wanted and not (reasons and self._facts.partitions[partition_id].is_complete):
            if shortfall.num_incomplete:
                reasons.append(self._incomplete(partition_id, shortfall, is_late, reach))
            if shortfall.num_not_matching:
                reasons.append(self._not_matching(partition_id, waiting, shortfall, is_late))
            reasons.append(self._too_few(partition_id, wanted, waited_s, reach))
        found = next((each for each in reasons if each.is_fault), reasons[0])
        return replace(found, is_over=all(each.is_over for each in reasons))

    def _leased(self, shortfall: Shortfall) -> _Reason:
        """Others hold samples of the task."""
        lease: LeaseHolder = shortfall.leased[0] if shortfall.leased else LeaseHolder(sample_id="", holder="", left_s=0)
        holders = [each for each in self._facts.clients if f"process {each.pid} on {each.host}" == lease.holder]
        # a process may have several clients, of which some were closed
        holder = min(holders, key=lambda each: (each.state != "open", each.heard_s), default=None)
        who = lease.holder or "an unnamed client"
        held = f"{_count(shortfall.num_leased)} are leased, '{lease.sample_id}' to"
        if holder is None:
            return _Reason("leased", f"{held} {who} for another {_seconds(lease.left_s)}.", False, who)
        name = process_of(holder)
        text = f"{held} {name} for another {_seconds(lease.left_s)}. {self._told(holder)}"
        return _Reason("leased", text, self._is_final(holder), name)

    def _lacking(self, partition_id: str, shortfall: Shortfall, is_late: bool, reach: int) -> _Reason:
        """Samples lack fields."""
        sample_id, names = next(iter(shortfall.missing_cells.items()), ("", ()))
        found = self._facts.partitions[partition_id]
        reasons = []
        for name in names:
            writers = [each for each in self._workers("put_samples") if name in each[1].fields]
            here = [each for each in writers if each[1].partition_id == partition_id] or writers
            lacks = f"{_count(shortfall.num_lacking)} lack '{name}', the first one is '{sample_id}'."
            if here:
                reason = self._of_producers(here, f"writes '{name}'", partition_id, is_late, reach)
                reasons.append(replace(reason, text=f"{lacks} {reason.text}"))
                continue
            is_over = is_late and not self._may_begin()
            near = _meant(name, found.specs) if is_over else None
            if near is not None:
                text = f"{lacks} Nobody writes it, but '{near}' is written."
                reasons.append(_Reason("name", text, True, is_over=True))
                continue
            faulty = self._faulty_task(partition_id, 1) if reach > 1 else None
            told = "" if faulty is None else f" The task '{faulty.task_name}' is starved: {faulty.text}"
            text = f"{lacks} No client that is known has written it.{told}"
            reasons.append(
                _Reason("unwritten", text, is_over, is_over=is_over)
                if faulty is None
                else _Reason(faulty.cause, text, True, faulty.culprit, is_over=faulty.is_over)
            )
        if not reasons:
            return _Reason("unwritten", f"{_count(shortfall.num_lacking)} lack fields that it requires.", False)
        return next((each for each in reasons if each.is_fault), reasons[0])

    def _incomplete(self, partition_id: str, shortfall: Shortfall, is_late: bool, reach: int) -> _Reason:
        """Groups are not whole."""
        found = self._facts.partitions[partition_id]
        group, count = next(iter(shortfall.incomplete_groups.items()), ("", 0))
        size = found.info.grpo_group_size or 1
        there = self._facts.members.get((partition_id, group), ())
        absent = [each for each in (f"{group}_g{place}" for place in range(size)) if each not in there]
        are = "is in a group that is" if shortfall.num_incomplete == 1 else "are in groups that are"
        what = f"{_count(shortfall.num_incomplete)} {are} not whole: '{group}' has {count} of {size}"
        if count >= size:
            return _Reason("group", f"{what}, and lost one that was cleared. It is never given.", is_late, is_over=True)
        if found.is_complete:
            return _Reason("group", f"{what}, and no more samples come. It is never given.", False, is_over=True)
        never = f"{what}. {preview(absent)} {'was' if len(absent) == 1 else 'were'} never put." if there else f"{what}."
        maker = self._maker(partition_id, group)
        sources = sorted(self._sources(partition_id), key=lambda each: each[0] is not maker)
        reason = self._of_producers(sources, "puts new samples", partition_id, is_late, reach)
        is_fault = reason.is_fault or is_late
        if maker is None:
            return _Reason("group", f"{never} {reason.text}", is_fault, reason.culprit, is_over=reason.is_over)
        name = process_of(maker)
        if maker.state == "open":
            told = f"It is made by {name}{_phase_of(maker, group)}."
            culprit = reason.culprit if reason.is_fault else name
        else:
            told = f"It was made by {name}." if reason.culprit == name else f"Its maker ended: {self._told(maker)}"
            culprit = name
        return _Reason("group", f"{never} {told} {reason.text}", is_fault, culprit, is_over=reason.is_over)

    def _maker(self, partition_id: str, group: str) -> ClientInfo | None:
        """Who says that it makes a group: one that is alive, else who was heard of last."""
        makers = [each for each in self._facts.clients if self._makes(each, partition_id, group)]
        return min(makers, key=lambda each: (each.state != "open", each.heard_s), default=None)

    def _not_matching(
        self, partition_id: str, alive: Sequence[_Worker], shortfall: Shortfall, is_late: bool
    ) -> _Reason:
        """Samples do not pass the filter."""
        asked = next((work.tag_filter for _, work in alive if work.tag_filter), None) or {}
        sample_id = next(iter(shortfall.not_matching), "")
        tags = self._facts.tags.get((partition_id, sample_id), {})
        wanted = ", ".join(f"{name} {symbol} {operand!r}" for name, (symbol, operand) in asked.items())
        has = ", ".join(f"{name} {tags[name]!r}" if name in tags else f"no {name}" for name in asked)
        newest = f" The newest of them, '{sample_id}', has {has}." if sample_id and has else ""
        text = f"{_count(shortfall.num_not_matching)} do not pass its filter ({wanted}).{newest}"
        sources = self._sources(partition_id)
        is_over = bool(sources) and all(client.state != "open" for client, _ in sources)
        is_over = is_over and self._is_final(self._ended(sources)[0])
        is_over = is_over or self._facts.partitions[partition_id].is_complete
        return _Reason("filter", text, is_late or is_over, is_over=is_over)

    def _too_few(
        self,
        partition_id: str,
        wanted: int,
        waited_s: float,
        reach: int,
    ) -> _Reason:
        """More samples must be put."""
        is_late = self._is_late(waited_s)
        found = self._facts.partitions[partition_id]
        written, expected = found.num_samples + found.num_cleared, found.info.num_samples
        given = sum(work.num_samples for _, work in self._claimers(*self._path[-1]) if work.fields)
        dropped = found.num_cleared - given
        # only what was cleared while it waits: who was given the others may be forgotten
        clearers = [
            each
            for each in self._workers("clear_samples", partition_id)
            if (ago_s := _ago_s(each)) is not None and ago_s < waited_s
        ]
        if clearers and dropped >= wanted > found.num_samples:
            last = process_of(min(clearers, key=lambda each: each[1].began_s + each[0].heard_s)[0])
            text = f"{_count(dropped)} of {written} were cleared by {last} before they were given to it: too old?"
            return _Reason("evicted", text, is_late, last)
        sources = self._sources(partition_id)
        came = f"{written} of {expected} samples came" if expected is not None else f"{_count(written)} came"
        if not written and found.info.registered_by:
            ago = _seconds(max(0.0, self._facts.now - found.info.registered_at))
            came = f"{came} since {found.info.registered_by} registered it {ago} ago"
        if not sources:
            text = f"{came}. No client that is known has put any."
            is_over = is_late and not self._may_begin()
            return _Reason("unwritten", text, is_over, is_over=is_over)
        reason = self._of_producers(sources, "puts new samples", partition_id, is_late, reach)
        if reason.cause == "closed" and reason.is_fault:
            short = "" if expected is not None else " It did not call finish_partition."
            return replace(reason, cause="short", text=f"{came}, and no more will. {reason.text}{short}")
        return replace(reason, text=f"{came}. {reason.text}")

    # --- those who are waited for -------------------------------------------------------------------------------------

    def _of_producers(
        self, workers: Sequence[_Worker], what: str, partition_id: str, is_late: bool, reach: int
    ) -> _Reason:
        """How those who do something fare."""
        if not workers:
            return _Reason("unwritten", f"No client that is known {what}.", False)
        alive = [each for each in workers if each[0].state == "open"]
        if not alive:
            last, fate, told = self._ended(workers)
            is_over = self._is_final(last)
            return _Reason(fate, f"Nobody {what} now: {told}", is_over, process_of(last), is_over=is_over)
        first = self._of_producer(alive[0], what, is_late, reach)
        is_good = not first.is_fault and not first.is_over
        others = (self._of_producer(each, what, is_late, reach) for each in alive[1:] if not is_good)
        reason = min([first, *others], key=lambda each: (each.is_over, each.is_fault))
        dead = [each for each in workers if each[0].state not in ("open", "closed")]
        if dead and not reason.is_fault:
            last, fate, told = self._ended(dead)
            quiet_s = min((ago_s for each in alive if (ago_s := _ago_s(each)) is not None), default=0.0)
            is_fault = is_late and quiet_s >= self._facts.patience_s
            cause = fate if is_fault else reason.cause
            return replace(reason, cause=cause, is_fault=is_fault, text=f"{reason.text} Another one {what}: {told}")
        return reason

    def _of_producer(self, worker: _Worker, what: str, is_late: bool, reach: int) -> _Reason:
        """How a producer that is alive fares."""
        client, _ = worker
        name = process_of(client)
        room_s = _call_of(client, "put_samples", _ROOM_S)
        capacity, held = self._facts.capacity_bytes, self._facts.held_bytes
        # one sample may be large: who waits for long waits for room if not much is left for it
        share = _FULL if room_s is not None and room_s < self._facts.patience_s else _FULL_FOR_LONG
        if room_s is not None and capacity is not None and held >= share * capacity:
            return self._full(f"{name} {what}, and waits for room for {_seconds(room_s)}.", is_late, reach)
        for claim in client.work:
            task = (claim.partition_id, claim.task_name)
            is_known = task[0] in self._facts.partitions and task[1] in self._facts.partitions[task[0]].tasks
            if claim.waits_s is not None and is_known:
                verdict = self.of_task(task, reach)
                if verdict is not None and verdict.state in ("starved", "waits"):
                    text = f"{name} {what}, and waits for samples of its task '{task[1]}' itself. {verdict.text}"
                    is_fault = verdict.state == "starved"
                    return _Reason(verdict.cause, text, is_fault, verdict.culprit, is_over=verdict.is_over)
                if verdict is None and is_late and not client.phases:
                    text = f"{name} {what}, and waits for samples of this task itself."  # or another thread works?
                    return _Reason("works", text, False, name, is_over=True)
        stuck_s = _call_of(client, None, self._facts.patience_s) or _call_of(
            client, "put_samples", self._facts.patience_s
        )
        if stuck_s is not None:
            stuck = self._stuck(client, stuck_s)
            return _Reason("stuck", f"It {what}. {stuck['text']}", True, name)
        quiet_s, phase = _ago_s(worker), _phase_of(client)
        if quiet_s is None:
            now = f": it is{phase}" if phase else ""
            return _Reason("works", f"{name} {what}, and has not done so yet{now}.", False, name)
        puts = [each for each in client.work if each.operation == "put_samples"]
        usual_s = max((each.longest_gap_s for each in puts), default=0.0)
        last_s = min((each.ended_s + client.heard_s for each in puts if each.ended_s is not None), default=quiet_s)
        if is_late and usual_s and last_s >= max(self._facts.patience_s, _PAUSES * usual_s):
            but = f"silent{phase}: it last" if phase else "last"
            puts_s = f"put samples {_seconds(last_s)} ago; its longest pause was {_seconds(usual_s)}"
            return _Reason("silent", f"{name} {what}. It is alive, but {but} {puts_s}.", True, name)
        text = f"{name} {what}. It is alive{phase}, and last did so {_seconds(quiet_s)} ago."
        return _Reason("works", text, False, name)

    def _full(self, who: str, is_late: bool, reach: int) -> _Reason:
        """The store is full: of which samples?"""
        full = f"The store is full ({self._facts.held_bytes} of {self._facts.capacity_bytes} bytes). {who}"
        tasks = [
            (partition_id, name, found.num_samples - counts.num_consumed)
            for partition_id, found in self._facts.partitions.items()
            for name, counts in found.tasks.items()
        ]
        faulty = self._faulty_task(None, 0) if reach > 0 else None
        if faulty is not None:
            text = f"It holds samples that the task '{faulty.task_name}' has not consumed. {faulty.text}"
            return _Reason("full", f"{full} {text}", True, faulty.culprit)
        partition_id, name, count = max(tasks, key=lambda each: each[2], default=("", "", 0))
        if not count:
            text = f"{full} All tasks have consumed all samples, and nobody clears them."
            # who was given samples may clear them when its step ends
            claims = [each for each in self._workers("claim_meta") if each[0].state == "open" and each[1].fields]
            return _Reason("full", text, is_late and all(self._wait_s(each) is not None for each in claims))
        text = f"{_count(count)} of '{partition_id}' are not consumed by the task '{name}'."
        claims = [each for each in self._claimers(partition_id, name) if each[0].state == "open"]
        is_fault = is_late and all(self._wait_s(each) is not None for each in claims)
        return _Reason("full", f"{full} {text}", is_fault)

    def _faulty_task(self, partition_id: str | None, reach: int) -> Verdict | None:
        """A task that is starved for a reason of its own, of those that hold most samples."""
        if (partition_id, reach) not in self._starved:
            tasks = [
                (each, name)
                for each, description in self._facts.partitions.items()
                if partition_id in (None, each)
                for name in description.tasks
            ]
            found = [verdict for each in tasks if (verdict := self.of_task(each, reach)) and verdict.state == "starved"]
            self._starved[partition_id, reach] = sorted(found, key=lambda each: -each.backlog)
        found = self._starved[partition_id, reach]
        return next((each for each in found if (each.partition_id, each.task_name) not in self._path), None)

    def _stuck(self, client: ClientInfo, stuck_s: float) -> dict[str, Any]:
        call = max(client.calls, key=lambda each: each.running_s)
        text = f"{process_of(client)} is alive, but has been in {call.operation} for {_seconds(stuck_s)}."
        return {"cause": "stuck", "culprit": process_of(client), "text": text}

    def _ended(self, workers: Sequence[_Worker]) -> tuple[ClientInfo, Any, str]:
        """Of those that ended, the last one, its fate, and a sentence."""
        client, _ = min(workers, key=lambda each: each[0].heard_s)
        others = len({each.client_id for each, _ in workers}) - 1
        more = f" So did {_count(others, 'other')}." if others else ""
        return client, client.state, f"{self._told(client)}{more}"

    def _is_final(self, client: ClientInfo) -> bool:
        """Whether a client ended, and nobody is about to take its place: a step may open clients of its own."""
        if client.state != "closed":
            return client.state != "open"
        claim = {each.client_id: each for each, _ in self._claimers(*self._path[-1]) if each.state == "open"}
        alike = self._roles[client.role] - sum(each.role == client.role for each in claim.values())
        return client.heard_s >= self._facts.patience_s and not alike

    def _may_begin(self) -> bool:
        """Whether somebody may still do what nobody has done so far: a client that has put nothing yet, and is not one
        of those that wait; or one that is not listed."""
        claim = {client.client_id for client, _ in self._claimers(*self._path[-1])}
        return not self._are_listed or bool(self._fresh - claim)

    def _told(self, client: ClientInfo) -> str:
        """What became of a client, as a sentence."""
        heard = f"{_seconds(client.heard_s)} ago" + "".join(f", in {each.name}" for each in client.phases[:1])
        ends = {
            "open": "is alive",
            "closed": f"closed its client {_seconds(client.heard_s)} ago",
            "gone": f"is gone; it was last heard of {heard}",
            "stopped": f"is stopped; it was last heard of {heard}",
            "silent": f"was last heard of {heard}: it is dead, stopped or cut off",
        }
        return f"{process_of(client)} {ends[client.state]}."

    def _wait_s(self, worker: _Worker) -> float | None:
        """For how long a client has got nothing for a task, over all claims that found nothing. None: it waits for
        nothing: it was served, or asks no longer."""
        client, work = worker
        asks_s = 0.0 if work.waits_s is not None else work.began_s + client.heard_s  # ago: it may ask again and again
        if (work.waits_s is None and work.unserved_s is None) or asks_s >= self._facts.patience_s:
            return None
        return max(work.waits_s or 0.0, work.unserved_s or 0.0) + client.heard_s

    def _is_late(self, waited_s: float) -> bool:
        """Whether what may be merely slow counts as a fault."""
        return waited_s >= _PAUSES * self._facts.patience_s

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def _workers(self, operation: str, partition_id: str | None = None) -> Sequence[_Worker]:
        return self._by_kind.get((operation,) if partition_id is None else (operation, partition_id), ())

    def _claimers(self, partition_id: str, task_name: str) -> Sequence[_Worker]:
        return self._by_kind.get(("claim_meta", partition_id, task_name), ())

    def _sources(self, partition_id: str) -> list[_Worker]:
        """Who puts new samples: those that put the fields which most samples have, and claim none of the partition; and
        those that say that they make groups of it."""
        if partition_id not in self._sourced:
            num_rows = self._facts.partitions[partition_id].num_rows
            most = max(num_rows.values(), default=0)
            first = {name for name, count in num_rows.items() if count == most}
            here, others = self._workers("put_samples", partition_id), self._workers("put_samples")
            tries: Sequence[tuple[Sequence[_Worker], Callable[[_Worker], bool]]] = (
                (here, lambda each: each[0].client_id not in self._claiming),
                (here, lambda each: bool(first.intersection(each[1].fields))),
                (others, lambda each: each[0].client_id not in self._claiming),
            )
            found = next((some for workers, good in tries if (some := list(filter(good, workers)))), [])
            known = {id(client) for client, _ in found}
            work = WorkInfo(operation="put_samples", partition_id=partition_id)
            makers = (each for each in self._facts.clients if self._makes(each, partition_id))
            self._sourced[partition_id] = [*found, *((each, work) for each in makers if id(each) not in known)]
        return self._sourced[partition_id]

    @staticmethod
    def _makes(client: ClientInfo, partition_id: str, group: str | None = None) -> bool:
        """Whether a client says by a phase that it makes a group, or any group, of a partition."""
        phases = (each for each in client.phases if each.partition_id == partition_id)
        return any(each.groups and group in (None, *each.groups) for each in phases)
