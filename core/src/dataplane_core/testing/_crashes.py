"""Processes that put and claim until they are killed at a random moment, and what is then found in the store.

Every victim puts in one thread and claims in others, so one kill -9 ends a producer in the middle of a put and a
consumer in the middle of a claim. A victim writes down what the store confirmed, as soon as it did, in a file that
outlives it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from tensordict import TensorDict

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import DataPlaneError, LeaseExpiredError
from dataplane_core.spec import Capability
from dataplane_core.testing._columns import as_objects, batch, items_of, jagged, rows_of
from dataplane_core.testing._profiles import is_long, new_seed
from dataplane_core.testing._timing import PROMPT_S, eventually

if TYPE_CHECKING:
    from dataplane_core.testing._store import Deployment
    from dataplane_core.testing._workers import Worker

__all__ = ["LEASED", "MOST_LOST", "PLAIN", "Aftermath", "aftermath"]

#: The tasks: one whose claims are leased, and one whose claims are not.
LEASED: Final = "leased"
PLAIN: Final = "plain"

#: How many are killed; the environment variable sets another number.
_KILLS: Final = int(os.environ.get("DATAPLANE_CONFORMANCE_KILLS") or (200 if is_long() else 20))
#: Victims that live at once, and those of them that work already: the others attach meanwhile.
_AT_ONCE: Final = 4
_AT_WORK: Final = 2
#: Samples of a put, and of a claim.
_ROWS: Final = 4
#: Samples without a lease that kills may lose: one claim each.
MOST_LOST: Final = _KILLS * _ROWS
#: Samples that are there from the start, so that claims find something at once.
_FIRST: Final = 8 * _KILLS
#: What a victim that is killed holds for so many seconds.
_LEASE_S: Final = 1.0
#: A victim is killed within two puts, and within so many seconds.
_LATEST_S: Final = 0.2
#: Seconds until a victim must have put and claimed, on a loaded machine.
_PATIENCE_S: Final = 120.0

_FIELDS: Final = ("x", "y", "o")


@dataclass(slots=True)
class Aftermath:
    """What victims were told before they were killed, and what others found afterwards.

    Attributes:
        seed: Chose the moments.
        confirmed: Ids of puts that returned.
        unconfirmed: Ids of the puts in which victims were killed.
        found: Id -> the fields that can be read of it, of all ids above.
        wrong: Ids whose cells or tags are not what was put.
        listed: Ids that the store lists (where it can).
        given: Ids that victims were given without a lease, repeats included.
        acking: Ids that victims began to ack.
        acked: Ids that victims acked, repeats included.
        taken: Task -> the ids that survivors were given (and acked, where leased) afterwards.
        consumed: Task -> whether it had consumed the partition in the end.
        unusable: What others met in the store after a kill; None: it served them.
        retried: What they met when they put again what victims could not; None: it is all there.
    """

    seed: int
    confirmed: list[str] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)
    found: dict[str, set[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    listed: list[str] | None = None
    given: list[str] = field(default_factory=list)
    acking: list[str] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)
    taken: dict[str, list[str]] = field(default_factory=dict)
    consumed: dict[str, bool] = field(default_factory=dict)
    unusable: str | None = None
    retried: str | None = None

    @property
    def names(self) -> list[str]:
        """Every id that was put or may have been."""
        return [*self.confirmed, *self.unconfirmed]


def aftermath(deployment: Deployment) -> Aftermath:
    """Kills clients of the store, one after the other, and looks at what they left."""
    seed = new_seed()
    found = Aftermath(seed)
    client = deployment.client
    partition = f"kit-crashes-{seed}"
    tasks = [
        task
        for task, need in ((PLAIN, Capability.CLAIMS), (LEASED, Capability.LEASES))
        if need in deployment.backend_class.capabilities
    ]
    client.register_partition(partition, list(_FIELDS), None, [PLAIN, LEASED])
    try:
        _put(client, partition, range(_FIRST))
        found.confirmed += _names(range(_FIRST))
        with tempfile.TemporaryDirectory(prefix="dataplane-crashes-") as folder:
            _kill_all(deployment, found, partition, tasks, Path(folder))
        if found.unusable is None:
            _look(deployment, found, partition)
            for task in tasks:
                _take_the_rest(client, found, partition, task)
            _retry(deployment, found, partition)
    finally:
        with suppress(DataPlaneError):  # the store may be broken; then that is what the tests say
            client.clear_samples(None, partition)
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def _names(numbers: Sequence[int]) -> list[str]:
    return [f"n{number}" for number in numbers]


def _fields(numbers: Sequence[int]) -> TensorDict:
    """Cells that follow from the sample's number: x of 0 to 3 elements, y of shape (3,), o an object."""
    return batch(
        len(numbers),
        x=jagged([torch.full((number % 4,), number) for number in numbers]),
        y=torch.tensor(numbers, dtype=torch.float64).unsqueeze(1).expand(-1, 3),
        o=as_objects(*[{"n": number} for number in numbers]),
    )


