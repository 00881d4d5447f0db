"""The rules about claims: who holds what, in which order it is given, and that nothing is passed over or lost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Final

from dataplane_testkit.chaos.history import OK, REFUSED, UNKNOWN, Call
from dataplane_testkit.chaos.rules import Finding, finding
from dataplane_testkit.chaos.timeline import Timeline

#: Seconds by which the clock of a store may be coarser than that of the history.
_SLACK_S: Final = 0.02
#: Seconds by which the end of a claim that waited may be late. If it is later, its process had no time to look.
_LATE_S: Final = 0.5
#: Seconds after which a request of a process that was killed, or gave up, can no longer reach the store.
_SETTLE_S: Final = 30.0


@dataclass(slots=True)
class Hold:
    """A sample that a claim gave.

    Attributes:
        claim: The claim.
        sample: The sample.
        token: The lease token. Empty: without a lease.
        acks, nacks, renewals: What was done with the token, unless it was refused.
    """

    claim: Call
    sample: str
    token: str
    acks: list[Call]
    nacks: list[Call]
    renewals: list[Call]

    def leased_until(self) -> float:
        """The moment before which the lease cannot have ended by itself."""
        if self.claim.lease_s is None:
            return math.inf
        renewed = [call for call in self.renewals if call.outcome == OK]
        begin_s = max(call.begin_s for call in [self.claim, *renewed])
        return begin_s + min(call.lease_s or 0.0 for call in [self.claim, *self.renewals]) - _SLACK_S

    def held_until(self) -> float:
        """The moment before which nobody else may be given the sample, if nobody gives it back or wipes it."""
        return math.inf if self.acked is not None else self.leased_until()

    @property
    def acked(self) -> Call | None:
        """The first ack that succeeded."""
        return next((call for call in self.acks if call.outcome == OK), None)

    @property
    def proof(self) -> list[Call]:
        """The calls that say how long the sample is held."""
        return [self.claim, *self.renewals, *([self.acked] if self.acked else [])]


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which a claim of a task could be given a sample for certain."""

    begin_s: float
    end_s: float
    sample: str
    first_write_by_s: float
    put: Call


def check_claims(time: Timeline) -> Iterator[Finding]:
    """What breaks a rule about claims."""
    claims: dict[tuple[str, str], list[Call]] = defaultdict(list)
    settles: dict[tuple[str, str], list[Call]] = defaultdict(list)
    checks: dict[str, list[Call]] = defaultdict(list)
    for call in time.calls:
        if call.operation == "claim":
            claims[call.partition, call.task].append(call)
        elif call.operation in ("ack", "nack", "renew"):
            settles[call.partition, call.task].append(call)
        elif call.operation == "consumed" and call.outcome == OK:
            checks[call.partition].append(call)
    for (partition, task), mine in claims.items():
        holds = _holds(mine, settles[partition, task])
        yield from _tokens(mine)
        for (partition_id, sample), group in holds.items():
            if not time.unsafe(partition_id, sample):
                yield from islice(_held_twice(time, group), 1)
        yield from _refused(time, settles[partition, task], holds)
        yield from _orders(time, mine)
        for fields in {call.fields for call in mine}:
            alike = [call for call in mine if call.fields == fields]
            yield from _passed_over(time, alike, mine, holds)
        yield from _consumed(time, [call for call in checks[partition] if call.task == task], mine, holds)
        yield from _never_given(time, mine, holds)


#: (partition, sample) -> its holds, those first whose claims began first.
Holds = dict[tuple[str, str], list[Hold]]


def _holds(claims: Sequence[Call], settles: Sequence[Call]) -> Holds:
    found: Holds = defaultdict(list)
    by_token: dict[tuple[str, str], Hold] = {}
    for claim in claims:
        if claim.outcome != OK:
            continue
        tokens = claim.tokens or ("",) * len(claim.samples)
        for sample, token in zip(claim.samples, tokens, strict=True):
            hold = Hold(claim, sample, token, [], [], [])
            found[claim.partition, sample].append(hold)
            by_token[sample, token] = hold
    for call in settles:
        if call.outcome == REFUSED:
            continue
        for sample, token in zip(call.samples, call.tokens, strict=True):
            settled = by_token.get((sample, token))
            if settled is not None:
                {"ack": settled.acks, "nack": settled.nacks, "renew": settled.renewals}[call.operation].append(call)
    return found


