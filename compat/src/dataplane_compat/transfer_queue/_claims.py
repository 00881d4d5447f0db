"""Claims by a sampler: which rows a task is given, in one process or the same in several."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dataplane_compat.transfer_queue import sampler as samplers
from dataplane_compat.transfer_queue._columns import tags_to_show
from dataplane_compat.transfer_queue._indexes import FIRST_OF_KEYS, HIDDEN_PARTITION, number_of
from dataplane_compat.transfer_queue._rows import Row, find_rows
from dataplane_compat.transfer_queue.sampler import BaseSampler, RankAwareSampler, SequentialSampler
from dataplane_core import KVBatchMeta
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import ClaimTimeoutError, ConfigError, UnknownPartitionError
from dataplane_core.spec import Capability

_SETTINGS: Final = f"{HIDDEN_PARTITION}settings"
_PLANS: Final = f"{HIDDEN_PARTITION}plans"
#: The plans whose rows may not have been acked yet.
_UNACKED: Final = f"{HIDDEN_PARTITION}unacked"
_LOCKS: Final = f"{HIDDEN_PARTITION}locks"
#: Seconds for which a process may hold rows or a lock while its sampler chooses.
_CHOOSE_S: Final = 60.0
#: More rows than a partition has.
_ALL: Final = 2**31 - 1
#: Arguments of our samplers that other processes need to make the same sampler.
_ARGUMENTS: Final = ("n_samples_per_prompt", "dp_size")


@dataclass(frozen=True)
class Asked:
    """The arguments of `TransferQueueClient.get_meta`."""

    fields: list[str]
    batch_size: int
    partition_id: str
    mode: str = "fetch"
    task_name: str | None = None
    sampling_config: dict[str, Any] | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The arguments for the sampler."""
        return self.sampling_config or {}


