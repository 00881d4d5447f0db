"""The rules that a history must keep, each with its sentence of the contract; and what breaks a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dataplane_testkit.chaos.history import Call
from dataplane_testkit.rules import sentences

#: Rule -> the sentence of docs/contract.md.
RULES: Final[Mapping[str, str]] = {name: sentence for name, (sentence, _) in sentences("chaos").items()}

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


def finding(rule: str, text: str, *calls: Call, about: str | Sequence[str] = ()) -> Finding:
    """A finding about a sample, or some, in the partition of the last call."""
    assert rule in RULES
    samples = (about,) if isinstance(about, str) else tuple(about)
    ordered = sorted({call.name: call for call in calls}.values(), key=lambda call: call.begin_s)
    return Finding(rule=rule, text=text, partition=calls[-1].partition, samples=samples, calls=tuple(ordered))