def _tokens(claims: Sequence[Call]) -> Iterator[Finding]:
    known: dict[str, Call] = {}
    for claim in claims:
        for token in set(claim.tokens):
            if token in known and token:
                text = f"{known[token].name} and {claim.name} (claims) were given the same lease token."
                yield finding("token", text, known[token], claim)
            known[token] = claim


# --- two holders ------------------------------------------------------------------------------------------------------


def _held_twice(time: Timeline, holds: Sequence[Hold]) -> Iterator[Finding]:
    for one, two in combinations(holds, 2):
        claims = one.claim, two.claim
        since, until = min(c.begin_s for c in claims), max(c.end_s for c in claims)
        partition, sample = one.claim.partition, one.sample
        if one.claim is two.claim:
            text = f"{one.claim.name} (claim) was given {sample} twice."
            yield finding("given once", text, one.claim, samples=(sample,))
        elif time.wiped(partition, sample, since, until):
            continue
        elif one.claim.end_s < two.claim.begin_s:
            if not _free_before(one, until):
                yield _twice(time, one, two)
        elif two.claim.end_s < one.claim.begin_s:
            if not _free_before(two, until):
                yield _twice(time, two, one)
        elif not _free_before(one, until) and not _free_before(two, until):
            yield _twice(time, one, two)


def _free_before(hold: Hold, moment_s: float) -> bool:
    """Whether somebody else may have been given the sample before a moment."""
    return hold.held_until() <= moment_s or any(call.begin_s < moment_s for call in hold.nacks)


def _twice(time: Timeline, one: Hold, two: Hold) -> Finding:
    first, second = one.claim.name, two.claim.name
    calls = {call.name: call for call in [*one.proof, *two.proof]}.values()
    samples = (one.sample,)
    if one.acked and two.acked and not time.wiped(one.claim.partition, one.sample, *_span(one.acked, two.acked)):
        acks = f"{one.acked.name} and {two.acked.name}"
        return finding(
            "two holders", f"{acks} both acked {one.sample}, of {first} and of {second}.", *calls, samples=samples
        )
    if one.acked and one.acked.begin_s > two.claim.end_s:
        text = f"{one.acked.name} acked {one.sample} of {first}, which had been handed out again to {second}."
        return finding("refused ack", text, *calls, samples=samples)
    if one.acked:
        text = f"{second} (claim) was given {one.sample} again, which {one.acked.name} had acked."
        return finding("given once", text, *calls, samples=samples)
    if one.claim.lease_s is None:
        text = f"{first} and {second} (claims) were both given {one.sample}, the first without a lease."
        return finding("given once", text, *calls, samples=samples)
    text = f"{second} (claim) was given {one.sample} while the lease of {first} lasted."
    return finding("lease", text, *calls, samples=samples)


def _span(one: Call, two: Call) -> tuple[float, float]:
    return min(one.begin_s, two.begin_s), max(one.end_s, two.end_s)


def _refused(time: Timeline, settles: Sequence[Call], holds: Holds) -> Iterator[Finding]:
    """Acks, nacks and renewals that were refused though every token was valid."""
    for call in settles:
        if call.outcome != REFUSED or call.error_name != "LeaseExpiredError":
            continue
        mine = [
            hold
            for sample, token in zip(call.samples, call.tokens, strict=True)
            for hold in holds.get((call.partition, sample), ())
            if hold.token == token
        ]
        if len(mine) == len(call.samples) and all(_valid(time, hold, call) for hold in mine):
            text = f"{call.name} ({call.operation}) was refused, though its leases lasted: {call.error}"
            claims = {hold.claim.name: hold.claim for hold in mine}.values()
            renewals = {each.name: each for hold in mine for each in hold.renewals}.values()
            yield finding("lease", text, *claims, *renewals, call, samples=call.samples)


def _valid(time: Timeline, hold: Hold, call: Call) -> bool:
    settled = [each for each in [*hold.acks, *hold.nacks] if each is not call and each.begin_s < call.end_s]
    wiped = time.wiped(call.partition, hold.sample, hold.claim.begin_s, call.end_s)
    unsafe = time.unsafe(call.partition, hold.sample)
    return not settled and not wiped and not unsafe and call.end_s < hold.leased_until()


