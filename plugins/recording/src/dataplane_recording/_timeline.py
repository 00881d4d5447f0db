"""What a run did to each partition, in its order, read from a recording."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from dataplane_core.codec import Columns
from dataplane_core.errors import InvalidRequestError, MissingDataError, preview
from dataplane_observe import Record, Recording

#: Blocks of rows that stay decoded.
_BLOCKS: Final = 4
#: Which batch of a task a claim asks for: rank and index, or None and the claim's place.
Key: TypeAlias = tuple[int | None, int]


class Event(NamedTuple):
    """A record, its place among all records, and of a put the place of a sample in it."""

    at: int
    record: Record
    place: int = 0

    @property
    def is_lost(self) -> bool:
        """Of a claim: whether it lost all its rows, see `Registration.lost`."""
        return not (self.record.ids or self.record.exhausted)


@dataclass
class Registration:
    """What the run did between two registrations of a partition's name."""

    number: int  # which of its registrations, from 0
    first: Event  # what opened it
    begin: float = -1  # the place at which the replay begins: of what was before, only its rows are known
    # what was registered, also later, by if_exists="keep"
    fields: dict[str, None] = field(default_factory=dict)
    consumer_tasks: dict[str, None] = field(default_factory=dict)
    enums: dict[str, dict[str, None]] = field(default_factory=dict)
    is_finished: bool = False  # the run said later how many samples there are
    # sample -> its puts, its reads, and the places of the clears that name it
    puts: dict[str, list[Event]] = field(default_factory=dict)
    reads: dict[str, list[Event]] = field(default_factory=dict)
    clears: dict[str, list[int]] = field(default_factory=dict)
    # task -> the first claim of each batch, without the rows that it lost
    claims: dict[str, dict[Key, Event]] = field(default_factory=dict)
    held: dict[str, dict[str, Key]] = field(default_factory=dict)  # task -> sample -> the batch whose lease holds it
    # sample -> the places of the last claim that lost it, since its process crashed or was too slow, and of the one
    # that was given it then. What was done in between is done again after it.
    lost: dict[str, tuple[int, int]] = field(default_factory=dict)

    def puts_of(self, sample_id: str, name: str, after: float = -1) -> list[Event]:
        """The puts of a cell, after a place."""
        return [put for put in self.puts.get(sample_id, ()) if name in put.record.specs and put.at > after]

    def reads_of(self, sample_id: str, name: str) -> list[Event]:
        """The reads of a cell by the client that read it first: several clients may each have read it as often."""
        reads = [read for read in self.reads.get(sample_id, ()) if name in read.record.fields]
        return [read for read in reads if read.record.client is reads[0].record.client]

    def add(self, event: Event) -> None:
        """Notes what the run did next."""
        at, record, _ = event
        held = self.held.setdefault(record.task, {})
        match record.op:
            case "clear_samples" if at < self.begin:
                for sample_id in record.ids:
                    self.puts.pop(sample_id, None)
            case "claim" | "get_samples" if at < self.begin or not (record.ids or record.exhausted):
                pass
            case "register_partition":
                self.is_finished |= self.first.record.num_samples is None and record.num_samples is not None
                self.fields |= dict.fromkeys(record.fields)
                self.consumer_tasks |= dict.fromkeys(record.consumer_tasks)
                for name, words in record.enums.items():
                    self.enums.setdefault(name, {}).update(dict.fromkeys(words))
            case "claim":
                key = record.dp_rank, at if record.dp_rank is None else record.batch_index
                claims = self.claims.setdefault(record.task, {})
                if key not in claims:
                    claims[key] = event
                    again = {sample_id: held[sample_id] for sample_id in record.ids if sample_id in held}
                    self._lose(again, claims, at)
                    held.update(dict.fromkeys(record.ids if record.lease_s is not None else (), key))
            case "ack" | "nack":
                for sample_id in record.ids:
                    held.pop(sample_id, None)
            case "set_cursor":
                held.clear()
            case "put_samples":
                fields = record.specs.keys()
                for place, sample_id in enumerate(record.ids):
                    since, until = self.lost.get(sample_id, (at, at))
                    self.puts[sample_id] = [
                        put
                        for put in self.puts.get(sample_id, ())
                        if not (since < put.at < until and set() < put.record.specs.keys() <= fields)
                    ] + [Event(at, record, place)]
            case "get_samples":
                for sample_id in record.ids:
                    self.reads.setdefault(sample_id, []).append(event)
            case "clear_samples":
                for sample_id in record.ids:
                    self.clears.setdefault(sample_id, []).append(at)
                    for keys in self.held.values():
                        keys.pop(sample_id, None)

    def _lose(self, again: dict[str, Key], claims: dict[Key, Event], at: int) -> None:
        """Takes samples that are given again out of the batches that held them, and their reads since then too."""
        for key in dict.fromkeys(again.values()):
            record = claims[key].record
            kept = [place for place, sample_id in enumerate(record.ids) if again.get(sample_id) != key]
            ids, tags = ([part[place] for place in kept] if part else part for part in (record.ids, record.tags))
            record = msgspec.structs.replace(record, ids=ids, tags=tags, exhausted=record.exhausted and bool(ids))
            claims[key] = claims[key]._replace(record=record)
        for sample_id, key in again.items():
            self.lost[sample_id] = since, _ = claims[key].at, at
            self.reads[sample_id] = [read for read in self.reads.get(sample_id, ()) if read.at < since]


