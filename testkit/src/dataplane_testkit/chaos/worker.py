"""What runs in each process: takes the steps of its schedule, and writes every call into its history."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from dataplane_core.client import DataPlaneClient
from dataplane_core.meta import KVBatchMeta
from dataplane_testkit._columns import as_objects, bits, items_of, rows_of
from dataplane_testkit.chaos.history import Recorder, Seen
from dataplane_testkit.chaos.schedule import BASE, LATER, PARTITIONS, TASKS, Plan, Step, steps

#: How many samples a process remembers per partition, to read, replace and clear them.
_KNOWN: Final = 60
#: The samples that all processes write, read and clear, and the share of these calls that go to them.
_HOT: Final = ("hot0", "hot1", "hot2")
_HOT_SHARE: Final = 0.3
#: How many claims it holds.
_HELD: Final = 12
#: The deadline of a blocking claim, in leases.
_WAIT_LEASES: Final = 2


# --- cells ------------------------------------------------------------------------------------------------------------


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
    if field == LATER:
        return torch.tensor([version, mark])
    return {"v": version, "sample": sample}


def version_of(field: str, sample: str, value: Any) -> int | str:
    """The version that a cell holds, or what is wrong with the cell."""
    try:
        if field == "o":
            version, length = int(value["v"]), 0
        else:
            version, length = int(value[0].item()), len(value) - 1
        if field == "x":
            version >>= 8
        if field == "y":
            length = int(value[2].item())
        wanted = cell(field, sample, version, length)
    except Exception as error:
        return f"the cell holds no version: {type(error).__name__}: {error}: {str(value)[:80]}"
    if field == "o":
        return version if value == wanted else f"expected {wanted}, read {value}"
    if value.dtype != wanted.dtype or value.shape != wanted.shape or bits(value) != bits(wanted):
        return f"expected version {version} as {str(wanted)[:80]}, read {str(value)[:80]}"
    return version


def _columns(samples: Sequence[str], fields: Iterable[str], version: int, lengths: Sequence[int]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for field in fields:
        cells = [cell(field, sample, version, size) for sample, size in zip(samples, lengths, strict=True)]
        columns[field] = as_objects(*cells) if field == "o" else cells if field == "x" else torch.stack(cells)
    return columns


def tags_seen(tags: Mapping[str, Any]) -> dict[str, int | str]:
    """The versions in the tags of a sample."""
    return {f"#{name}": value for name, value in tags.items() if isinstance(value, int)}


# --- steps ------------------------------------------------------------------------------------------------------------


class Hands:
    """Makes the calls of one process and writes them down.

    Args:
        client: The client.
        recorder: Writes the history.
        plan: What all schedules have in common.
        first_version: The version of the first put; each further one has the next.
        timeout_s: The client's ``op_timeout_s``.
        folder: Where saves go.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        recorder: Recorder,
        plan: Plan,
        first_version: int,
        timeout_s: float,
        folder: Path,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._plan = plan
        self._version = first_version
        self._timeout_s = timeout_s
        self._folder = folder
        self._numbers = 0
        self._known = {name: deque[str](maxlen=_KNOWN) for name in PARTITIONS}
        self._held: deque[KVBatchMeta] = deque(maxlen=_HELD)

    def take(self, step: Step) -> None:
        """Takes a step."""
        act: Callable[[Step], None] = getattr(self, f"_{step.kind}")
        act(step)

    def _call(self, operation: str, partition: str, act: Callable[[], Mapping[str, Any] | None], **about: Any) -> bool:
        about.setdefault("timeout_s", self._timeout_s)
        return self._recorder.call(operation, partition, act, **about)

    # puts

    def _put(self, step: Step) -> None:
        names = [f"{self._recorder.process}-{self._numbers + index}" for index in range(step.count)]
        self._numbers += step.count
        if self._write(step, names, BASE, "v"):
            self._known[step.partition].extend(names)

    def _put_later(self, step: Step) -> None:
        self._write(step, self._pick(step), (LATER,), "z")

    def _overwrite(self, step: Step) -> None:
        self._write(step, self._pick(step), BASE, "v")

    _put_again = _overwrite  # weighed apart: what was put before may have been cleared

    def _write(self, step: Step, names: Sequence[str], fields: Sequence[str], tag: str) -> bool:
        if not names:
            return False
        return self.write(step.partition, names, fields, tag, step.lengths[: len(names)])

    def write(
        self, partition: str, names: Sequence[str], fields: Sequence[str], tag: str, lengths: Sequence[int]
    ) -> bool:
        """Puts fields of samples with the next version, which a tag holds too."""
        self._version += 1
        version = self._version
        columns = _columns(names, fields, version, lengths)
        sizes = [8 * (length + 1) + 24 if tag == "v" else 16 for length in lengths]

        def act() -> None:
            self._client.put_samples(names, partition, columns, [{tag: version} for _ in names])

        written = [*fields, f"#{tag}"] if self._plan.tags else list(fields)
        about = {"samples": list(names), "fields": written, "version": version, "size_bytes": sizes}
        return self._call("put", partition, act, **about)

    def _pick(self, step: Step) -> list[str]:
        """Some of the samples that this process knows of, or of those that all processes fight for."""
        rng = random.Random(step.choice)
        known = list(_HOT) if rng.random() < _HOT_SHARE else list(dict.fromkeys(self._known[step.partition]))
        return rng.sample(known, min(step.count, len(known)))

    # reads

    def _get(self, step: Step) -> None:
        self.read(step.partition, self._pick(step), BASE)

    def _get_one_field(self, step: Step) -> None:
        self.read(step.partition, self._pick(step), ((*BASE, LATER)[int(step.choice * 4)],))

    def read(self, partition: str, names: Sequence[str], fields: Sequence[str]) -> bool:
        """Reads fields of samples. Returns whether all of them are there."""

        def act() -> Mapping[str, Any]:
            rows = self._client.get_samples(names, partition, list(fields))
            return {"seen": seen_of(rows, names, fields)}

        if not names:
            return False
        found = self._call("get", partition, act, samples=list(names), fields=list(fields))
        if not found and fields == BASE:  # some are gone
            self._known[partition] = deque((each for each in self._known[partition] if each not in names), _KNOWN)
        return found

    def _list(self, step: Step) -> None:
        self._known[step.partition].extend(self.listed(step.partition)[-step.count * 6 :])

    def listed(self, partition: str) -> list[str]:
        """Lists a partition. Returns the samples; none if the call failed."""
        found: list[str] = []

        def act() -> Mapping[str, Any]:
            meta = self._client.list_samples(partition)
            found.extend(meta.sample_ids)
            tags = meta.tags or [{} for _ in meta.sample_ids]
            seen = {sample: tags_seen(row) for sample, row in zip(meta.sample_ids, tags, strict=True)}
            return {"samples": meta.sample_ids, "seen": seen}

        self._call("list", partition, act)
        return found

    def _consumed(self, step: Step) -> None:
        self.consumed(step.partition, step.task)

    def consumed(self, partition: str, task: str) -> bool:
        """Asks whether a task is done with a partition."""
        answers: list[bool] = []

        def act() -> Mapping[str, Any]:
            answers.append(self._client.check_consumption_status(partition, [task]))
            return {"flag": answers[0]}

        return self._call("consumed", partition, act, task=task) and answers[0]

    # claims

    def _claim(self, step: Step) -> None:
        meta = self.claim(step.partition, step.task, step.count)
        if meta is not None and step.choice < 0.4:
            self.read(step.partition, meta.sample_ids, BASE)

    def _wait(self, step: Step) -> None:
        self.claim(step.partition, step.task, step.count, blocking=True)

    def claim(self, partition: str, task: str, limit: int, *, blocking: bool = False) -> KVBatchMeta | None:
        """Claims, and keeps the meta. Returns None if the claim failed."""
        fields, lease_s = TASKS[task].fields, self._plan.lease_of(task)
        wait_s = _WAIT_LEASES * self._plan.lease_s
        replies: list[KVBatchMeta] = []

        def act() -> Mapping[str, Any]:
            meta = self._client.claim_meta(
                partition, task, list(fields), limit, blocking=blocking, timeout_s=wait_s, lease_s=lease_s
            )
            replies.append(meta)
            tags = meta.tags or [{} for _ in meta.sample_ids]
            return {
                "samples": meta.sample_ids,
                "tokens": meta.lease_tokens or [],
                "seen": {sample: tags_seen(row) for sample, row in zip(meta.sample_ids, tags, strict=True)},
            }

        about = {"task": task, "fields": list(fields), "limit": limit, "lease_s": lease_s, "blocking": blocking}
        timeout_s = wait_s if blocking else self._timeout_s
        if not self._call("claim", partition, act, **about, timeout_s=timeout_s):
            return None
        meta = replies[0]
        self._known[partition].extend(meta.sample_ids)
        if meta.size and lease_s is not None:
            self._held.append(meta)
        return meta

    def _ack(self, step: Step) -> None:
        meta = self._choose(step)
        if meta is not None:
            self._settle("ack", meta)
            if step.choice < 0.25:
                self._settle("ack", meta)  # as if the first reply had been lost
            if step.choice > 0.5:
                self.clear(meta.partition_id, meta.sample_ids)

    def _nack(self, step: Step) -> None:
        meta = self._choose(step)
        if meta is not None:
            self._settle("nack", meta)

    def _renew(self, step: Step) -> None:
        meta = self._choose(step)
        if meta is not None and self._settle("renew", meta, lease_s=self._plan.lease_s):
            self._held.append(meta)

    def ack(self, meta: KVBatchMeta) -> bool:
        """Acks a claim."""
        return self._settle("ack", meta)

    def _choose(self, step: Step) -> KVBatchMeta | None:
        """One of the claims that are held, or a part of it, which is then no longer held."""
        if not self._held:
            return None
        place = int(step.choice * len(self._held))
        meta = self._held[place]
        del self._held[place]
        if meta.size > 1 and step.count == 1:
            self._held.append(meta.slice(1, meta.size))
            meta = meta.slice(0, 1)
        return meta

    def _settle(self, operation: str, meta: KVBatchMeta, **more: Any) -> bool:
        def act() -> None:
            getattr(self._client, operation)(meta, **more)

        about = {"samples": meta.sample_ids, "tokens": meta.lease_tokens or [], "task": meta.task_name, **more}
        return self._call(operation, meta.partition_id, act, **about)

    # the partition

    def _clear(self, step: Step) -> None:
        self.clear(step.partition, self._pick(step))

    def clear(self, partition: str, names: Sequence[str]) -> bool:
        """Clears samples."""

        def act() -> None:
            self._client.clear_samples(list(names), partition)

        return bool(names) and self._call("clear", partition, act, samples=list(names))

    def _clear_all(self, step: Step) -> None:
        def act() -> None:
            self._client.clear_samples(None, step.partition)

        self._call("clear", step.partition, act, whole=True)
        self.register(step.partition, "keep")

    def _register(self, step: Step) -> None:
        self.register(step.partition, "register")

    def _keep(self, step: Step) -> None:
        self.register(step.partition, "keep")

    def register(self, partition: str, operation: str) -> None:
        """Registers a partition, anew or with ``if_exists="keep"``."""
        how: Literal["replace", "keep"] = "keep" if operation == "keep" else "replace"

        def act() -> None:
            self._client.register_partition(partition, [*BASE, LATER], None, list(TASKS), if_exists=how)

        self._call(operation, partition, act)

    def _save(self, step: Step) -> None:
        self._numbers += 1
        folder = self._folder / f"save-{self._recorder.process}-{self._numbers}-{step.partition}"

        def act() -> None:
            self._client.save(folder, {"folder": folder.name}, [step.partition])

        self._call("save", step.partition, act, version=self._numbers)