def _put(client: DataPlaneClient, partition: str, numbers: Sequence[int]) -> None:
    client.put_samples(_names(numbers), partition, _fields(numbers), [{"n": number} for number in numbers])


def _right(client: DataPlaneClient, partition: str, names: Sequence[str]) -> Iterator[bool]:
    """Of samples that are all there, whether each holds its own cells."""
    found = client.get_samples(names, partition, list(_FIELDS))
    rows, items = rows_of(found["x"], len(names)), items_of(found["o"])
    for name, row, others, item in zip(names, rows, found["y"].tolist(), items, strict=True):
        number = int(name[1:])
        yield row.tolist() == [number] * (number % 4) and others == [number] * 3 and item == {"n": number}


# --- victims ----------------------------------------------------------------------------------------------------------


def _live(client: DataPlaneClient, path: str, partition: str, first: int, tasks: Sequence[str]) -> None:
    """What a victim does until it is killed, or until the process that forked it is gone."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def report(what: str, *about: Any) -> None:
        os.write(file, (json.dumps([what, *about]) + "\n").encode())

    def guarded(role: Callable[..., None], *arguments: Any) -> None:
        try:
            role(client, partition, report, *arguments)
        except Exception as error:  # the survivor reads it
            report("failed", f"{type(error).__name__}: {error}")

    parent = os.getppid()
    for arguments in [(_produce, first), *((_consume, task) for task in tasks)]:
        threading.Thread(target=guarded, args=arguments, daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def _produce(client: DataPlaneClient, partition: str, report: Callable[..., None], first: int) -> None:
    for start in itertools.count(first, _ROWS):
        began = time.monotonic()
        _put(client, partition, range(start, start + _ROWS))
        report("put", start, time.monotonic() - began)


def _consume(client: DataPlaneClient, partition: str, report: Callable[..., None], task: str) -> None:
    lease_s = _LEASE_S if task == LEASED else None
    for turn in itertools.count():
        meta = client.claim_meta(partition, task, list(_FIELDS), _ROWS, blocking=False, lease_s=lease_s)
        if not meta.size:
            time.sleep(0.001)  # the producers are behind
            continue
        if lease_s is None:
            report("given", meta.sample_ids)
        elif turn % 3:
            report("acking", meta.sample_ids)
            with suppress(LeaseExpiredError):  # this process was slow; the samples are somebody else's
                client.ack(meta)
                report("acked", meta.sample_ids)
        else:
            report("holding", meta.sample_ids)


def _read(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the survivor -----------------------------------------------------------------------------------------------------


def _kill_all(deployment: Deployment, found: Aftermath, partition: str, tasks: Sequence[str], folder: Path) -> None:
    moments = random.Random(found.seed)
    waiting: list[tuple[int, Worker]] = []
    started = 0
    try:
        for victim in range(_KILLS):
            while len(waiting) < min(_AT_ONCE, _KILLS - victim):
                number = victim + len(waiting)
                worker = deployment.new_worker()
                waiting.append((number, worker))
            for number, worker in waiting[:_AT_WORK]:
                if number == started:
                    worker.start(_live, str(folder / str(number)), partition, _first(number), tasks)
                    started += 1
            number, worker = waiting[0]
            worker.wait_ready()
            _kill(worker, folder / str(number), tasks, moments)
            waiting.pop(0)
            worker.close()
            _record(found, folder / str(number), _first(number))
            try:
                _serve(deployment.client, partition, victim)
            except Exception as error:
                found.unusable = f"after kill {victim + 1} the store failed others: {type(error).__name__}: {error}"
                return
    finally:
        for _, worker in waiting:
            worker.kill()
            worker.close()


def _first(victim: int) -> int:
    """The number of a victim's first sample."""
    return (victim + 1) * 1_000_000


