"""Random schedules on the ledger and on `NaiveLedger`, compared after every step.

    python core/tests/ledger/simulation.py --steps 1000000 --seed 0

Time jumps forward, so leases and puts end; partitions are registered anew; the store is full now and then; what is
written is saved and loaded. A schedule is a list of plain steps that a seed determines. If the two differ, the schedule
is shrunk by leaving out steps as long as they still differ, and printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
from naive_ledger import EMPTY, FLOAT, INT, INTS, NaiveLedger, Refused

from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import Ledger, StateReader, commands, to_state

__all__ = ["Difference", "Schedule", "run", "shrink", "simulate"]

NAMES = ["p", "q"]
FIELDS = ["x", "y"]
TASKS = ["t", "u"]
IDS = [f"k{group}_g{member}" for group in range(5) for member in range(3)]
TAGS = [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 2, "rare": "r"}, {}]
FILTERS = [None, None, {"n": (">=", 1)}, {"n": ("in", [0, 2])}, {"n": (">=", 2), "rare": ("==", "r")}]
#: Steps of a schedule, and how often all that is there is compared.
EPISODE = 5_000
COMPARE_EVERY = 20

#: An operation and what it is called with.
Step = tuple[str, dict[str, Any]]


class Difference(AssertionError):
    """The ledger and the model differ."""


@dataclass(frozen=True)
class Schedule:
    """The options of a ledger, and steps."""

    options: dict[str, Any]
    steps: list[Step]

    @classmethod
    def drawn(cls, seed: int, num_steps: int) -> Schedule:
        """The schedule of a seed."""
        dice = random.Random(seed)
        options = {
            "capacity_bytes": dice.choice([None, 200, 400]),
            "overwrite": dice.random() < 0.8,
            "self_expiring": dice.random() < 0.5,
        }
        names, weights = list(_DRAW), [weight for weight, _ in _DRAW.values()]
        steps: list[Step] = [("register", _register(dice) | {"name": name, "keep": False}) for name in NAMES]
        for name in dice.choices(names, weights, k=num_steps):
            steps.append((name, _DRAW[name][1](dice)))
        return cls(options, steps)


def _part(dice: random.Random) -> str:
    return dice.choice("pppq")


def _register(dice: random.Random) -> dict[str, Any]:
    drawn = {"tasks": dice.sample(TASKS, dice.randint(1, 2)), "total": dice.choice([None, 4, 8, 12])}
    return drawn | {"name": _part(dice), "group": dice.choice([None, None, 2, 3]), "keep": dice.random() < 0.7}


def _put(dice: random.Random) -> dict[str, Any]:
    ids = dice.sample(IDS, dice.randint(1, 5))
    if dice.random() < 0.5:  # whole groups
        ids = [each for each in IDS if each[:2] in {one[:2] for one in ids[:2]}][: dice.choice([2, 3, 6])]
    fields = dice.choice([["x"], ["y"], ["x", "y"], ["x", "y"], []])
    tags = dice.choices(TAGS, k=len(ids)) if dice.random() < 0.6 or not fields else None
    drawn = {"name": _part(dice), "ids": ids, "fields": fields, "size": 8 * bool(fields), "tags": tags}
    spec = dice.choice([INT, FLOAT, EMPTY, EMPTY, INTS, INTS] if dice.random() < 0.1 else [INTS])
    return drawn | {"spec": spec, "ttl_s": dice.choice([3.0, 30.0])}


def _claim(dice: random.Random) -> dict[str, Any]:
    return {
        "name": _part(dice),
        "task": dice.choice("tttu"),
        "fields": dice.choice([["x"], ["y"], ["x", "y"]]),
        "size": dice.choice([1, 2, 2, 3, 4, 6, 6]),
        "all_or_nothing": dice.random() < 0.4,
        "lease_s": dice.choice([None, 2.0, 5.0, 5.0, 20.0]),
        "tag_filter": dice.choice(FILTERS),
        "sampler": dice.choice(["first_write", "first_write", "freshest"]),
    }


def _settle(dice: random.Random) -> dict[str, Any]:
    return {
        "op": dice.choice(["ack", "nack", "renew"]),
        "ago": dice.choice([0, 0, 0, 1, 2, 5]),
        "part": dice.choice([0, 0, 0, 1, 2]),
    }


#: Operation -> how often, and what it is called with.
_DRAW: dict[str, tuple[float, Callable[[random.Random], dict[str, Any]]]] = {
    "register": (1.2, _register),
    "put": (24, _put),
    "begin": (6, _put),
    "commit": (5, lambda dice: {"ago": dice.randrange(4)}),
    "abort": (1, lambda dice: {"ago": dice.randrange(4)}),
    "clear": (7, lambda dice: {"name": _part(dice), "ids": dice.sample(IDS, dice.randint(1, 4))}),
    "clear_all": (0.1, lambda dice: {"name": _part(dice)}),
    "claim": (30, _claim),
    "settle": (18, _settle),
    "set_cursor": (
        0.7,
        lambda dice: {
            "name": _part(dice),
            "task": dice.choice("tu"),
            "ids": dice.sample(IDS, 4),
            "create": dice.random() < 0.5,
        },
    ),
    "wait": (8, lambda dice: {"seconds": dice.choice([0.125, 0.5, 0.5, 1.0, 3.0, 10.0])}),
    "save_and_load": (0.3, lambda dice: {"seconds": dice.choice([-50.0, 0.0, 1000.0])}),
}


class _Run:
    """A ledger and a model that take the same steps."""

    def __init__(self, options: dict[str, Any], compare_every: int) -> None:
        self.options, self.compare_every = options, compare_every
        self.ledger = Ledger(**options)
        self.model = NaiveLedger(**options)
        self.now = 0.0
        self.count = 0
        self.writes: list[int] = []  # of puts that were begun, the last one last
        self.claims: list[tuple[str, str, list[str], str]] = []

    def step(self, name: str, arguments: dict[str, Any]) -> None:
        self.count += 1
        self.expire()
        getattr(self, name)(**arguments)
        if self.count % self.compare_every == 0:
            self.compare()

    def expire(self) -> None:
        self.model.expire(self.now)
        if not self.options["self_expiring"]:
            due = self.ledger.apply(commands.Due(), self.now)
            if due is not None:
                self.ledger.apply(due, self.now)

    def both(self, command: Any, expected: Callable[[], Any], of: Callable[[Any], Any] = lambda reply: None) -> Any:
        """Runs a command and what the model does. Returns the reply, or None if both refuse."""
        try:
            reply = self.ledger.apply(command, self.now)
            found: Any = ("ok", of(reply))
        except DataPlaneError as error:
            reply, found = None, (type(error).__name__, list(getattr(error, "sample_ids", ())))
        try:
            told = ("ok", expected())
        except Refused as refusal:
            told = refusal.answer
        self.same(command, found, told)
        return reply

    def same(self, what: Any, found: Any, expected: Any) -> None:
        if found != expected:
            raise Difference(f"{what}: the ledger says {found}. Expected {expected}.")

    # --- steps --------------------------------------------------------------------------------------------------------

    def register(self, name: str, tasks: list[str], total: int | None, group: int | None, keep: bool) -> None:
        kept = "keep" if keep else "replace"
        command = commands.Register(name, FIELDS, total, tasks, group, {}, f"e{self.count}", if_exists=kept)
        self.both(command, lambda: self.model.register(name, tasks, total, group, keep))

    def begin(
        self, name: str, ids: list[str], fields: list[str], size: int, tags: Any, spec: Any, ttl_s: float
    ) -> None:
        write = self.count * 100
        specs = {field: spec if field == "y" else INT for field in fields}
        writes = [commands.Write(fields, [size] * len(ids))] if fields else []
        command = commands.BeginPut(name, ids, specs, writes, tags, None, write_id=write, ttl_s=ttl_s)
        end = self.now + ttl_s
        if self.both(command, lambda: self.model.begin(write, name, ids, specs, size, tags, end, self.now)) is not None:
            self.writes.append(write)

    def put(self, **arguments: Any) -> None:
        before = len(self.writes)
        self.begin(**arguments)
        if len(self.writes) > before:
            self.commit(ago=0)

    def commit(self, ago: int) -> None:
        if ago < len(self.writes):
            write = self.writes.pop(-1 - ago)
            self.both(commands.CommitPut(write), lambda: self.model.commit(write, self.now))

    def abort(self, ago: int) -> None:
        if ago < len(self.writes):
            write = self.writes.pop(-1 - ago)
            self.both(commands.AbortPut(write), lambda: self.model.abort(write))

    def clear(self, name: str, ids: list[str] | None) -> None:
        reply = self.both(
            commands.Clear(name, ids), lambda: self.model.clear(name, ids, self.now), lambda reply: reply[0]
        )
        self.ledger.apply(commands.Collected(reply[1]), self.now)

    def clear_all(self, name: str) -> None:
        self.clear(name, None)

    def claim(self, name: str, task: str, fields: list[str], size: int, **asked: Any) -> None:
        token = f"k{self.count}"
        command = commands.ClaimSamples(name, task, fields, size, token=token, **asked)
        reply = self.both(
            command,
            lambda: self.model.claim(name, task, fields, size, self.now, token=token, **asked),
            lambda reply: (list(reply.sample_ids), list(reply.tags), reply.exhausted, reply.num_ready),
        )
        if reply is not None and reply.sample_ids and asked["lease_s"] is not None:
            self.claims = [*self.claims[-8:], (name, task, list(reply.sample_ids), token)]

    def settle(self, op: str, ago: int, part: int) -> None:
        if ago >= len(self.claims):
            return
        name, task, ids, token = self.claims[-1 - ago]
        ids = ids[part and len(ids) // 2 :] if part < 2 else ids[: max(1, len(ids) // 2)]
        tokens = [token] * len(ids)
        kinds = {"ack": commands.Ack, "nack": commands.Nack}
        command = commands.Renew(name, task, ids, tokens, 4.0) if op == "renew" else kinds[op](name, task, ids, tokens)
        self.both(command, lambda: self.model.settle(op, name, task, ids, tokens, self.now + 4.0))

    def set_cursor(self, name: str, task: str, ids: list[str], create: bool) -> None:
        command = commands.SetCursor(name, task, ids, create)
        self.both(command, lambda: self.model.set_cursor(name, task, ids, create), lambda reply: reply)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def save_and_load(self, seconds: float) -> None:
        """In another process, whose clock shows another time."""
        saved = [msgpack.packb(section) for section in to_state(self.ledger, self.now)]
        self.now += seconds
        reader = StateReader(self_expiring=self.options["self_expiring"])
        for section in saved:
            reader.take(msgpack.unpackb(section), self.now)
        reader.end()
        self.ledger = reader.ledger
        self.ledger._capacity_bytes, self.ledger._overwrite = self.options["capacity_bytes"], self.options["overwrite"]
        for put in self.model.pending.values():
            put["end"] = max(put["end"], self.now - seconds) + seconds
        for part in self.model.parts.values():
            for row in part["rows"]:
                row["holds"] = {task: (token, end + seconds, done) for task, (token, end, done) in row["holds"].items()}

    def locate(self, name: str, ids: list[str], fields: list[str]) -> None:
        def found(located: commands.Located) -> Any:
            cells: Any = [[None] * len(ids) for _ in fields]
            for part in located.parts:
                for field in part.fields:
                    for row, position in zip(part.rows, part.positions, strict=True):
                        cells[fields.index(field)][row] = (part.write_id, position)
            return [cells, [located.specs[field] for field in fields]]

        self.both(commands.Locate(name, ids, fields), lambda: self.model.locate(name, ids, fields), found)

    # --- all that is there --------------------------------------------------------------------------------------------

    def compare(self) -> None:
        self.expire()
        self.same("held bytes", self.ledger.held_bytes, self.model.held_bytes())
        names = self.ledger.apply(commands.ListPartitions(), self.now).partition_ids
        self.same("partitions", sorted(names), sorted(self.model.parts))
        for name, part in self.model.parts.items():
            listed = self.ledger.apply(commands.ListSamples(name), self.now)
            self.same("samples", list(listed.sample_ids), [row["id"] for row in part["rows"]])
            self.same("tags", list(listed.tags), [row["tags"] for row in part["rows"]])
            for fields in (["x"], ["y"], ["x", "y"]):
                ids = [row["id"] for row in part["rows"] if row["cells"].keys() >= set(fields)]
                for some in (ids, *([each] for each in ids)):
                    if some:
                        self.locate(name, some, fields)
            told = self.ledger.apply(commands.Inspect(name), self.now)
            self.same("counts", (told.num_samples, told.num_cleared), (len(part["rows"]), part["cleared"]))
            for task in part["tasks"]:
                holds = [row["holds"][task] for row in part["rows"] if task in row["holds"]]
                ready = sum(map(len, self.model.ready(part, task, FIELDS, None)))
                expected = (ready, sum(not hold[2] for hold in holds), sum(hold[2] for hold in holds))
                one = told.tasks[task]
                self.same(f"task {task}", (one.num_ready, one.num_leased, one.num_consumed), expected)
                consumed = self.ledger.apply(commands.Consumed(name, [task]), self.now)
                self.same("consumed", consumed, self.model.consumed(name, task))


def run(schedule: Schedule, compare_every: int = COMPARE_EVERY) -> tuple[int, str] | None:
    """Runs a schedule. Returns the number of the step after which the two differ and how, or None."""
    both = _Run(schedule.options, compare_every)
    for number, (name, arguments) in enumerate(schedule.steps):
        try:
            both.step(name, arguments)
        except Exception as error:  # also what the ledger must not raise
            return number, f"{type(error).__name__}: {error}"
    return None


def shrink(schedule: Schedule) -> Schedule:
    """A schedule that still differs, with as few steps as leaving out steps can reach."""
    failed = run(schedule, 1)
    assert failed is not None
    steps = schedule.steps[: failed[0] + 1]
    size = len(steps) // 2
    while size:
        at = 0
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            found = run(Schedule(schedule.options, shorter), 1)
            if found is None:
                at += size
            else:
                steps = shorter[: found[0] + 1]
        size //= 2
    return Schedule(schedule.options, steps)


def simulate(num_steps: int, seed: int) -> None:
    """Runs schedules with so many steps in all.

    Raises:
        Difference: The two differ. It has the shrunk schedule.
    """
    for first in range(0, num_steps, EPISODE):
        schedule = Schedule.drawn(seed * 1_000_003 + first, min(EPISODE, num_steps - first))
        if run(schedule) is not None:
            small = shrink(schedule)
            found = run(small, 1)
            assert found is not None
            lines = "\n".join(f"    {step}," for step in small.steps)
            raise Difference(f"{found[1]}\nSchedule({small.options}, [\n{lines}\n])")


def main() -> None:
    """Runs the simulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.process_time()
    try:
        simulate(arguments.steps, arguments.seed)
    except Difference as error:
        sys.exit(str(error))
    print(f"{arguments.steps} steps: no difference, {time.process_time() - start:.0f} s of CPU")


if __name__ == "__main__":
    main()
