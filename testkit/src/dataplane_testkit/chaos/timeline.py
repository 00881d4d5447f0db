"""What a history says for certain about the samples: when a put took effect at the latest, and what may have wiped it.

A call takes effect at some moment between its start and its end. A call of unknown outcome may take effect at any
moment after its start, or never. So every answer here is one of certainty: what cannot be certain is never held
against a store.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dataplane_testkit.chaos.history import OK, REFUSED, Call, History

#: The operations that drop what a partition held.
_WIPES: Final = ("clear", "register")


@dataclass(slots=True)
class Put:
    """What a put writes of one sample.

    Attributes:
        call: The put.
        fields: The fields and tags.
        seen: Field -> the end of the first reply that showed the put's version in it.
        seen_from_s: The start of the last call that showed the version. What was over before then did not wipe it.
    """

    call: Call
    fields: frozenset[str]
    seen: dict[str, float]
    seen_from_s: float = -math.inf

    @property
    def begin_s(self) -> float:
        """The put took effect after this moment."""
        return self.call.begin_s

    @property
    def done_s(self) -> float:
        """All of the put had taken effect by this moment, by its own reply."""
        return self.call.end_s if self.call.outcome == OK else math.inf


@dataclass(frozen=True, slots=True)
class Wipe:
    """A clear or a registration, or a loss of data.

    Attributes:
        begin_s: It took effect after this moment.
        end_s: And before this one, if it did. Infinite: unknown.
        sure: Whether it took effect.
        call: The call, if it was one.
    """

    begin_s: float
    end_s: float
    sure: bool
    call: Call | None


class Timeline:
    """The puts and wipes of a history, by sample."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.calls = sorted(history.calls, key=lambda call: call.begin_s)
        self._puts: dict[tuple[str, str], list[Put]] = defaultdict(list)
        self._samples: dict[str, list[str]] = defaultdict(list)
        self._by_version: dict[tuple[str, str, int], Put] = {}
        self._wipes: dict[tuple[str, str | None], list[Wipe]] = defaultdict(list)
        self._registrations: dict[str, list[Call]] = defaultdict(list)
        self._losses = [Wipe(each.begin_s, each.end_s, False, None) for each in history.events if each.loses_data]
        for call in self.calls:
            if call.operation == "put":
                self._add_put(call)
            elif call.operation in _WIPES and call.outcome != REFUSED:
                self._add_wipe(call)
            if call.operation in ("register", "keep") and call.outcome == OK:
                self._registrations[call.partition].append(call)
        for call in self.calls:
            for sample, cells in call.seen.items():
                for field, version in cells.items():
                    self._witness(call, sample, field, version)

    def _add_put(self, call: Call) -> None:
        for sample in call.samples:
            put = Put(call, frozenset(call.fields), {})
            self._by_version[call.partition, sample, call.version] = put
            if call.outcome != REFUSED:
                if (call.partition, sample) not in self._puts:
                    self._samples[call.partition].append(sample)
                self._puts[call.partition, sample].append(put)

    def _add_wipe(self, call: Call) -> None:
        sure = call.outcome == OK
        wipe = Wipe(call.begin_s, call.end_s if sure else math.inf, sure, call)
        for sample in [None] if call.whole or call.operation == "register" else call.samples:
            self._wipes[call.partition, sample].append(wipe)

    def _witness(self, call: Call, sample: str, field: str, version: int | str) -> None:
        put = self._by_version.get((call.partition, sample, version)) if isinstance(version, int) else None
        if put is not None:
            put.seen[field] = min(call.end_s, put.seen.get(field, math.inf))
            put.seen_from_s = max(call.begin_s, put.seen_from_s)

    # --- puts ---------------------------------------------------------------------------------------------------------

    def samples(self, partition: str) -> list[str]:
        """The samples that were put, or may have been put."""
        return self._samples.get(partition, [])

    def puts(self, partition: str, sample: str) -> list[Put]:
        """The puts of a sample that were not refused, in the order in which they began."""
        return self._puts.get((partition, sample), [])

    def put_of(self, partition: str, sample: str, version: int) -> Put | None:
        """The put that wrote, or may have written, this version of a sample; refused ones too."""
        return self._by_version.get((partition, sample, version))

    def effect_s(self, put: Put, sample: str, field: str) -> float:
        """The moment by which a field of a put had taken effect for certain. Infinite: never for certain."""
        moments = [put.done_s, put.seen.get(field, math.inf)]
        if self.history.whole_puts and put.seen and (first := min(put.seen.values())) < moments[0]:
            others = self.puts(put.call.partition, sample)
            # whoever sees a part of the first write of these fields sees all of it
            if not any(each is not put and each.begin_s < first and each.fields & put.fields for each in others):
                moments.append(first)
            elif self.history.atomic_overwrite and not field.startswith("#"):
                moments += [seen_s for name, seen_s in put.seen.items() if not name.startswith("#")]
        return min(moments)

    def there(self, partition: str, sample: str, field: str, begin_s: float, end_s: float) -> Put | None:
        """A put by which a cell was there for certain, from ``begin_s`` to ``end_s``. None: not for certain."""
        for put in self.puts(partition, sample):
            certain = field in put.fields and self.effect_s(put, sample, field) < begin_s
            if certain and not self.wiped(partition, sample, max(put.begin_s, put.seen_from_s), end_s):
                return put
        return None

    # --- wipes --------------------------------------------------------------------------------------------------------

    def wipes(self, partition: str, sample: str) -> Iterator[Wipe]:
        """What dropped, or may have dropped, a sample."""
        yield from self._wipes.get((partition, None), ())
        yield from self._wipes.get((partition, sample), ())
        yield from self._losses

    def wiped(self, partition: str, sample: str, after_s: float, before_s: float) -> bool:
        """Whether something may have dropped a sample between two moments."""
        return any(wipe.begin_s < before_s and wipe.end_s > after_s for wipe in self.wipes(partition, sample))

    def registered(self, partition: str, begin_s: float, end_s: float) -> Call | None:
        """A registration by which a partition was there for certain from ``begin_s`` to ``end_s``."""
        whole = [*self._wipes.get((partition, None), ()), *self._losses]
        for call in self._registrations[partition]:
            others = [wipe for wipe in whole if wipe.call is not call]
            if call.end_s < begin_s and not any(w.begin_s < end_s and w.end_s > call.begin_s for w in others):
                return call
        return None

    # --- the first write ----------------------------------------------------------------------------------------------

    def first_write_by(self, partition: str, sample: str, at_s: float) -> float:
        """The moment by which a sample that is held at ``at_s`` had been written first. Infinite: not certain."""
        begun = [wipe.end_s for wipe in self.wipes(partition, sample) if wipe.begin_s < at_s]
        since = max(begun, default=-math.inf)
        puts = [put for put in self.puts(partition, sample) if put.begin_s > since]
        return min((self.effect_s(put, sample, field) for put in puts for field in put.fields), default=math.inf)

    def first_write_after(self, partition: str, sample: str, at_s: float) -> float:
        """The moment after which a sample that is held from ``at_s`` on was written first."""
        sure = [wipe.begin_s for wipe in self.wipes(partition, sample) if wipe.sure and wipe.end_s < at_s]
        since = max(sure, default=-math.inf)
        puts = [put for put in self.puts(partition, sample) if put.done_s > since]
        return min((max(put.begin_s, since) for put in puts), default=-math.inf)

    # --- processes ----------------------------------------------------------------------------------------------------

    def unsafe(self, partition: str, sample: str) -> bool:
        """Whether nothing is promised about a sample: the store is not fenced, and a put of it may overlap a wipe."""
        if self.history.fenced:
            return False
        return any(self.wiped(partition, sample, put.begin_s, put.done_s) for put in self.puts(partition, sample))

    def ran(self, call: Call, late_s: float) -> bool:
        """Whether the process of a call was not stopped during it, and had the time to end it at its deadline."""
        stops = [each for each in self.history.events if each.kind == "stop" and each.process == call.process]
        stopped = any(each.begin_s < call.end_s and each.end_s > call.begin_s for each in stops)
        return not stopped and call.end_s <= call.begin_s + call.timeout_s + late_s

    def killed_s(self, process: str) -> float:
        """When a process was killed. Infinite: never."""
        kills = [each.end_s for each in self.history.events if each.kind == "kill" and each.process == process]
        return min(kills, default=math.inf)
