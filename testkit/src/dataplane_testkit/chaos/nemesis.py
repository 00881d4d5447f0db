"""The processes of a run: starts them, kills, stops and continues them, and disturbs the store where its author can."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from dataplane_testkit._author import Disturbance
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_testkit._workers import Worker
from dataplane_testkit.chaos.history import Event
from dataplane_testkit.chaos.worker import Plan, live

#: How likely it is that a worker is killed or stopped, or that something is done to the store.
_WEIGHTS: Final[Mapping[str, float]] = {"kill": 5, "stop": 4}
_WEIGHT_OF_OTHERS: Final = 2
#: How long it lasts, in leases: some stops outlast them.
_LENGTHS: Final = (0.2, 0.5, 1.5, 3.0)
#: Seconds between two looks at workers that end, and at whether a call begins.
_LOOK_S: Final = 0.02
_AIM_LOOK_S: Final = 0.0002
#: Seconds for which it waits for a call of the worker that it is about to kill or stop.
_AIM_S: Final = 1.0
#: The most seconds from the start of that call to the kill or stop.
_LATEST_S: Final = 0.0015
#: How many calls a worker has made when `Nemesis.kill_all` kills it.
_CALLS: Final = 15


@dataclass(slots=True)
class _Life:
    """A worker from its start to its kill. While it is stopped: since when, and when to continue it."""

    number: int
    life: int
    process: Worker
    stopped_s: float | None = None
    due_s: float = 0.0

    @property
    def name(self) -> str:
        return f"w{self.number}.{self.life}"


class Nemesis:
    """The workers of a run, and what is done to them. Each killed worker gets a new life.

    Args:
        plan: What all processes have in common.
        new_worker: Starts a process with a client of the store.
        names: Gets the names of all lives.
        events: Gets what was done.
    """

    def __init__(self, plan: Plan, new_worker: Callable[[], Worker], names: list[str], events: list[Event]) -> None:
        self._plan, self._new_worker, self._names, self._events = plan, new_worker, names, events
        self._workers: dict[int, _Life] = {}
        self._until_s = 0.0

    def close(self) -> None:
        """Ends the workers that are left."""
        for worker in self._workers.values():
            worker.process.kill()
            worker.process.close()

    def start(self, count: int, for_s: float) -> None:
        """Starts so many workers, and lets them take steps for a time once all are attached."""
        for number in range(count):
            self._fork(number, 0)
        for worker in self._workers.values():
            worker.process.wait_ready()
        self._until_s = time.monotonic() + for_s
        for worker in self._workers.values():
            self._begin(worker)

    def disrupt(self, faults: Mapping[str, Disturbance | None], every_s: float, look: Callable[[], None]) -> None:
        """Kills and stops workers and disturbs the store until the workers end.

        Args:
            faults: What happens: ``kill``, ``stop``, and by name what can be done to the store.
            every_s: The mean time from one to the next, in seconds.
            look: Called a few times a second.
        """
        rng, due_s = random.Random(f"{self._plan.seed} nemesis"), time.monotonic() + every_s / 2
        others = len(faults.keys() - _WEIGHTS.keys())
        weights = [_WEIGHTS.get(name) or _WEIGHT_OF_OTHERS / others for name in faults]
        while True:
            due_s += rng.uniform(0.3, 1.7) * every_s if faults else math.inf
            while time.monotonic() < min(due_s, self._until_s):
                self._continue(self._now())
                look()
                time.sleep(0.05)
            if time.monotonic() >= self._until_s:
                return
            name, number = rng.choices(list(faults), weights)[0], rng.randrange(len(self._workers))
            for_s, disturbance = rng.choice(_LENGTHS) * self._plan.lease_s, faults[name]
            if disturbance is not None:
                self._disturb(name, disturbance, for_s)
                continue
            self._stop(self._workers[number], rng.random(), for_s)
            if name == "kill":
                self._renew(self._kill(number))

    def kill_all(self, count: int) -> None:
        """Kills so many workers, each after some calls. When it returns, none is left."""
        rng, size = random.Random(self._plan.seed), len(self._workers)
        for turn in range(max(count, size)):
            worker = self._workers[turn % size]
            eventually(partial(self._has_called, worker), STARTS_S, f"the first calls of {worker.name}")
            self._stop(worker, rng.random())
            self._kill(worker.number)
            if turn < count - size:
                self._renew(worker)

    def finish(self, late_s: float) -> None:
        """Waits until all workers have ended, but not much longer: their last calls are then ones that never ended."""
        self._continue(math.inf)
        for worker in self._workers.values():
            while not worker.process.replied and time.monotonic() < self._until_s + late_s:
                time.sleep(_LOOK_S)
            if worker.process.replied:
                worker.process.result()  # raises what the worker raised, or that it died by itself

    def _now(self) -> float:
        return time.monotonic() - self._plan.epoch_s

    def _begin(self, worker: _Life) -> None:
        self._names.append(worker.name)
        self._plan.file_of(worker.name).touch()
        worker.process.start(live, self._plan, worker.number, worker.life, self._until_s)

    def _fork(self, number: int, life: int) -> _Life:
        worker = self._workers[number] = _Life(number, life, self._new_worker())
        return worker

    def _renew(self, killed: _Life) -> None:
        """Gives a worker that was killed its next life."""
        worker = self._fork(killed.number, killed.life + 1)
        worker.process.wait_ready()
        self._begin(worker)

    def _has_called(self, worker: _Life) -> bool:
        if worker.process.replied:
            worker.process.result()  # raises what ended it
        return self._plan.file_of(worker.name).read_bytes().count(b"\n") >= 2 * _CALLS

    def _disturb(self, name: str, disturbance: Disturbance, for_s: float) -> None:
        began_s = self._now()
        with disturbance.act():
            time.sleep(for_s if disturbance.lasts else 0.0)
        times = {"begin_s": began_s, "end_s": self._now()}
        self._events.append(Event(kind=name, process="", **times, loses_data=disturbance.loses_data))

    def _kill(self, number: int) -> _Life:
        """Kills a worker that is stopped."""
        worker = self._workers.pop(number)
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.kill()  # which also waits for its end
        self._add_event("kill", worker)
        worker.process.close()
        return worker

    def _continue(self, by_s: float) -> None:
        """Continues the workers whose stop is over by a moment."""
        for worker in self._workers.values():
            if worker.stopped_s is not None and worker.due_s <= by_s:
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGCONT)
                self._add_event("stop", worker)

    def _add_event(self, kind: str, worker: _Life) -> None:
        assert worker.stopped_s is not None
        self._events.append(Event(kind=kind, process=worker.name, begin_s=worker.stopped_s, end_s=self._now()))
        worker.stopped_s = None

    def _stop(self, worker: _Life, choice: float, for_s: float = 0.0) -> None:
        """Stops a worker in the middle of a call, if one begins soon: most of the time it pauses."""
        if worker.stopped_s is not None:
            return
        worker.stopped_s = self._now()
        give_up, lines = time.monotonic() + _AIM_S, 0
        with self._plan.file_of(worker.name).open("rb") as file:
            while True:
                lines += file.read().count(b"\n")
                over = time.monotonic() > give_up
                if lines % 2 or over:  # each call is a line at its start and one at its end
                    time.sleep(choice * _LATEST_S)
                    os.kill(worker.process.pid, signal.SIGSTOP)
                    lines += file.read().count(b"\n")
                    if lines % 2 or over:
                        break
                    os.kill(worker.process.pid, signal.SIGCONT)
                time.sleep(_AIM_LOOK_S)
        worker.due_s = self._now() + for_s