class Timeline:
    """A recording, read once. The replay begins after the end of ``after_step``, or where the run began."""

    def __init__(self, folder: Path, after_step: int | None) -> None:
        self._recording = Recording(folder)
        self._registrations: dict[str, list[Registration]] = {}
        self._early: dict[str, list[Event]] = {}  # before any registration
        self._blocks: dict[int, tuple[dict[str, int], Columns]] = {}
        epochs: dict[tuple[str, str], Registration] = {}
        events = [Event(at, record) for at, record in enumerate(self._recording.records())]
        self._steps = [(event.at, event.record.step) for event in events if event.record.step is not None]
        begin: float = max((at for at, step in self._steps if step == after_step), default=-1)
        if after_step is not None and begin < 0:
            raise InvalidRequestError(
                f"after_step {after_step} is refused: the run marked "
                f"{preview(step for _, step in self._steps) or 'no step'}.",
                hint="The trainer marks the end of each step by client.mark_step.",
            )
        marker = next(
            (event.record.client for event in events if event.at > begin and event.record.step is not None), None
        )
        if after_step is not None and marker is not None:  # if the run was resumed after it: what crashed is over
            begin = max(begin, next(event.at for event in events if event.record.client is marker) - 0.5)
        for event in events:
            record, name = event.record, event.record.partition
            if record.status != "ok" or not name:
                continue
            known = self._registrations.setdefault(name, [])
            if event.at < begin and record.op == "clear_samples" and record.drops_all:
                known.clear()
                continue
            if record.op != "register_partition":
                if known:
                    known[-1].add(event)
                elif record.op != "clear_samples":  # which may name a partition that is not there
                    self._early.setdefault(name, []).append(event)
                continue
            key = name, record.epoch
            if key not in epochs:
                if event.at < begin:
                    known.clear()
                epochs[key] = Registration(len(known), event, begin)
                known.append(epochs[key])
            epochs[key].add(event)
            for early in self._early.pop(name, ()):  # another client was quicker than the one that registered
                known[0].add(early)
        for known in self._registrations.values():
            while len(known) > 1 and known[0].first.at < begin and not (known[0].claims or known[0].reads):
                del known[0]  # it was over when the replay begins, though nobody had cleared it
            for number, registration in enumerate(known):
                registration.number = number

    def registrations(self, partition_id: str) -> list[Registration]:
        """The registrations of a partition. Empty: the run did not have it."""
        if partition_id in self._early:
            raise MissingDataError(
                f"the recording has operations on partition '{partition_id}', but no registration of it.",
                hint="Record all clients of the run, and give max_bytes enough room for all segments.",
            )
        return self._registrations.get(partition_id, [])

    def step_before(self, event: Event) -> int | None:
        """The step whose end was the last before an event."""
        number = bisect_right(self._steps, (event.at, 0))
        return self._steps[number - 1][1] if number else None

    def when(self, event: Event) -> str:
        """When an event was, in words."""
        step = self.step_before(event)
        return "before the end of any step" if step is None else f"after step {step}"

    def block(self, event: Event) -> tuple[dict[str, int], Columns]:
        """The recorded rows of a put: where each sample is, and the columns. Raises as `Recording.rows`."""
        if event.at not in self._blocks:
            ids, columns = self._recording.rows(event.record)
            assert isinstance(columns, Columns)
            if len(self._blocks) >= _BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[event.at] = {sample_id: row for row, sample_id in enumerate(ids)}, columns
        return self._blocks[event.at]