# --- order and readiness ----------------------------------------------------------------------------------------------


def _orders(time: Timeline, claims: Sequence[Call]) -> Iterator[Finding]:
    """The order within one reply."""
    for claim in claims:
        if claim.outcome != OK:
            continue
        latest_s, latest = -math.inf, ""
        for sample in claim.samples:
            if time.unsafe(claim.partition, sample):
                continue
            if time.first_write_by(claim.partition, sample, claim.end_s) < latest_s:
                text = f"{claim.name} (claim) gives {sample} after {latest}, which was written later."
                puts = [put.call for each in (sample, latest) for put in time.puts(claim.partition, each)]
                yield finding("order", text, *puts, claim, samples=(sample, latest))
                break
            after_s = time.first_write_after(claim.partition, sample, claim.begin_s)
            if after_s > latest_s:
                latest_s, latest = after_s, sample


def _windows(time: Timeline, claims: Sequence[Call], every: Sequence[Call], holds: Holds) -> list[Window]:
    """When which sample could be given for certain to claims with the fields of ``claims``."""
    partition, fields = claims[0].partition, claims[0].fields
    doubtful = [(call.begin_s, _may_hold_until(time, call)) for call in every if call.outcome == UNKNOWN]
    found: list[Window] = []
    for sample in time.samples(partition):
        if time.unsafe(partition, sample):
            continue
        busy = list(doubtful)
        for hold in holds.get((partition, sample), ()):
            free_s = min((call.end_s for call in hold.nacks if call.outcome == OK), default=math.inf)
            busy.append((hold.claim.begin_s, free_s))
        for window in _ready(time, partition, sample, fields):
            found += _without(window, sorted(busy))
    return sorted(found, key=lambda window: window.begin_s)


def _ready(time: Timeline, partition: str, sample: str, fields: Sequence[str]) -> Iterator[Window]:
    """When a sample was ready for certain."""
    since = -math.inf
    for wipe in [*sorted(time.wipes(partition, sample), key=lambda wipe: wipe.begin_s), None]:
        until = math.inf if wipe is None else wipe.begin_s
        puts = [put for put in time.puts(partition, sample) if put.begin_s > since]
        ready, chosen = -math.inf, None
        for field in fields:
            moments = [
                (time.effect_s(put, sample, field), place) for place, put in enumerate(puts) if field in put.fields
            ]
            moment, place = min(moments, default=(math.inf, 0))
            if moment > ready:
                ready, chosen = moment, puts[place] if puts else None
        if chosen is not None and ready < until:
            first = min(time.effect_s(put, sample, field) for put in puts for field in put.fields)
            yield Window(ready, until, sample, first, chosen.call)
        since = max(since, math.inf if wipe is None else wipe.end_s)


def _without(window: Window, busy: Sequence[tuple[float, float]]) -> Iterator[Window]:
    begin_s = window.begin_s
    for start_s, end_s in busy:
        if end_s <= begin_s:
            continue
        if start_s > begin_s and start_s < window.end_s:
            yield Window(begin_s, start_s, window.sample, window.first_write_by_s, window.put)
        begin_s = max(begin_s, end_s) if start_s < window.end_s else begin_s
        if begin_s >= window.end_s:
            return
    yield Window(begin_s, window.end_s, window.sample, window.first_write_by_s, window.put)


def _may_hold_until(time: Timeline, claim: Call) -> float:
    """Until when a claim of unknown outcome may hold samples, or take some."""
    if claim.lease_s is None:
        return math.inf
    gave_up_s = min(claim.end_s, time.killed_s(claim.process))
    return gave_up_s + _SETTLE_S + claim.lease_s


