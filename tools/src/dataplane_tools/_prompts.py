"""Which prompts of a recorded run were skipped over a resume, and which were given twice."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

#: Tags that number or name the prompt of a sample, the first one that a sample has counts.
_TAGS: Final = ("prompt", "prompt_index", "prompt_id")
#: The group `v3_p17r1` is the second attempt at prompt 17, with the weights of version 3.
_VERSIONED: Final = re.compile(r"v\d+_p(\d+)(?:r\d+)?")
_NUMBERED: Final = re.compile(r"(.*?)(\d{1,18})", re.DOTALL)
_RANDOM: Final = re.compile(r"[0-9a-fA-F-]{32,}")
_DIGITS: Final = re.compile(r"\d+")
_MOST_RANGES: Final = 5
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
    """Prompts that no step that counts trained on, though later ones were.

    Attributes:
        names: The first few, as text.
        first: The first one.
        num_prompts: How many.
        resume: The resume that skipped them.
        is_generated: Whether they were put before it.
    """

    names: str
    first: str
    num_prompts: int
    resume: Resume
    is_generated: bool


class Repeated(NamedTuple):
    """A prompt that two steps that count were trained on, and the resume between."""

    name: str
    first: str
    second: str
    resume: Resume


@dataclass(slots=True)
class _Stream:
    """Prompts whose names differ in their number only, in partitions whose names do not differ more.

    ``newest``: the greatest number. ``disorder``: by how much a number that was first put was below it, at most.
    """

    name: str
    prompts: dict[int, Prompt] = field(default_factory=dict)
    newest: int = -1
    disorder: int = 0

    def name_of(self, number: int) -> str:
        return self.name.replace("*", str(number))


class Prompts:
    """The prompts of a run. Those without a number are not among them."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], _Stream] = {}

    def put(self, sample_id: str, partition: str, tags: Mapping[str, Any], at: float) -> tuple[Prompt | None, int]:
        """Notes that a sample was first put. Returns its prompt and the number of its life."""
        name, number, member = _named(sample_id, tags)
        if number is None:
            return None, 0
        stream = self._streams.setdefault((_DIGITS.sub("#", partition), name), _Stream(name))
        prompt = stream.prompts.get(number)
        if prompt is None:
            prompt = stream.prompts[number] = Prompt(at, at)
            stream.disorder = max(stream.disorder, stream.newest - number)
            stream.newest = max(number, stream.newest)
        bit = 1 << member
        if prompt.members & bit or not prompt.lives:
            prompt.lives, prompt.members = prompt.lives + 1, 0
        prompt.members |= bit
        prompt.latest = at
        return prompt, prompt.lives

    def skipped(self, resumes: Sequence[Resume], blind_until: float) -> Iterator[Skipped]:
        """The prompts that a resume skipped.

        Numbers that were never put: between one that was put before a resume and one that was put after it; or so
        little below the greatest one before it that they were under way. Nothing is said of them where numbers are
        missing elsewhere too, or where more are missing than were ever put: they jump. And prompts that were put
        before it, and then neither trained on nor put again, while later ones were.

        Args:
            resumes: In the order of time.
            blind_until: Up to then the recording lacks records: nothing is said of that time.
        """
        times = [each.at for each in resumes]
        for stream in self._streams.values() if resumes else ():
            for generated, found in (
                (False, _missing(stream, times, blind_until)),
                (True, _lost(stream, times, blind_until)),
            ):
                for place, ranges in sorted(found.items()):
                    count = sum(last - first + 1 for first, last in ranges)
                    yield Skipped(
                        _text_of(stream, ranges), stream.name_of(ranges[0][0]), count, resumes[place], generated
                    )

    def repeated(self, resumes: Sequence[Resume]) -> Iterator[Repeated]:
        """The prompts that two steps that count were trained on, with a resume between.

        Not those of a further pass over all prompts: there no prompt is new any more, and the first one comes again.
        And not those of streams whose numbers come again without a resume: they do not name prompts.
        """
        times = [each.at for each in resumes]
        for stream in self._streams.values():
            found: list[tuple[float, int, Repeated]] = []
            again = False
            for number, prompt in stream.prompts.items():
                for (_, before, first), (_, after, second) in pairwise(prompt.trained):
                    place = bisect_right(times, before)
                    if place == len(times) or times[place] > after:
                        again = True
                    else:
                        found.append((after, number, Repeated(stream.name_of(number), first, second, resumes[place])))
            if again or not found:
                continue
            newest = max(prompt.first for prompt in stream.prompts.values())
            may_begin_anew = min(stream.prompts) in {number for _, number, _ in found} or stream.disorder > 0
            yield from (each for at, _, each in sorted(found) if newest > at or not may_begin_anew)


def _missing(stream: _Stream, times: Sequence[float], blind_until: float) -> dict[int, list[tuple[int, int]]]:
    """Place of a resume -> the numbers that were never put, as ranges."""
    found: dict[int, list[tuple[int, int]]] = {}
    numbers = sorted(stream.prompts)
    pairs = list(pairwise(numbers))
    if sum(right - left == 1 for left, right in pairs) * 2 < len(pairs):
        return {}  # they are not consecutive anyway
    newest = [-1] * (len(times) + 1)  # the greatest number before each resume
    for number in numbers:
        place = bisect_right(times, stream.prompts[number].first)
        newest[place] = max(number, newest[place])
    newest = list(accumulate(newest, max))
    widest = 1  # the distance of two numbers between which numbers are missing for another reason
    gaps: list[tuple[int, int, int]] = []
    for left, right in pairs:
        if right - left == 1:
            continue
        before, after = stream.prompts[left].first, stream.prompts[right].first
        place = bisect_right(times, before)
        crosses = place < len(times) and times[place] <= after
        if not crosses:
            place = bisect_right(times, max(before, after))
            crosses = place < len(times) and newest[place] >= right and newest[place] - left - 1 <= stream.disorder
        if crosses and before > blind_until:
            gaps.append((left, right, place))
        else:
            widest = max(widest, right - left)
    for left, right, place in gaps:
        if widest < right - left <= len(numbers) + 1:
            found.setdefault(place, []).append((left + 1, right - 1))
    return found


def _lost(stream: _Stream, times: Sequence[float], blind_until: float) -> dict[int, list[tuple[int, int]]]:
    """Place of a resume -> the numbers of the prompts that were put before it and are gone, as ranges."""
    found: dict[int, list[int]] = {}
    trained_later = float("-inf")  # when a prompt with a greater number that was trained on was put, at the latest
    for number in sorted(stream.prompts, reverse=True):
        prompt = stream.prompts[number]
        if prompt.trained:
            trained_later = max(trained_later, prompt.trained[-1][1])
        elif (prompt.is_undone or prompt.is_dropped_later) and not prompt.is_decided and prompt.first > blind_until:
            place = bisect_right(times, prompt.latest)
            if place < len(times) and times[place] <= trained_later:
                found.setdefault(place, []).append(number)
    return {place: _ranges(numbers[::-1]) for place, numbers in found.items()}


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ranges


def _text_of(stream: _Stream, ranges: Sequence[tuple[int, int]]) -> str:
    """Numbers as ``q7 to q9, q12``, the first few."""
    texts = [" to ".join(map(stream.name_of, dict.fromkeys(pair))) for pair in ranges[:_MOST_RANGES]]
    return ", ".join(texts) + (", ..." if len(ranges) > _MOST_RANGES else "")


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