def seen_of(rows: Any, names: Sequence[str], fields: Sequence[str]) -> Seen:
    """The versions in the rows of a read."""
    seen: Seen = {name: {} for name in names}
    for field in fields:
        column = rows[field]
        if not isinstance(column, list):
            column = items_of(column) if field == "o" else rows_of(column, len(names))
        for name, value in zip(names, column, strict=True):
            seen[name][field] = version_of(field, name, value)
    return seen


def live(
    client: DataPlaneClient,
    plan: Plan,
    worker: int,
    life: int,
    path: str,
    epoch_s: float,
    until_s: float,
    timeout_s: float,
) -> int:
    """Takes steps until the run is over.

    Args:
        client: The client.
        plan: What all schedules have in common.
        worker: The number of the worker.
        life: The how manieth life of this worker.
        path: The file of the history.
        epoch_s: `time.monotonic` at the start of the run.
        until_s: When to stop, by `time.monotonic`.
        timeout_s: The client's ``op_timeout_s``.

    Returns:
        The number of steps.
    """
    recorder = Recorder(Path(path), f"w{worker}.{life}", epoch_s)
    hands = Hands(client, recorder, plan, (worker * 1000 + life) * 100_000, timeout_s, Path(path).parent)
    parent, taken = os.getppid(), 0
    try:
        for step in steps(plan, worker, life):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or os.getppid() != parent:
                return taken
            time.sleep(min(step.pause_s, left_s))
            hands.take(step)
            taken += 1
        return taken
    finally:
        recorder.close()