class _Partition:
    """What a sampler may ask of the partition."""

    def __init__(self, tags: Mapping[int, dict[str, Any]]) -> None:
        self._tags = tags

    def get_custom_meta(self, global_indices: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The tags of rows, by index."""
        return {index: self._tags[index] for index in global_indices if index in self._tags}


class Claims:
    """Gives rows to tasks as the store's sampler chooses."""

    def __init__(self, client: DataPlaneClient, controller: Mapping[str, Any] | None) -> None:
        """Takes the settings from the process that started the store.

        Args:
            client: The client.
            controller: ``sampler`` and ``polling_mode``, if this process started the store.
        """
        self._client = client
        self._lock = threading.Lock()
        self._sampler: BaseSampler | None = None
        self._polling: bool | None = None
        if controller is not None:
            self._sampler = _sampler_of(controller.get("sampler") or "SequentialSampler")
            self._polling = bool(controller.get("polling_mode"))
            self._publish(self._sampler)

    @property
    def polling_mode(self) -> bool:
        """Whether `get_meta` returns an empty batch instead of waiting."""
        self._read_settings()
        return bool(self._polling)

    def claim(self, asked: Asked, task_name: str) -> list[Row]:
        """Rows for a task, or none if there are not enough."""
        sampler = self._read_settings()
        rank, batch_index = asked.config.get("dp_rank"), asked.config.get("batch_index")
        has_ranks = rank is not None and batch_index is not None
        by_rank = type(sampler) is RankAwareSampler and has_ranks and Capability.SAMPLERS in self._client.capabilities
        if type(sampler) is SequentialSampler or by_rank:  # the client's own claims do the same
            batch: dict[str, Any] = {"dp_rank": rank, "batch_index": batch_index} if by_rank else {}
            try:
                claimed = self._client.claim_meta(
                    asked.partition_id, task_name, asked.fields, asked.batch_size, timeout_s=0.0, **batch
                )
            except ClaimTimeoutError:
                return []
            return _rows(claimed, asked.fields)
        with self._lock:
            if not has_ranks:
                with self._choice(sampler, asked, task_name) as (rows, _):
                    return rows
            return self._planned(sampler, asked, task_name)

    def forget(self, partition_id: str | None, task_name: str | None = None) -> None:
        """Drops what samplers chose.

        Args:
            partition_id: In this partition. None: what this process chose in all.
            task_name: For this task, as far as other processes know it. None: for all tasks.
        """
        with self._lock:
            if self._sampler is not None and partition_id is None:
                self._sampler.load_checkpoint({name: {} for name in self._sampler.save_checkpoint()})
            elif self._sampler is not None and partition_id is not None:
                self._sampler.clear_cache(partition_id)
        if partition_id is None:
            return
        dropped = [partition_id] if task_name is None else [partition_id, task_name]
        try:
            names = self._client.list_sample_ids(_PLANS)
        except UnknownPartitionError:
            return
        plans = [name for name in names if json.loads(name)[: len(dropped)] == dropped]
        self._client.clear_samples(plans, _PLANS)

    # --- one choice ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _choice(
        self, sampler: BaseSampler, asked: Asked, task_name: str
    ) -> Iterator[tuple[list[Row], dict[Any, list[str]]]]:
        """Leases all rows that are ready, lets the sampler choose, and gives the others back.

        Yields the rows, and the ids for each rank for which the sampler chose now. They count as given after the block;
        if it raises, they go back too.
        """
        partition_id = asked.partition_id
        held = self._client.claim_meta(partition_id, task_name, asked.fields, _ALL, blocking=False, lease_s=_CHOOSE_S)
        given: list[int] = []
        try:
            held = self._without_planned(held, partition_id, task_name)
            rows = self._by_index(partition_id, _rows(held, asked.fields))
            sampled: Sequence[int] = []
            ranks: dict[Any, Sequence[int]] = {}
            used: set[int] = set()
            if held.size and held.size >= asked.batch_size:
                tags = _Partition({index: row.tags for index, row in rows.items()})
                sampled, consumed = sampler(sorted(rows), asked.batch_size, partition=tags, **asked.config)
                ranks = _kept(sampler, partition_id, task_name, asked.config, sampled)
                used = {*consumed, *(index for rank in ranks.values() for index in rank if consumed)}
            chosen = [place for place, index in enumerate(rows) if index in used]
            if ranks and chosen:  # a process that took too long must not replace the plan of the next
                self._client.renew(held.subset(chosen), _CHOOSE_S)
            ids = {rank: [rows[index].sample_id for index in own if index in rows] for rank, own in ranks.items()}
            yield [rows[index] for index in sampled if index in rows], ids
            given = chosen
            if given:
                self._client.ack(held.subset(given))
        finally:
            rest = held.drop(given)
            if rest is not None:
                self._client.nack(rest)

    def _by_index(self, partition_id: str, rows: Sequence[Row]) -> dict[int, Row]:
        """Rows by the index that a sampler sees, in which neighbours were written one after the other.

        The index of a row with a key is its place among the rows that the partition holds: TransferQueue numbers such
        rows too, but the store does not.
        """
        numbers = [number_of(row.sample_id) for row in rows]
        places: dict[str, int] = {}
        if None in numbers:
            held = self._client.list_sample_ids(partition_id)
            known = dict.fromkeys([*held, *(row.sample_id for row in rows)])  # also those that were cleared just now
            places = {sample_id: FIRST_OF_KEYS + place for place, sample_id in enumerate(known)}
        return {
            places[row.sample_id] if number is None else number: row for row, number in zip(rows, numbers, strict=True)
        }

    def _without_planned(self, held: KVBatchMeta, partition_id: str, task_name: str) -> KVBatchMeta:
        """Acks rows that a plan names, as a process was killed between its plan and its ack. Returns the others."""
        try:
            unacked = self._client.list_sample_ids(_UNACKED, {"task": json.dumps([partition_id, task_name])})
        except UnknownPartitionError:
            return held
        planned = {each for plan in find_rows(self._client, _PLANS, unacked) for each in json.loads(plan.tags["ids"])}
        places = [place for place, each in enumerate(held.sample_ids) if each in planned]
        if not places:
            return held
        self._client.ack(held.subset(places))
        return held.drop(places) or held.subset([])

    # --- the same choice in several processes -------------------------------------------------------------------------

    def _planned(self, sampler: BaseSampler, asked: Asked, task_name: str) -> list[Row]:
        """The rows of a rank's batch: chosen by the first process that asks, and read by the others."""
        partition_id, dp_rank, batch_index = asked.partition_id, asked.config["dp_rank"], asked.config["batch_index"]

        def name_of(rank: Any) -> str:
            return json.dumps([partition_id, task_name, rank, batch_index])

        plan = self._read_plan(name_of(dp_rank))
        if plan is None:
            task = json.dumps([partition_id, task_name])
            lock = self._take_lock(task)
            if not lock.size:
                return []
            try:
                plan = self._read_plan(name_of(dp_rank))
                if plan is None:
                    with self._choice(sampler, asked, task_name) as (_, ranks):
                        sampler.clear_cache(partition_id)  # what it chose is kept in the store
                        names = list(map(name_of, ranks))
                        if names:
                            self._client.put_samples(names, _UNACKED, tags=[{"task": task}] * len(names))
                            tags = [{"ids": json.dumps(ids)} for ids in ranks.values()]
                            self._client.put_samples(names, _PLANS, tags=tags)
                        plan = ranks.get(dp_rank, [])
                    self._client.clear_samples(names, _UNACKED)
            finally:
                self._client.nack(lock)
        return find_rows(self._client, partition_id, plan) if plan else []

    def _read_plan(self, name: str) -> list[str] | None:
        found = find_rows(self._client, _PLANS, [name])
        return json.loads(found[0].tags["ids"]) if found else None

    def _take_lock(self, name: str) -> KVBatchMeta:
        """The lock of a task, or an empty meta if another process holds it."""
        self._client.put_samples([name], _LOCKS, tags=[{"name": name}])
        return self._client.claim_meta(
            _LOCKS, "lock", [], 1, blocking=False, lease_s=_CHOOSE_S, tag_filter={"name": name}
        )

    # --- settings -----------------------------------------------------------------------------------------------------

    def _publish(self, sampler: BaseSampler) -> None:
        settings: dict[str, Any] = {"polling_mode": bool(self._polling), "sampler": type(sampler).__name__}
        settings.update({name: getattr(sampler, name) for name in _ARGUMENTS if hasattr(sampler, name)})
        self.keep_settings(json.dumps(settings))

    def settings(self) -> str | None:
        """The settings in the store, as JSON. None: it has none."""
        found = find_rows(self._client, _SETTINGS, ["controller"])
        return str(found[0].tags["settings"]) if found else None

    def keep_settings(self, settings: str | None) -> None:
        """Writes settings into the store. None: leaves those that are there."""
        if settings is not None:
            self._client.put_samples(["controller"], _SETTINGS, tags=[{"settings": settings}])

    def _read_settings(self) -> BaseSampler:
        if self._sampler is None:
            settings = json.loads(self.settings() or "{}")
            self._polling = bool(settings.pop("polling_mode", False))
            name = settings.pop("sampler", "SequentialSampler")
            self._sampler = _sampler_of(name, **settings)
        return self._sampler


