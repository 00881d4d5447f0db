"""The rules about rows: what reads, listings and saves may show, what the store may hold, and how calls may end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Final

from dataplane_testkit.chaos.history import OK, REFUSED, Call, Event
from dataplane_testkit.chaos.rules import Finding, finding
from dataplane_testkit.chaos.timeline import Timeline

#: Operations whose replies show cells or tags of samples.
_SHOWS: Final = ("get", "claim", "list", "saved")

#: Operation -> the errors with which it may end besides those of `_ANY`. All others are faults.
_ALLOWED: Final = {
    "put": {"CapacityExceededError", "RoomTimeoutError"},
    "get": {"MissingDataError", "LostSamplesError"},
    "claim": {"ClaimTimeoutError", "UnknownTaskError"},
    "ack": {"LeaseExpiredError", "UnknownTaskError"},
    "nack": {"LeaseExpiredError", "UnknownTaskError"},
    "renew": {"LeaseExpiredError", "UnknownTaskError"},
    "save": {"MissingDataError", "UnknownTaskError"},
}
_ANY: Final = {"", "OperationTimeoutError", "StalePartitionError", "UnknownPartitionError"}
#: A run with so many puts in which none succeeds proves nothing.
_MANY_PUTS: Final = 10


def check_reads(time: Timeline) -> Iterator[Finding]:
    """What breaks a rule about rows."""
    for call in time.calls:
        if call.operation in _SHOWS and call.outcome == OK:
            yield from _shown(time, call)
        if call.operation == "get" and call.outcome != OK:
            yield from _not_read(time, call)
        if call.operation in ("list", "saved") and call.outcome == OK:
            yield from _left_out(time, call)
        yield from _how_it_ended(time, call)
        yield from _within_its_deadline(time, call)
    yield from _capacity(time)
    puts = [call for call in time.calls if call.operation == "put"]
    if len(puts) >= _MANY_PUTS and all(call.outcome != OK for call in puts):
        yield finding("puts", f"none of {len(puts)} puts succeeded. The last one: {puts[-1].error}", puts[-1])


# --- what a reply shows -----------------------------------------------------------------------------------------------


def _shown(time: Timeline, call: Call) -> Iterator[Finding]:
    for sample, cells in call.seen.items():
        if time.unsafe(call.partition, sample):
            continue
        for field, version in cells.items():
            if isinstance(version, str):
                text = f"{call.name} ({call.operation}) shows {sample}, field {field}: {version}."
                yield finding("bits", text, call, samples=(sample,))
            else:
                yield from _version(time, call, sample, field, version)
        yield from _half(time, call, sample)
        if call.operation == "get" and time.history.atomic_overwrite:
            yield from _mixed(time, call, sample)


def _version(time: Timeline, call: Call, sample: str, field: str, version: int) -> Iterator[Finding]:
    what = f"{call.name} ({call.operation}) shows version {version} of {sample}, field {field}"
    put = time.put_of(call.partition, sample, version)
    if put is None or field not in put.fields:
        yield finding("written", f"{what}, which nobody wrote.", call, samples=(sample,))
        return
    if put.call.outcome == REFUSED:
        text = f"{what}, which {put.call.name} was refused to write."
        yield finding("written", text, put.call, call, samples=(sample,))
    elif put.begin_s > call.end_s:
        yield finding("written", f"{what}, before {put.call.name} wrote it.", call, put.call, samples=(sample,))
    effect_s = time.effect_s(put, sample, field)
    for other in time.puts(call.partition, sample):
        if field in other.fields and effect_s < other.begin_s and time.effect_s(other, sample, field) < call.begin_s:
            text = f"{what}, which {other.call.name} had replaced."
            yield finding("latest", text, put.call, other.call, call, samples=(sample,))
            break
    for wipe in time.wipes(call.partition, sample):
        if wipe.sure and wipe.call is not None and effect_s < wipe.begin_s and wipe.end_s < call.begin_s:
            text = f"{what}, which {wipe.call.name} ({wipe.call.operation}) had dropped."
            yield finding("cleared", text, put.call, wipe.call, call, samples=(sample,))
            break


def _half(time: Timeline, call: Call, sample: str) -> Iterator[Finding]:
    """A reply that shows a sample without a tag that every put of the required fields brings along."""
    puts = time.puts(call.partition, sample)
    needed = call.fields if call.operation == "claim" else ()
    bring = [put.fields for put in puts if not needed or set(needed) & put.fields]
    if not bring:
        text = f"{call.name} ({call.operation}) shows {sample}, which nobody wrote."
        yield finding("written", text, call, samples=(sample,))
        return
    always = {field for field in frozenset.intersection(*bring) if field.startswith("#")}
    absent = sorted(always - call.seen[sample].keys())
    if absent and call.operation in ("claim", "list"):
        text = f"{call.name} ({call.operation}) shows {sample} without the tag {absent[0][1:]}, put with its data."
        yield finding("half", text, puts[0].call, call, samples=(sample,))


def _mixed(time: Timeline, call: Call, sample: str) -> Iterator[Finding]:
    versions = {field: version for field, version in call.seen[sample].items() if isinstance(version, int)}
    for (one, v), (two, w) in combinations(versions.items(), 2):
        if v == w:
            continue
        puts = time.put_of(call.partition, sample, v), time.put_of(call.partition, sample, w)
        if all(put is not None and {one, two} <= put.fields for put in puts):
            text = f"{call.name} (get) shows {sample} with field {one} of version {v} and field {two} of version {w}."
            yield finding("mixed", text, *(put.call for put in puts if put), call, samples=(sample,))
            return


# --- what a reply leaves out ------------------------------------------------------------------------------------------


def _not_read(time: Timeline, call: Call) -> Iterator[Finding]:
    """A read that says that cells are missing, though all of them were there."""
    if call.error_name == "LostSamplesError" and not any(each.loses_data for each in time.history.events):
        yield finding("lost", f"{call.name} (get): the store has lost payload. {call.error}", call)
    if call.error_name not in ("MissingDataError", "UnknownPartitionError"):
        return
    puts = []
    for sample in call.samples:
        for field in call.fields:
            put = time.there(call.partition, sample, field, call.begin_s, call.end_s)
            if put is None or time.unsafe(call.partition, sample):
                return
            puts.append(put)
    committed = all(put.done_s < call.begin_s for put in puts)
    rule = "committed" if committed else "half"
    why = "" if committed else " Other cells of the same put had been seen before."
    text = f"{call.name} (get) does not find samples that were there: {call.error}{why}"
    yield finding(rule, text, *(put.call for put in puts), call, samples=call.samples)


def _left_out(time: Timeline, call: Call) -> Iterator[Finding]:
    for sample in time.samples(call.partition):
        if sample in call.seen or time.unsafe(call.partition, sample):
            continue
        for put in time.puts(call.partition, sample):
            moments = [time.effect_s(put, sample, field) for field in put.fields]
            if max(moments) < call.begin_s and not time.wiped(
                call.partition, sample, max(put.begin_s, put.seen_from_s), call.end_s
            ):
                rule = "save" if call.operation == "saved" else "committed"
                text = f"{call.name} ({call.operation}) leaves out {sample}, which {put.call.name} had put."
                yield finding(rule, text, put.call, call, samples=(sample,))
                break


# --- how calls end ----------------------------------------------------------------------------------------------------


def _how_it_ended(time: Timeline, call: Call) -> Iterator[Finding]:
    name = call.error_name
    if name.startswith("!"):
        yield finding("error", f"{call.name} ({call.operation}) raised {call.error[1:]}", call)
    elif name == "UnknownPartitionError" and call.operation not in ("get", "saved"):
        registration = time.registered(call.partition, call.begin_s, call.end_s)
        if registration is not None:
            text = f"{call.name} ({call.operation}) does not know a partition that was registered: {call.error}"
            yield finding("registered", text, registration, call)
    elif call.operation == "saved" and call.outcome != OK:
        yield finding("save", f"a save cannot be loaded: {call.error}", call)
    elif not _is_allowed(call) and not _disturbed(time, call):
        after = f"after {call.end_s - call.begin_s:.3f} s of {call.timeout_s:g} s"
        text = f"{call.name} ({call.operation}) failed {after}, though nothing was done to the store: {call.error}"
        yield finding("error", text, call)


def _is_allowed(call: Call) -> bool:
    """Whether a call may end with its error while nothing is done to the store. It may time out at its deadline."""
    early = call.error_name.endswith("TimeoutError") and call.end_s - call.begin_s < call.timeout_s / 2
    return not early and call.error_name in _ANY | _ALLOWED.get(call.operation, set())


def _disturbed(time: Timeline, call: Call) -> bool:
    """Whether something was done to the store during a call or shortly before."""
    late_s = time.history.allowance_s

    def overlaps(event: Event) -> bool:
        return not event.process and event.begin_s < call.end_s and event.end_s + late_s > call.begin_s

    return any(overlaps(event) for event in time.history.events)


def _within_its_deadline(time: Timeline, call: Call) -> Iterator[Finding]:
    history = time.history
    if math.isinf(call.end_s) and not math.isinf(time.killed_s(call.process)):
        return
    end_s = min(call.end_s, history.end_s)
    stops = [each for each in history.events if each.kind == "stop" and each.process == call.process]
    stopped = [each.end_s for each in stops if each.begin_s < end_s and each.end_s > call.begin_s]
    latest_s = max(call.begin_s + call.timeout_s, *stopped, -math.inf) + history.allowance_s
    if end_s > latest_s and not math.isinf(end_s):
        how = "did not end" if math.isinf(call.end_s) else "took"
        text = (
            f"{call.name} ({call.operation}) {how} {end_s - call.begin_s:.1f} s. Its deadline was {call.timeout_s:g} s."
        )
        yield finding("deadline", text, call)


# --- room -------------------------------------------------------------------------------------------------------------


def _capacity(time: Timeline) -> Iterator[Finding]:
    """The cells that were held for certain at the end of each put, and what they take together."""
    capacity_bytes = time.history.capacity_bytes
    if capacity_bytes is None:
        return
    moments: list[tuple[float, int, Call]] = []
    for call in time.calls:
        if call.operation != "put" or call.outcome != OK:
            continue
        for sample, size_bytes in zip(call.samples, call.size_bytes, strict=True):
            until_s = _held_until(time, call, sample)
            if until_s > call.end_s:
                moments.append((call.end_s, size_bytes, call))
                moments.append((until_s, -size_bytes, call))
    held_bytes, held = 0, {}
    for _, size_bytes, call in sorted(moments, key=lambda moment: moment[:2]):
        held_bytes += size_bytes
        held[call.name] = call
        if held_bytes > capacity_bytes:
            text = f"when {call.name} (put) had ended, the store held at least {held_bytes} bytes of {capacity_bytes}."
            yield finding("capacity", text, *_holding(time, held.values(), call.end_s))
            return


def _held_until(time: Timeline, call: Call, sample: str) -> float:
    """Until when the cells of a put are held for certain."""
    mine = set(call.fields)
    later = [
        put.begin_s
        for put in time.puts(call.partition, sample)
        if put.call is not call and put.done_s > call.begin_s and mine & put.fields
    ]
    wipes = [wipe.begin_s for wipe in time.wipes(call.partition, sample) if wipe.end_s > call.begin_s]
    return min([*later, *wipes], default=math.inf)


def _holding(time: Timeline, puts: Iterable[Call], at_s: float) -> list[Call]:
    return [
        call
        for call in puts
        if any(_held_until(time, call, sample) > at_s for sample in call.samples) and call.end_s <= at_s
    ]
