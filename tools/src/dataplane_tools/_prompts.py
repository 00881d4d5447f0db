"""Which prompts of a recorded run were skipped over a resume, and which were given twice."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

#: Tags that number or name the prompt of a sample, the first one that a sample has counts.
_TAGS: Final = ("prompt", "prompt_index", "prompt_id")
#: The group `v3_p17r1` is the second attempt at prompt 17, with the weights of version 3.
_VERSIONED: Final = re.compile(r"v\d+_p(\d+)(?:r\d+)?")
_NUMBERED: Final = re.compile(r"(.*?)(\d{1,18})", re.DOTALL)
_RANDOM: Final = re.compile(r"[0-9a-fA-F-]{32,}")
_MEMBER: Final = re.compile(r"(.+)_g(\d{1,4})", re.DOTALL)


class Resume(NamedTuple):
    """A client that began after all earlier ones of its role had ended.

    Attributes:
        at: When its first operation ended.
        role: Its role.
        pid: Its process.
        after: The greatest step that had been marked. None: none.
    """

    at: float
    role: str
    pid: int
    after: int | None

    def __str__(self) -> str:
        when = "before any step" if self.after is None else f"after step {self.after}"
        return f"the resume of {self.role} (process {self.pid}) {when}"


@dataclass(slots=True)
class Prompt:
    """A prompt.

    Attributes:
        first: When a sample of it was first put, and ``latest``: when one was put last.
        lives: How often it was given: a life begins when a sample of it is put that this life has already.
        members: The samples of the present life, as bits.
        trained: Its lives that were trained on: the number, when it was put, and the step.
        is_undone: Whether a step trained on it from before which the run went on later.
        is_decided: Whether it was cleared by somebody who was there when it was put.
        is_dropped_later: Whether a client that began later dropped it with its partition.
    """

    first: float
    latest: float
    lives: int = 0
    members: int = 0
    trained: list[tuple[int, float, str]] = field(default_factory=list)
    is_undone: bool = False
    is_decided: bool = False
    is_dropped_later: bool = False

    def train(self, life: int, put_at: float, step: str) -> None:
        """Notes that a step that counts trained on it."""
        if not self.trained or self.trained[-1][0] != life:
            self.trained.append((life, put_at, step))


class Skipped(NamedTuple):
    """Prompts that no step that counts was trained on, though others after them were.

    ``generated``: they were put before the resume.
    """

    stream: str
    numbers: list[int]
    resume: Resume
    generated: bool


class Repeated(NamedTuple):
    """A prompt that two steps that count were trained on, and the resume between. None: there was none."""

    name: str
    first: str
    second: str
    resume: Resume


class Prompts:
    """The prompts of a run, in streams: those whose names differ in their last number only.

    Attributes:
        streams: Name of the stream, as ``q*`` -> number -> prompt. Prompts without a number are in none.
    """

    def __init__(self) -> None:
        self.streams: dict[str, dict[int, Prompt]] = {}
        self._falls: dict[str, int] = {}  # how often a smaller number was first put after a greater one
        self._newest: dict[str, int] = {}

    def put(self, sample_id: str, tags: Mapping[str, Any], at: float) -> tuple[Prompt | None, int]:
        """Notes that a sample was first put. Returns its prompt and the number of its life."""
        stream, number, member = _named(sample_id, tags)
        if number is None:
            return None, 0
        prompts = self.streams.setdefault(stream, {})
        prompt = prompts.get(number)
        if prompt is None:
            prompt = prompts[number] = Prompt(at, at)
            newest = self._newest.get(stream, -1)
            self._falls[stream] = self._falls.get(stream, 0) + (number < newest)
            self._newest[stream] = max(number, newest)
        bit = 1 << member
        if prompt.members & bit or not prompt.lives:
            prompt.lives, prompt.members = prompt.lives + 1, 0
        prompt.members |= bit
        prompt.latest = at
        return prompt, prompt.lives

    def skipped(self, resumes: Sequence[Resume], blind_until: float) -> Iterator[Skipped]:
        """The prompts that a resume skipped: numbers that were never put between two that were put before and after
        it; and prompts that were put before it, and neither trained on nor put again, while later ones were.

        Args:
            resumes: In the order of time.
            blind_until: Up to then the recording lacks records: nothing is said of that time.
        """
        times = [each.at for each in resumes]
        for stream, prompts in self.streams.items():
            numbers = sorted(prompts)
            steps = [right - left for left, right in pairwise(numbers)]
            if not resumes or sum(each == 1 for each in steps) * 2 < len(steps):
                continue  # the numbers are not consecutive anyway
            for left, right in pairwise(numbers):
                before, after = prompts[left].first, prompts[right].first
                place = bisect_right(times, before)
                if right - left > 1 and before > blind_until and place < len(times) and times[place] <= after:
                    yield Skipped(stream, list(range(left + 1, right)), resumes[place], generated=False)
            yield from self._lost(stream, numbers, resumes, times, blind_until)

    def _lost(
        self, stream: str, numbers: Sequence[int], resumes: Sequence[Resume], times: Sequence[float], blind_until: float
    ) -> Iterator[Skipped]:
        found: dict[Resume, list[int]] = {}
        trained_later = float("-inf")  # when the newest prompt with a greater number that was trained on was put
        for number in reversed(numbers):
            prompt = self.streams[stream][number]
            if prompt.trained:
                trained_later = max(trained_later, prompt.trained[-1][1])
            elif (prompt.is_undone or prompt.is_dropped_later) and not prompt.is_decided and prompt.first > blind_until:
                place = bisect_right(times, prompt.latest)
                if place < len(times) and times[place] <= trained_later:
                    found.setdefault(resumes[place], []).append(number)
        for resume, each in found.items():
            yield Skipped(stream, each[::-1], resume, generated=True)

    def repeated(self, resumes: Sequence[Resume]) -> Iterator[Repeated]:
        """The prompts that two steps that count were trained on, with a resume between.

        Not those of a further pass over all prompts: there no prompt is new any more, and the first one comes again.
        And not those of streams whose numbers come again without a resume: they do not name prompts.
        """
        times = [each.at for each in resumes]
        for stream, prompts in self.streams.items():
            found: list[tuple[int, float, Repeated]] = []
            again = False
            for number, prompt in prompts.items():
                for (_, before, first), (_, after, second) in pairwise(prompt.trained):
                    place = bisect_right(times, before)
                    if place == len(times) or times[place] > after:
                        again = True
                        break
                    name = stream.replace("*", str(number))
                    found.append((number, after, Repeated(name, first, second, resumes[place])))
            if again or not found:
                continue
            newest = max(prompt.first for prompt in prompts.values())
            begins_anew = min(prompts) in {number for number, _, _ in found} or self._falls[stream] > 0
            for _, at, each in sorted(found, key=lambda each: each[:2]):
                if newest > at or not begins_anew:
                    yield each


def _named(sample_id: str, tags: Mapping[str, Any]) -> tuple[str, int | None, int]:
    """The stream, the number of the prompt in it, and the number of the sample in the group."""
    grouped = _MEMBER.fullmatch(sample_id)
    group, member = (grouped[1], int(grouped[2])) if grouped else (sample_id, 0)
    for tag in _TAGS:
        value = tags.get(tag)
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{tag} *", value, member
    if found := _VERSIONED.fullmatch(group):
        return "prompt *", int(found[1]), member
    found = None if _RANDOM.fullmatch(group) else _NUMBERED.fullmatch(group)
    if found:
        return f"{found[1]}*", int(found[2]), member
    return "", None, member
