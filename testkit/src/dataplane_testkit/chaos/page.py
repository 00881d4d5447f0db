"""A failing history as a page of Markdown: what is wrong, the rule, and the calls that prove it, in order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from dataplane_core.errors import printable
from dataplane_testkit.chaos.history import OK, Call, Event, History
from dataplane_testkit.chaos.rules import GRANTED, RULES, Finding

#: The most calls that are listed per finding, the most samples per call, and the most characters of a call.
_MOST_CALLS: Final = 60
_MOST_SAMPLES: Final = 6
_MOST_CHARACTERS: Final = 300
_LEGEND: Final = (
    "Times are seconds since the run began. A call takes effect at some moment between its begin and its end. `w0.2` "
    "is worker 0 in its life 2: a new life begins after each kill. The calls with `*` prove the fault; without the "
    "others it would not be certain. `#v` is the tag that holds the version, `#z` that of the field `z`."
)

#: Findings, each with a history in which `check` finds it.
Found = Sequence[tuple[Finding, History]]


def page(
    name: str, command: str, broken: Found, facts: str, seen: Found = (), promises: Mapping[str, str] | None = None
) -> str:
    """The page.

    Args:
        name: The name of the backend or shim.
        command: The command that runs the same schedule again.
        broken: What was found, each with its shrunk history.
        facts: What ran, in a sentence.
        seen: What breaks the contract, and no promise of the store.
        promises: As in `Shim`, of a store that does not promise all that the contract says.
    """
    count = "1 fault" if len(broken) == 1 else f"{len(broken)} faults"
    lines = [f"# {count} of {name} under chaos", "", facts, "", "The same schedule again (times will differ):", ""]
    lines += [f"    {command}", ""]
    for number, (found, history) in enumerate([*broken, *seen], start=1):
        said = None if promises is None else promises.get(found.rule)
        title = found.rule if number <= len(broken) else f"Seen, not promised: {found.rule}"
        lines += [f"## {number}. {title}", "", found.text, "", f'The contract: "{RULES[found.rule]}"', ""]
        if promises is not None:
            lines += ["The store does not promise this." if said is None else f"The store: {said}", ""]
        if said is not None and number > len(broken):
            lacks = ", ".join(f"`{each}`" for each in GRANTED if each not in (promises or {}))
            lines += [f"This takes for granted some of what the store does not promise: {lacks}.", ""]
        lines += [*(f"    {line}" for line in table(found, history)), ""]
    return "\n".join(map(printable, [*lines, _LEGEND])) + "\n"


def table(found: Finding, history: History) -> list[str]:
    """The calls of a history and what was done meanwhile, one per line. Those that prove the finding have a star."""
    proof = {call.name for call in found.calls}
    calls = list(history.calls)
    if len(calls) > _MOST_CALLS:
        calls = [call for call in calls if call.name in proof][-_MOST_CALLS:]
    since_s = min((call.begin_s for call in calls), default=0.0) - 1
    until_s = max((min(call.end_s, call.begin_s + 60) for call in calls), default=0.0) + 1
    shown: list[Call | Event] = [*calls, *(event for event in history.events if since_s <= event.begin_s <= until_s)]
    return [_line(each, proof) for each in sorted(shown, key=lambda each: each.begin_s)]


def _line(each: Call | Event, proof: set[str]) -> str:
    end = "never" if math.isinf(each.end_s) else f"{each.end_s:.3f}"
    if isinstance(each, Call):
        star = "*" if each.name in proof else " "
        text = f"{each.name:<9} {_asked(each)} -> {_reply(each)}"
        text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    else:
        what = {"kill": "kill -9", "stop": "stopped with SIGSTOP, then continued"}.get(each.kind, each.kind)
        star, text = " ", f"{each.process or 'the store':<9} {what}"
    return f"{each.begin_s:8.3f} {end:>8} {star} {text}"


def _asked(call: Call) -> str:
    words = [call.operation, call.partition, call.task and f"task {call.task}"]
    words += [f"version {call.version}" if call.operation == "put" else "", ",".join(call.fields)]
    if call.operation == "claim":
        words.append(f"{'a full batch of' if call.blocking else 'up to'} {call.limit}")
    words += [f"lease {call.lease_s:g} s" if call.lease_s is not None else "", "everything" if call.whole else ""]
    words += [_samples(call)] if call.operation not in ("claim", "list", "saved") else []
    return " ".join(filter(None, words))


def _reply(call: Call) -> str:
    if call.outcome != OK:
        return f"{call.outcome} {call.error}".strip()
    if call.operation == "consumed":
        return str(call.flag)
    return _samples(call) or "nothing" if call.operation in ("get", "claim", "list", "saved") else "ok"


def _samples(call: Call) -> str:
    """The samples of a call, with the ends of their tokens and with what the reply showed of them."""
    tokens = dict(zip(call.samples, call.tokens, strict=False))
    shown = []
    for sample in call.samples[:_MOST_SAMPLES]:
        cells = " ".join(f"{name}={version}" for name, version in call.seen.get(sample, {}).items())
        token = f"({tokens[sample][-6:]})" if tokens.get(sample) else ""
        shown.append(" ".join(filter(None, [sample, token, cells])))
    more = len(call.samples) - _MOST_SAMPLES
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
