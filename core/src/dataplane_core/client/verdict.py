"""Why a task gets no samples: from what the store tells to one cause, with names. Pure; `DataPlaneClient.why` asks.

A *fault* is what no waiting mends: a process that is gone, a filter that nothing passes. A task that waits for a
producer which is alive is not starved, however slow that is. What may be slow or may be a fault, such as a group that
is short of a sample, counts as a fault after five times ``patience_s``.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from dataplane_core.errors import Cause, LeaseHolder, Shortfall, Verdict, preview
from dataplane_core.spec import ClientInfo, PartitionDescription, WorkInfo
from dataplane_core.spec.replies import Answer

#: A client with something that it does.
_Worker: TypeAlias = tuple[ClientInfo, WorkInfo]
#: A partition and a task of it.
_Task: TypeAlias = tuple[str, str]

#: Seconds after which a put that has not ended counts as one that waits for room, while puts do.
_ROOM_S: Final = 3.0
#: What may be slow or a fault is a fault after so many times the patience.
_LATE: Final = 5.0
#: What numbers a name: ``step-3``, ``train_b``.
_PLACE: Final = r"\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])"
#: With this begins the name of a task of an export, which is never starved.
_EXPORTS: Final = "export:"
#: Operations that wait for other clients.
_WAITING: Final = ("claim_meta", "put_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a store.

    Attributes:
        partitions: Partition -> what it holds.
        answers: Partition and task -> what the claim that `claims_of` finds would be given.
        clients: Those that announced themselves, also if they ended. Empty if the backend does not list them.
        patience_s: See above.
        now: The time, in seconds since 1970.
    """

    partitions: Mapping[str, PartitionDescription]
    answers: Mapping[_Task, Answer | None] = field(default_factory=dict)
    clients: Sequence[ClientInfo] = ()
    patience_s: float = 60.0
    now: float = 0.0


def got_nothing(work: WorkInfo) -> bool:
    """Whether a claim waits, or has ended in vain."""
    return work.ended_s is None or work.served_s is None or work.served_s > work.began_s


def claims_of(clients: Iterable[ClientInfo], partition_id: str) -> dict[str, WorkInfo]:
    """Task -> what its clients claim now, or claimed last."""
    works = (work for client in clients for work in client.work)
    claims = [work for work in works if (work.operation, work.partition_id) == ("claim_meta", partition_id)]
    # the last one counts. Claims without fields look after old samples, and are no stage's own
    claims.sort(key=lambda work: (work.ended_s is None, bool(work.fields), -work.began_s))
    return {work.task_name: work for work in claims}


def judge(facts: Facts, tasks: Iterable[_Task]) -> list[Verdict]:
    """How tasks fare. Raises `KeyError` if a partition has no such task."""
    verdicts = map(_Judge(facts).of_task, tasks)
    return [verdict for verdict in verdicts if verdict is not None]  # none is being judged


def _call_s(client: ClientInfo, operation: str | None, least_s: float) -> float | None:
    """The seconds for which a client has had an operation under way, if they are so many. None stands for all that do
    not wait for others."""
    for call in client.calls:
        is_meant = call.operation == operation if operation else call.operation not in _WAITING
        # not since: most that were under way when it announced itself have ended
        if is_meant and call.running_s >= least_s:
            return call.running_s + client.heard_s
    return None


def _ago_s(worker: _Worker) -> float | None:
    """Seconds since a client last put samples, or was given some."""
    client, work = worker
    return None if work.served_s is None else work.served_s + client.heard_s


def process_of(client: ClientInfo) -> str:
    """A client's process, for messages: ``process 4711 on host-a (reward)``."""
    return f"process {client.pid} on {client.host} ({client.role})"


def _phase_of(client: ClientInfo, group: str | None = None) -> str:
    """The phase that a client has been in longest, or that makes a group: `` in generate for 14 s``. Or nothing."""
    phase = next((phase for phase in client.phases if group is None or group in phase.groups), None)
    return "" if phase is None else f" in {phase.name} for {_seconds(phase.running_s + client.heard_s)}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


