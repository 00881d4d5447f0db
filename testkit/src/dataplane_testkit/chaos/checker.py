"""Proves a history against the contract, and shortens one that breaks a rule. Pure: no I/O, no clock, no processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from dataplane_testkit.chaos.claims import check_claims
from dataplane_testkit.chaos.history import Call, History
from dataplane_testkit.chaos.reads import check_reads
from dataplane_testkit.chaos.rules import Finding
from dataplane_testkit.chaos.timeline import Timeline

#: The most findings of one rule that are returned.
_MOST: Final = 2
#: The most checks for which a history is shortened.
_MOST_CHECKS: Final = 300


def check(history: History) -> list[Finding]:
    """What breaks a rule of the contract, those first whose last call began first; of each rule a few.

    A history is only held to what is certain. A call of unknown outcome may have taken effect at any moment after its
    start, or never.
    """
    time = Timeline(history)
    found = sorted([*check_reads(time), *check_claims(time)], key=lambda each: each.calls[-1].begin_s)
    counts: Counter[str] = Counter()
    kept: dict[tuple[object, ...], Finding] = {}
    for each in found:
        if counts[each.rule] < _MOST and each.key not in kept:
            counts[each.rule] += 1
            kept[each.key] = each
    return list(kept.values())


def shrunk(history: History, found: Finding) -> History:
    """The shortest history that this function finds in which the same finding is found.

    It drops the calls and samples that do not matter to it. The calls that prove it stay.
    """
    key, needed = found.key, {call.name for call in found.calls}

    checks = iter(range(_MOST_CHECKS))

    def still(calls: Sequence[Call]) -> bool:
        if next(checks, None) is None:
            return False
        time = Timeline(replace(history, calls=tuple(calls)))
        return any(each.key == key for each in chain(check_reads(time), check_claims(time)))

    calls = [call for call in history.calls if call.partition == found.partition or call.name in needed]
    if found.samples:
        short = [call.only(found.samples) for call in calls]
        kept = [
            call if call.name in needed and not call.seen else each for call, each in zip(calls, short, strict=True)
        ]
        tried = [
            [call for call in each if call.samples or call.whole or call.name in needed or not _about(call)]
            for each in (short, kept)
        ]
        calls = next((each for each in (*tried, calls) if still(each)), list(history.calls))
    last_s = max((call.begin_s for call in found.calls), default=math.inf)
    early = [call for call in calls if call.begin_s <= last_s]
    calls = early if still(early) else calls
    size = max(1, len(calls) // 2)
    while True:
        place = 0
        while place < len(calls):
            part = [call for call in calls[place : place + size] if call.name in needed]
            fewer = [*calls[:place], *part, *calls[place + size :]]
            if len(fewer) < len(calls) and still(fewer):
                calls = fewer
                place += len(part)
            else:
                place += size
        if size == 1:
            break
        size //= 2
    processes = {call.process for call in calls}
    events = tuple(each for each in history.events if each.process in processes or not each.process)
    return replace(history, calls=tuple(sorted(calls, key=lambda call: call.begin_s)), events=events)


def _about(call: Call) -> bool:
    """Whether a call is about samples, so that it says nothing without them."""
    return call.operation in ("put", "get", "claim", "ack", "nack", "renew", "clear")
