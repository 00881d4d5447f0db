"""What each process does: takes random steps, the same again for the same seed, and writes down every call."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability
from dataplane_testkit._columns import as_objects, bits, items_of, rows_of
from dataplane_testkit._profiles import by_profile, is_long, new_seed
from dataplane_testkit.chaos.history import Recorder, Seen

PARTITIONS: Final = ("p0", "p1")
#: The fields that are put together first, and the one that is put later.
BASE: Final = ("x", "y", "o")
LATER: Final = "z"
#: Task -> the fields that its claims require, and whether they have leases.
TASKS: Final[Mapping[str, tuple[tuple[str, ...], bool]]] = {
    "train": (BASE, True),
    "once": (("x",), False),
    "score": ((LATER,), True),
}
#: Step -> the capability that it needs, and its weight for a producer, a consumer and one that does a bit of all.
STEPS: Final[Mapping[str, tuple[Capability | None, tuple[int, int, int]]]] = {
    "put": (None, (40, 4, 12)),
    "put_later": (Capability.OVERWRITE, (14, 4, 4)),
    "overwrite": (Capability.OVERWRITE, (8, 2, 4)),
    "put_again": (Capability.OVERWRITE, (4, 1, 2)),
    "get": (None, (10, 10, 22)),
    "get_one_field": (None, (4, 4, 6)),
    "claim": (Capability.CLAIMS, (6, 40, 16)),
    "wait": (Capability.CLAIMS, (0, 4, 2)),
    "ack": (Capability.LEASES, (4, 18, 6)),
    "nack": (Capability.LEASES, (1, 4, 3)),
    "renew": (Capability.LEASES, (1, 5, 2)),
    "clear": (None, (8, 8, 6)),
    "clear_all": (None, (0, 0, 1)),
    "register": (None, (0, 0, 1)),
    "keep": (None, (1, 1, 2)),
    "list": (Capability.LISTING, (1, 2, 8)),
    "consumed": (Capability.CLAIMS, (0, 3, 4)),
    "save": (Capability.CURSORS, (0, 0, 1)),
}
#: How many samples a process remembers per partition, to read, replace and clear them, and how many claims it holds.
_KNOWN: Final = 60
_HELD: Final = 12
#: The samples that all processes write, read and clear, and the share of these calls that go to them.
_HOT: Final = ("hot0", "hot1", "hot2")
_HOT_SHARE: Final = 0.3
#: The deadline of a blocking claim, in leases.
_WAIT_LEASES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run goes.

    Attributes:
        seed: The random seed of all schedules.
        schedule_s: How long the workers take steps, in seconds.
        workers: How many processes, or threads of a backend of scope process.
        pause_s: The mean pause between two steps of a worker, in seconds.
        every_s: The mean time between two kills or stops, in seconds.
        lease_s: The lease of a claim, in seconds.
        op_timeout_s: The deadline of a call, in seconds.
        allowance_s: Seconds that a call may take beyond its deadline on a busy machine.
        capacity_bytes: What the store may hold, if the backend can limit it.
        kills: How many processes are killed, each after some calls, in place of kills and stops by the clock. With the
            last of them the run is over. None: the clock decides.
        num_steps: How many steps each worker takes. The workers are then threads. None: the clock decides.
        faults: What is done to the processes and the store: ``kill``, ``stop``, and names of the store's disturbances.
            None: all of it.
        steps: What the workers do, such as ``put`` and ``claim``. None: all that the store can do.
    """

    seed: int
    schedule_s: float
    workers: int = 3
    pause_s: float = 0.05
    every_s: float = 2.0
    lease_s: float = 1.0
    op_timeout_s: float = 30.0
    allowance_s: float = 15.0
    capacity_bytes: int = 640 * 1024
    kills: int | None = None
    num_steps: int | None = None
    faults: frozenset[str] | None = None
    steps: frozenset[str] | None = None

    @classmethod
    def brief(cls) -> Settings:
        """For a backend's own tests: 10 s with few calls and a fixed seed. 30 s and a new seed under the profile long;
        4 s, in which faults follow each other faster, under the profile brief.

        ``DATAPLANE_CONFORMANCE_SEED`` sets the seed.
        """
        if is_long():
            return cls(seed=new_seed(), schedule_s=30.0)
        schedule_s = by_profile(4.0, 10.0, 30.0)
        seed = int(os.environ.get("DATAPLANE_CONFORMANCE_SEED") or 1)
        return cls(seed=seed, schedule_s=schedule_s, pause_s=0.15, every_s=schedule_s / 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all processes of a run have in common."""

    settings: Settings
    #: Where the histories and the saves go.
    folder: Path
    #: `time.monotonic` at the start of the run.
    epoch_s: float
    #: The steps that the workers take.
    steps: frozenset[str] = frozenset(STEPS)
    #: Whether the claims of leased tasks have leases, and whether puts have a tag with their version.
    leases: bool = True
    tags: bool = True

    def lease_of(self, task: str) -> float | None:
        """The lease of a task's claims, in seconds. None: they have none."""
        return self.settings.lease_s if self.leases and TASKS[task][1] else None

    def file_of(self, process: str) -> Path:
        return self.folder / f"{process}.jsonl"


def cell(field: str, sample: str, version: int, length: int) -> Any:
    """What a put of this version writes: every bit follows from the sample and the version, which it holds.

    ``x`` is int64 of shape (length + 1,), ``y`` float64 of shape (3,), ``z`` int64 of shape (2,), ``o`` an object.
    """
    mark = sum(sample.encode()) % 251
    if field == "x":
        rest = np.random.default_rng(version).integers(-(2**62), 2**62, size=length)
        return torch.from_numpy(np.concatenate([[version * 256 + mark], rest]).astype(np.int64))
    if field == "y":
        return torch.tensor([float(version), float(mark), float(length)], dtype=torch.float64)
    return torch.tensor([version, mark]) if field == LATER else {"v": version, "sample": sample}


def columns_of(names: Sequence[str], fields: Sequence[str], version: int, lengths: Sequence[int]) -> dict[str, Any]:
    """What a put of this version writes of some samples."""
    columns: dict[str, Any] = {}
    for field in fields:
        cells = [cell(field, name, version, length) for name, length in zip(names, lengths, strict=True)]
        columns[field] = as_objects(*cells) if field == "o" else cells if field == "x" else torch.stack(cells)
    return columns


def version_of(field: str, sample: str, value: Any) -> int | str:
    """The version that a cell holds, or what is wrong with the cell."""
    try:
        first = int(value["v"] if field == "o" else value[0].item())
        version = first >> 8 if field == "x" else first
        length = int(value[2].item()) if field == "y" else len(value) - 1
        wanted = cell(field, sample, version, length)
    except Exception as error:
        return f"the cell holds no version: {type(error).__name__}: {error}: {str(value)[:80]}"
    same = value == wanted if field == "o" else value.dtype == wanted.dtype and value.shape == wanted.shape
    if same and (field == "o" or bits(value) == bits(wanted)):
        return version
    return f"expected version {version} as {str(wanted)[:80]}, read {str(value)[:80]}"


def seen_of(rows: Any, names: Sequence[str], fields: Sequence[str]) -> Seen:
    seen: Seen = {name: {} for name in names}
    for field in fields:
        column = rows[field]
        if not isinstance(column, list):
            column = items_of(column) if field == "o" else rows_of(column, len(names))
        for name, value in zip(names, column, strict=True):
            seen[name][field] = version_of(field, name, value)
    return seen


def shown_by(meta: KVBatchMeta) -> dict[str, Any]:
    """What the meta of a claim or a list shows: the samples, their tokens, and the versions in their tags."""
    tags = meta.tags or [{} for _ in meta.sample_ids]
    versions = [{f"#{name}": value for name, value in row.items() if isinstance(value, int)} for row in tags]
    seen = dict(zip(meta.sample_ids, versions, strict=True))
    return {"samples": meta.sample_ids, "tokens": meta.lease_tokens or [], "seen": seen}


class Hands:
    """Makes the calls of one process and writes them down. A call that failed returns something false.

    Args:
        client: A `DataPlaneClient`, or what has its methods.
        plan: What all processes have in common.
        process: The name of this one.
        first_version: The version of the first put; each further one has the next.
    """

    def __init__(self, client: Any, plan: Plan, process: str, first_version: int) -> None:
        self._client, self._plan, self._process, self._version = client, plan, process, first_version
        self._recorder = Recorder(plan.file_of(process), plan.epoch_s)
        self._numbers = 0
        self._known = {name: deque[str](maxlen=_KNOWN) for name in PARTITIONS}
        self._held: list[KVBatchMeta] = []

    def close(self) -> None:
        self._recorder.close()

    def take(self, kind: str, rng: random.Random) -> None:
        partition, task = rng.choices(PARTITIONS, (3, 1))[0], rng.choice(("train", *TASKS))
        lengths = rng.choices((1, 3, 200, 1000), k=rng.choice((1, 1, 2, 3, 4, 6)))
        count, chance, samples = len(lengths), rng.random(), list(dict.fromkeys(self._known[partition]))
        if rng.random() < _HOT_SHARE:
            samples = list(_HOT)
        some = rng.sample(samples, min(count, len(samples)))
        match kind:
            case "put":
                names = [f"{self._process}-{self._numbers + index}" for index in range(count)]
                self._numbers += count
                if self.write(partition, names, BASE, lengths):
                    self._known[partition].extend(names)
            case "overwrite" | "put_again":  # weighed apart: what was put before may have been cleared
                self.write(partition, some, BASE, lengths)
            case "put_later":
                self.write(partition, some, (LATER,), lengths)
            case "get":
                self.read(partition, some, BASE)
            case "get_one_field":
                self.read(partition, some, (rng.choice((*BASE, LATER)),))
            case "claim":
                meta = self.claim(partition, task, count)
                if meta is not None and chance < 0.4:
                    self.read(partition, meta.sample_ids, BASE)
            case "wait":
                self.claim(partition, task, count, blocking=True)
            case "ack" | "nack" | "renew" if self._held:
                meta = self._held.pop(rng.randrange(len(self._held)))
                if meta.size > 1 and count == 1:  # a part of it
                    self._held.append(meta.slice(1, meta.size))
                    meta = meta.slice(0, 1)
                if self.settle(kind, meta, **({"lease_s": self._plan.settings.lease_s} if kind == "renew" else {})):
                    self._held += [meta] if kind == "renew" else []
                if kind == "ack" and chance < 0.25:
                    self.settle("ack", meta)  # as if the first reply had been lost
                if kind == "ack" and chance > 0.5:
                    self.clear(meta.partition_id, meta.sample_ids)
            case "clear":
                self.clear(partition, some)
            case "clear_all":
                self._call("clear", partition, partial(self._client.clear_samples, None, partition), whole=True)
                self.register(partition, "keep")
            case "register" | "keep":
                self.register(partition, kind)
            case "list":
                self._known[partition].extend(self.listed(partition)[-count * 6 :])
            case "consumed":
                self.consumed(partition, task)
            case "save":
                self._numbers += 1
                folder = self._plan.folder / f"save-{self._process}-{self._numbers}-{partition}"
                save = partial(self._client.save, folder, {"folder": folder.name}, [partition])
                self._call("save", partition, save, version=self._numbers)

    def _call(self, operation: str, partition: str, act: Callable[[], Any], *shows: Any, **about: Any) -> Any:
        usual = {"operation": operation, "partition": partition, "timeout_s": self._plan.settings.op_timeout_s}
        return self._recorder.call(act, *shows, **{**usual, **about})

    def write(self, partition: str, names: Sequence[str], fields: Sequence[str], lengths: Sequence[int] = ()) -> bool:
        """Puts fields of samples with the next version, which a tag holds too."""
        if not names:
            return False
        self._version += 1
        tag, sizes = "z" if tuple(fields) == (LATER,) else "v", list(lengths[: len(names)]) or [3] * len(names)
        columns = columns_of(names, fields, self._version, sizes)
        put = partial(self._client.put_samples, names, partition, columns, [{tag: self._version} for _ in names])
        about = {
            "samples": list(names),
            "fields": [*fields, *([f"#{tag}"] if self._plan.tags else [])],
            "version": self._version,
            "size_bytes": [16 if tag == "z" else 8 * (size + 1) + 24 for size in sizes],
        }
        return self._call("put", partition, put, **about) is not None

    def read(self, partition: str, names: Sequence[str], fields: Sequence[str]) -> bool:
        if not names:
            return False
        get = partial(self._client.get_samples, names, partition, list(fields))
        about = {"samples": list(names), "fields": list(fields)}
        rows = self._call("get", partition, get, lambda rows: {"seen": seen_of(rows, names, fields)}, **about)
        if rows is None and fields == BASE:  # some are gone
            self._known[partition] = deque((name for name in self._known[partition] if name not in names), _KNOWN)
        return rows is not None

    def listed(self, partition: str) -> list[str]:
        """Lists a partition. Returns the samples; none if the call failed."""
        meta = self._call("list", partition, partial(self._client.list_samples, partition), shown_by)
        return [] if meta is None else list(meta.sample_ids)

    def consumed(self, partition: str, task: str) -> bool:
        ask = partial(self._client.check_consumption_status, partition, [task])
        return bool(self._call("consumed", partition, ask, lambda flag: {"flag": flag}, task=task))

    def claim(self, partition: str, task: str, limit: int, *, blocking: bool = False) -> KVBatchMeta | None:
        """Claims, and keeps the meta. Returns None if the claim failed."""
        fields, lease_s, wait_s = (
            list(TASKS[task][0]),
            self._plan.lease_of(task),
            _WAIT_LEASES * self._plan.settings.lease_s,
        )
        options = {"blocking": blocking, "lease_s": lease_s}
        claim = partial(self._client.claim_meta, partition, task, fields, limit, timeout_s=wait_s, **options)
        about = {"task": task, "fields": fields, "limit": limit, **options}
        timeout_s = wait_s if blocking else self._plan.settings.op_timeout_s
        meta: KVBatchMeta | None = self._call("claim", partition, claim, shown_by, **about, timeout_s=timeout_s)
        if meta is not None:
            self._known[partition].extend(meta.sample_ids)
            self._held = [*self._held, *([meta] if meta.size and lease_s is not None else [])][-_HELD:]
        return meta

    def settle(self, operation: str, meta: KVBatchMeta, **more: Any) -> bool:
        about = {"samples": meta.sample_ids, "tokens": meta.lease_tokens or [], "task": meta.task_name, **more}
        act = partial(getattr(self._client, operation), meta, **more)
        return self._call(operation, meta.partition_id, act, **about) is not None

    def clear(self, partition: str, names: Sequence[str]) -> bool:
        clear = partial(self._client.clear_samples, list(names), partition)
        return bool(names) and self._call("clear", partition, clear, samples=list(names)) is not None

    def register(self, partition: str, operation: str) -> None:
        how = "keep" if operation == "keep" else "replace"
        register = self._client.register_partition
        self._call(operation, partition, partial(register, partition, [*BASE, LATER], None, list(TASKS), if_exists=how))


def live(client: Any, plan: Plan, worker: int, life: int, until_s: float) -> None:
    """Takes random steps, as a worker in one of its lives, until the run is over by `time.monotonic`.

    Each step has random numbers of its own, so that it does not depend on what the store replied to those before.
    """
    hands = Hands(client, plan, f"w{worker}.{life}", (worker * 1000 + life) * 100_000)
    settings, kinds, parent = plan.settings, sorted(plan.steps), os.getppid()
    weights = [STEPS[kind][1][worker % 3] for kind in kinds]
    for number in itertools.count() if settings.num_steps is None else range(settings.num_steps):
        rng = random.Random(f"{settings.seed} {worker} {life} {number}")
        pause_s, kind = rng.expovariate(1 / settings.pause_s), rng.choices(kinds, weights)[0]
        time.sleep(max(0.0, min(pause_s, 5 * settings.pause_s, until_s - time.monotonic())))
        if time.monotonic() >= until_s or os.getppid() != parent:
            break
        hands.take(kind, rng)
    hands.close()