def _count(number: int, what: str = "sample") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _meant(name: str, names: Iterable[str]) -> str | None:
    """The name of these that was probably meant by an unknown one. Not one that differs in a number or a lone
    letter only."""
    near = difflib.get_close_matches(name, set(names), n=1, cutoff=0.75)
    bare = [re.sub(_PLACE, "", similar) for similar in (name, *near)]
    return near[0] if len(set(bare)) > 1 else None


@dataclass(frozen=True, slots=True)
class _Reason:
    """What may keep a task waiting. A fault, and ``is_over``: as of `Verdict`."""

    cause: Cause
    text: str
    is_fault: bool
    culprit: str = ""
    is_over: bool = False

    def after(self, text: str, **changes: Any) -> _Reason:
        """The same, with a text before its own."""
        return replace(self, text=f"{text} {self.text}", **changes)


class _Judge:
    """Judges each task at most twice, so that its cost grows with the tasks and not with the paths between them."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._verdicts: dict[tuple[_Task, bool], Verdict | None] = {}  # None: it is being judged
        self._path: list[_Task] = []  # those that are being judged
        self._work: dict[tuple[str, ...], list[_Worker]] = {}
        for client in facts.clients:
            for work in client.work:
                kind = (work.operation, work.partition_id, work.task_name)
                for part in {kind[:count] for count in (1, 2, 3)}:
                    self._work.setdefault(part, []).append((client, work))
        open_clients = [client for client in facts.clients if client.state == "open"]
        self._roles = Counter(client.role for client in open_clients)
        self._are_listed = any(client.client_id for client in facts.clients)
        self._full = next((partition.full for partition in facts.partitions.values() if partition.full), None)
        # who has registered and says nothing of what it does does not count: registering is not writing
        begun = {client.client_id for client, _ in self._workers("put_samples")}
        begun |= {client.client_id for client, _ in self._workers("register_partition") if not client.phases}
        self._fresh = {client.client_id for client in open_clients} - begun - {""}
        self._idle = any(client.client_id and not client.work for client in open_clients)
        self._claiming = {client.client_id for client, _ in self._workers("claim_meta")}

    def of_task(self, task: _Task, deep: bool = True) -> Verdict | None:
        """Judges a task. None: it is being judged.

        ``deep``: also whether another task is why the store is full, or why nobody has written a field. Those are not
        judged deeply, so that no two are each other's cause.
        """
        if (task, deep) not in self._verdicts:
            self._verdicts[task, deep] = None
            self._path.append(task)
            verdict = self._judged(*task, deep)
            if verdict.state == "starved" and task[1].startswith(_EXPORTS):
                verdict = replace(verdict, state="idle")
            self._verdicts[task, deep] = verdict
            self._path.pop()
        return self._verdicts[task, deep]

    # --- one task -----------------------------------------------------------------------------------------------------

    def _judged(self, partition_id: str, task_name: str, deep: bool) -> Verdict:
        partition = self._facts.partitions[partition_id]
        counts = partition.tasks[task_name]
        backlog = partition.num_samples - counts.num_consumed
        answer = self._facts.answers.get((partition_id, task_name))
        num_ready = counts.num_ready if answer is None else answer.num_ready
        verdict = Verdict(
            partition_id=partition_id, task_name=task_name, state="moves", backlog=backlog, num_ready=num_ready
        )
        if partition.is_complete and (counts.is_consumed or not backlog):
            text = "It was given all samples that were to come."
            if backlog:
                text = f"It was given all samples but {backlog}, which are never given: their groups are not whole."
            return replace(verdict, state="done", text=text)
        # claims without fields look after old samples, and are no stage's own
        claimers = [
            worker for worker in self._claimers(verdict) if worker[1].fields or self._wait_s(worker) is not None
        ]
        if not claimers:
            return self._unclaimed(verdict)
        alive = [worker for worker in claimers if worker[0].state == "open"]
        if not alive:
            last, story = self._ended(claimers)
            if not self._is_final(last) or (last.state == "closed" and not backlog):
                return replace(verdict, state="idle", text=f"Nobody claims for it now: {story}")
            text = f"{_count(backlog)} of it are left, and nobody claims them: {story}"
            fault = _Reason(last.state, text, True, process_of(last))  # type: ignore[arg-type] # it is not open
            return self._starved(verdict, fault, last.heard_s)
        waiting = [worker for worker in alive if self._wait_s(worker) is not None]
        if not waiting or answer is None or answer.shortfall is None:
            return self._works(verdict, alive)
        waits_s = max(self._wait_s(worker) or 0.0 for worker in waiting)
        # the task gets samples, also if another of its clients is given them
        waited_s = min([waits_s, *(ago_s for worker in alive if (ago_s := _ago_s(worker)) is not None)])
        wanted = max(work.batch_size for _, work in waiting)
        if answer.num_ready >= wanted:
            text = f"{_count(answer.num_ready)} are ready, and its claim asks for {wanted}: it is answered now."
            return replace(verdict, text=text)
        reason = self._why(verdict, waiting, answer.shortfall, wanted, waited_s, deep)
        reason = reason.after(f"It has {answer.num_ready} of {wanted} samples.")
        return self._starved(verdict, reason, waited_s)

    def _starved(self, verdict: Verdict, reason: _Reason, waited_s: float) -> Verdict:
        """A verdict with its reason. It waits if that is no fault."""
        return replace(
            verdict,
            state="starved" if reason.is_fault else "waits",
            cause=reason.cause,
            waited_s=waited_s,
            culprit=reason.culprit,
            is_over=reason.is_over,
            text=reason.text,
        )

    def _unclaimed(self, verdict: Verdict) -> Verdict:
        """Nobody has claimed for the task."""
        others = self._workers("claim_meta", verdict.partition_id)
        near = _meant(verdict.task_name, (work.task_name for _, work in others))
        partition = self._facts.partitions[verdict.partition_id]
        waited_s = partition.oldest_s or 0.0
        may_begin = self._idle or not self._are_listed
        if near is None and partition.is_complete and waited_s >= self._facts.patience_s and not may_begin:
            text = f"Nobody has claimed for it, and all of its samples are there, the oldest for {_seconds(waited_s)}."
            return self._starved(verdict, _Reason("unclaimed", text, True), waited_s)
        if near is None or not self._is_late(waited_s) or may_begin:
            return replace(verdict, state="idle", cause="unclaimed", text="Nobody has claimed for it so far.")
        name = process_of(next(client for client, work in others if work.task_name == near))
        text = f"Nobody has claimed for it, but {name} claims for '{near}'. Is that a typing error?"
        return self._starved(verdict, _Reason("name", text, True, name), waited_s)

    def _works(self, verdict: Verdict, alive: Sequence[_Worker]) -> Verdict:
        """Its clients are alive, and do not wait."""
        for client, _ in alive:
            stuck_s = _call_s(client, None, self._facts.patience_s)
            if stuck_s is not None:
                return self._starved(verdict, self._stuck(client, stuck_s), stuck_s)
        last = min(alive, key=lambda worker: worker[1].began_s + worker[0].heard_s)
        since_s = _ago_s(last)
        story = "was given none yet" if since_s is None else f"was last given samples {_seconds(since_s)} ago"
        return replace(verdict, text=f"{process_of(last[0])} works on it, and {story}.")

    # --- why a claim waits --------------------------------------------------------------------------------------------

    def _why(
        self,
        verdict: Verdict,
        waiting: Sequence[_Worker],
        shortfall: Shortfall,
        wanted: int,
        waited_s: float,
        deep: bool,
    ) -> _Reason:
        """The one reason why a claim waits: the first fault, else the first that there is."""
        partition_id = verdict.partition_id
        is_late = self._is_late(waited_s)
        reasons: list[_Reason] = []
        coming = verdict.num_ready  # what the claim can count on if others do their work
        names = {f"process {client.pid} on {client.host}" for client, _ in waiting}
        # who holds samples and waits for more, such as a stream that reads ahead, does not wait for these
        own = bool(shortfall.leased) and all(lease.holder in names for lease in shortfall.leased)
        if shortfall.num_leased and not own:
            reasons.append(self._leased(shortfall))
            coming += 0 if reasons[-1].is_fault else shortfall.num_leased
        if shortfall.num_lacking or shortfall.missing_cells:
            reasons.append(self._lacking(partition_id, shortfall, is_late, deep))
            coming += shortfall.num_lacking
        # once all are written, the last claim waits for those that can still be given, however few
        if coming < wanted and not (reasons and self._facts.partitions[partition_id].is_complete):
            if shortfall.num_incomplete:
                reasons.append(self._incomplete(partition_id, shortfall, is_late, deep))
            if shortfall.num_not_matching:
                reasons.append(self._not_matching(partition_id, waiting, shortfall, is_late))
            reasons.append(self._too_few(partition_id, is_late, deep))
        reason = next((reason for reason in reasons if reason.is_fault), reasons[0])
        return replace(reason, is_over=all(reason.is_over for reason in reasons))

    def _leased(self, shortfall: Shortfall) -> _Reason:
        """Others hold samples of the task."""
        lease = shortfall.leased[0] if shortfall.leased else LeaseHolder(sample_id="", holder="", left_s=0)
        holders = [client for client in self._facts.clients if f"process {client.pid} on {client.host}" == lease.holder]
        # a process may have several clients, of which some were closed
        holder = min(holders, key=lambda client: (client.state != "open", client.heard_s), default=None)
        who = (lease.holder or "an unnamed client") if holder is None else process_of(holder)
        text = f"{_count(shortfall.num_leased)} are leased, '{lease.sample_id}' to {who}"
        text = f"{text} for another {_seconds(lease.left_s)}."
        if holder is None:
            return _Reason("leased", text, False, who)
        return _Reason("leased", f"{text} {self._story(holder)}", self._is_final(holder), who)

    def _lacking(self, partition_id: str, shortfall: Shortfall, is_late: bool, deep: bool) -> _Reason:
        """Samples lack fields."""
        sample_id, names = next(iter(shortfall.missing_cells.items()), ("", ()))
        reasons = []
        for name in names:
            writers = [worker for worker in self._workers("put_samples") if name in worker[1].fields]
            here = [worker for worker in writers if worker[1].partition_id == partition_id] or writers
            lacks = f"{_count(shortfall.num_lacking)} lack '{name}', the first one is '{sample_id}'."
            reason = self._of_producers(here, f"writes '{name}'", is_late, deep)
            reason = reason if here else self._unwritten(partition_id, name, reason, deep)
            reasons.append(reason.after(lacks))
        if not reasons:
            return _Reason("unwritten", f"{_count(shortfall.num_lacking)} lack fields that it requires.", False)
        return next((reason for reason in reasons if reason.is_fault), reasons[0])

    def _unwritten(self, partition_id: str, name: str, reason: _Reason, deep: bool) -> _Reason:
        """Nobody writes a field: since its name is another one, or since another task is starved?"""
        near = _meant(name, self._facts.partitions[partition_id].specs) if reason.is_over else None
        if near is not None:
            return _Reason("name", f"Nobody writes it, but '{near}' is written.", True, is_over=True)
        other = self._starved_task(partition_id) if deep else None
        if other is None:
            return reason
        text = f"{reason.text} The task '{other.task_name}' is starved: {other.text}"
        return _Reason(other.cause, text, True, other.culprit, is_over=other.is_over)

    def _incomplete(self, partition_id: str, shortfall: Shortfall, is_late: bool, deep: bool) -> _Reason:
        """Groups are not whole."""
        partition = self._facts.partitions[partition_id]
        group, count = next(iter(shortfall.incomplete_groups.items()), ("", 0))
        size = partition.info.grpo_group_size or 1
        absent = [
            member for member in (f"{group}_g{place}" for place in range(size)) if member not in shortfall.members
        ]
        are = "is in a group that is" if shortfall.num_incomplete == 1 else "are in groups that are"
        what = f"{_count(shortfall.num_incomplete)} {are} not whole: '{group}' has {count} of {size}"
        if count >= size:
            return _Reason("group", f"{what}, and lost one that was cleared. It is never given.", is_late, is_over=True)
        if partition.is_complete:
            return _Reason("group", f"{what}, and no more samples come. It is never given.", False, is_over=True)
        never = f"{what}. {preview(absent)} {'was' if len(absent) == 1 else 'were'} never put."
        makers = [client for client in self._facts.clients if _makes(client, partition_id, group)]
        maker = min(makers, key=lambda client: (client.state != "open", client.heard_s), default=None)
        sources = sorted(self._sources(partition_id), key=lambda worker: worker[0] is not maker)
        reason = self._of_producers(sources, "puts new samples", is_late, deep)
        is_fault = reason.is_fault or is_late
        if maker is None:
            return reason.after(never, cause="group", is_fault=is_fault)
        culprit = name = process_of(maker)
        if maker.state == "open":
            story = f"It is made by {name}{_phase_of(maker, group)}."
            culprit = reason.culprit if reason.is_fault else name
        else:
            story = f"It was made by {name}." if reason.culprit == name else f"Its maker ended: {self._story(maker)}"
        return reason.after(f"{never} {story}", cause="group", is_fault=is_fault, culprit=culprit)

    def _not_matching(
        self, partition_id: str, waiting: Sequence[_Worker], shortfall: Shortfall, is_late: bool
    ) -> _Reason:
        """Samples do not pass the filter."""
        asked = next((work.tag_filter for _, work in waiting if work.tag_filter), None) or {}
        sample_id, tags = next(iter(shortfall.not_matching), ""), shortfall.newest_tags
        condition = ", ".join(f"{name} {symbol} {operand!r}" for name, (symbol, operand) in asked.items())
        has = ", ".join(f"{name} {tags[name]!r}" if name in tags else f"no {name}" for name in asked)
        newest = f" The newest of them, '{sample_id}', has {has}." if sample_id and has else ""
        text = f"{_count(shortfall.num_not_matching)} do not pass its filter ({condition}).{newest}"
        sources = self._sources(partition_id)
        is_over = bool(sources) and all(client.state != "open" for client, _ in sources)
        is_over = is_over and self._is_final(self._ended(sources)[0])
        is_over = is_over or self._facts.partitions[partition_id].is_complete
        return _Reason("filter", text, is_late or is_over, is_over=is_over)

    def _too_few(self, partition_id: str, is_late: bool, deep: bool) -> _Reason:
        """More samples must be put."""
        partition = self._facts.partitions[partition_id]
        written, expected = partition.num_samples + partition.num_cleared, partition.info.num_samples
        came = f"{written} of {expected} samples came" if expected is not None else f"{_count(written)} came"
        if partition.num_cleared:
            came = f"{came}, of which {partition.num_cleared} were cleared"
        if not written and partition.info.registered_by:
            ago = _seconds(max(0.0, self._facts.now - partition.info.registered_at))
            came = f"{came} since {partition.info.registered_by} registered it {ago} ago"
        reason = self._of_producers(self._sources(partition_id), "puts new samples", is_late, deep)
        if reason.cause == "closed" and reason.is_fault:
            short = "" if expected is not None else " It did not call finish_partition."
            return replace(reason, cause="short", text=f"{came}, and no more will. {reason.text}{short}")
        return reason.after(f"{came}.")

    # --- those who are waited for -------------------------------------------------------------------------------------

    def _of_producers(self, workers: Sequence[_Worker], what: str, is_late: bool, deep: bool) -> _Reason:
        """How those who do something fare."""
        if not workers:
            is_over = is_late and not self._may_begin()
            return _Reason("unwritten", f"No client that is known {what}.", is_over, is_over=is_over)
        alive = [worker for worker in workers if worker[0].state == "open"]
        if not alive:
            last, story = self._ended(workers)
            is_over = self._is_final(last)
            cause: Any = last.state  # which is not open
            return _Reason(cause, f"Nobody {what} now: {story}", is_over, process_of(last), is_over=is_over)
        reasons = []
        for worker in alive:  # until one does its work
            reasons.append(self._of_producer(worker, what, is_late, deep))
            if not (reasons[-1].is_fault or reasons[-1].is_over):
                break
        reason = min(reasons, key=lambda reason: (reason.is_over, reason.is_fault))
        dead = [worker for worker in workers if worker[0].state not in ("open", "closed")]
        if dead and not reason.is_fault:
            last, story = self._ended(dead)
            quiet_s = min((ago_s for worker in alive if (ago_s := _ago_s(worker)) is not None), default=0.0)
            is_fault = is_late and quiet_s >= self._facts.patience_s
            cause = last.state if is_fault else reason.cause
            return replace(reason, cause=cause, is_fault=is_fault, text=f"{reason.text} Another one {what}: {story}")
        return reason

    def _of_producer(self, worker: _Worker, what: str, is_late: bool, deep: bool) -> _Reason:
        """How a producer that is alive fares."""
        client, patience_s = worker[0], self._facts.patience_s
        name = process_of(client)
        room_s = _call_s(client, "put_samples", _ROOM_S)
        if room_s is not None and self._full is not None:
            held, most = self._full
            text = f"The store is full ({held} of {most} bytes). {name} {what}, and waits for room for"
            return self._not_cleared(is_late, deep).after(f"{text} {_seconds(room_s)}.")
        for claim in client.work:
            task = (claim.partition_id, claim.task_name)
            is_known = task[0] in self._facts.partitions and task[1] in self._facts.partitions[task[0]].tasks
            if claim.operation != "claim_meta" or claim.ended_s is not None or not is_known:
                continue
            verdict = self.of_task(task, deep)
            if verdict is not None and verdict.state in ("starved", "waits"):
                text = f"{name} {what}, and waits for samples of its task '{task[1]}' itself. {verdict.text}"
                is_fault = verdict.state == "starved"
                return _Reason(verdict.cause, text, is_fault, verdict.culprit, is_over=verdict.is_over)
            if verdict is None and is_late and not client.phases:
                text = f"{name} {what}, and waits for samples of this task itself."  # or another thread works?
                return _Reason("works", text, False, name, is_over=True)
        stuck_s = _call_s(client, None, patience_s) or _call_s(client, "put_samples", patience_s)
        if stuck_s is not None:
            return self._stuck(client, stuck_s).after(f"It {what}.")
        last_s, phase = _ago_s(worker), _phase_of(client)
        if last_s is None:
            now = f": it is{phase}" if phase else ""
            return _Reason("works", f"{name} {what}, and has not done so yet{now}.", False, name)
        text = f"{name} {what}. It is alive{phase}, and last did so {_seconds(last_s)} ago."
        return _Reason("works", text, False, name)

    def _not_cleared(self, is_late: bool, deep: bool) -> _Reason:
        """The store is full: of which samples?"""
        other = self._starved_task(None) if deep else None
        if other is not None:
            text = f"It holds samples that the task '{other.task_name}' has not consumed. {other.text}"
            return _Reason("full", text, True, other.culprit)
        left = {
            (partition_id, name): partition.num_samples - counts.num_consumed
            for partition_id, partition in self._facts.partitions.items()
            for name, counts in partition.tasks.items()
        }
        task = max(left, key=left.__getitem__, default=("", ""))
        if left.get(task):
            text = f"{_count(left[task])} of '{task[0]}' are not consumed by the task '{task[1]}'."
            claims = list(self._workers("claim_meta", *task))
        else:
            text = "All tasks have consumed all samples, and nobody clears them."
            # who was given samples may clear them when its step ends
            claims = [worker for worker in self._workers("claim_meta") if worker[1].fields]
        alive = [worker for worker in claims if worker[0].state == "open"]
        is_fault = is_late and all(self._wait_s(worker) is not None for worker in alive)
        return _Reason("full", text, is_fault)

    def _starved_task(self, partition_id: str | None) -> Verdict | None:
        """A task that is starved for a reason of its own: of a partition, or of all, the one with most left."""
        tasks = [
            (name, task)
            for name, partition in self._facts.partitions.items()
            if partition_id in (None, name)
            for task in partition.tasks
            if (name, task) not in self._path
        ]
        verdicts = [verdict for task in tasks if (verdict := self.of_task(task, deep=False)) is not None]
        starved = [verdict for verdict in verdicts if verdict.state == "starved"]
        return max(starved, key=lambda verdict: verdict.backlog, default=None)

    def _stuck(self, client: ClientInfo, stuck_s: float) -> _Reason:
        call, name = max(client.calls, key=lambda call: call.running_s), process_of(client)
        return _Reason(
            "stuck", f"{name} is alive, but has been in {call.operation} for {_seconds(stuck_s)}.", True, name
        )

    def _ended(self, workers: Sequence[_Worker]) -> tuple[ClientInfo, str]:
        """Of those that ended, the last one, and a sentence."""
        client, _ = min(workers, key=lambda worker: worker[0].heard_s)
        others = len({other.client_id for other, _ in workers}) - 1
        more = f" So did {_count(others, 'other')}." if others else ""
        return client, f"{self._story(client)}{more}"

    def _is_final(self, client: ClientInfo) -> bool:
        """Whether a client ended, and nobody is about to take its place: a step may open clients of its own."""
        if client.state != "closed":
            return client.state != "open"
        alike = self._roles[client.role] - sum(claimer.role == client.role for claimer in self._open_claimers())
        return client.heard_s >= self._facts.patience_s and not alike

    def _may_begin(self) -> bool:
        """Whether somebody may still do what nobody has done so far: a client that has put nothing yet, and is not one
        of those that wait; or one that is not listed."""
        return not self._are_listed or bool(self._fresh - {client.client_id for client in self._open_claimers()})

    def _story(self, client: ClientInfo) -> str:
        """What became of a client, as a sentence."""
        heard = f"{_seconds(client.heard_s)} ago" + "".join(f", in {phase.name}" for phase in client.phases[:1])
        ends = {
            "open": "is alive",
            "closed": f"closed its client {_seconds(client.heard_s)} ago",
            "gone": f"is gone; it was last heard of {heard}",
            "stopped": f"is stopped; it was last heard of {heard}",
            "silent": f"was last heard of {heard}: it is dead, stopped or cut off",
        }
        return f"{process_of(client)} {ends[client.state]}."

    def _wait_s(self, worker: _Worker) -> float | None:
        """For how long a client has got nothing for a task. None: it was served, or asks no longer."""
        client, work = worker
        asks_no_longer = work.ended_s is not None and work.ended_s + client.heard_s >= self._facts.patience_s
        return None if asks_no_longer or not got_nothing(work) else work.began_s + client.heard_s

    def _is_late(self, waited_s: float) -> bool:
        """Whether what may be merely slow counts as a fault."""
        return waited_s >= _LATE * self._facts.patience_s

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def _workers(self, *kind: str) -> Sequence[_Worker]:
        """Those that do something: an operation, of a partition, for a task."""
        return self._work.get(kind, ())

    def _claimers(self, verdict: Verdict) -> Sequence[_Worker]:
        return self._workers("claim_meta", verdict.partition_id, verdict.task_name)

    def _open_claimers(self) -> list[ClientInfo]:
        """The open clients of the task that is being judged."""
        claimers = {client.client_id: client for client, _ in self._workers("claim_meta", *self._path[-1])}
        return [client for client in claimers.values() if client.state == "open"]

    def _sources(self, partition_id: str) -> list[_Worker]:
        """Who puts new samples: those that put the fields which most samples have, and claim none of the partition; and
        those that say that they make groups of it."""
        num_rows = self._facts.partitions[partition_id].num_rows
        most = max(num_rows.values(), default=0)
        first = {name for name, count in num_rows.items() if count == most}
        here = self._workers("put_samples", partition_id)
        sources = (
            [worker for worker in here if worker[0].client_id not in self._claiming]
            or [worker for worker in here if first.intersection(worker[1].fields)]
            or [worker for worker in self._workers("put_samples") if worker[0].client_id not in self._claiming]
        )
        puts = {id(client) for client, _ in sources}
        makes = WorkInfo(operation="put_samples", partition_id=partition_id, began_s=0.0)
        makers = [client for client in self._facts.clients if _makes(client, partition_id) and id(client) not in puts]
        return [*sources, *((client, makes) for client in makers)]


def _makes(client: ClientInfo, partition_id: str, group: str | None = None) -> bool:
    """Whether a client says by a phase that it makes a group, or any group, of a partition."""
    phases = (phase for phase in client.phases if phase.partition_id == partition_id)
    return any(phase.groups and group in (None, *phase.groups) for phase in phases)