def _kill(worker: Worker, path: Path, tasks: Sequence[str], moments: random.Random) -> None:
    """Kills a victim that has put and claimed, somewhere within its next operations."""
    expected = {"put"} | ({"given"} if PLAIN in tasks else set()) | ({"acked"} if LEASED in tasks else set())

    def busy() -> list[list[Any]] | None:
        reports = _read(path)
        failures = [report[1] for report in reports if report[0] == "failed"]
        assert not failures, f"a client failed before it was killed: {failures[0]}"
        return reports if expected <= {report[0] for report in reports} else None

    reports = eventually(busy, _PATIENCE_S, "the first put and claim of a process")
    assert reports is not None
    put_s = [report[2] for report in reports if report[0] == "put"][-1]
    time.sleep(moments.uniform(0, min(2 * put_s, _LATEST_S)))
    worker.kill()


def _record(found: Aftermath, path: Path, first: int) -> None:
    reports = _read(path)
    starts = [report[1] for report in reports if report[0] == "put"]
    for start in starts:
        found.confirmed += _names(range(start, start + _ROWS))
    start = max(starts) + _ROWS if starts else first
    found.unconfirmed += _names(range(start, start + _ROWS))
    for record, what in ((found.given, "given"), (found.acking, "acking"), (found.acked, "acked")):
        record += [name for report in reports if report[0] == what for name in report[1]]


def _serve(client: DataPlaneClient, partition: str, number: int) -> None:
    """What anybody else does with the store, after a kill."""
    other = f"{partition}-{number}"
    client.register_partition(other, list(_FIELDS), None, [PLAIN])
    _put(client, other, range(_ROWS))
    assert all(_right(client, other, _names(range(_ROWS)))), "a read returned other cells than were put"
    client.clear_samples(None, other)


def _look(deployment: Deployment, found: Aftermath, partition: str) -> None:
    """Reads every sample, whole ones together and doubtful ones cell by cell."""
    client = deployment.client

    def has(name: str, fields: Sequence[str]) -> bool:
        try:
            client.get_samples([name], partition, list(fields))
        except KeyError:
            return False
        return True

    # listed before it is read: what a victim sent last may be committed only now
    tags: dict[str, Any] = {}
    if Capability.LISTING in deployment.backend_class.capabilities:
        meta = client.list_samples(partition)
        tags = dict(zip(meta.sample_ids, meta.tags or [], strict=True))
        found.listed = meta.sample_ids
    try:
        client.get_samples(found.confirmed, partition, list(_FIELDS))
        doubtful = found.unconfirmed
    except KeyError:
        doubtful = found.names
    found.found = {name: set(_FIELDS) for name in found.names}
    for name in doubtful:
        found.found[name] = {each for each in _FIELDS if has(name, [each])}
        if 0 < len(found.found[name]) < len(_FIELDS):
            found.found[name] = {each for each in _FIELDS if has(name, [each])}
    whole = [name for name in found.names if len(found.found[name]) == len(_FIELDS)]
    found.wrong = [name for name, right in zip(whole, _right(client, partition, whole), strict=True) if not right]
    found.wrong += [name for name, row in tags.items() if row != {"n": int(name[1:])}]


def _take_the_rest(client: DataPlaneClient, found: Aftermath, partition: str, task: str) -> None:
    """Claims, and acks where that is needed, until the task has consumed the partition or no more comes."""
    taken = found.taken[task] = []
    last = time.monotonic()
    while True:
        lease_s = 600.0 if task == LEASED else None
        meta = client.claim_meta(partition, task, list(_FIELDS), 64, blocking=False, lease_s=lease_s)
        if meta.size and lease_s is not None:
            client.ack(meta)
        taken += meta.sample_ids
        found.consumed[task] = client.check_consumption_status(partition, [task])
        if meta.size:
            last = time.monotonic()
        elif found.consumed[task] or lease_s is None or time.monotonic() > last + _LEASE_S + PROMPT_S:
            return
        else:
            time.sleep(0.02)  # until the leases of the victims have run out


def _retry(deployment: Deployment, found: Aftermath, partition: str) -> None:
    """Puts again, from another process's point of view, what victims were putting."""
    client = deployment.client
    again = found.unconfirmed
    if Capability.OVERWRITE not in deployment.backend_class.capabilities:
        again = [name for name in again if not found.found[name]]
    if not again:
        return
    try:
        for start in range(0, len(again), _ROWS):
            _put(client, partition, [int(name[1:]) for name in again[start : start + _ROWS]])
        bad = [name for name, right in zip(again, _right(client, partition, again), strict=True) if not right]
        assert not bad, f"after the retry {bad[0]} is not what was put"
    except Exception as error:
        found.retried = f"{type(error).__name__}: {error}"
