"""A failing history as a page of Markdown: what is wrong, the rule, and the calls that prove it, in order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from dataplane_core.errors import printable
from dataplane_testkit.chaos.history import OK, REFUSED, Call, Event, History
from dataplane_testkit.chaos.rules import RULES, Finding

#: The most calls that the page lists per finding, and the most samples that it names per call.
_MOST_CALLS: Final = 60
_MOST_SAMPLES: Final = 6
#: What a store may not promise, and the contract takes for granted where it judges other rules.
_GRANTED: Final = ("half", "mixed", "fenced", "durable")


def page(
    backend: str,
    command: str,
    findings: Sequence[tuple[Finding, History]],
    facts: str,
    seen: Sequence[tuple[Finding, History]] = (),
    promises: Mapping[str, str] | None = None,
) -> str:
    """The page.

    Args:
        backend: The backend's name.
        command: The command that runs the same schedule again.
        findings: What was found, each with its shrunk history.
        facts: What ran, in a sentence.
        seen: As `findings`: what breaks the contract, and no promise of the store.
        promises: As in `Shim`, of a store that does not promise all that the contract says.

    Returns:
        The page as Markdown.
    """
    count = "1 fault" if len(findings) == 1 else f"{len(findings)} faults"
    lines = [f"# {count} of {backend} under chaos", "", facts, "", "The same schedule again (times will differ):", ""]
    lines += [f"    {command}", ""]
    for number, (found, history) in enumerate([*findings, *seen], start=1):
        title = found.rule if number <= len(findings) else f"Seen, not promised: {found.rule}"
        lines += [f"## {number}. {title}", "", f"**{found.text}**", ""]
        lines += [f'The contract: "{RULES[found.rule]}"', ""]
        if promises is not None:
            lines += [_promised(found.rule, promises, broken=number <= len(findings)), ""]
        lines += [*table(found, history), ""]
    lines += _LEGEND
    return "\n".join(map(printable, lines)) + "\n"


def _promised(rule: str, promises: Mapping[str, str], *, broken: bool) -> str:
    if rule not in promises:
        return "The store does not promise this."
    if broken:
        return f"The store: {promises[rule]}"
    lacks = ", ".join(f"`{name}`" for name in _GRANTED if name not in promises)
    return (
        f"The store: {promises[rule]}. This finding takes for granted some of what the store does not promise: {lacks}."
    )


_LEGEND: Final = [
    "## How to read the tables",
    "",
    "Times are seconds since the run began. A call takes effect at some moment between its begin and its end. `w0.2` "
    "is worker 0 in its life 2: a new life begins after each kill. Bold calls prove the fault; without the others it "
    "would not be certain. `#v` is the tag that holds the version, `#z` that of the field `z`.",
]


def table(found: Finding, history: History) -> list[str]:
    """The calls of a history, in lines of Markdown; those that prove the finding are bold."""
    proof = {call.name for call in found.calls}
    calls = list(history.calls)
    if len(calls) > _MOST_CALLS:
        calls = [call for call in calls if call.name in proof][-_MOST_CALLS:]
    since = min((call.begin_s for call in calls), default=0.0)
    until = max((min(call.end_s, call.begin_s + 60) for call in calls), default=0.0)
    rows: list[tuple[float, str]] = [(call.begin_s, _call_row(call, call.name in proof)) for call in calls]
    rows += [(each.begin_s, _event_row(each)) for each in history.events if since - 1 <= each.begin_s <= until + 1]
    head = ["| begin | end | call | what | outcome |", "|---|---|---|---|---|"]
    return [*head, *(row for _, row in sorted(rows))]


def _call_row(call: Call, bold: bool) -> str:
    end = "never" if math.isinf(call.end_s) else f"{call.end_s:.3f}"
    name = f"**{call.name}**" if bold else call.name
    return f"| {call.begin_s:.3f} | {end} | {name} | {_cell(_what(call))} | {_outcome(call)} |"


def _event_row(event: Event) -> str:
    what = {"kill": "kill -9", "stop": "stopped with SIGSTOP, then continued"}.get(event.kind, event.kind)
    return f"| {event.begin_s:.3f} | {event.end_s:.3f} | {event.process or 'the store'} | *{what}* | |"


def _what(call: Call) -> str:
    words = [call.operation, f"`{call.partition}`"]
    if call.operation == "put":
        words.append(f"version {call.version} of fields {', '.join(call.fields)}")
    elif call.fields:
        words.append(f"fields {', '.join(call.fields)}")
    if call.task:
        words.append(f"task `{call.task}`")
    if call.operation == "claim":
        words.append(f"{'a full batch of' if call.blocking else 'up to'} {call.limit}")
    if call.lease_s is not None:
        words.append(f"lease {call.lease_s:g} s")
    if call.whole:
        words.append("the whole partition")
    asked = call.operation not in ("claim", "list", "saved")
    if asked and call.samples:
        words.append(_names(call, call.samples))
    return ", ".join(words)


def _names(call: Call, samples: Sequence[str]) -> str:
    tokens = dict(zip(call.samples, call.tokens, strict=False)) if call.operation != "put" else {}
    shown = [f"{each} ({tokens[each][-6:]})" if tokens.get(each) else each for each in samples[:_MOST_SAMPLES]]
    more = f" and {len(samples) - _MOST_SAMPLES} more" if len(samples) > _MOST_SAMPLES else ""
    return ", ".join(shown) + more


def _outcome(call: Call) -> str:
    if call.outcome == REFUSED:
        return f"refused: {_cell(call.error)}"
    if call.outcome != OK:
        return f"unknown: {_cell(call.error)}" if call.error else "unknown"
    if call.operation == "consumed":
        return str(call.flag)
    if call.seen:
        parts = [
            f"{sample}: " + ", ".join(f"{field}={version}" for field, version in cells.items())
            for sample, cells in list(call.seen.items())[:_MOST_SAMPLES]
        ]
        tokens = sorted(set(call.tokens))
        held = f"; token {tokens[0][-6:]}" if len(tokens) == 1 and tokens[0] else ""
        return _cell("; ".join(parts) + held)
    if call.operation in ("claim", "list"):
        return _names(call, call.samples) if call.samples else "nothing"
    return "ok"


def _cell(text: str) -> str:
    short = text if len(text) <= 300 else f"{text[:300]}..."
    return short.replace("|", "\\|")
