"""The rules that a history must keep, each with its sentence of the contract; and what breaks a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dataplane_testkit.chaos.history import Call

#: Rule -> the sentence of docs/contract.md.
RULES: Final[Mapping[str, str]] = {
    "committed": "Returns only when the write is committed and visible to every other client",
    "lost": "A missing sample, or a cell not yet produced, raises a subclass of `KeyError` that names the first few "
    "and counts the rest. A read never returns fewer rows.",
    "puts": "Writes cells",
    "bits": "Dtype and values come back bit for bit",
    "written": "a read never returns bytes of another sample",
    "latest": "last committed write wins",
    "cleared": "drops those rows with their tags and cursors",
    "half": "no reader or claim sees half of it, or its data without its tags",
    "mixed": "A read that overlaps an overwrite may mix old and new cells, unless the backend declares "
    "`atomic_overwrite`",
    "given once": "no sample is given to a task twice",
    "two holders": "two holders never both succeed",
    "lease": "So a lease never ends early",
    "refused ack": "`LeaseExpiredError` names the ids whose token is no longer valid",
    "token": "its identity is never given to another one",
    "order": "Samples come in order of first write, unless a sampler says otherwise.",
    "ready": "A claim with `blocking=False` returns what is ready now: up to `batch_size` samples, perhaps none.",
    "waiting": "A blocking claim waits until `batch_size` samples are ready, and returns them.",
    "handed out again": "a claim that is neither acked nor renewed in time is handed out again",
    "at most one claim": "if the reply to a claim is lost, its rows are lost to the task",
    "consumed": "whether every task has consumed every sample that the partition holds",
    "capacity": "the store holds at most `capacity_bytes` of payload",
    "deadline": "Every call ends by its deadline",
    "error": "Errors derive from `DataPlaneError`",
    "registered": "An unknown partition raises `KeyError`",
    "save": "A save is whole or not there",
}

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
