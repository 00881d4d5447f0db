"""What each process does: takes random steps, the same again for the same seed, and writes down every call."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dataplane_core.errors import InvalidRequestError, OperationTimeoutError, StalePartitionError
from dataplane_core.ledger import group_of, rollout_of
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import GROUP_ROLLOUTS_TAG, ROLLOUT_ROWS_TAG
from dataplane_core.spec import Capability
from dataplane_testkit._columns import as_objects, bits, items_of, rows_of
from dataplane_testkit._profiles import by_profile, is_long, new_seed
from dataplane_testkit.chaos.history import UNKNOWN, Recorder, Seen, read_calls

PARTITIONS: Final = ("p0", "p1")
#: The partition of rollouts of several rows. In the history, a group of rollouts is one sample: see `Hands.roll`.
ROLLOUTS: Final = "r0"
#: How many rollouts a group has, and the most rows of a rollout.
_GROUP_SIZE: Final = 2
_MOST_ROWS: Final = 3
#: The fields that are put together first, and the one that is put later.
BASE: Final = ("x", "y", "o")
LATER: Final = "z"
#: Besides those of `BASE`, where the store keeps large cells by content: a picture, one of few, which many puts bring.
#: It follows from the version, so it is read together with ``x``. From which size on cells are large is set by the run.
MEDIA: Final = "m"
_PICTURES: Final = 5
_PICTURE_BYTES: Final = 20_000
SHARE_ABOVE: Final[Mapping[str, int]] = {MEDIA: _PICTURE_BYTES // 2}
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
    "roll": (Capability.GROUPS, (4, 1, 1)),  # of several calls
    "claim_groups": (Capability.GROUPS, (1, 8, 3)),
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
    capacity_bytes: int = 1536 * 1024
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
    #: The fields that are put together first.
    base: tuple[str, ...] = BASE

    @property
    def partitions(self) -> tuple[str, ...]:
        return (*PARTITIONS, ROLLOUTS) if "roll" in self.steps else PARTITIONS

    def lease_of(self, task: str) -> float | None:
        """The lease of a task's claims, in seconds. None: they have none."""
        return self.settings.lease_s if self.leases and TASKS[task][1] else None

    def file_of(self, process: str) -> Path:
        return self.folder / f"{process}.jsonl"


def cell(field: str, sample: str, version: int, length: int) -> Any:
    """What a put of this version writes: every bit follows from the sample and the version, which it holds.

    ``x`` is int64 of shape (length + 1,), ``y`` float64 of shape (3,), ``z`` int64 of shape (2,), ``o`` an object.
    ``m`` is uint8, and follows from the version alone.
    """
    if field == MEDIA:
        return _picture(version % _PICTURES)
    mark = sum(sample.encode()) % 251
    if field == "x":
        rest = np.random.default_rng(version).integers(-(2**62), 2**62, size=length)
        return torch.from_numpy(np.concatenate([[version * 256 + mark], rest]).astype(np.int64))
    if field == "y":
        return torch.tensor([float(version), float(mark), float(length)], dtype=torch.float64)
    return torch.tensor([version, mark]) if field == LATER else {"v": version, "sample": sample}


@cache
def _picture(number: int) -> torch.Tensor:
    rng = np.random.default_rng(number)
    return torch.from_numpy(rng.integers(256, size=_PICTURE_BYTES + number, dtype=np.uint8))


def columns_of(names: Sequence[str], fields: Sequence[str], version: int, lengths: Sequence[int]) -> dict[str, Any]:
    """What a put of this version writes of some samples."""
    columns: dict[str, Any] = {}
    for field in fields:
        cells = [cell(field, name, version, length) for name, length in zip(names, lengths, strict=True)]
        columns[field] = as_objects(*cells) if field == "o" else cells if field == "x" else torch.stack(cells)
    return columns


