"""The first reading of a recording: who marks steps, who claims, and where the run was resumed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dataplane_observe import Recording, Writer
from dataplane_tools._prompts import Resume

#: A tag that each row of `dataplane_integrations.weights` has.
_WEIGHTS: Final = "weight_anchor"


@dataclass(slots=True)
class Client:
    """A client of the run, which has done something.

    Attributes:
        writer: What it said of itself.
        first: When its first operation ended, and ``last``: its last one.
        until: Segment and line of its last record: a run that goes on writes more.
        counts: Operation -> how many samples.
        is_closed: Whether it was closed.
    """

    writer: Writer
    first: float
    last: float = 0.0
    until: tuple[str, int] = ("", 0)
    counts: Counter[str] = field(default_factory=Counter)
    is_closed: bool = False


@dataclass(slots=True)
class Survey:
    """What is to be known of a run before its samples are followed.

    Attributes:
        clients: Id -> client, in the order of their first records.
        marks: (time, step, client) of each mark that counts.
        undone: For each of them, whether the run went on from an earlier step later.
        others: Marks that do not count, since two clients marked steps at the same time.
        claimed: Partitions of which a task was given samples.
        weights: Partitions of weights: their rows are no samples.
        tasks: The tasks that train: those that the client that marks steps claims for; else its role; else all.
        consumers: Clients that were given samples of these tasks.
        readers: Clients whose reads of other partitions train, of those that read in most steps: the one that marks
            steps; else its role; else all.
        failures: (operation, error) -> how often.
        resumes: Where a role began again.
        blind_until: Up to then records are lost or were deleted.
        end: When the last operation ended.
        num_records: How many there are.
    """

    clients: dict[str, Client] = field(default_factory=dict)
    marks: list[tuple[float, int, str]] = field(default_factory=list)
    undone: list[bool] = field(default_factory=list)
    others: int = 0
    claimed: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    tasks: set[str] = field(default_factory=set)
    consumers: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    resumes: list[Resume] = field(default_factory=list)
    blind_until: float = -math.inf
    end: float = 0.0
    num_records: int = 0


def survey(recording: Recording, task: str | None = None) -> Survey:
    """Reads a recording for the first time.

    Args:
        recording: The recording.
        task: The task that trains. None: find it out.
    """
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
