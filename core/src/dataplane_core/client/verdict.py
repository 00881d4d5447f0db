"""Why a task gets no samples: from what the store tells to one cause, with names. Pure; `DataPlaneClient.why` asks.

A *fault* is what no waiting mends: a process that is gone, a filter that nothing passes. A task that waits for a
producer which is alive is not starved, however slow that is. What may be slow or may be a fault, such as a group that
is short of a sample, counts as a fault after five times ``patience_s``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

from dataplane_core.errors import Cause, LeaseHolder, Shortfall, Verdict, lack_of_rollout, preview
from dataplane_core.spec import ClientInfo, PartitionDescription, WorkInfo
from dataplane_core.spec.replies import Answer

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
    """What is known of a store."""

    partitions: Mapping[str, PartitionDescription]
    answers: Mapping[_Task, Answer | None] = field(default_factory=dict)  # to the claim that `claims_of` finds
    clients: Sequence[ClientInfo] = ()  # those that announced themselves, also if they ended
    patience_s: float = 60.0
    now: float = 0.0  # since 1970


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


def process_of(client: ClientInfo) -> str:
    """A client's process, for messages: ``process 4711 on host-a (reward)``."""
    return f"process {client.pid} on {client.host} ({client.role})"


def _story_of(client: ClientInfo) -> str:
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


def _phase_of(client: ClientInfo, group: str | None = None) -> str:
    """The phase that a client has been in longest, or that makes a group: `` in generate for 14 s``. Or nothing."""
    phase = next((phase for phase in client.phases if group is None or group in phase.groups), None)
    return "" if phase is None else f" in {phase.name} for {_seconds(phase.running_s + client.heard_s)}"


def _makes(client: ClientInfo, partition_id: str, group: str | None = None) -> bool:
    """Whether a client says by a phase that it makes a group, or any group, of a partition."""
    phases = (phase for phase in client.phases if phase.partition_id == partition_id)
    return any(phase.groups and group in (None, *phase.groups) for phase in phases)


def _liveliest(clients: Iterable[ClientInfo]) -> ClientInfo | None:
    return min(clients, key=lambda client: (client.state != "open", client.heard_s), default=None)


def _call_s(client: ClientInfo, operation: str | None, least_s: float) -> float | None:
    """The seconds for which a client has had an operation under way, if they are so many. None stands for all that do
    not wait for others."""
    for call in client.calls:
        is_meant = call.operation == operation if operation else call.operation not in _WAITING
        # not since: most that were under way when it announced itself have ended
        if is_meant and call.running_s >= least_s:
            return call.running_s + client.heard_s
    return None


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


