"""The first reading of a recording: who marks steps, who claims, and where the run was resumed. And its prompts: which
were skipped over a resume, and which were given twice.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from typing import Any, Final, NamedTuple, TypeAlias

from dataplane_core.errors import preview
from dataplane_observe import Recording, Writer

#: A tag that each row of `dataplane_integrations.weights` has.
_WEIGHTS: Final = "weight_anchor"


@dataclass(slots=True)
class Client:
    """A client of the run, which has done something."""

    writer: Writer
    first: float  # when its first operation ended
    last: float = 0.0  # when its last one ended
    until: tuple[str, int] = ("", 0)  # segment and line of its last record: a run that goes on writes more
    counts: Counter[str] = field(default_factory=Counter)  # operation -> how many samples
    is_closed: bool = False


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
class Survey:
    """What is to be known of a run before its samples are followed."""

    clients: dict[str, Client] = field(default_factory=dict)  # in the order of their first records
    marks: list[tuple[float, int, str]] = field(default_factory=list)  # (time, step, client) of those that count
    undone: list[bool] = field(default_factory=list)  # for each mark, whether the run went on from before it later
    others: int = 0  # marks that do not count, since two clients marked steps at the same time
    claimed: set[str] = field(default_factory=set)  # partitions of which a task was given samples
    weights: set[str] = field(default_factory=set)  # partitions of weights: their rows are no samples
    #: The tasks that train: those that the client that marks steps claims for; else its role; else all.
    tasks: set[str] = field(default_factory=set)
    consumers: set[str] = field(default_factory=set)  # clients that were given samples of these tasks
    #: Clients whose reads of other partitions train, of those that read in most steps: as with ``tasks``.
    readers: set[str] = field(default_factory=set)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # by operation and error
    resumes: list[Resume] = field(default_factory=list)
    blind_until: float = -math.inf  # up to then records are lost or were deleted
    end: float = 0.0  # of the last operation
    num_records: int = 0


def survey(recording: Recording, task: str | None = None) -> Survey:
    """Reads a recording for the first time. ``task``: the one that trains, if it is not to be found out."""
    found = Survey(blind_until=max((segment.until for segment in recording.dropped), default=-math.inf))
    claimed: set[tuple[str, str, str]] = set()  # partition, task, client
    read: dict[tuple[str, str], set[int]] = {}  # partition, client -> how many steps had ended at its reads
    for record in recording.records():
        client = record.client.client
        if record.op == "end":
            if client in found.clients:
                found.clients[client].is_closed = True
            continue
        found.num_records += 1
        does = found.clients.setdefault(client, Client(record.client, record.at))
        does.last, does.until = record.at, (record.segment, record.line)
        does.counts[record.op] += record.rows if record.status == "ok" else 0
        found.end = max(found.end, record.at)
        if record.op == "step" and record.step is not None:
            found.marks.append((record.at, record.step, client))
        elif record.op == "lost":
            found.blind_until = max(found.blind_until, record.at)
        elif record.status != "ok":
            found.failures[record.op, record.error] += 1
        elif record.op == "put_samples" and any(_WEIGHTS in tags for tags in record.tags or ()):
            found.weights.add(record.partition)
        elif record.op == "claim" and record.ids:
            claimed.add((record.partition, record.task, client))
        elif record.op == "get_samples" and record.ids:
            read.setdefault((record.partition, client), set()).add(len(found.marks))
    claimed = {claim for claim in claimed if claim[0] not in found.weights}
    read = {key: counts for key, counts in read.items() if key[0] not in found.weights}
    _choose_marks(found)
    markers = {client for _, _, client in found.marks}
    roles = {found.clients[client].writer.role for client in markers}
    by_marker = {name for _, name, client in claimed if client in markers}
    by_role = {name for _, name, client in claimed if found.clients[client].writer.role in roles}
    found.tasks = {task} if task is not None else by_marker or by_role or {name for _, name, _ in claimed}
    found.claimed = {partition for partition, _, _ in claimed}
    steps = {key: len(counts) for key, counts in read.items() if key[0] not in found.claimed}
    most = max(steps.values(), default=0)  # who reads in few steps, such as at the end, does not train
    readers = {client for (_, client), count in steps.items() if 2 * count >= most}
    of_role = {client for client in readers if found.clients[client].writer.role in roles}
    found.readers = readers & markers or of_role or readers
    found.consumers = {client for _, name, client in claimed if name in found.tasks}
    found.resumes = sorted(_resumes(found))
    return found


def _choose_marks(found: Survey) -> None:
    """Leaves the marks of one client at a time, and finds those from before which the run went on later."""
    markers = {client for _, _, client in found.marks}
    chosen: list[str] = []
    for client in sorted(markers, key=lambda client: found.clients[client].first):
        if not chosen or found.clients[client].first > found.clients[chosen[-1]].last:
            chosen.append(client)
    marks = [mark for mark in found.marks if mark[2] in chosen]
    found.others = len(found.marks) - len(marks)
    found.marks = marks
    least = math.inf
    for _, step, _ in reversed(marks):
        found.undone.append(step >= least)
        least = min(least, step)
    found.undone.reverse()


def _resumes(found: Survey) -> Iterator[Resume]:
    ends: dict[str, float] = {}
    for client in found.clients.values():  # in the order of their first records
        at, role = client.first, client.writer.role
        if at > ends.get(role, math.inf):
            after = max((step for when, step, _ in found.marks if when < at), default=None)
            yield Resume(at, role, client.writer.pid, after)
        ends[role] = max(ends.get(role, -math.inf), client.last)


# --- prompts ----------------------------------------------------------------------------------------------------------


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
_MEMBER: Final = re.compile(r"(.+)_g(\d{1,4})(?:/(\d{1,4}))?", re.DOTALL)


@dataclass(slots=True)
class Prompt:
    """A prompt."""

    first: float  # when a sample of it was first put
    latest: float  # when one was put last
    lives: int = 0  # how often it was given: one begins when a sample of it is put that the present one has already
    members: list[int] = field(default_factory=list)  # of this life: for each row, the rollouts that have it, as bits
    trained: list[tuple[int, float, str]] = field(default_factory=list)  # lives: number, when it was put, and the step
    trained_at: float = -math.inf  # when a sample of it that a step trained on was consumed last
    is_undone: bool = False  # a step trained on it from before which the run went on later
    is_decided: bool = False  # it was cleared by somebody who was there when it was put
    is_dropped_later: bool = False  # a client that began later dropped it with its partition

    def train(self, life: int, put_at: float, step: str, trained_at: float) -> None:
        """Notes that a step that counts trained on it."""
        self.trained_at = max(self.trained_at, trained_at)
        if not self.trained or self.trained[-1][0] != life:
            self.trained.append((life, put_at, step))


@dataclass(slots=True)
class _Stream:
    """Prompts whose names differ in their number only, in partitions whose names do not differ more."""

    name: str
    prompts: dict[int, Prompt] = field(default_factory=dict)
    newest: int = -1  # the greatest number
    disorder: int = 0  # by how much a number that was first put was below that, at most

    def name_of(self, number: int) -> str:
        return self.name.replace("*", str(number))


class Prompts:
    """The prompts of a run. Those without a number are not among them."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], _Stream] = {}

    def put(self, sample_id: str, partition: str, tags: Mapping[str, Any], at: float) -> tuple[Prompt | None, int]:
        """Notes that a sample was first put. Returns its prompt and the number of its life."""
        name, number, member, row = _named(sample_id, tags)
        if number is None:
            return None, 0
        stream = self._streams.setdefault((_DIGITS.sub("#", partition), name), _Stream(name))
        prompt = stream.prompts.get(number)
        if prompt is None:
            prompt = stream.prompts[number] = Prompt(at, at)
            stream.disorder = max(stream.disorder, stream.newest - number)
            stream.newest = max(number, stream.newest)
        bit = 1 << member
        if not prompt.lives or (row < len(prompt.members) and prompt.members[row] & bit):
            prompt.lives, prompt.members = prompt.lives + 1, []
        prompt.members += [0] * (row + 1 - len(prompt.members))
        prompt.members[row] |= bit
        prompt.latest = at
        return prompt, prompt.lives

    def skipped(self, resumes: Sequence[Resume], blind_until: float) -> Iterator[dict[str, Any]]:
        """The prompts that a resume skipped, as findings.

        Numbers that were never put: between one that was put before a resume and one that was put after it; or so
        little below the greatest one before it that they were under way. Nothing is said of them where numbers are
        missing elsewhere too, or where more are missing than were ever put: they jump. And prompts that were put
        before it, and then neither trained on nor put again, while later ones were.
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


def _named(sample_id: str, tags: Mapping[str, Any]) -> tuple[str, int | None, int, int]:
    """The stream, the number of the prompt in it, that of the rollout in the group, and that of the row in it."""
    grouped = _MEMBER.fullmatch(sample_id)
    group, member, row = (grouped[1], int(grouped[2]), int(grouped[3] or 0)) if grouped else (sample_id, 0, 0)
    for tag in _TAGS:
        value = tags.get(tag)
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{tag} *", value, member, row
    if found := _VERSIONED.fullmatch(group):
        return "prompt *", int(found[1]), member, row
    found = None if _RANDOM.fullmatch(group) else _NUMBERED.fullmatch(group)
    if found:
        return f"{found[1]}*", int(found[2]), member, row
    return "", None, member, row
