"""Kills, stops and continues the workers, and disturbs the store where its author says how."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from dataplane_testkit._author import Disturbance
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_testkit._workers import Worker
from dataplane_testkit.chaos.history import Event
from dataplane_testkit.chaos.schedule import Disruption
from dataplane_testkit.chaos.worker import live

#: Seconds between two looks at workers that end.
_LOOK_S: Final = 0.02
#: Seconds for which it looks for the start of a call of the worker that it is about to kill or stop, and between two
#: looks.
_AIM_S: Final = 1.0
_AIM_LOOK_S: Final = 0.0002
#: The most seconds from the start of that call to the kill or stop.
_LATEST_S: Final = 0.0015
#: How many calls a worker has made when `Nemesis.kill_all` kills it.
_CALLS: Final = 15


class Nemesis:
    """The workers of a run, and what is done to them. Each killed worker gets a new life.

    Args:
        new_worker: Starts a process with a client of the store.
        arguments: Worker, life and end of the run -> the arguments of `live`.
        events: Gets what was done.
        now: The seconds since the run began.
        disturbances: Name -> what can be done to the store.
    """

    def __init__(
        self,
        new_worker: Callable[[], Worker],
        arguments: Callable[[int, int, float], tuple[Any, ...]],
        events: list[Event],
        now: Callable[[], float],
        disturbances: Mapping[str, Disturbance],
    ) -> None:
        self._disturbances = disturbances
        self._new_worker = new_worker
        self._arguments = arguments
        self._events = events
        self._now = now
        self._workers: dict[int, tuple[int, Worker]] = {}
        self._files: dict[int, Path] = {}
        self._stopped: dict[int, tuple[float, float]] = {}  # worker -> since when, and when to continue it

    def __enter__(self) -> Nemesis:
        return self

    def __exit__(self, *exc: object) -> None:
        for _, worker in self._workers.values():
            worker.kill()
            worker.close()

    def start(self, count: int) -> None:
        """Starts the processes and waits until all are attached."""
        for number in range(count):
            self._workers[number] = 0, self._new_worker()
        for _, worker in self._workers.values():
            worker.wait_ready()

    def begin(self, until_s: float) -> None:
        """Lets all begin with their steps."""
        for number, (life, worker) in self._workers.items():
            self._begin(number, life, worker, until_s)

    def do(self, disruption: Disruption, until_s: float) -> None:
        """Kills or stops a worker, or disturbs the store. Continues the workers whose stop is over."""
        self.continue_those_due()
        number = disruption.worker
        life, _ = self._workers[number]
        if disruption.kind in ("kill", "stop") and number not in self._stopped:
            self._stop(number, disruption.choice, disruption.for_s)
        if disruption.kind == "kill":
            self._kill(number)
            self._renew(number, life + 1, until_s)
        elif disruption.kind == "disturb":
            name = sorted(self._disturbances)[int(disruption.choice * len(self._disturbances))]
            disturbance, began_s = self._disturbances[name], self._now()
            with disturbance.act():
                time.sleep(disruption.for_s if disturbance.lasts else 0.0)
            self._events.append(
                Event(kind=name, process="", begin_s=began_s, end_s=self._now(), loses_data=disturbance.loses_data)
            )

    def kill_all(self, count: int, seed: int, until_s: float) -> None:
        """Kills so many workers, each after some calls. When it returns, none is left."""
        rng, numbers = random.Random(seed), list(self._workers)
        count = max(count, len(numbers))
        for turn in range(count):
            number = numbers[turn % len(numbers)]
            life, _ = self._workers[number]
            eventually(partial(self._has_called, number), STARTS_S, f"the first calls of w{number}.{life}")
            self._stop(number, rng.random())
            self._kill(number)
            del self._workers[number]
            if turn < count - len(numbers):
                self._renew(number, life + 1, until_s)

    def continue_those_due(self) -> None:
        """Continues the workers whose stop is over."""
        for number, (_, due_s) in list(self._stopped.items()):
            if self._now() >= due_s:
                self._continue(number)

    def finish(self, give_up: float) -> None:
        """Waits until all workers have ended.

        Args:
            give_up: When a worker that has not ended is left to `__exit__`, by `time.monotonic`. Its last call is then
                one that never ended.
        """
        for number in list(self._stopped):
            self._continue(number)
        for _, worker in self._workers.values():
            while not worker.replied and time.monotonic() < give_up:
                time.sleep(_LOOK_S)
            if worker.replied:
                worker.result()  # raises what the worker raised
            # a worker that died by itself raises here

    def _has_called(self, number: int) -> bool:
        """Whether a worker has made some calls."""
        _, worker = self._workers[number]
        if worker.replied:
            worker.result()  # raises what ended it
        return self._files[number].read_bytes().count(b"\n") >= 2 * _CALLS

    def _kill(self, number: int) -> None:
        """Kills a worker that is stopped."""
        life, worker = self._workers[number]
        stopped_s, _ = self._stopped.pop(number)
        os.kill(worker.pid, signal.SIGKILL)
        worker.kill()  # which also waits for its end
        self._events.append(Event(kind="kill", process=f"w{number}.{life}", begin_s=stopped_s, end_s=self._now()))
        worker.close()

    def _stop(self, number: int, choice: float, for_s: float = 0.0) -> None:
        """Stops a worker in the middle of a call, if one begins soon: most of the time it pauses."""
        began_s = self._now()
        self._stop_in_a_call(number, choice * _LATEST_S)
        self._stopped[number] = began_s, self._now() + for_s

    def _stop_in_a_call(self, number: int, late_s: float) -> None:
        pid, give_up, lines = self._workers[number][1].pid, time.monotonic() + _AIM_S, 0
        with self._files[number].open("rb") as file:
            while True:
                lines += file.read().count(b"\n")
                over = time.monotonic() > give_up
                if lines % 2 or over:  # each call is a line at its start and one at its end
                    time.sleep(late_s)
                    os.kill(pid, signal.SIGSTOP)
                    lines += file.read().count(b"\n")
                    if lines % 2 or over:
                        return
                    os.kill(pid, signal.SIGCONT)
                time.sleep(_AIM_LOOK_S)

    def _renew(self, number: int, life: int, until_s: float) -> None:
        """Gives a worker that was killed its next life."""
        self._workers[number] = life, self._new_worker()
        self._workers[number][1].wait_ready()
        self._begin(number, life, self._workers[number][1], until_s)

    def _begin(self, number: int, life: int, worker: Worker, until_s: float) -> None:
        arguments = self._arguments(number, life, until_s)
        self._files[number] = Path(arguments[3])
        worker.start(live, *arguments)

    def _continue(self, number: int) -> None:
        if number in self._stopped:
            began_s, _ = self._stopped.pop(number)
            life, worker = self._workers[number]
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGCONT)
            self._events.append(Event(kind="stop", process=f"w{number}.{life}", begin_s=began_s, end_s=self._now()))