def _sampler_of(given: Any, **arguments: Any) -> BaseSampler:
    """A sampler from an object, a class, or the name of one of ours."""
    if isinstance(given, str):
        if given not in samplers.__all__:
            raise ConfigError(
                f"sampler '{given}' is not known here. Expected one of {', '.join(samplers.__all__)}.",
                hint="A sampler of your own works in the process that passes it to init().",
            )
        given = getattr(samplers, given)
    if isinstance(given, type):
        given = given(**arguments)
    if not callable(getattr(given, "sample", None)):
        raise ConfigError(f"sampler is a {type(given).__name__}. Expected a BaseSampler, its class or its name.")
    found: BaseSampler = given
    return found


def _kept(
    sampler: BaseSampler, partition_id: str, task_name: str, config: Mapping[str, Any], sampled: Sequence[int]
) -> dict[Any, Sequence[int]]:
    """Rank -> the rows chosen for this batch: those of the caller, and of other ranks if the sampler chose for all."""
    rank = config.get("dp_rank")
    if rank is None or not sampled:
        return {}
    batch_index = config.get("batch_index")
    ranks: dict[Any, Sequence[int]] = {rank: sampled}
    for other, batches in sampler._states.get(partition_id, {}).get(task_name, {}).items():
        kept = batches.get(batch_index) if isinstance(batches, Mapping) else None
        if kept and other != rank:
            ranks[other] = kept[0] if isinstance(kept, tuple) else kept
    return ranks


def _rows(claimed: KVBatchMeta, fields: Sequence[str]) -> list[Row]:
    known = list(fields)
    return [
        Row(sample_id, tags_to_show(tags), known)
        for sample_id, tags in zip(claimed.sample_ids, claimed.tags or (), strict=True)
    ]