class _Worker(NamedTuple):
    """A client, and something that it does."""

    client: ClientInfo
    work: WorkInfo

    @property
    def is_open(self) -> bool:
        return self.client.state == "open"

    @property
    def ago_s(self) -> float | None:
        """Seconds since it last put samples, or was given some."""
        return None if self.work.served_s is None else self.work.served_s + self.client.heard_s


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
        self.facts = facts
        self._verdicts: dict[tuple[_Task, bool], Verdict | None] = {}  # None: it is being judged
        self._path: list[_Task] = []  # those that are being judged
        self._work: dict[tuple[str, ...], list[_Worker]] = {}
        for client in facts.clients:
            for work in client.work:
                kind = (work.operation, work.partition_id, work.task_name)
                for part in {kind[:count] for count in (1, 2, 3)}:
                    self._work.setdefault(part, []).append(_Worker(client, work))
        # bytes that the store holds and may hold, while puts wait for room
        self.full = next((partition.full for partition in facts.partitions.values() if partition.full), None)
        self.are_listed = any(client.client_id for client in facts.clients)
        # who has registered and says nothing of what it does does not count: registering is not writing
        begun = {client.client_id for client, _ in self.workers("put_samples")}
        begun |= {client.client_id for client, _ in self.workers("register_partition") if not client.phases}
        open_clients = [client for client in facts.clients if client.state == "open"]
        # who has put nothing yet
        self.fresh = {client.client_id for client in open_clients} - begun - {""}
        self.is_idle = any(client.client_id and not client.work for client in open_clients)

    def of_task(self, task: _Task, deep: bool = True) -> Verdict | None:
        """Judges a task. None: it is being judged.

        ``deep``: also whether another task is why the store is full, or why nobody has written a field. Those are not
        judged deeply, so that no two are each other's cause.
        """
        if (task, deep) not in self._verdicts:
            self._verdicts[task, deep] = None
            self._path.append(task)
            verdict = _Case(self, task, deep).verdict()
            if verdict.state == "starved" and task[1].startswith(_EXPORTS):
                verdict = replace(verdict, state="idle")
            self._verdicts[task, deep] = verdict
            self._path.pop()
        return self._verdicts[task, deep]

    def starved_task(self, partition_id: str | None) -> Verdict | None:
        """A task that is starved for a reason of its own: of a partition, or of all, the one with most left."""
        tasks = [
            (name, task)
            for name, partition in self.facts.partitions.items()
            if partition_id in (None, name)
            for task in partition.tasks
            if (name, task) not in self._path
        ]
        verdicts = [verdict for task in tasks if (verdict := self.of_task(task, deep=False)) is not None]
        starved = [verdict for verdict in verdicts if verdict.state == "starved"]
        return max(starved, key=lambda verdict: verdict.backlog, default=None)

    def workers(self, *kind: str) -> Sequence[_Worker]:
        """Those that do something: an operation, of a partition, for a task."""
        return self._work.get(kind, ())

    def sources(self, partition_id: str) -> list[_Worker]:
        """Who puts new samples: those that put the fields which most samples have, and claim none of the partition; and
        those that say that they make groups of it."""
        num_rows = self.facts.partitions[partition_id].num_rows
        most = max(num_rows.values(), default=0)
        first = {name for name, count in num_rows.items() if count == most}
        claiming = {client.client_id for client, _ in self.workers("claim_meta")}
        here = self.workers("put_samples", partition_id)
        sources = (
            [worker for worker in here if worker.client.client_id not in claiming]
            or [worker for worker in here if first.intersection(worker.work.fields)]
            or [worker for worker in self.workers("put_samples") if worker.client.client_id not in claiming]
        )
        puts = {id(client) for client, _ in sources}
        makes = WorkInfo(operation="put_samples", partition_id=partition_id, began_s=0.0)
        makers = [client for client in self.facts.clients if _makes(client, partition_id) and id(client) not in puts]
        return [*sources, *(_Worker(client, makes) for client in makers)]