def _passed_over(time: Timeline, alike: Sequence[Call], every: Sequence[Call], holds: Holds) -> Iterator[Finding]:
    """Claims that did not give a sample that they had to give."""
    windows, active, place = _windows(time, alike, every, holds), list[Window](), 0
    for claim in alike:
        while place < len(windows) and windows[place].begin_s < claim.begin_s:
            active.append(windows[place])
            place += 1
        active = [window for window in active if window.end_s > claim.begin_s]
        over = [window for window in active if window.end_s > claim.end_s and window.sample not in claim.samples]
        if not over:
            continue
        if claim.outcome == OK and len(claim.samples) < claim.limit and not claim.blocking:
            text = (
                f"{claim.name} (claim of up to {claim.limit}) gave {len(claim.samples)}, and not {over[0].sample}, "
                "which was ready and which nobody had been given."
            )
            yield finding("ready", text, over[0].put, claim, samples=(over[0].sample,))
        elif claim.error_name == "ClaimTimeoutError" and len(over) >= claim.limit and time.ran(claim, _LATE_S):
            text = f"{claim.name} (claim of {claim.limit}) waited in vain, while {len(over)} samples were ready."
            proof = over[: claim.limit]
            yield finding(
                "waiting", text, *(each.put for each in proof), claim, samples=tuple(each.sample for each in proof)
            )
        elif claim.outcome == OK and claim.samples:
            yield from _too_late(time, claim, over)


def _too_late(time: Timeline, claim: Call, over: Sequence[Window]) -> Iterator[Finding]:
    """A full claim that passed over a sample that was written before one that it gave."""
    first = min(over, key=lambda window: window.first_write_by_s)
    given = [(time.first_write_after(claim.partition, each, claim.begin_s), each) for each in claim.samples]
    moment_s, sample = max(given)
    if first.first_write_by_s < moment_s:
        text = f"{claim.name} (claim) gave {sample}, and not {first.sample}, which was written before and was ready."
        puts = [put.call for put in time.puts(claim.partition, sample)]
        yield finding("order", text, first.put, *puts, claim, samples=(first.sample, sample))


# --- the end ----------------------------------------------------------------------------------------------------------


def _consumed(time: Timeline, checks: Sequence[Call], claims: Sequence[Call], holds: Holds) -> Iterator[Finding]:
    """A task that counts as done while a sample was not given, or given under a lease and not acked."""
    for check in checks:
        if not check.flag or any(c.outcome == UNKNOWN and c.lease_s is None for c in claims if c.begin_s < check.end_s):
            continue
        for sample in time.samples(check.partition):
            put = next(
                (
                    put
                    for put in time.puts(check.partition, sample)
                    if max(time.effect_s(put, sample, field) for field in put.fields) < check.begin_s
                    and not time.wiped(check.partition, sample, put.begin_s, check.end_s)
                ),
                None,
            )
            if put is None or time.unsafe(check.partition, sample):
                continue
            given = [
                hold
                for hold in holds.get((check.partition, sample), ())
                if hold.claim.begin_s < check.end_s
                and (hold.claim.lease_s is None or any(ack.begin_s < check.end_s for ack in hold.acks))
            ]
            if not given:
                text = f"{check.name} says that task {check.task} is done, which was not given {sample} for good."
                yield finding("consumed", text, put.call, check, samples=(sample,))
                break


def _never_given(time: Timeline, claims: Sequence[Call], holds: Holds) -> Iterator[Finding]:
    """Samples that were still there when the audit had claimed all, and that nobody was given for good."""
    audit = [claim for claim in claims if claim.begin_s > time.history.audited_s and claim.outcome == OK]
    if not audit or len(audit[-1].samples) >= audit[-1].limit:
        return
    last, partition = audit[-1], audit[-1].partition
    missing: list[tuple[str, Call]] = []
    for sample in time.samples(partition):
        puts = [time.there(partition, sample, field, last.begin_s, last.end_s) for field in last.fields]
        if puts[0] is None or None in puts or time.unsafe(partition, sample):
            continue
        mine = holds.get((partition, sample), ())
        if last.lease_s is None and not mine:
            missing.append((sample, puts[0].call))
        elif last.lease_s is not None and not any(hold.acks for hold in mine):
            text = f"{sample} was never acked, and the audit, which claimed all, was not given it."
            yield finding(
                "handed out again",
                text,
                puts[0].call,
                *(hold.claim for hold in mine),
                last,
                samples=(sample,),
            )
    at_most = sum(claim.limit for claim in claims if claim.outcome == UNKNOWN)
    if len(missing) > at_most:
        text = (
            f"{len(missing)} samples were given to nobody of task {last.task}. Claims whose replies were lost account "
            f"for at most {at_most}."
        )
        lost = [claim for claim in claims if claim.outcome == UNKNOWN]
        samples = tuple(sample for sample, _ in missing[: at_most + 1])
        yield finding(
            "at most one claim", text, *(call for _, call in missing[: at_most + 1]), *lost, last, samples=samples
        )
