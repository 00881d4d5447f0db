"""Asks the store why a task gets no samples: for `DataPlaneClient.why`, and for claims that wait or time out."""

from __future__ import annotations

import logging
import math
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from msgspec import structs

from dataplane_core.client.announcing import describe_client
from dataplane_core.client.connection import ADVICE_S, Connection
from dataplane_core.client.verdict import Facts, claims_of, got_nothing, judge
from dataplane_core.errors import ClaimTimeoutError, DataPlaneError, UnknownPartitionError, Verdict
from dataplane_core.spec import (
    Capability,
    ClaimRequest,
    ClientInfo,
    ListPartitionsRequest,
    PartitionDescription,
    Question,
)
from dataplane_core.spec.replies import Answer
from dataplane_core.spec.requests import InspectRequest, ListClientsRequest

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
    partitions: dict[str, PartitionDescription] = {}
    answers: dict[tuple[str, str], Answer | None] = {}

    def inspect(name: str) -> None:
        claims = claims_of(clients, name)
        questions = [
            Question(
                task_name=task_name,
                required_fields=list(claim.fields),
                tag_filter=None if claim.tag_filter is None else dict(claim.tag_filter),
                explain=got_nothing(claim),
            )
            for task_name, claim in claims.items()
        ]
        count_rows = any(question.explain for question in questions)  # all samples are looked at then, anyway
        request = InspectRequest(name, questions, count_rows=count_rows, deadline=deadline)
        description: PartitionDescription = connection.call(request)
        partitions[name] = description
        said = description.answers or [None] * len(claims)  # a backend may answer none
        answers.update({(name, task_name): answer for task_name, answer in zip(claims, said, strict=True)})

    if partition_id is not None:
        inspect(partition_id)
    if partition_id is None or partitions[partition_id].full:  # of which samples?
        for name in list_partitions(connection, deadline):
            if name != partition_id:
                with suppress(UnknownPartitionError):  # cleared meanwhile
                    inspect(name)
    return Facts(
        partitions=partitions,
        answers=answers,
        clients=clients,
        patience_s=connection.config.warn_after_s or PATIENCE_S,
        now=time.time(),
    )


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
