"""Proves a history against the contract, and shortens one that breaks a rule. Pure: no I/O, no clock, no processes.

A call takes effect at some moment between its start and its end. A call of unknown outcome may take effect at any
moment after its start, or never. So every answer here is one of certainty: what cannot be certain is never held
against a store.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Final

from dataplane_testkit._profiles import fewest
from dataplane_testkit.chaos.history import OK, REFUSED, UNKNOWN, Call, Event, History
from dataplane_testkit.rules import sentences_of

#: The most findings of one rule that are returned, and the most checks for which a history is shortened.
_MOST: Final = 2
_MOST_CHECKS: Final = 300
#: Operation -> the errors with which it may end besides those of `_ANY`. All others are faults.
_ALLOWED: Final = {
    "put": {"CapacityExceededError", "RoomTimeoutError"},
    "get": {"MissingDataError", "LostSamplesError"},
    "claim": {"ClaimTimeoutError", "UnknownTaskError"},
    **{name: {"LeaseExpiredError", "UnknownTaskError"} for name in ("ack", "nack", "renew")},
    "save": {"MissingDataError", "UnknownTaskError"},
}
_ANY: Final = {"", "OperationTimeoutError", "StalePartitionError", "UnknownPartitionError"}
#: A run with so many puts in which none succeeds proves nothing.
_MANY_PUTS: Final = 10
#: Seconds by which the end of a claim that waited may be late. If it is later, its process had no time to look.
_LATE_S: Final = 0.5
#: Seconds after which a request of a process that was killed, or gave up, can no longer reach the store.
_SETTLE_S: Final = 30.0

#: Seconds by which the clock of a store may be coarser than that of the history.
_SLACK_S: Final = 0.02
_OF_TASKS: Final = ("claim", "ack", "nack", "renew", "consumed")

#: Rule -> the sentence of docs/contract.md.
RULES: Final[Mapping[str, str]] = {name: sentence for name, (sentence, _) in sentences_of("chaos").items()}

#: What a store may promise besides: a put that overlaps a clear commits before it or fails; a committed put survives
#: the death of the store's processes.
GUARANTEES: Final = ("fenced", "durable")
#: What a store may not promise, and the contract takes for granted where it judges other rules.
GRANTED: Final = ("half", "mixed", *GUARANTEES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that a history breaks.

    Attributes:
        rule: One of `RULES`.
        text: What is wrong, with the names of the calls.
        partition: The partition that it is about. Empty: the store.
        samples: The samples that it is about. Empty: all of the calls.
        calls: The calls that prove it, those first that began first.
    """

    rule: str
    text: str
    partition: str
    samples: tuple[str, ...]
    calls: tuple[Call, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the same finding in a shorter history."""
        return self.rule, self.partition, self.samples, tuple(call.name for call in self.calls)


Findings = Iterator[Finding]
#: A finding, and the history in which `check` finds it.
Judged = tuple[Finding, History]


def finding(rule: str, text: str, *calls: Call, about: str | Sequence[str] = ()) -> Finding:
    assert rule in RULES
    samples = (about,) if isinstance(about, str) else tuple(about)
    ordered = sorted({call.name: call for call in calls}.values(), key=lambda call: call.begin_s)
    return Finding(rule=rule, text=text, partition=calls[-1].partition, samples=samples, calls=tuple(ordered))


def check(history: History) -> list[Finding]:
    """What breaks a rule of the contract, those first whose last call began first; of each rule a few."""
    counts: Counter[str] = Counter()
    kept: dict[tuple[object, ...], Finding] = {}
    for one in sorted(_all(history), key=lambda one: one.calls[-1].begin_s):
        if counts[one.rule] < _MOST and one.key not in kept:
            counts[one.rule] += 1
            kept[one.key] = one
    return list(kept.values())


def _all(history: History) -> Findings:
    index = Index(history)
    for rule in (_replies, _reads, _listings, _ends, _deadlines, _puts, _capacity, _leaks):
        yield from rule(index)
    for task in index.tasks.values():
        yield from _tokens(task)
        yield from _given_twice(task)
        yield from _refused(task)
        yield from _order(task)
        yield from _passed_over(index, task)
        yield from _consumed(task)
        yield from _never_given(task, history.audited_s)


def judged(history: History, promises: Mapping[str, str] | None) -> tuple[list[Judged], list[Judged]]:
    """What a history breaks of what a store promises, as in `Shim`, and what else it breaks of the contract.

    Each finding has the history in which `check` finds it. Nothing that the store does not promise is taken for granted
    where its promises are judged: not that puts and overwrites are whole, that a put which overlaps a clear fails, or
    that the store outlives its processes. Without ``promises``, the whole contract is promised.
    """
    if promises is None:
        return [(one, history) for one in check(history)], []
    lasts = "durable" in promises
    held = replace(
        history,
        events=tuple(replace(e, loses_data=e.loses_data or not (e.process or lasts)) for e in history.events),
        atomic_overwrite="mixed" in promises,
        whole_puts="half" in promises,
        fenced="fenced" in promises,
    )
    broken = [one for one in check(held) if one.rule in promises or one.rule == "puts"]  # without puts, no proof
    rules = {one.rule for one in broken}
    seen = [one for one in check(history) if one.rule not in rules]
    return [(one, held) for one in broken], [(one, history) for one in seen]


def shrunk(history: History, found: Finding) -> History:
    """The shortest history that this function finds in which the same finding is found.

    It drops the calls and samples that do not matter to it. The calls that prove it stay.
    """
    needed = {call.name for call in found.calls}

    def still(calls: Sequence[Call]) -> bool:
        return any(other.key == found.key for other in _all(replace(history, calls=tuple(calls))))

    calls = [call for call in history.calls if call.partition == found.partition or call.name in needed]
    if found.samples:
        short = [call.only(found.samples) for call in calls]
        whole = [call if call.name in needed and not call.seen else call.only(found.samples) for call in calls]
        calls = next((part for part in (short, whole, calls) if still(part)), list(history.calls))
    proof = [call for call in calls if call.name in needed]
    others = [call for call in calls if call.name not in needed]
    calls = [*proof, *fewest(others, lambda part: part if still([*proof, *part]) else None, _MOST_CHECKS)]
    processes = {call.process for call in calls}
    events = tuple(event for event in history.events if event.process in processes or not event.process)
    return replace(history, calls=tuple(sorted(calls, key=lambda call: call.begin_s)), events=events)


def _replies(index: Index) -> Findings:
    """What replies show of samples."""
    for call in index.calls:
        for sample, cells in call.seen.items() if call.outcome == OK else ():
            row = index.rows[call.partition][sample]
            if not row.unsafe:
                for name, version in cells.items():
                    yield from _cell(row, call, name, version)
                yield from _without_tags(row, call)
                if call.operation == "get" and index.history.atomic_overwrite:
                    yield from _mixed(row, call)


def _cell(row: Row, call: Call, name: str, version: int | str) -> Findings:
    if isinstance(version, str):
        rule = "groups" if call.operation == "claim" else "bits"
        yield finding(rule, f"{call} shows {row.sample}, field {name}: {version}.", call, about=row.sample)
        return
    what, put = f"{call} shows version {version} of {row.sample}, field {name}", row.versions.get(version)
    if put is None or name not in put.sure_s:
        yield finding("written", f"{what}, which nobody wrote.", call, about=row.sample)
        return
    if put.call.outcome == REFUSED:
        yield finding("written", f"{what}, which {put.call} was refused to write.", put.call, call, about=row.sample)
    elif put.call.begin_s > call.end_s:
        yield finding("written", f"{what}, before {put.call} wrote it.", put.call, call, about=row.sample)
    later = [other for other in row.puts if other.call.begin_s > put.sure_s[name]]
    for replaced in [other.call for other in later if other.sure_s.get(name, math.inf) < call.begin_s][:1]:
        yield finding("latest", f"{what}, which {replaced} had replaced.", put.call, replaced, call, about=row.sample)
    wipes = [wipe for wipe in row.wipes if isinstance(wipe, Call) and put.sure_s[name] < wipe.begin_s]
    for wipe in [wipe for wipe in wipes if wipe.done_s < call.begin_s][:1]:
        yield finding("cleared", f"{what}, which {wipe} had dropped.", put.call, wipe, call, about=row.sample)


def _without_tags(row: Row, call: Call) -> Findings:
    """A reply that shows a sample without a tag that every put of the required fields brings along."""
    needed = set(call.fields) if call.operation == "claim" else set()
    bring = [put.sure_s.keys() for put in row.puts if not needed or needed & put.sure_s.keys()]
    if not bring:
        yield finding("written", f"{call} shows {row.sample}, which nobody wrote.", call, about=row.sample)
    elif call.operation in ("claim", "list"):
        always = set.intersection(*map(set, bring)) - call.seen[row.sample].keys()
        for tag in [name for name in sorted(always) if name.startswith("#")][:1]:
            text = f"{call} shows {row.sample} without the tag {tag[1:]}, put with its data."
            yield finding("half", text, row.puts[0].call, call, about=row.sample)


def _mixed(row: Row, call: Call) -> Findings:
    puts = [(name, row.versions.get(v)) for name, v in call.seen[row.sample].items() if isinstance(v, int)]
    for (one, first), (two, second) in combinations(puts, 2):
        if first and second and first is not second and {one, two} <= first.sure_s.keys() & second.sure_s.keys():
            text = f"{call} shows {row.sample} with field {one} of {first.call} and field {two} of {second.call}."
            yield finding("mixed", text, first.call, second.call, call, about=row.sample)
            return


def _reads(index: Index) -> Findings:
    """Reads that say that cells are missing, though all of them were there."""
    for call in index.calls:
        if call.operation == "get" and call.error_name in ("MissingDataError", "UnknownPartitionError"):
            rows = [index.rows[call.partition][sample] for sample in call.samples]
            puts = [row.cells(call.begin_s, call.end_s, call.fields) for row in rows]
            if all(puts):
                calls = [put.call for part in puts for put in part]
                rule = "committed" if all(put.done_s < call.begin_s for put in calls) else "half"
                why = "" if rule == "committed" else " Other cells of the same put had been seen before."
                text = f"{call} does not find samples that were there: {call.error}{why}"
                yield finding(rule, text, *calls, call, about=call.samples)


def _listings(index: Index) -> Findings:
    for call in index.calls:
        if call.operation in ("list", "saved") and call.outcome == OK:
            for row in index.rows[call.partition].values():
                put = row.there(call.begin_s, call.end_s)
                if put is not None and row.sample not in call.seen and not row.unsafe:
                    rule = "save" if call.operation == "saved" else "committed"
                    text = f"{call} leaves out {row.sample}, which {put.call} had put."
                    yield finding(rule, text, put.call, call, about=row.sample)


def _ends(index: Index) -> Findings:
    for call in index.calls:
        name = call.error_name
        if name == "LostSamplesError" and not any(event.loses_data for event in index.history.events):
            yield finding("lost", f"{call}: the store has lost payload. {call.error}", call)
        if name.startswith("!"):
            yield finding("error", f"{call} raised {call.error[1:]}", call)
        elif name == "UnknownPartitionError" and call.operation not in ("get", "saved"):
            registration = index.registered(call.partition, call.begin_s, call.end_s)
            if registration is not None:
                text = f"{call} does not know a partition that was registered: {call.error}"
                yield finding("registered", text, registration, call)
        elif call.operation == "saved" and call.outcome != OK:
            yield finding("save", f"a save cannot be loaded: {call.error}", call)
        elif not _may_end_so(call) and not _disturbed(index.history, call):
            after = f"after {call.end_s - call.begin_s:.3f} s of {call.timeout_s:g} s"
            yield finding("error", f"{call} failed {after}, though nothing was done to the store: {call.error}", call)


def _may_end_so(call: Call) -> bool:
    """Whether a call may end with its error while nothing is done to the store. It may time out at its deadline."""
    early = call.error_name.endswith("TimeoutError") and call.end_s - call.begin_s < call.timeout_s / 2
    return not early and call.error_name in _ANY | _ALLOWED.get(call.operation, set())


def _disturbed(history: History, call: Call) -> bool:
    """Whether something was done to the store during a call or shortly before."""
    since_s = call.begin_s - history.allowance_s
    return any(not event.process and event.begin_s < call.end_s and event.end_s > since_s for event in history.events)


def _deadlines(index: Index) -> Findings:
    for call in index.calls:
        ended, end_s = not math.isinf(call.end_s), min(call.end_s, index.history.end_s)
        if math.isinf(end_s) or not (ended or math.isinf(index.killed_s(call.process))):
            continue
        latest_s = max([call.begin_s + call.timeout_s, *(stop.end_s for stop in index.stops(call, end_s))])
        if end_s > latest_s + index.history.allowance_s:
            how = f"{'took' if ended else 'did not end in'} {end_s - call.begin_s:.1f} s"
            yield finding("deadline", f"{call} {how}. Its deadline was {call.timeout_s:g} s.", call)


def _puts(index: Index) -> Findings:
    puts = [call for call in index.calls if call.operation == "put"]
    if len(puts) >= _MANY_PUTS and all(call.outcome != OK for call in puts):
        yield finding("puts", f"none of {len(puts)} puts succeeded. The last one: {puts[-1].error}", puts[-1])


def _capacity(index: Index) -> Findings:
    """The cells that were held for certain at the end of each put, and what they take together."""
    changes: list[tuple[float, int, Call]] = []
    for call in index.calls:
        if call.operation == "put" and call.outcome == OK and index.history.capacity_bytes is not None:
            for sample, size_bytes in zip(call.samples, call.size_bytes, strict=True):
                until_s = _held_until(index.rows[call.partition][sample], call)
                if until_s > call.end_s:
                    changes += [(call.end_s, size_bytes, call), (until_s, -size_bytes, call)]
    held_bytes, held = 0, Counter[str]()
    for _, size_bytes, call in sorted(changes, key=lambda change: change[:2]):
        held_bytes += size_bytes
        held[call.name] += 1 if size_bytes > 0 else -1
        if held_bytes > (index.history.capacity_bytes or 0):
            text = f"{call} ended, and the store held at least {held_bytes} bytes of {index.history.capacity_bytes}."
            yield finding("capacity", text, *(put for put in index.calls if held[put.name] > 0))
            return


def _leaks(index: Index) -> Findings:
    wipes = [call for call in index.calls if call.operation == "clear" and call.whole]
    if index.history.left_bytes and not any(event.loses_data for event in index.history.events):
        text = f"{wipes[-1]} was the last of the run, and the engine still held {index.history.left_bytes} bytes."
        yield finding("leaked", text, wipes[-1])


def _held_until(row: Row, call: Call) -> float:
    """Until when the cells of a put are held for certain."""
    others = [put for put in row.puts if put.call is not call and not put.sure_s.keys().isdisjoint(call.fields)]
    ends = [end for end in [*(put.call for put in others), *row.wipes] if end.done_s > call.begin_s]
    return min((end.begin_s for end in ends), default=math.inf)


def _tokens(task: Task) -> Findings:
    claims: dict[str, Call] = {}
    for claim in task.claims:
        for token in {*claim.tokens} - {""}:
            if token in claims:
                text = f"{claims[token]} and {claim} were given the same lease token."
                yield finding("token", text, claims[token], claim)
            claims[token] = claim


def _given_twice(task: Task) -> Findings:
    for holds in task.holds.values():
        pairs = (_twice(one, two) for one, two in combinations(holds, 2) if not one.row.unsafe)
        yield from [pair for pair in pairs if pair is not None][:1]


def _twice(one: Hold, two: Hold) -> Finding | None:
    """What is wrong with it that a sample was given by two claims, of which the first began first."""
    first, second, sample = one.claim, two.claim, one.row.sample
    if first is second:
        return finding("given once", f"{first} was given {sample} twice.", first, about=sample)
    until_s, overlap = max(first.end_s, second.end_s), first.end_s >= second.begin_s
    if one.row.wiped(first.begin_s, until_s) or one.free_before(until_s) or (overlap and two.free_before(until_s)):
        return None
    acks = [*one.acked, *two.acked]
    if len(acks) == 2 and not one.row.wiped(min(ack.begin_s for ack in acks), max(ack.end_s for ack in acks)):
        rule, text = "two holders", f"{acks[0]} and {acks[1]} both succeeded for {sample}, of {first} and of {second}."
    elif one.acked and acks[0].begin_s > second.end_s:
        rule, text = "refused ack", f"{acks[0]} succeeded for {sample} of {first}, after {second} had been given it."
    elif one.acked:
        rule, text = "given once", f"{second} was given {sample} again, after {acks[0]}."
    elif first.lease_s is None:
        rule, text = "given once", f"{first} and {second} were both given {sample}, the first without a lease."
    else:
        rule, text = "lease", f"{second} was given {sample} while the lease of {first} lasted."
    proof = [first, *one.renewals, *one.acked, second, *two.renewals, *two.acked]
    return finding(rule, text, *proof, about=sample)


def _refused(task: Task) -> Findings:
    """Acks, nacks and renewals that were refused though every token was valid."""
    for call in task.settles:
        if call.outcome == REFUSED and call.error_name == "LeaseExpiredError":
            leases = zip(call.samples, call.tokens, strict=True)
            mine = [hold for sample, token in leases for hold in task.holds[sample] if hold.token == token]
            if len(mine) == len(call.samples) and all(_valid(hold, call) for hold in mine):
                proof = [step for hold in mine for step in (hold.claim, *hold.renewals)]
                text = f"{call} was refused, though its leases lasted: {call.error}"
                yield finding("lease", text, *proof, call, about=call.samples)


def _valid(hold: Hold, call: Call) -> bool:
    settled = any(settle.begin_s < call.end_s for settle in [*hold.acks, *hold.nacks])
    wiped = hold.row.wiped(hold.claim.begin_s, call.end_s)
    return not settled and not wiped and not hold.row.unsafe and call.end_s < hold.leased_until_s


def _order(task: Task) -> Findings:
    """The order within one reply."""
    for claim in task.claims:
        rows = [task.rows[sample] for sample in claim.samples if claim.outcome == OK]
        latest_s, latest = -math.inf, rows[:1]
        for row in [row for row in rows if not row.unsafe]:
            if row.first_write_by(claim.end_s) < latest_s:
                text = f"{claim} gives {row.sample} after {latest[0].sample}, which was written later."
                puts = [put.call for of in (row, *latest) for put in of.puts]
                yield finding("order", text, *puts, claim, about=(row.sample, latest[0].sample))
                break
            after_s = row.first_write_after(claim.begin_s)
            if after_s > latest_s:
                latest_s, latest = after_s, [row]


def _passed_over(index: Index, task: Task) -> Findings:
    """Claims that did not give a sample that they had to give: it was ready all the time, and nobody could hold it."""
    lost = [(claim.begin_s, _may_take_until(index, claim)) for claim in task.claims if claim.outcome == UNKNOWN]
    kept_s = {
        sample: min((hold.claim.begin_s for hold in holds if math.isinf(hold.freed_s)), default=math.inf)
        for sample, holds in task.holds.items()
    }
    for claim in task.claims:
        begin_s, end_s, over = claim.begin_s, claim.end_s, list[tuple[Row, list[Call]]]()
        if any(since_s <= end_s and until_s >= begin_s for since_s, until_s in lost):
            continue
        for row in [row for sample, row in task.rows.items() if kept_s[sample] > end_s]:
            held = any(hold.claim.begin_s <= end_s and hold.freed_s >= begin_s for hold in task.holds[row.sample])
            puts = [] if held or row.sample in claim.samples else row.cells(begin_s, end_s, claim.fields)
            over += [(row, [put.call for put in puts])] if puts else []
        waited = claim.error_name == "ClaimTimeoutError" and end_s <= begin_s + claim.timeout_s + _LATE_S
        if over and claim.outcome == OK and len(claim.samples) < claim.limit and not claim.blocking:
            (row, puts_of), gave = over[0], f"{claim} of up to {claim.limit} gave {len(claim.samples)}"
            text = f"{gave}, and not {row.sample}, which was ready and which nobody had been given."
            yield finding("ready", text, *puts_of, claim, about=row.sample)
        elif over and waited and len(over) >= claim.limit and not index.stops(claim, end_s):
            text = f"{claim} of {claim.limit} waited in vain, while {len(over)} samples were ready."
            calls = [put for _, puts_of in over[: claim.limit] for put in puts_of]
            about = [row.sample for row, _ in over[: claim.limit]]
            yield finding("waiting", text, *calls, claim, about=about)
        elif over and claim.outcome == OK and claim.samples:
            row, puts_of = min(over, key=lambda pair: pair[0].first_write_by(end_s))
            rows = [task.rows[sample] for sample in claim.samples]
            last = max(rows, key=lambda row: row.first_write_after(begin_s))
            if row.first_write_by(end_s) < last.first_write_after(begin_s):
                text = f"{claim} gave {last.sample}, and not {row.sample}, which was written before and was ready."
                calls = [*puts_of, *(put.call for put in last.puts)]
                yield finding("order", text, *calls, claim, about=(row.sample, last.sample))


def _may_take_until(index: Index, claim: Call) -> float:
    """Until when a claim of unknown outcome may hold samples, or take some."""
    if claim.lease_s is None:
        return math.inf
    return min(claim.end_s, index.killed_s(claim.process)) + _SETTLE_S + claim.lease_s


def _consumed(task: Task) -> Findings:
    """A task that counts as done while a sample was not given, or given under a lease and not acked."""
    lost = [claim for claim in task.claims if claim.outcome == UNKNOWN and claim.lease_s is None]
    for end in task.ends:
        for row in task.rows.values() if all(claim.begin_s >= end.end_s for claim in lost) else ():
            put = row.there(end.begin_s, end.end_s)
            is_given = any(hold.for_good(end.end_s) for hold in task.holds[row.sample])
            if put is not None and not is_given and not row.unsafe:
                text = f"{end} says that task {end.task} is done, which was not given {row.sample} for good."
                yield finding("consumed", text, put.call, end, about=row.sample)
                break


def _never_given(task: Task, audited_s: float) -> Findings:
    """Samples that were still there when the audit had claimed all, and that nobody was given for good."""
    audit = [claim for claim in task.claims if claim.begin_s > audited_s and claim.outcome == OK]
    if not audit or len(audit[-1].samples) >= audit[-1].limit:
        return
    last, missing = audit[-1], list[tuple[str, Call]]()
    for row in task.rows.values():
        puts, holds = row.cells(last.begin_s, last.end_s, last.fields), task.holds[row.sample]
        if puts and last.lease_s is None and not holds:
            missing.append((row.sample, puts[0].call))
        elif puts and last.lease_s is not None and not any(hold.acks for hold in holds):
            text = f"{row.sample} was never acked, and the audit, which claimed all, was not given it."
            claims = [hold.claim for hold in holds]
            yield finding("handed out again", text, puts[0].call, *claims, last, about=row.sample)
    lost = [claim for claim in task.claims if claim.outcome == UNKNOWN]
    at_most = sum(claim.limit for claim in lost)
    if len(missing) > at_most:
        what = f"{len(missing)} samples were given to nobody of task {last.task}"
        text = f"{what}. Claims whose replies were lost account for at most {at_most}."
        samples, calls = zip(*missing[: at_most + 1], strict=True)
        yield finding("at most one claim", text, *calls, *lost, last, about=samples)


@dataclass(slots=True)
class Put:
    """What a put writes of one sample."""

    call: Call
    #: Field or tag -> the moment by which it had taken effect for certain. Infinite: never for certain.
    sure_s: dict[str, float]
    #: Field -> the end of the first reply that showed the put's version in it.
    seen_s: dict[str, float] = field(default_factory=dict)
    #: The start of the last call that showed the version. What was over before then did not drop it.
    seen_from_s: float = -math.inf


@dataclass(slots=True)
class Row:
    """What is known of a sample of a partition."""

    sample: str
    #: The puts that were not refused, those first that began first.
    puts: list[Put] = field(default_factory=list)
    #: Version -> the put of it, also if it was refused.
    versions: dict[int, Put] = field(default_factory=dict)
    #: What dropped the sample, or may have dropped it: clears, registrations and losses of data.
    wipes: list[Call | Event] = field(default_factory=list)
    #: Whether nothing is promised about it: the store is not fenced, and a put of it may overlap a wipe.
    unsafe: bool = False

    def wiped(self, after_s: float, before_s: float) -> bool:
        """Whether something may have dropped it between two moments."""
        return any(wipe.begin_s < before_s and wipe.done_s > after_s for wipe in self.wipes)

    def there(self, begin_s: float, end_s: float, fields: Collection[str] = ()) -> Put | None:
        """A put by which these fields, or all that it wrote, were there for certain from one moment to another."""
        for put in self.puts:
            certain = all(put.sure_s.get(name, math.inf) < begin_s for name in fields or put.sure_s)
            if certain and not self.wiped(max(put.call.begin_s, put.seen_from_s), end_s):
                return put
        return None

    def cells(self, begin_s: float, end_s: float, fields: Collection[str]) -> list[Put]:
        """The puts by which all fields were there for certain from one moment to another. Empty: not for certain."""
        puts: list[Put] = []
        for name in fields:
            put = None if self.unsafe else self.there(begin_s, end_s, (name,))
            if put is None:
                return []
            puts.append(put)
        return puts

    def first_write_by(self, at_s: float) -> float:
        """The moment by which the sample, held at ``at_s``, had been written first. Infinite: not certain."""
        since_s = max((wipe.done_s for wipe in self.wipes if wipe.begin_s < at_s), default=-math.inf)
        puts = [put for put in self.puts if put.call.begin_s > since_s]
        return min((by_s for put in puts for by_s in put.sure_s.values()), default=math.inf)

    def first_write_after(self, at_s: float) -> float:
        """The moment after which the sample, held from ``at_s`` on, was written first."""
        sure = [wipe.begin_s for wipe in self.wipes if isinstance(wipe, Call) and wipe.done_s < at_s]
        since_s = max(sure, default=-math.inf)
        puts = [put.call for put in self.puts if put.call.done_s > since_s]
        return min((max(put.begin_s, since_s) for put in puts), default=-math.inf)

    def prove(self, history: History) -> None:
        """Says by when each field of each put had taken effect, from what replies showed."""
        for put in self.versions.values():
            first_s = min(put.seen_s.values(), default=math.inf)
            data_s = [by_s for name, by_s in put.seen_s.items() if not name.startswith("#")]
            others = [other for other in self.puts if other is not put and other.call.begin_s < first_s]
            first_write = all(other.sure_s.keys().isdisjoint(put.sure_s) for other in others)
            for name in put.sure_s:
                moments = [put.sure_s[name], put.seen_s.get(name, math.inf)]
                if history.whole_puts and first_write:
                    moments.append(first_s)  # whoever sees a part of the first write of these fields sees all of it
                elif history.whole_puts and history.atomic_overwrite and not name.startswith("#"):
                    moments += data_s
                put.sure_s[name] = min(moments)
        overlaps = (self.wiped(put.call.begin_s, put.call.done_s) for put in self.puts)
        self.unsafe = not history.fenced and any(overlaps)


@dataclass(slots=True)
class Hold:
    """A sample that a claim gave."""

    row: Row
    claim: Call
    #: The lease token. Empty: without a lease.
    token: str
    #: The calls with the token that were not refused.
    acks: list[Call] = field(default_factory=list)
    nacks: list[Call] = field(default_factory=list)
    renewals: list[Call] = field(default_factory=list)

    @property
    def acked(self) -> list[Call]:
        """The first ack that succeeded, if any."""
        return [call for call in self.acks if call.outcome == OK][:1]

    @property
    def freed_s(self) -> float:
        """The moment from which it was free for certain, since a nack had given it back."""
        return min((call.done_s for call in self.nacks), default=math.inf)

    @property
    def leased_until_s(self) -> float:
        """The moment before which the lease cannot have ended by itself."""
        if self.claim.lease_s is None:
            return math.inf
        begin_s = max(call.begin_s for call in [self.claim, *self.renewals] if call.outcome == OK)
        return begin_s + min(call.lease_s or 0.0 for call in [self.claim, *self.renewals]) - _SLACK_S

    def free_before(self, moment_s: float) -> bool:
        """Whether somebody else may have been given the sample before a moment, if nothing dropped it."""
        ended = not self.acked and self.leased_until_s <= moment_s
        return ended or any(call.begin_s < moment_s for call in self.nacks)

    def for_good(self, moment_s: float) -> bool:
        """Whether the task may have been given the sample for good before a moment."""
        done = self.claim.lease_s is None or any(ack.begin_s < moment_s for ack in self.acks)
        return self.claim.begin_s < moment_s and done


class Task:
    """What a task was given of a partition, whose samples are ``rows``."""

    def __init__(self, calls: list[Call], rows: dict[str, Row]) -> None:
        self.rows = rows
        self.claims = [call for call in calls if call.operation == "claim"]
        #: Its acks, nacks and renewals.
        self.settles = [call for call in calls if call.operation in ("ack", "nack", "renew")]
        #: When it was said to be done.
        self.ends = [call for call in calls if call.operation == "consumed" and call.flag]
        #: Sample -> its holds, those first whose claims began first.
        self.holds: dict[str, list[Hold]] = {sample: [] for sample in rows}
        by_token = {}
        for claim in self.claims:
            tokens = claim.tokens or ("",) * len(claim.samples)
            for sample, token in zip(claim.samples, tokens, strict=True) if claim.outcome == OK else ():
                by_token[sample, token] = hold = Hold(rows[sample], claim, token)
                self.holds[sample].append(hold)
        for call in self.settles:
            for key in zip(call.samples, call.tokens, strict=True) if call.outcome != REFUSED else ():
                if key in by_token:
                    hold = by_token[key]
                    {"ack": hold.acks, "nack": hold.nacks, "renew": hold.renewals}[call.operation].append(call)


class Index:
    """A history by samples and tasks. ``calls`` are its calls, those first that began first."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.calls = sorted(history.calls, key=lambda call: call.begin_s)
        #: Partition -> sample -> what is known of it.
        self.rows: dict[str, dict[str, Row]] = defaultdict(dict)
        #: Partition -> what dropped all of it, or may have dropped it.
        losses: list[Call | Event] = [event for event in history.events if event.loses_data]
        self.wipes: dict[str, list[Call | Event]] = defaultdict(losses.copy)
        of_tasks: dict[tuple[str, str], list[Call]] = defaultdict(list)
        for call in self.calls:
            rows = self.rows[call.partition]
            mine = [rows.setdefault(sample, Row(sample)) for sample in dict.fromkeys((*call.samples, *call.seen))]
            if call.operation in _OF_TASKS:
                of_tasks[call.partition, call.task].append(call)
            elif call.operation == "put":
                for row in mine:
                    put = Put(call, dict.fromkeys(call.fields, call.done_s))
                    known = row.versions.setdefault(call.version, put)
                    if call.outcome != REFUSED and known is put:
                        row.puts.append(put)
                    elif call.outcome != REFUSED:  # it goes on with the put of a process that died
                        known.sure_s = {name: min(by_s, call.done_s) for name, by_s in known.sure_s.items()}
            elif call.operation in ("clear", "register") and call.outcome != REFUSED:
                whole = call.whole or call.operation == "register"
                for wipes in [self.wipes[call.partition]] if whole else [row.wipes for row in mine]:
                    wipes.append(call)
        for call in self.calls:
            for sample, cells in call.seen.items():
                for name, version in cells.items():
                    versions = self.rows[call.partition][sample].versions
                    shown = versions.get(version) if isinstance(version, int) else None
                    if shown is not None:
                        shown.seen_s[name] = min(call.end_s, shown.seen_s.get(name, math.inf))
                        shown.seen_from_s = max(call.begin_s, shown.seen_from_s)
        for partition, rows in self.rows.items():
            for row in rows.values():
                row.wipes += self.wipes[partition]
                row.prove(history)
        self.tasks = {key: Task(calls, self.rows[key[0]]) for key, calls in of_tasks.items()}

    def registered(self, partition: str, begin_s: float, end_s: float) -> Call | None:
        """A registration by which a partition was there for certain from one moment to another."""
        for call in self.calls:
            if call.operation in ("register", "keep") and call.partition == partition and call.done_s < begin_s:
                others = [wipe for wipe in self.wipes[partition] if wipe is not call]
                if not any(wipe.begin_s < end_s and wipe.done_s > call.begin_s for wipe in others):
                    return call
        return None

    def stops(self, call: Call, end_s: float) -> list[Event]:
        """The stops of the process of a call between its begin and a moment."""
        mine = [event for event in self.history.events if event.kind == "stop" and event.process == call.process]
        return [event for event in mine if event.begin_s < end_s and event.end_s > call.begin_s]

    def killed_s(self, process: str) -> float:
        kills = [event.end_s for event in self.history.events if event.kind == "kill" and event.process == process]
        return min(kills, default=math.inf)
