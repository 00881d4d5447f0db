"""What a history says for certain: by when each put took effect, what may have dropped it, and who held which sample.

A call takes effect at some moment between its start and its end. A call of unknown outcome may take effect at any
moment after its start, or never. So every answer here is one of certainty: what cannot be certain is never held
against a store.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from dataplane_testkit.chaos.history import OK, REFUSED, Call, Event, History

#: Seconds by which the clock of a store may be coarser than that of the history.
_SLACK_S: Final = 0.02
_OF_TASKS: Final = ("claim", "ack", "nack", "renew", "consumed")


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
        found: list[Put] = []
        for name in fields:
            put = None if self.unsafe else self.there(begin_s, end_s, (name,))
            if put is None:
                return []
            found.append(put)
        return found

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
            others = [each for each in self.puts if each is not put and each.call.begin_s < first_s]
            first_write = all(each.sure_s.keys().isdisjoint(put.sure_s) for each in others)
            for name in put.sure_s:
                moments = [put.call.done_s, put.seen_s.get(name, math.inf)]
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
        losses: list[Call | Event] = [each for each in history.events if each.loses_data]
        self.wipes: dict[str, list[Call | Event]] = defaultdict(losses.copy)
        of_tasks: dict[tuple[str, str], list[Call]] = defaultdict(list)
        for call in self.calls:
            rows = self.rows[call.partition]
            mine = [rows.setdefault(sample, Row(sample)) for sample in dict.fromkeys((*call.samples, *call.seen))]
            if call.operation in _OF_TASKS:
                of_tasks[call.partition, call.task].append(call)
            elif call.operation == "put":
                for row in mine:
                    row.versions[call.version] = put = Put(call, dict.fromkeys(call.fields, call.done_s))
                    row.puts += [put] if call.outcome != REFUSED else []
            elif call.operation in ("clear", "register") and call.outcome != REFUSED:
                whole = call.whole or call.operation == "register"
                for wipes in [self.wipes[call.partition]] if whole else [row.wipes for row in mine]:
                    wipes.append(call)
        for call in self.calls:
            for sample, cells in call.seen.items():
                for name, version in cells.items():
                    self._witness(call, self.rows[call.partition][sample].versions, name, version)
        for partition, rows in self.rows.items():
            for row in rows.values():
                row.wipes += self.wipes[partition]
                row.prove(history)
        self.tasks = {key: Task(calls, self.rows[key[0]]) for key, calls in of_tasks.items()}

    def _witness(self, call: Call, versions: dict[int, Put], name: str, version: int | str) -> None:
        put = versions.get(version) if isinstance(version, int) else None
        if put is not None:
            put.seen_s[name] = min(call.end_s, put.seen_s.get(name, math.inf))
            put.seen_from_s = max(call.begin_s, put.seen_from_s)

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
        mine = [each for each in self.history.events if each.kind == "stop" and each.process == call.process]
        return [each for each in mine if each.begin_s < end_s and each.end_s > call.begin_s]

    def killed_s(self, process: str) -> float:
        """When a process was killed. Infinite: never."""
        kills = [each.end_s for each in self.history.events if each.kind == "kill" and each.process == process]
        return min(kills, default=math.inf)
