"""Asks the store why a task gets no samples: for `DataPlaneClient.why`, and for claims that wait or time out."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from msgspec import structs

from dataplane_core.client.announcing import describe_client
from dataplane_core.client.connection import ADVICE_S, Connection
from dataplane_core.client.verdict import Facts, got_nothing, judge, question_of, room_is_wanted
from dataplane_core.config import size_bytes
from dataplane_core.errors import ClaimTimeoutError, DataPlaneError, UnknownPartitionError, Verdict
from dataplane_core.spec import (
    Capability,
    ClaimRequest,
    ClientInfo,
    ListPartitionsRequest,
    ListRequest,
    PartitionDescription,
    Question,
    SampleList,
    TagValue,
)
from dataplane_core.spec.replies import Answer
from dataplane_core.spec.requests import ConsumptionRequest, InspectRequest, ListClientsRequest

#: How long a task may wait before what might be slow counts as a fault, if the config does not say it.
PATIENCE_S: Final = 60.0
#: A client that has not announced itself for so many periods, and so many seconds, is late.
_LATE: Final = 1.5
_LATE_S: Final = 0.5
#: A claim that waits, or times out, asks why if it waited for so many seconds per client of the store, since all may do
#: so together. One that times out must have waited for so many seconds at least.
_EXPLAINED_AFTER_S: Final = 1.0
_PER_CLIENT_S: Final = 0.1

_log = logging.getLogger(__name__)


def judged(
    connection: Connection, partition_id: str | None, task_name: str | None, deadline: float = math.inf
) -> list[Verdict]:
    """The verdicts of tasks: of one partition, or of all; of one task, or of all."""
    facts = _facts(connection, partition_id, deadline)
    names = sorted(facts.partitions) if partition_id is None else [partition_id]
    tasks = [(name, task) for name in names for task in facts.partitions[name].tasks if task_name in (None, task)]
    return judge(facts, tasks)


def clients_of(connection: Connection, *, ended: bool, deadline: float = math.inf) -> list[ClientInfo]:
    """The clients of the store, sorted. ``ended``: also those that are gone, with what this host knows of them."""
    request = ListClientsRequest(ended=ended, deadline=deadline)
    clients: list[ClientInfo] = connection.call(request)
    if ended:
        clients = [structs.replace(client, state=_state_of(client)) for client in clients]
    return sorted(clients, key=lambda client: (client.host, client.pid, client.client_id))


def list_partitions(connection: Connection, deadline: float = math.inf) -> list[str]:
    """The names of all registered partitions, sorted."""
    request = ListPartitionsRequest(deadline=deadline)
    return sorted(connection.call(request))


def _facts(connection: Connection, partition_id: str | None, deadline: float) -> Facts:
    """What the store knows of a partition, or of all, and of its clients."""
    own = describe_client(connection, connection.announcer)  # what it announced last may be seconds old
    clients = [own]
    if Capability.CLIENTS in connection.capabilities:
        others = clients_of(connection, ended=True, deadline=deadline)
        clients += [client for client in others if client.client_id != own.client_id]
    capacity = connection.config.options.get("capacity_bytes")
    wants_all = partition_id is None or (capacity is not None and room_is_wanted(clients))
    names = list_partitions(connection, deadline) if wants_all else [partition_id or ""]
    partitions: dict[str, PartitionDescription] = {}
    answers: dict[tuple[str, str], Answer | None] = {}
    finished: set[tuple[str, str]] = set()
    for name in names:
        asked = {task: question_of(clients, name, task) for task in _tasks_of(clients, name)}
        waiting = [claim for claim in asked.values() if claim is not None]
        questions = [
            Question(
                task_name=claim.task_name,
                required_fields=list(claim.fields),
                tag_filter=None if claim.tag_filter is None else dict(claim.tag_filter),
                explain=got_nothing(claim),
            )
            for claim in waiting
        ]
        try:
            count_rows = any(question.explain for question in questions)  # all samples are looked at then, anyway
            request = InspectRequest(name, questions, count_rows=count_rows, deadline=deadline)
            partitions[name] = connection.call(request)
        except UnknownPartitionError:
            if name == partition_id:
                raise
            continue  # cleared meanwhile
        said = partitions[name].answers or [None] * len(waiting)  # a backend may answer none
        answers |= {(name, claim.task_name): answer for claim, answer in zip(waiting, said, strict=True)}
        has_ended = partitions[name].is_complete and partitions[name].info.grpo_group_size is not None
        for task in partitions[name].tasks if has_ended else ():  # those that stay short may be left
            consumption = ConsumptionRequest(name, [task], deadline=deadline)
            if connection.call(consumption):
                finished.add((name, task))
    facts = Facts(
        partitions=partitions,
        answers=answers,
        finished=finished,
        clients=clients,
        held_bytes=sum(partition.held_bytes for partition in partitions.values()) if wants_all else 0,
        capacity_bytes=None if capacity is None else int(size_bytes(capacity)) * connection.config.num_ledgers,
        patience_s=connection.config.warn_after_s or PATIENCE_S,
        now=time.time(),
    )
    return _with_names(connection, facts, deadline)


def _with_names(connection: Connection, facts: Facts, deadline: float) -> Facts:
    """Adds what is known of the samples and groups that shortfalls name."""
    tags: dict[tuple[str, str], Mapping[str, TagValue]] = {}
    members: dict[tuple[str, str], list[str]] = {}
    for (name, _), answer in facts.answers.items():
        shortfall = None if answer is None else answer.shortfall
        if shortfall is None or not (shortfall.not_matching or shortfall.incomplete_groups):
            continue
        size = facts.partitions[name].info.grpo_group_size or 1
        groups = {group: [f"{group}_g{place}" for place in range(size)] for group in shortfall.incomplete_groups}
        ids = [*shortfall.not_matching, *(member for group in groups.values() for member in group)]
        with suppress(UnknownPartitionError):  # cleared meanwhile
            request = ListRequest(name, None, list(dict.fromkeys(ids)), deadline=deadline)
            listed: SampleList = connection.call(request)
            there = dict(zip(listed.sample_ids, listed.tags, strict=True))
            tags |= {(name, sample): there[sample] for sample in shortfall.not_matching if sample in there}
            members |= {(name, group): [sample for sample in ids if sample in there] for group, ids in groups.items()}
    return replace(facts, tags=tags, members=members)


def warn(connection: Connection, request: ClaimRequest, waited_s: float, until: float) -> Verdict | None:
    """Says why a claim waits, in the log and to middleware. Never raises what goes wrong with that."""
    if waited_s < _worth_s(connection):
        return None
    verdict = _verdict_of(connection, request, until)
    if verdict is None or verdict.state not in ("waits", "starved") or connection.config.warn_after_s is None:
        return verdict
    _log.log(logging.WARNING if verdict.state == "starved" else logging.INFO, "%s", verdict)
    for plugin in connection.middleware:
        if hasattr(plugin, "note_verdict"):
            try:
                plugin.note_verdict(verdict)
            except Exception:  # of a listener, say; the claim goes on
                _log.exception("%s was not told why a claim waits.", type(plugin).__name__)
    return verdict


def explain(
    connection: Connection, error: ClaimTimeoutError, request: ClaimRequest, waited_s: float, verdict: Verdict | None
) -> None:
    """Says why a claim timed out, if no verdict ended it. Not if that might cost the store much."""
    error.verdict = verdict
    if error.verdict is None and waited_s >= max(_EXPLAINED_AFTER_S, _worth_s(connection)):
        error.verdict = _verdict_of(connection, request)
    if error.verdict is not None and error.verdict.state in ("waits", "starved"):
        error.message = f"{error.message} {error.verdict.text}"


def _worth_s(connection: Connection) -> float:
    """Seconds that a claim must have waited to be worth a look at the store."""
    return 0.0 if connection.announcer is None else connection.announcer.num_clients * _PER_CLIENT_S


def _verdict_of(connection: Connection, request: ClaimRequest, until: float = math.inf) -> Verdict | None:
    """Why a claim of this client, which is under way, waits, if that is soon found."""
    if not {Capability.LISTING, Capability.CLAIMS} <= connection.capabilities:
        return None
    key = request.partition_id, request.task_name
    try:
        return next(iter(judged(connection, *key, min(until, time.monotonic() + ADVICE_S))), None)
    except DataPlaneError:  # the claim itself says what is wrong
        return None
    except Exception:  # of middleware, say; it must not take the place of the claim's own error
        _log.exception("It was not found out why claim_meta('%s', '%s') waits.", *key)
        return None


def _tasks_of(clients: Iterable[ClientInfo], partition_id: str) -> list[str]:
    """The tasks of a partition for which clients claim."""
    works = (work for client in clients for work in client.work)
    return list(dict.fromkeys(work.task_name for work in works if work.task_name and work.partition_id == partition_id))


def _state_of(client: ClientInfo) -> Literal["open", "closed", "silent", "stopped", "gone"]:
    """The state of a client, with what this host knows of its process if it should have announced itself by now."""
    # a process that still announces itself is there, even if this host lists it under another number
    is_late = client.heard_s > _LATE * client.period_s + _LATE_S
    if client.host != socket.gethostname() or client.state == "closed" or not (client.period_s and is_late):
        return client.state
    try:
        state = Path(f"/proc/{client.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except (OSError, IndexError):
        return client.state
    return "stopped" if state in "Tt" else "gone" if state in "ZX" else client.state
