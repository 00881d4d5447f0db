"""Which prompts of a recorded run were skipped over a resume, and which were given twice."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from typing import Any, Final, NamedTuple, TypeAlias

from dataplane_core.errors import preview

#: Tags that number or name the prompt of a sample, the first one that a sample has counts.
_TAGS: Final = ("prompt", "prompt_index", "prompt_id")
#: The group `v3_p17r1` is the second attempt at prompt 17, with the weights of version 3.
_VERSIONED: Final = re.compile(r"v\d+_p(\d+)(?:r\d+)?")
_NUMBERED: Final = re.compile(r"(.*?)(\d{1,18})", re.DOTALL)
_RANDOM: Final = re.compile(r"[0-9a-fA-F-]{32,}")
_DIGITS: Final = re.compile(r"\d+")
_MOST_RANGES: Final = 5
#: Place of a resume -> numbers, each range with its first and its last one.
_Ranges: TypeAlias = dict[int, list[tuple[int, int]]]
_MEMBER: Final = re.compile(r"(.+)_g(\d{1,4})", re.DOTALL)


class Resume(NamedTuple):
    """A client that began after all earlier ones of its role had ended: when its first operation ended, its role and
    process, and the greatest step that had been marked."""

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
        trained_at: When a sample of it that a step trained on was consumed last.
        is_undone: Whether a step trained on it from before which the run went on later.
        is_decided: Whether it was cleared by somebody who was there when it was put.
        is_dropped_later: Whether a client that began later dropped it with its partition.
    """

    first: float
    latest: float
    lives: int = 0
    members: int = 0
    trained: list[tuple[int, float, str]] = field(default_factory=list)
    trained_at: float = -math.inf
    is_undone: bool = False
    is_decided: bool = False
    is_dropped_later: bool = False

    def train(self, life: int, put_at: float, step: str, trained_at: float) -> None:
        """Notes that a step that counts trained on it."""
        self.trained_at = max(self.trained_at, trained_at)
        if not self.trained or self.trained[-1][0] != life:
            self.trained.append((life, put_at, step))


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

    def skipped(self, resumes: Sequence[Resume], blind_until: float) -> Iterator[dict[str, Any]]:
        """The prompts that a resume skipped, as findings.

        Numbers that were never put: between one that was put before a resume and one that was put after it; or so
        little below the greatest one before it that they were under way. Nothing is said of them where numbers are
        missing elsewhere too, or where more are missing than were ever put: they jump. And prompts that were put
        before it, and then neither trained on nor put again, while later ones were.

        Args:
            resumes: In the order of time.
            blind_until: Up to then the recording lacks records: nothing is said of that time.
        """
        times = [each.at for each in resumes]
        for stream, (find, more) in product(self._streams.values() if resumes else (), _SKIPPED):
            for place, ranges in sorted(find(stream, times, blind_until).items()):
                count = sum(last - first + 1 for first, last in ranges)
                names = [" to ".join(map(stream.name_of, dict.fromkeys(pair))) for pair in ranges[:_MOST_RANGES]]
                names += ["..."] if len(ranges) > _MOST_RANGES else []
                text = f"{several(count, 'prompt')} skipped over {resumes[place]}: {', '.join(names)}{more}."
                yield {"kind": "skipped", "text": text, "count": count, "first": stream.name_of(ranges[0][0])}

    def repeated(self, resumes: Sequence[Resume]) -> Iterator[dict[str, Any]]:
        """The prompts that two steps that count were trained on, with a resume between, as a finding for each resume.

        Not those of a further pass over all prompts: there no prompt is new any more, and the first one comes again.
        And not those of streams whose numbers come again without a resume: they do not name prompts.
        """
        times = [each.at for each in resumes]
        of_resume: dict[Resume, list[tuple[str, str, str]]] = {}
        for stream in self._streams.values():
            found: list[tuple[float, int, int, str, str]] = []
            for number, prompt in stream.prompts.items():
                for (_, before, first), (_, after, second) in pairwise(prompt.trained):
                    found.append((after, number, _between(times, before, after), first, second))
            if any(place == len(times) for _, _, place, _, _ in found):
                continue
            newest = max(prompt.first for prompt in stream.prompts.values())
            may_begin_anew = stream.disorder > 0 or min(stream.prompts) in {number for _, number, *_ in found}
            for at, number, place, first, second in sorted(found):
                if newest > at or not may_begin_anew:
                    of_resume.setdefault(resumes[place], []).append((stream.name_of(number), first, second))
        for resume, those in of_resume.items():
            name, first, second = those[0]
            text = f"{several(len(those), 'prompt')} given twice over {resume}: {preview(each for each, _, _ in those)}"
            text += f". '{name}' was trained on in {first} and in {second}."
            yield {"kind": "given twice", "text": text, "count": len(those), "first": name}


