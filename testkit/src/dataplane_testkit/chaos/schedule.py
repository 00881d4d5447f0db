"""What each process does, in which order: random, and the same again for the same seed.

A step does not depend on what the store replies. Where it needs something that only the run knows, such as a claim that
is held, the step has a number between 0 and 1 that chooses among what there is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

PARTITIONS: Final = ("p0", "p1")
#: The fields that are put together first, and the one that is put later.
BASE: Final = ("x", "y", "o")
LATER: Final = "z"


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer task.

    Attributes:
        fields: The fields that its claims require.
        leased: Whether its claims have leases.
    """

    fields: tuple[str, ...]
    leased: bool


TASKS: Final[Mapping[str, Task]] = {
    "train": Task(("x", "y", "o"), leased=True),
    "once": Task(("x",), leased=False),
    "score": Task(("z",), leased=True),
}

#: Step -> its weight for a producer, a consumer and one that does a bit of everything.
_WEIGHTS: Final[Mapping[str, tuple[int, int, int]]] = {
    "put": (40, 4, 12),
    "put_later": (14, 4, 4),
    "overwrite": (8, 2, 4),
    "put_again": (4, 1, 2),
    "get": (10, 10, 22),
    "get_one_field": (4, 4, 6),
    "claim": (6, 40, 16),
    "wait": (0, 4, 2),
    "ack": (4, 18, 6),
    "nack": (1, 4, 3),
    "renew": (1, 5, 2),
    "clear": (8, 8, 6),
    "clear_all": (0, 0, 1),
    "register": (0, 0, 1),
    "keep": (1, 1, 2),
    "list": (1, 2, 8),
    "consumed": (0, 3, 4),
    "save": (0, 0, 1),
}

#: The kinds of steps.
KINDS: Final = frozenset(_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Plan:
    """What all schedules of a run have in common.

    Attributes:
        seed: The random seed.
        pause_s: The mean pause before a step, in seconds.
        lease_s: The lease of a claim, in seconds.
        steps: The kinds of steps that the backend can take.
        tasks: The tasks whose claims the backend can serve.
        leases: Whether the claims of leased tasks have leases.
        tags: Whether puts have a tag with their version.
    """

    seed: int
    pause_s: float
    lease_s: float
    steps: frozenset[str] = KINDS
    tasks: tuple[str, ...] = tuple(TASKS)
    leases: bool = True
    tags: bool = True

    def lease_of(self, task: str) -> float | None:
        """The lease of a task's claims, in seconds. None: they have none."""
        return self.lease_s if self.leases and TASKS[task].leased else None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a process.

    Attributes:
        kind: What to do.
        pause_s: How long to wait before.
        partition: Where.
        count: How many samples.
        task: For which task.
        choice: Chooses among what there is, from 0 to less than 1.
        lengths: The rows of field ``x`` have so many elements.
    """

    kind: str
    pause_s: float
    partition: str
    count: int
    task: str
    choice: float
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.pause_s:.3f} s, then {self.kind} {self.partition} {self.task} {self.count} samples, "
            f"choice {self.choice:.3f}, lengths {' '.join(map(str, self.lengths))}"
        )


def steps(plan: Plan, worker: int, life: int) -> Iterator[Step]:
    """The steps of a worker in one of its lives, without end."""
    rng = random.Random(f"{plan.seed} {worker} {life}")
    kinds = sorted(plan.steps)
    weights = [_WEIGHTS[kind][worker % 3] for kind in kinds]
    while True:
        count = rng.choice((1, 1, 2, 3, 4, 6))
        yield Step(
            kind=rng.choices(kinds, weights)[0],
            pause_s=round(min(rng.expovariate(1 / plan.pause_s), 5 * plan.pause_s), 4),
            partition=rng.choices(PARTITIONS, (3, 1))[0],
            count=count,
            task=rng.choice((*plan.tasks, plan.tasks[0])),
            choice=_choice(rng),
            lengths=tuple(rng.choice((1, 3, 200, 1000)) for _ in range(count)),
        )


#: What can be done to a run -> its weight. ``disturb``: something that the author of the store supplies.
DISRUPTIONS: Final[Mapping[str, int]] = {"kill": 5, "stop": 4, "disturb": 2}


@dataclass(frozen=True, slots=True)
class Disruption:
    """What is done to a worker or to the store.

    Attributes:
        at_s: When, in seconds since the run began.
        kind: ``kill``, ``stop``, or ``disturb``.
        worker: Which worker.
        for_s: How long it lasts.
        choice: Chooses among the disturbances that the author supplies, from 0 to less than 1.
    """

    at_s: float
    kind: str
    worker: int
    for_s: float
    choice: float


def disruptions(plan: Plan, workers: int, every_s: float, kinds: Sequence[str]) -> Iterator[Disruption]:
    """What is done to the workers of a run, without end.

    Args:
        plan: The plan.
        workers: How many workers there are.
        every_s: The mean time from one disruption to the next, in seconds.
        kinds: Those of `DISRUPTIONS` that happen. At least one.
    """
    rng = random.Random(f"{plan.seed} nemesis")
    at_s = every_s / 2
    weights = [DISRUPTIONS[kind] for kind in kinds]
    while True:
        at_s += rng.uniform(0.3, 1.7) * every_s
        kind = rng.choices(kinds, weights)[0]
        # some stops outlast the leases
        for_s = rng.choice((0.2, 0.5, 1.5, 3.0)) * plan.lease_s
        yield Disruption(round(at_s, 3), kind, rng.randrange(workers), for_s, rng.random())


def _choice(rng: random.Random) -> float:
    """From 0 to less than 1, with few digits: a rounded number may be 1, and choose what is not there."""
    return int(rng.random() * 10_000) / 10_000