def version_of(field: str, sample: str, value: Any, put: int | str = 0) -> int | str:
    """The version that a cell holds, or what is wrong with the cell. ``put``: of a picture, the version of its put."""
    try:
        first = put if field == MEDIA else int(value["v"] if field == "o" else value[0].item())
        version = int(first) >> 8 if field == "x" else int(first)
        length = int(value[2].item()) if field == "y" else len(value) - 1
        wanted = cell(field, sample, version, length)
    except Exception as error:
        return f"the cell holds no version: {type(error).__name__}: {error}: {str(value)[:80]}"
    same = value == wanted if field == "o" else value.dtype == wanted.dtype and value.shape == wanted.shape
    if same and (field == "o" or bits(value) == bits(wanted)):
        return version
    return f"expected version {version} as {str(wanted)[:80]}, read {str(value)[:80]}"


def seen_of(rows: Any, partition: str, names: Sequence[str], fields: Sequence[str]) -> Seen:
    seen: Seen = {name: {} for name in samples_of(partition, names)}
    for field in sorted(fields, key=MEDIA.__eq__):  # pictures follow ``x``
        column = rows[field]
        if not isinstance(column, list):
            column = items_of(column) if field == "o" else rows_of(column, len(names))
        for name, value in zip(names, column, strict=True):
            cells = seen[group_of(name) if partition == ROLLOUTS else name]
            if not isinstance(cells.get(field), str):  # of another row of the group
                cells[field] = version_of(field, name, value, cells.get("x", 0))
    return seen


def samples_of(partition: str, names: Sequence[str]) -> list[str]:
    """Samples as the history has them: rows of rollouts as their groups."""
    return list(dict.fromkeys(map(group_of, names))) if partition == ROLLOUTS else list(names)


def samples_and_tokens(meta: KVBatchMeta) -> dict[str, list[str]]:
    """The samples of a claim or a list and their lease tokens, as the history has them."""
    tokens = meta.lease_tokens or []
    if meta.partition_id == ROLLOUTS and tokens:
        tokens = list(dict(zip(map(group_of, meta.sample_ids), tokens, strict=True)).values())
    return {"samples": samples_of(meta.partition_id, meta.sample_ids), "tokens": tokens}


def shown_by(meta: KVBatchMeta) -> dict[str, Any]:
    """What the meta of a claim or a list shows: the samples, their tokens, and the versions in their tags."""
    tags = dict(zip(meta.sample_ids, meta.tags or [{} for _ in meta.sample_ids], strict=True))
    if meta.partition_id == ROLLOUTS:
        seen: Seen = {group: {"#v": _version_of_group(group, tags)} for group in samples_of(ROLLOUTS, meta.sample_ids)}
    else:
        seen = {
            name: {f"#{t}": value for t, value in row.items() if isinstance(value, int)} for name, row in tags.items()
        }
    return {**samples_and_tokens(meta), "seen": seen}


def _version_of_group(group: str, tags: Mapping[str, Mapping[str, Any]]) -> int | str:
    """The version of a group that a claim gave, by the tags of all rows; or what is wrong with it."""
    rows = {name: row for name, row in tags.items() if group_of(name) == group}
    sizes, versions = _whole_rollouts(rows), {row.get("v") for row in rows.values()}
    ends = {row[GROUP_ROLLOUTS_TAG] for row in rows.values() if GROUP_ROLLOUTS_TAG in row} or {_GROUP_SIZE}
    if sum(sizes.values()) == len(rows) and {len(sizes)} == ends and versions == {_version_in(group)}:
        return _version_in(group)
    return f"expected {min(ends)} whole rollouts of version {_version_in(group)}, given {rows}"


