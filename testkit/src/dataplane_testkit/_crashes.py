"""Kills processes that put and claim, each at a random moment, and records what is then found in the store.

A process that will be killed is called a victim. Every victim puts in one thread and claims in others, so one kill -9
ends a producer in the middle of a put and a consumer in the middle of a claim. As soon as the store confirms a call,
the victim records this in a file, which is read after the kill. A survivor is a client that is not killed.
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
from dataplane_testkit._blobs import journal_state
from dataplane_testkit._columns import as_objects, batch, items_of, jagged, rows_of
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._profiles import by_profile, new_seed
from dataplane_testkit._timing import PROMPT_S, eventually

if TYPE_CHECKING:
    from dataplane_testkit._store import Deployment
    from dataplane_testkit._workers import Worker

#: The two tasks: claims of the first are leased, claims of the second are not.
LEASED: Final = "leased"
PLAIN: Final = "plain"

#: How many victims are killed. The environment variable sets another number.
_KILLS: Final = int(os.environ.get("DATAPLANE_CONFORMANCE_KILLS") or by_profile(5, 20, 200))
#: How many victims run at the same time, and how many of them put and claim. The others are still attaching.
_AT_ONCE: Final = 4
_AT_WORK: Final = 2
#: Samples in each put and in each claim.
_ROWS: Final = 4
#: The most samples without a lease that the kills may lose: one claim per kill.
MOST_LOST: Final = _KILLS * _ROWS
#: Samples that are put before the victims start, so that the first claims find some.
_FIRST: Final = 8 * _KILLS
#: The duration of the leases of the victims in seconds.
_LEASE_S: Final = 1.0
#: A victim is killed within the time of two puts, but at most so many seconds later.
_LATEST_S: Final = 0.2
#: Seconds within which a victim must have put and claimed once, on a loaded machine.
_PATIENCE_S: Final = 120.0

_FIELDS: Final = ("x", "y", "o")


@dataclass(slots=True)
class Aftermath:
    """What the store confirmed to the victims, and what survivors found afterwards.

    Attributes:
        seed: The random seed of the moments of the kills.
        confirmed: Ids of puts that returned.
        unconfirmed: Ids of the puts in which victims were killed.
        found: Id (confirmed or not) -> its fields that can be read.
        wrong: Ids whose cells or tags differ from what was put.
        listed: Ids that the store lists. None if it does not declare listing.
        given: Ids that victims were given without a lease. An id may occur several times.
        acking: Ids for which victims called ack.
        acked: Ids for which the ack of a victim returned. An id may occur several times.
        taken: Task -> the ids that a survivor was given afterwards, and acked if they were leased.
        consumed: Task -> whether it has consumed the partition at the end.
        unusable: The error that a survivor got after a kill. None if there was none.
        retried: The error that a survivor got when it repeated the unconfirmed puts. None if there was none.
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
        """Every id that was put or may have been put."""
        return [*self.confirmed, *self.unconfirmed]


def aftermath(deployment: Deployment) -> Aftermath:
    """Kills victims one after the other, and records what they left in the store."""
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
        with suppress(DataPlaneError):  # the store may be broken; the tests report that
            client.clear_samples(None, partition)
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def _names(numbers: Sequence[int]) -> list[str]:
    return [f"n{number}" for number in numbers]


def _fields(numbers: Sequence[int]) -> TensorDict:
    """Cells that the sample's number determines: x has 0 to 3 elements, y has shape (3,), o is an object."""
    return batch(
        len(numbers),
        x=jagged([torch.full((number % 4,), number) for number in numbers]),
        y=torch.tensor(numbers, dtype=torch.float64).unsqueeze(1).expand(-1, 3),
        o=as_objects(*[{"n": number} for number in numbers]),
    )


def _put(client: DataPlaneClient, partition: str, numbers: Sequence[int]) -> None:
    client.put_samples(_names(numbers), partition, _fields(numbers), [{"n": number} for number in numbers])