class _Case:
    """A task that is judged. ``deep``: as of `_Judge.of_task`."""

    def __init__(self, judge: _Judge, task: _Task, deep: bool) -> None:
        self._judge, self._deep = judge, deep
        self._clients, self._patience_s = judge.facts.clients, judge.facts.patience_s
        self._partition_id, self._task_name = task
        self._partition = judge.facts.partitions[self._partition_id]
        self._claimers = judge.workers("claim_meta", *task)
        self._claiming = {worker.client.client_id for worker in self._claimers if worker.is_open}
        self._is_late = False  # whether what may be merely slow counts as a fault by now

    def verdict(self) -> Verdict:
        """How the task fares."""
        task = self._partition.tasks[self._task_name]
        answer = self._judge.facts.answers.get((self._partition_id, self._task_name))
        backlog = self._partition.num_samples - task.num_consumed
        moves = Verdict(
            partition_id=self._partition_id,
            task_name=self._task_name,
            state="moves",
            backlog=backlog,
            num_ready=task.num_ready if answer is None else answer.num_ready,
        )
        if self._partition.is_complete and (task.is_consumed or not backlog):
            text = "It was given all samples that were to come."
            if backlog:
                text = f"It was given all samples but {backlog}, which are never given: their groups are not whole."
            return replace(moves, state="done", text=text)
        # claims without fields look after old samples, and are no stage's own
        claimers = [worker for worker in self._claimers if worker.work.fields or self._wait_s(worker) is not None]
        if not claimers:
            return self._unclaimed(moves)
        alive = [worker for worker in claimers if worker.is_open]
        if not alive:
            last, story = self._ended(claimers)
            if not self._is_final(last) or (last.state == "closed" and not backlog):
                return replace(moves, state="idle", text=f"Nobody claims for it now: {story}")
            text = f"{_count(backlog)} of it are left, and nobody claims them: {story}"
            fault = _Reason(last.state, text, True, process_of(last))  # type: ignore[arg-type] # it is not open
            return _waits(moves, fault, last.heard_s)
        waiting = [worker for worker in alive if self._wait_s(worker) is not None]
        if not waiting or answer is None or answer.shortfall is None:
            return self._works(moves, alive)
        waits_s = max(self._wait_s(worker) or 0.0 for worker in waiting)
        # the task gets samples, also if another of its clients is given them
        waited_s = min([waits_s, *(worker.ago_s for worker in alive if worker.ago_s is not None)])
        wanted = max(work.batch_size for _, work in waiting)
        if answer.num_ready >= wanted:
            text = f"{_count(answer.num_ready)} are ready, and its claim asks for {wanted}: it is answered now."
            return replace(moves, text=text)
        self._is_late = waited_s >= _LATE * self._patience_s
        reason = self._why(waiting, answer.shortfall, wanted - answer.num_ready)
        what = "groups" if self._partition.info.rollouts else "samples"
        return _waits(moves, reason.after(f"It has {answer.num_ready} of {wanted} {what}."), waited_s)

    def _unclaimed(self, moves: Verdict) -> Verdict:
        """Nobody has claimed for the task."""
        others = self._judge.workers("claim_meta", self._partition_id)
        near = _meant(self._task_name, (work.task_name for _, work in others))
        waited_s = self._partition.oldest_s or 0.0
        may_begin = self._judge.is_idle or not self._judge.are_listed
        if near is None and self._partition.is_complete and waited_s >= self._patience_s and not may_begin:
            text = f"Nobody has claimed for it, and all of its samples are there, the oldest for {_seconds(waited_s)}."
            return _waits(moves, _Reason("unclaimed", text, True), waited_s)
        if near is None or waited_s < _LATE * self._patience_s or may_begin:
            return replace(moves, state="idle", cause="unclaimed", text="Nobody has claimed for it so far.")
        name = process_of(next(client for client, work in others if work.task_name == near))
        text = f"Nobody has claimed for it, but {name} claims for '{near}'. Is that a typing error?"
        return _waits(moves, _Reason("name", text, True, name), waited_s)

    def _works(self, moves: Verdict, alive: Sequence[_Worker]) -> Verdict:
        """Its clients are alive, and do not wait."""
        for client, _ in alive:
            stuck_s = _call_s(client, None, self._patience_s)
            if stuck_s is not None:
                return _waits(moves, _stuck(client, stuck_s), stuck_s)
        last = min(alive, key=lambda worker: worker.work.began_s + worker.client.heard_s)
        story = "was given none yet" if last.ago_s is None else f"was last given samples {_seconds(last.ago_s)} ago"
        return replace(moves, text=f"{process_of(last.client)} works on it, and {story}.")

    # --- why a claim waits --------------------------------------------------------------------------------------------

    def _why(self, waiting: Sequence[_Worker], shortfall: Shortfall, num_short: int) -> _Reason:
        """The one reason why a claim waits for so many more: the first fault, else the first that there is."""
        reasons: list[_Reason] = []
        coming = 0  # what the claim can count on if others do their work
        names = {f"process {client.pid} on {client.host}" for client, _ in waiting}
        # who holds samples and waits for more, such as a stream that reads ahead, does not wait for these
        own = bool(shortfall.leased) and all(lease.holder in names for lease in shortfall.leased)
        if shortfall.num_leased and not own:
            reasons.append(self._leased(shortfall))
            coming += 0 if reasons[-1].is_fault else shortfall.num_leased
        if shortfall.num_lacking or shortfall.missing_cells:
            reasons.append(self._lacking(shortfall))
            coming += shortfall.num_lacking
        # Once all are written, the last claim waits for those that can still be given, however few. Of rollouts, groups
        # are short and samples are coming, so the two cannot be compared.
        if (coming < num_short or self._partition.info.rollouts) and not (reasons and self._partition.is_complete):
            if shortfall.num_incomplete:
                reasons.append(self._incomplete(shortfall))
            if shortfall.num_not_matching:
                reasons.append(self._not_matching(waiting, shortfall))
            reasons.append(self._too_few())
        reason = next((reason for reason in reasons if reason.is_fault), reasons[0])
        return replace(reason, is_over=all(reason.is_over for reason in reasons))

    def _leased(self, shortfall: Shortfall) -> _Reason:
        """Others hold samples of the task."""
        lease = shortfall.leased[0] if shortfall.leased else LeaseHolder(sample_id="", holder="", left_s=0)
        holders = [client for client in self._clients if f"process {client.pid} on {client.host}" == lease.holder]
        holder = _liveliest(holders)  # a process may have several clients, of which some were closed
        who = (lease.holder or "an unnamed client") if holder is None else process_of(holder)
        text = f"{_count(shortfall.num_leased)} are leased, '{lease.sample_id}' to {who}"
        text = f"{text} for another {_seconds(lease.left_s)}."
        if holder is None:
            return _Reason("leased", text, False, who)
        return _Reason("leased", f"{text} {_story_of(holder)}", self._is_final(holder), who)

    def _lacking(self, shortfall: Shortfall) -> _Reason:
        """Samples lack fields."""
        sample_id, names = next(iter(shortfall.missing_cells.items()), ("", ()))
        reasons = []
        for name in names:
            writers = [worker for worker in self._judge.workers("put_samples") if name in worker.work.fields]
            here = [worker for worker in writers if worker.work.partition_id == self._partition_id] or writers
            reason = self._of_producers(here, f"writes '{name}'")
            reason = reason if here else self._unwritten(name, reason)
            lacks = f"{_count(shortfall.num_lacking)} lack '{name}', the first one is '{sample_id}'."
            reasons.append(reason.after(lacks))
        if not reasons:
            return _Reason("unwritten", f"{_count(shortfall.num_lacking)} lack fields that it requires.", False)
        return next((reason for reason in reasons if reason.is_fault), reasons[0])

    def _unwritten(self, name: str, reason: _Reason) -> _Reason:
        """Nobody writes a field: since its name is another one, or since another task is starved?"""
        near = _meant(name, self._partition.specs) if reason.is_over else None
        if near is not None:
            return _Reason("name", f"Nobody writes it, but '{near}' is written.", True, is_over=True)
        other = self._judge.starved_task(self._partition_id) if self._deep else None
        if other is None:
            return reason
        text = f"{reason.text} The task '{other.task_name}' is starved: {other.text}"
        return _Reason(other.cause, text, True, other.culprit, is_over=other.is_over)

    def _incomplete(self, shortfall: Shortfall) -> _Reason:
        """Groups are not whole."""
        group, count = next(iter(shortfall.incomplete_groups.items()), ("", 0))
        info = self._partition.info
        size = info.grpo_group_size or (None if info.rollouts else 1)
        are = "is in a group that is" if shortfall.num_incomplete == 1 else "are in groups that are"
        has = f"{count} rollouts" if size is None else f"{count} of {size}"
        what = f"{_count(shortfall.num_incomplete)} {are} not whole: '{group}' has {has}"
        if size is not None and count >= size:
            text = f"{what}, and lost one that was cleared. It is never given."
            return _Reason("group", text, self._is_late, is_over=True)
        if self._partition.is_complete:
            return _Reason("group", f"{what}, and no more samples come. It is never given.", False, is_over=True)
        never = f"{what}. {self._absent(group, size, shortfall)}."
        makers = [client for client in self._clients if _makes(client, self._partition_id, group)]
        maker = _liveliest(makers)
        sources = sorted(self._judge.sources(self._partition_id), key=lambda worker: worker.client is not maker)
        reason = self._of_producers(sources, "puts new samples")
        is_fault = reason.is_fault or self._is_late
        if maker is None:
            return reason.after(never, cause="group", is_fault=is_fault)
        culprit = name = process_of(maker)
        if maker.state == "open":
            story = f"It is made by {name}{_phase_of(maker, group)}."
            culprit = reason.culprit if reason.is_fault else name
        else:
            story = f"It was made by {name}." if reason.culprit == name else f"Its maker ended: {_story_of(maker)}"
        return reason.after(f"{never} {story}", cause="group", is_fault=is_fault, culprit=culprit)

    def _absent(self, group: str, size: int | None, shortfall: Shortfall) -> str:
        """What a group lacks."""
        for rollout in shortfall.unsealed.items():
            return lack_of_rollout(*rollout)
        if size is None:
            return f"'{group}' was never sealed"
        members = [f"{group}_g{place}" for place in range(size)]
        absent = [member for member in members if member not in shortfall.members]
        was, or_cleared = "was" if len(absent) == 1 else "were", ", or cleared" if self._partition.num_cleared else ""
        return f"{preview(absent)} {was} never put{or_cleared}"

    def _not_matching(self, waiting: Sequence[_Worker], shortfall: Shortfall) -> _Reason:
        """Samples do not pass the filter."""
        asked = next((work.tag_filter for _, work in waiting if work.tag_filter), None) or {}
        sample_id, tags = next(iter(shortfall.not_matching), ""), shortfall.newest_tags
        condition = ", ".join(f"{name} {symbol} {operand!r}" for name, (symbol, operand) in asked.items())
        has = ", ".join(f"{name} {tags[name]!r}" if name in tags else f"no {name}" for name in asked)
        newest = f" The newest of them, '{sample_id}', has {has}." if sample_id and has else ""
        text = f"{_count(shortfall.num_not_matching)} do not pass its filter ({condition}).{newest}"
        sources = self._judge.sources(self._partition_id)
        have_ended = bool(sources) and not any(worker.is_open for worker in sources)
        is_over = self._partition.is_complete or (have_ended and self._is_final(self._ended(sources)[0]))
        return _Reason("filter", text, self._is_late or is_over, is_over=is_over)

    def _too_few(self) -> _Reason:
        """More samples must be put."""
        info, num_cleared = self._partition.info, self._partition.num_cleared
        written, expected = self._partition.num_samples + num_cleared, info.num_samples
        came = f"{written} of {expected} samples came" if expected is not None else f"{_count(written)} came"
        if num_cleared:
            came = f"{came}, of which {num_cleared} were cleared"
        if not written and info.registered_by:
            ago = _seconds(max(0.0, self._judge.facts.now - info.registered_at))
            came = f"{came} since {info.registered_by} registered it {ago} ago"
        reason = self._of_producers(self._judge.sources(self._partition_id), "puts new samples")
        if reason.cause == "closed" and reason.is_fault:
            short = "" if expected is not None else " It did not call finish_partition."
            return replace(reason, cause="short", text=f"{came}, and no more will. {reason.text}{short}")
        return reason.after(f"{came}.")

    # --- those who are waited for -------------------------------------------------------------------------------------

    def _of_producers(self, workers: Sequence[_Worker], what: str) -> _Reason:
        """How those who do something fare."""
        if not workers:
            is_over = self._is_late and not self._may_begin()
            return _Reason("unwritten", f"No client that is known {what}.", is_over, is_over=is_over)
        alive = [worker for worker in workers if worker.is_open]
        if not alive:
            last, story = self._ended(workers)
            is_over = self._is_final(last)
            cause: Any = last.state  # which is not open
            return _Reason(cause, f"Nobody {what} now: {story}", is_over, process_of(last), is_over=is_over)
        reasons = []
        for worker in alive:  # until one does its work
            reasons.append(self._of_producer(worker, what))
            if not (reasons[-1].is_fault or reasons[-1].is_over):
                break
        reason = min(reasons, key=lambda reason: (reason.is_over, reason.is_fault))
        dead = [worker for worker in workers if worker.client.state not in ("open", "closed")]
        if dead and not reason.is_fault:
            last, story = self._ended(dead)
            quiet_s = min((worker.ago_s for worker in alive if worker.ago_s is not None), default=0.0)
            is_fault = self._is_late and quiet_s >= self._patience_s
            cause = last.state if is_fault else reason.cause
            return replace(reason, cause=cause, is_fault=is_fault, text=f"{reason.text} Another one {what}: {story}")
        return reason

    def _of_producer(self, worker: _Worker, what: str) -> _Reason:
        """How a producer that is alive fares."""
        client, partitions = worker.client, self._judge.facts.partitions
        name = process_of(client)
        room_s = _call_s(client, "put_samples", _ROOM_S)
        if room_s is not None and self._judge.full is not None:
            held, most = self._judge.full
            text = f"The store is full ({held} of {most} bytes). {name} {what}, and waits for room for"
            return self._not_cleared().after(f"{text} {_seconds(room_s)}.")
        for claim in client.work:
            task = (claim.partition_id, claim.task_name)
            is_known = task[0] in partitions and task[1] in partitions[task[0]].tasks
            if claim.operation != "claim_meta" or claim.ended_s is not None or not is_known:
                continue
            verdict = self._judge.of_task(task, self._deep)
            if verdict is not None and verdict.state in ("starved", "waits"):
                text = f"{name} {what}, and waits for samples of its task '{task[1]}' itself. {verdict.text}"
                is_fault = verdict.state == "starved"
                return _Reason(verdict.cause, text, is_fault, verdict.culprit, is_over=verdict.is_over)
            if verdict is None and self._is_late and not client.phases:
                text = f"{name} {what}, and waits for samples of this task itself."  # or another thread works?
                return _Reason("works", text, False, name, is_over=True)
        stuck_s = _call_s(client, None, self._patience_s) or _call_s(client, "put_samples", self._patience_s)
        if stuck_s is not None:
            return _stuck(client, stuck_s).after(f"It {what}.")
        phase = _phase_of(client)
        if worker.ago_s is None:
            now = f": it is{phase}" if phase else ""
            return _Reason("works", f"{name} {what}, and has not done so yet{now}.", False, name)
        text = f"{name} {what}. It is alive{phase}, and last did so {_seconds(worker.ago_s)} ago."
        return _Reason("works", text, False, name)

    def _not_cleared(self) -> _Reason:
        """The store is full: of which samples?"""
        other = self._judge.starved_task(None) if self._deep else None
        if other is not None:
            text = f"It holds samples that the task '{other.task_name}' has not consumed. {other.text}"
            return _Reason("full", text, True, other.culprit)
        left = {
            (partition_id, name): partition.num_samples - counts.num_consumed
            for partition_id, partition in self._judge.facts.partitions.items()
            for name, counts in partition.tasks.items()
        }
        task = max(left, key=left.__getitem__, default=("", ""))
        if left.get(task):
            text = f"{_count(left[task])} of '{task[0]}' are not consumed by the task '{task[1]}'."
            claims = self._judge.workers("claim_meta", *task)
        else:
            text = "All tasks have consumed all samples, and nobody clears them."
            # who was given samples may clear them when its step ends
            claims = [worker for worker in self._judge.workers("claim_meta") if worker.work.fields]
        is_fault = self._is_late and all(self._wait_s(worker) is not None for worker in claims if worker.is_open)
        return _Reason("full", text, is_fault)

    def _ended(self, workers: Sequence[_Worker]) -> tuple[ClientInfo, str]:
        """Of those that ended, the last one, and a sentence."""
        client, _ = min(workers, key=lambda worker: worker.client.heard_s)
        others = len({other.client_id for other, _ in workers}) - 1
        more = f" So did {_count(others, 'other')}." if others else ""
        return client, f"{_story_of(client)}{more}"

    def _is_final(self, client: ClientInfo) -> bool:
        """Whether a client ended, and nobody is about to take its place: a step may open clients of its own."""
        if client.state != "closed":
            return client.state != "open"
        alike = [other for other in self._clients if other.state == "open" and other.role == client.role]
        return client.heard_s >= self._patience_s and all(other.client_id in self._claiming for other in alike)

    def _may_begin(self) -> bool:
        """Whether somebody may still do what nobody has done so far: a client that has put nothing yet, and is not one
        of those that wait; or one that is not listed."""
        return not self._judge.are_listed or bool(self._judge.fresh - self._claiming)

    def _wait_s(self, worker: _Worker) -> float | None:
        """For how long a client has got nothing for a task. None: it was served, or asks no longer."""
        client, work = worker
        asks_no_longer = work.ended_s is not None and work.ended_s + client.heard_s >= self._patience_s
        return None if asks_no_longer or not got_nothing(work) else work.began_s + client.heard_s


def _waits(moves: Verdict, reason: _Reason, waited_s: float) -> Verdict:
    """The verdict of a task that waits, or is starved if the reason is a fault."""
    return replace(
        moves,
        state="starved" if reason.is_fault else "waits",
        cause=reason.cause,
        waited_s=waited_s,
        culprit=reason.culprit,
        is_over=reason.is_over,
        text=reason.text,
    )


def _stuck(client: ClientInfo, stuck_s: float) -> _Reason:
    call, name = max(client.calls, key=lambda call: call.running_s), process_of(client)
    return _Reason("stuck", f"{name} is alive, but has been in {call.operation} for {_seconds(stuck_s)}.", True, name)
