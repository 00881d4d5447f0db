"""A registration that happens again: what each operation of this process stands for in the run."""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dataplane_core.spec import ClaimRequest, GetRequest, PartitionInfo, PutRequest, SettleRequest
from dataplane_recording._timeline import Event, Registration

#: Sample and field.
Cell: TypeAlias = tuple[str, str]


@dataclass
class Replay:
    """A registration, and how far this process is in it."""

    run: Registration
    info: PartitionInfo  # as this process registered it
    is_ours: bool = False  # this process registered it; if not, it works on samples of another process's registration
    is_used: bool = False  # this process did anything with its samples
    own: dict[str, set[str]] = field(default_factory=dict)  # sample -> the fields that this process put
    stands_for: dict[Cell, int] = field(default_factory=dict)  # cell -> the place of the recorded put
    reads: Counter[Cell] = field(default_factory=Counter)  # by this process
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)  # sample -> what this process put
    cleared: dict[str, float] = field(default_factory=dict)  # sample -> the recorded clear up to which nothing is there
    claimed: dict[str, int] = field(default_factory=dict)  # sample -> the place of the recorded claim that gave it last
    given: dict[str, set[tuple[int | None, int]]] = field(default_factory=dict)  # task -> recorded claims made again
    leases: dict[str, dict[str, tuple[str, bool]]] = field(default_factory=dict)  # task -> sample -> token, is acked

    def next_put(self, cell: Cell) -> Event | None:
        """The recorded put that the next put of a cell stands for. One beyond the last is compared with the last."""
        puts = self.run.puts_of(*cell)
        later = [put for put in puts if put.at > self.stands_for.get(cell, self.run.begin)]
        return later[0] if later else puts[-1] if puts else None

    def version(self, cell: Cell) -> Event | None:
        """The recorded put whose cell a read gets: the last one before the recorded read, or else claim, of it."""
        sample_id = cell[0]
        puts = self.run.puts_of(*cell, self.cleared.get(sample_id, -1))
        if len(puts) < 2:
            return puts[0] if puts else None
        reads, at = self.run.reads_of(*cell), self.claimed.get(sample_id, math.inf)
        if reads:
            at = reads[min(self.reads[cell], len(reads) - 1)].at
        return ([put for put in puts if put.at < at] or puts[:1])[-1]

    def next_claim(self, request: ClaimRequest) -> tuple[tuple[int | None, int], Event] | None:
        """The recorded claim that a claim stands for, and its key."""
        claims, given = self.run.claims.get(request.task_name, {}), self.given.get(request.task_name, ())
        kept = {key: claim for key, claim in claims.items() if not claim.is_lost}
        if request.dp_rank is None:
            return next(((key, claim) for key, claim in kept.items() if key[0] is None and key not in given), None)
        index = request.batch_index if request.batch_epoch in (None, self.info.epoch) else 0
        is_left = {number for _, number in kept}  # one that all its ranks lost has no number
        for key in sorted(lost for lost in claims.keys() - kept.keys() if lost[0] == request.dp_rank):
            index += key[1] <= index and (claims[key].record.num_ranks is None or key[1] not in is_left)
        event = claims.get((request.dp_rank, index))
        return None if event is None else ((request.dp_rank, index), event)

    def has_more(self, request: Any) -> bool:
        """Whether the run did more of what a request asks for, in this registration, than this process has done."""
        if isinstance(request, ClaimRequest):
            return self.next_claim(request) is not None
        if isinstance(request, GetRequest):
            cells = [(request.sample_ids[0], name) for name in request.fields]
            return any(self.reads[cell] < max(1, len(self.run.reads_of(*cell))) for cell in cells)
        if isinstance(request, PutRequest):
            cells = [(request.sample_ids[0], name) for name in request.columns]
            return any(
                not self.is_own(*cell) or self.run.puts_of(*cell, self.stands_for.get(cell, -1)) for cell in cells
            )
        return True

    def is_consumed(self, task_name: str) -> bool:
        """Whether this process was given, and acked, all that the run claimed for its ranks."""
        given, claims = self.given.get(task_name, set()), self.run.claims.get(task_name, {})
        ranks = {rank for rank, _ in given}
        is_left = any(key[0] in ranks and key not in given for key, claim in claims.items() if not claim.is_lost)
        return bool(given) and not is_left and all(done for _, done in self.leases.get(task_name, {}).values())

    def settle(self, request: SettleRequest) -> list[str]:
        """Acks leases, gives them back or renews them. Returns the samples whose lease is not held: then none are."""
        held = self.leases.get(request.task_name, {})
        pairs = list(zip(request.sample_ids, request.lease_tokens, strict=True))
        fit = (False, True) if request.op == "ack" else (False,)
        lost = [sample_id for sample_id, token in pairs if held.get(sample_id) not in [(token, done) for done in fit]]
        if not lost and request.op == "nack":
            for sample_id in request.sample_ids:
                held.pop(sample_id, None)
        elif not lost and request.op == "ack":
            held.update((sample_id, (token, True)) for sample_id, token in pairs)
        return lost

    def clear(self, sample_id: str) -> None:
        """Forgets a sample. It is there again if the run put it again after it cleared it."""
        before = self.cleared.get(sample_id, -1)
        self.cleared[sample_id] = next((at for at in self.run.clears.get(sample_id, ()) if at > before), math.inf)
        self.own.pop(sample_id, None)
        self.tags.pop(sample_id, None)

    def is_own(self, sample_id: str, name: str) -> bool:
        """Whether this process put a cell."""
        return name in self.own.get(sample_id, ())

    def has(self, sample_id: str) -> bool:
        """Whether a sample was put, by the run or by this process, and not cleared."""
        puts = self.run.puts.get(sample_id)
        return sample_id in self.own or (puts is not None and puts[-1].at > self.cleared.get(sample_id, -1))

    def sample_ids(self) -> dict[str, None]:
        """The samples that are there, those of the run first."""
        return dict.fromkeys(filter(self.has, (*self.run.puts, *self.own)))

    def listed(self) -> dict[str, dict[str, Any]]:
        """Sample -> its tags, as far as other processes of the run put them, or this one now.

        The client that registered the partition in the run is this process, if it registers it here: what it put later
        in the run is not there yet.
        """
        found: dict[str, dict[str, Any]] = {}
        mine, begin = self.run.first.record.client if self.is_ours else None, self.run.begin
        for sample_id in self.sample_ids():
            puts = self.run.puts.get(sample_id, ())
            theirs = [put for put in puts if put.at < begin or put.record.client is not mine]
            if theirs or sample_id in self.tags:
                tags = [put.record.tags[put.place] for put in theirs if put.record.tags is not None]
                found[sample_id] = dict(ChainMap(self.tags.get(sample_id, {}), *tags[::-1]))
        return found

    def fields_of(self, sample_id: str) -> tuple[str, ...]:
        """The fields that a sample has."""
        return tuple(sorted({*self.recorded_fields(sample_id), *self.own.get(sample_id, ())}))

    def recorded_fields(self, sample_id: str) -> Iterator[str]:
        """The fields that the run put of a sample, each once."""
        after = self.cleared.get(sample_id, -1)
        puts = (put for put in self.run.puts.get(sample_id, ()) if put.at > after)
        return iter(dict.fromkeys(name for put in puts for name in put.record.specs))