def _right(client: DataPlaneClient, partition: str, names: Sequence[str]) -> Iterator[bool]:
    """Yields for each sample whether its cells are right. All samples must exist."""
    found = client.get_samples(names, partition, list(_FIELDS))
    rows, items = rows_of(found["x"], len(names)), items_of(found["o"])
    for name, row, others, item in zip(names, rows, found["y"].tolist(), items, strict=True):
        number = int(name[1:])
        yield row.tolist() == [number] * (number % 4) and others == [number] * 3 and item == {"n": number}


# --- victims ----------------------------------------------------------------------------------------------------------


def _live(client: DataPlaneClient, path: str, partition: str, first: int, tasks: Sequence[str]) -> None:
    """What a victim does until it is killed, or until its parent process is gone."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def report(what: str, *about: Any) -> None:
        os.write(file, (json.dumps([what, *about]) + "\n").encode())

    def guarded(role: Callable[..., None], *arguments: Any) -> None:
        try:
            role(client, partition, report, *arguments)
        except Exception as error:  # the parent reads it from the file
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
            time.sleep(0.001)  # no sample is ready yet
            continue
        if lease_s is None:
            report("given", meta.sample_ids)
        elif turn % 3:
            report("acking", meta.sample_ids)
            with suppress(LeaseExpiredError):  # this process was slow, and another client holds the samples now
                client.ack(meta)
                report("acked", meta.sample_ids)
        else:
            report("holding", meta.sample_ids)


def _read(path: Path) -> list[list[Any]]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a kill may have cut the last line
    return [json.loads(line) for line in lines]


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
            try:
                _kill(worker, folder / str(number), tasks, moments)
            except AssertionError as error:
                raise AssertionError(f"{error}{journal_state(backend_of(deployment.client))}") from None
            waiting.pop(0)
            worker.close()
            _record(found, folder / str(number), _first(number))
            try:
                _serve(deployment.client, partition, victim)
            except Exception as error:
                state = journal_state(backend_of(deployment.client))
                found.unusable = f"after kill {victim + 1}, another client got {type(error).__name__}: {error}{state}"
                return
    finally:
        for _, worker in waiting:
            worker.kill()
            worker.close()


def _first(victim: int) -> int:
    """The number of a victim's first sample."""
    return (victim + 1) * 1_000_000


def _kill(worker: Worker, path: Path, tasks: Sequence[str], moments: random.Random) -> None:
    """Waits until a victim has put and claimed, then kills it at a random moment of its next operations."""
    expected = {"put"} | ({"given"} if PLAIN in tasks else set()) | ({"acked"} if LEASED in tasks else set())

    def busy() -> list[list[Any]] | None:
        reports = _read(path)
        failures = [report[1] for report in reports if report[0] == "failed"]
        assert not failures, f"a client got an error before it was killed: {failures[0]}"
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
    """After a kill, uses the store as another client would: registers, puts, reads and clears a partition."""
    other = f"{partition}-{number}"
    client.register_partition(other, list(_FIELDS), None, [PLAIN])
    _put(client, other, range(_ROWS))
    assert all(_right(client, other, _names(range(_ROWS)))), "a read returned cells that differ from what was put"
    client.clear_samples(None, other)


def _look(deployment: Deployment, found: Aftermath, partition: str) -> None:
    """Records which samples and cells can be read. Reads confirmed samples together, uncertain ones cell by cell."""
    client = deployment.client

    def has(name: str, fields: Sequence[str]) -> bool:
        try:
            client.get_samples([name], partition, list(fields))
        except KeyError:
            return False
        return True

    # list before the reads: the last put of a victim may be committed only now
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
    """Claims (and acks if leased) until the task has consumed the partition or no claim gives more samples."""
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
            time.sleep(0.02)  # until the leases of the victims have expired


def _retry(deployment: Deployment, found: Aftermath, partition: str) -> None:
    """Repeats the unconfirmed puts of the victims as another client."""
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
        assert not bad, f"after the repeated put, {bad[0]} differs from what was put"
    except Exception as error:
        found.retried = f"{type(error).__name__}: {error}"