def _whole_rollouts(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The rollouts that are sealed and have all rows, by rows and their tags; and how many rows that are."""
    sizes = {rollout_of(name): tags[ROLLOUT_ROWS_TAG] for name, tags in rows.items() if ROLLOUT_ROWS_TAG in tags}
    return {rollout: size for rollout, size in sizes.items() if {f"{rollout}/{row}" for row in range(size)} <= {*rows}}


def _version_in(group: str) -> int:
    """The version of a group, with which its name ends."""
    return int(group.rpartition("-")[2])


class Hands:
    """Makes the calls of one process and writes them down. A call that failed returns something false.

    ``client`` has the methods of a `DataPlaneClient`. Each put has another version, from ``first_version`` on.
    """

    def __init__(self, client: Any, plan: Plan, process: str, first_version: int) -> None:
        self._client, self._plan, self._process, self._version = client, plan, process, first_version
        self._recorder = Recorder(plan.file_of(process), plan.epoch_s)
        self._numbers = 0
        self._known = {name: deque[str](maxlen=_KNOWN) for name in (*PARTITIONS, ROLLOUTS)}
        self._held: list[KVBatchMeta] = []

    def close(self) -> None:
        self._recorder.close()

    def take(self, kind: str, rng: random.Random) -> None:
        base = self._plan.base
        partition, task = rng.choices(PARTITIONS, (3, 1))[0], rng.choice(("train", *TASKS))
        # a put of large cells begins and commits in two messages, and a kill can fall between them
        lengths = rng.choices((1, 3, 200, 3000), k=rng.choice((1, 1, 2, 3, 4, 6)))
        count, chance, samples = len(lengths), rng.random(), list(dict.fromkeys(self._known[partition]))
        if rng.random() < _HOT_SHARE:
            samples = list(_HOT)
        some = rng.sample(samples, min(count, len(samples)))
        match kind:
            case "put":
                names = [f"{self._process}-{self._numbers + index}" for index in range(count)]
                self._numbers += count
                if self.write(partition, names, base, lengths):
                    self._known[partition].extend(names)
            case "overwrite" | "put_again":  # weighed apart: what was put before may have been cleared
                self.write(partition, some, base, lengths)
            case "put_later":
                self.write(partition, some, (LATER,), lengths)
            case "get":
                self.read(partition, some, base)
            case "get_one_field":
                self.read(partition, some, (rng.choice((*base, LATER)),))
            case "roll":
                self._version += 1
                self.roll(f"{self._process}-{self._version}")
            case "claim" | "claim_groups":
                meta = self.claim(ROLLOUTS if kind == "claim_groups" else partition, task, count)
                if meta is not None and chance < 0.4:
                    self.read(meta.partition_id, meta.sample_ids, base)
            case "wait":
                self.claim(partition, task, count, blocking=True)
            case "ack" | "nack" | "renew" if self._held:
                meta = self._held.pop(rng.randrange(len(self._held)))
                if meta.size > 1 and count == 1 and meta.partition_id != ROLLOUTS:  # a part of it
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
                self.clear_all(partition := rng.choice((partition, *self._plan.partitions)))
                self.register(partition, "keep")
            case "register" | "keep":
                self.register(rng.choice((partition, *self._plan.partitions)), kind)
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

    def roll(self, group: str) -> None:
        """Puts a group of rollouts, row by row. In the history it is one put of one sample, the group."""
        self._put_group(group, partial(self._put_rows, group))

    def _put_rows(self, group: str) -> None:
        rng, base, version = random.Random(group), self._plan.base, _version_in(group)
        until_s = time.monotonic() + self._plan.settings.op_timeout_s
        for rollout in (f"{group}_g{number}" for number in range(_GROUP_SIZE)):
            size = rng.randint(1, _MOST_ROWS)
            for name in (f"{rollout}/{row}" for row in range(size)):
                columns = columns_of([name], base, version, [3])
                self._client.put_samples([name], ROLLOUTS, columns, [{"v": version}])
                if time.monotonic() > until_s:
                    raise OperationTimeoutError("the rest of the group was not put")
            self._client.seal({rollout: size}, ROLLOUTS)

    def end_group(self, group: str) -> None:
        """Goes on for a process that died while it put a group: ends it with its whole rollouts, or begins it anew."""

        def put() -> None:
            names = [name for name in self._client.list_sample_ids(ROLLOUTS, fields=BASE) if group_of(name) == group]
            meta = self._client.list_samples(ROLLOUTS, sample_ids=names)
            whole = _whole_rollouts(dict(zip(meta.sample_ids, meta.tags or (), strict=True)))
            if not names:
                raise StalePartitionError("nothing of the group is left")
            if not whole:
                self._client.clear_samples(names, ROLLOUTS)
                self._put_rows(group)
            elif len(whole) < _GROUP_SIZE:
                with suppress(InvalidRequestError):  # what the dead one had sent came late: the group is whole now
                    self._client.seal(whole, ROLLOUTS, ends_groups=True)

        self._put_group(group, put)

    def _put_group(self, group: str, put: Callable[[], None]) -> None:
        about = {"samples": [group], "fields": [*self._plan.base, "#v"], "version": _version_in(group)}
        timeout_s = 2 * self._plan.settings.op_timeout_s  # of several calls
        self._call("put", ROLLOUTS, put, **about, size_bytes=[0], timeout_s=timeout_s)

    def read(self, partition: str, names: Sequence[str], fields: Sequence[str]) -> bool:
        if not names:
            return False
        fields = (MEDIA, "x") if tuple(fields) == (MEDIA,) else fields
        get = partial(self._client.get_samples, names, partition, list(fields))
        about = {"samples": samples_of(partition, names), "fields": list(fields)}
        rows = self._call(
            "get", partition, get, lambda rows: {"seen": seen_of(rows, partition, names, fields)}, **about
        )
        if rows is None and fields == self._plan.base:  # some are gone
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
        fields, lease_s = list(TASKS[task][0]), self._plan.lease_of(task)
        options, wait_s = {"blocking": blocking, "lease_s": lease_s}, _WAIT_LEASES * self._plan.settings.lease_s
        claim = partial(self._client.claim_meta, partition, task, fields, limit, timeout_s=wait_s, **options)
        about = {"task": task, "fields": fields, "limit": limit, **options}
        timeout_s = wait_s if blocking else self._plan.settings.op_timeout_s
        meta: KVBatchMeta | None = self._call("claim", partition, claim, shown_by, **about, timeout_s=timeout_s)
        if meta is not None:
            self._known[partition].extend(meta.sample_ids)
            self._held = [*self._held, *([meta] if meta.size and lease_s is not None else [])][-_HELD:]
        return meta

    def settle(self, operation: str, meta: KVBatchMeta, **more: Any) -> bool:
        about = {**samples_and_tokens(meta), "task": meta.task_name, **more}
        act = partial(getattr(self._client, operation), meta, **more)
        return self._call(operation, meta.partition_id, act, **about) is not None

    def clear(self, partition: str, names: Sequence[str]) -> bool:
        clear = partial(self._client.clear_samples, list(names), partition)
        return bool(names) and self._call("clear", partition, clear, samples=samples_of(partition, names)) is not None

    def clear_all(self, partition: str) -> None:
        self._call("clear", partition, partial(self._client.clear_samples, None, partition), whole=True)

    def register(self, partition: str, operation: str) -> None:
        how: dict[str, Any] = {"if_exists": "keep" if operation == "keep" else "replace"}
        how |= {"grpo_group_size": _GROUP_SIZE, "rollouts": True} if partition == ROLLOUTS else {}
        register = partial(self._client.register_partition, partition, [*self._plan.base, LATER], None, list(TASKS))
        self._call(operation, partition, partial(register, **how))


def live(client: Any, plan: Plan, worker: int, life: int, until_s: float) -> None:
    """Takes random steps, as a worker in one of its lives, until the run is over by `time.monotonic`.

    Each step has random numbers of its own, so that it does not depend on what the store replied to those before.
    """
    hands = Hands(client, plan, f"w{worker}.{life}", (worker * 1000 + life) * 100_000)
    settings, kinds, parent = plan.settings, sorted(plan.steps), os.getppid()
    before = f"w{worker}.{life - 1}"
    for call in read_calls(plan.file_of(before), before) if life else ():
        if call.partition == ROLLOUTS and call.operation == "put" and call.outcome == UNKNOWN:
            hands.end_group(call.samples[0])
    weights = [STEPS[kind][1][worker % 3] for kind in kinds]
    for number in itertools.count() if settings.num_steps is None else range(settings.num_steps):
        rng = random.Random(f"{settings.seed} {worker} {life} {number}")
        pause_s, kind = rng.expovariate(1 / settings.pause_s), rng.choices(kinds, weights)[0]
        time.sleep(max(0.0, min(pause_s, 5 * settings.pause_s, until_s - time.monotonic())))
        if time.monotonic() >= until_s or os.getppid() != parent:
            break
        hands.take(kind, rng)
    hands.close()