def several(count: int, what: str) -> str:
    """Such as ``2 prompts were``."""
    return f"{count} {what} was" if count == 1 else f"{count} {what}s were"


def _between(times: Sequence[float], before: float, after: float) -> int:
    """The place of the first resume between two times. The number of all of them: there is none."""
    place = bisect_right(times, before)
    return place if place < len(times) and times[place] <= after else len(times)


def _missing(stream: _Stream, times: Sequence[float], blind_until: float) -> _Ranges:
    """The numbers that were never put."""
    found: _Ranges = {}
    numbers = sorted(stream.prompts)
    gaps = [(left, right) for left, right in pairwise(numbers) if right - left > 1]
    if len(gaps) * 2 > len(numbers) - 1:
        return found  # they are not consecutive anyway
    newest = [-1] * (len(times) + 1)  # the greatest number before each resume
    for number in numbers:
        place = bisect_right(times, stream.prompts[number].first)
        newest[place] = max(number, newest[place])
    newest = list(accumulate(newest, max))
    widest = 1  # the distance of two numbers between which numbers are missing for another reason
    skipped: list[tuple[int, int, int]] = []
    for left, right in gaps:
        before, after = stream.prompts[left].first, stream.prompts[right].first
        place = _between(times, before, after)
        if place == len(times):  # were they under way?
            place = bisect_right(times, max(before, after))
            if newest[place] < right or newest[place] - left - 1 > stream.disorder:
                place = len(times)
        if place < len(times) and before > blind_until:
            skipped.append((left, right, place))
        else:
            widest = max(widest, right - left)
    for left, right, place in skipped:
        if widest < right - left <= len(numbers) + 1:
            found.setdefault(place, []).append((left + 1, right - 1))
    return found


def _lost(stream: _Stream, times: Sequence[float], blind_until: float) -> _Ranges:
    """The numbers of the prompts that were put before a resume and are gone."""
    found: _Ranges = {}
    trained_later = -math.inf  # when a prompt with a greater number was trained on, at the latest
    for number in sorted(stream.prompts, reverse=True):
        prompt = stream.prompts[number]
        trained_later = max(trained_later, prompt.trained_at)
        if prompt.trained:
            continue
        if (prompt.is_undone or prompt.is_dropped_later) and not prompt.is_decided and prompt.first > blind_until:
            place = _between(times, prompt.latest, trained_later)
            if place < len(times):
                ranges = found.setdefault(place, [])
                goes_on = ranges and ranges[-1][0] == number + 1
                ranges.append((number, ranges.pop()[1] if goes_on else number))
    return {place: ranges[::-1] for place, ranges in found.items()}


#: How skipped prompts are found, and what is said of them.
_SKIPPED: Final[Sequence[tuple[Callable[[_Stream, Sequence[float], float], _Ranges], str]]] = (
    (_missing, ""),
    (_lost, ". They were put before it, no step that counts trained on them, and later ones were trained on"),
)


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
