"""Random histories of commands, for ledgers that must answer alike. The rules themselves are compared with those of
Redis' scripts, by `plugins/redis_store/tests/differential.py`.

A seed determines a history. Time jumps forward, so leases and puts end; partitions are registered anew; the store is
full now and then.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgpack

from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import Command, Ledger, StateReader, commands, to_state
from dataplane_core.spec import FieldSpec

IDS = [f"k{group}_g{member}" for group in range(5) for member in range(3)]
TAGS = [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 2, "rare": "r"}, {}]
FILTERS = [None, None, {"n": (">=", 1)}, {"n": ("in", [0, 2])}, {"n": (">=", 2), "rare": ("==", "r")}]
INT, FLOAT = FieldSpec("tensor", "int64", 1), FieldSpec("tensor", "float32", 1)
ODD_SPECS = [INT, FLOAT, *2 * [FieldSpec.of_empty_lists(), FieldSpec.of_ints(1)]]
#: Operation -> how often.
OPERATIONS = {
    "register": 1.2,
    "put": 24,
    "begin": 6,
    "commit": 5,
    "abort": 1,
    "clear": 7,
    "clear_all": 0.1,
    "claim": 30,
    "settle": 18,
    "set_cursor": 0.7,
    "locate": 5,
    "wait": 8,
}


def answer(ledger: Ledger, command: Command[Any], now: float) -> Any:
    """The reply, or the refusal with all that it says. Garbage has no order."""
    try:
        reply = ledger.apply(command, now)
        return (reply[0], sorted(reply[1])) if isinstance(command, commands.ClearRequest) else reply
    except DataPlaneError as error:
        return type(error).__name__, str(error)


def described(ledger: Ledger, name: str, now: float) -> Any:
    """A description without the oldest leases: of several that are alike or were loaded, it may name any."""
    told = ledger.apply(commands.InspectRequest(name), now)
    return replace(told, tasks={task: replace(each, oldest_lease=None) for task, each in told.tasks.items()})


def contents(ledger: Ledger, now: float) -> Any:
    """All that clients can ask for."""
    reads = [commands.ListRequest, commands.ExportRequest, lambda name: commands.FieldsRequest(name, IDS)]
    reads += [lambda name, task=task: commands.ConsumptionRequest(name, [task]) for task in "tu"]
    found = {}
    ledger.apply(
        commands.ClearRequest("nobody", None), now
    )  # what puts reserved whose time is over is given up by then
    for name in ledger.apply(commands.ListPartitionsRequest(), now).partition_ids:
        found[name] = [described(ledger, name, now), *[answer(ledger, read(name), now) for read in reads]]
    return found, ledger.held_bytes


def saved_and_loaded(ledger: Ledger, now: float = 0.0, then: float | None = None) -> Ledger:
    """The ledger in another process, whose clock shows another time."""
    reader = StateReader(self_expiring=ledger._self_expiring)
    for section in [msgpack.packb(each) for each in to_state(ledger, now)]:
        reader.take(msgpack.unpackb(section), now if then is None else then)
    reader.end()
    reader.ledger._capacity_bytes, reader.ledger._overwrite = ledger._capacity_bytes, ledger._overwrite
    return reader.ledger


class History:
    """Commands one after another. Those that name a put or a lease name one that was answered before."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.options = {"capacity_bytes": self.dice.choice([None, 200, 400]), "overwrite": self.dice.random() < 0.8}
        self.now = 0.0
        self.count = 0
        self._next: list[Command[Any]] = [self._register(name, keep=False) for name in "qp"]
        self._begun: list[int] = []
        self._claims: list[commands.ClaimRequest] = []
        self._given: dict[str, list[str]] = {}

    def command(self) -> Command[Any]:
        """The next command."""
        while not self._next:
            (name,) = self.dice.choices(list(OPERATIONS), list(OPERATIONS.values()))
            self.count += 1
            drawn = getattr(self, f"_{name}")()
            self._next += [] if drawn is None else [drawn]
        return self._next.pop()

    def heard(self, command: Command[Any], reply: Any) -> None:
        """What it was answered."""
        refused = isinstance(reply, tuple) and isinstance(reply[0], str)
        if isinstance(command, commands.BeginPut):
            if not refused:
                self._begun.append(reply)
            elif self._next:
                self._next.pop()  # its commit
        elif isinstance(command, commands.ClearRequest) and not refused:
            self._next.append(commands.Collected(reply[1]))
        elif isinstance(command, commands.ClaimRequest) and not refused and command.lease_s and reply.sample_ids:
            self._claims = [*self._claims[-8:], command]
            self._given[command.token] = list(reply.sample_ids)

    def _part(self) -> str:
        return self.dice.choice("pppq")

    def _register(self, name: str = "", keep: bool | None = None) -> Command[Any]:
        dice, keep = self.dice, self.dice.random() < 0.7 if keep is None else keep
        tasks, total = dice.sample("tu", dice.randint(1, 2)), dice.choice([None, 4, 8, 12])
        group, how = dice.choice([None, None, 2, 3]), "keep" if keep else "replace"
        where = name or self._part()
        return commands.RegisterRequest(
            where, ["x", "y"], total, tasks, group, {}, f"e{self.count}{name}", if_exists=how
        )

    def _begin(self) -> Command[Any]:
        dice, ids = self.dice, self.dice.sample(IDS, self.dice.randint(1, 5))
        if dice.random() < 0.5:  # whole groups
            ids = [each for each in IDS if each[:2] in {one[:2] for one in ids[:2]}][: dice.choice([2, 3, 6])]
        fields = dice.choice([["x"], ["y"], ["x", "y"], ["x", "y"], []])
        tags = dice.choices(TAGS, k=len(ids)) if dice.random() < 0.6 or not fields else None
        odd = dice.choice(ODD_SPECS) if dice.random() < 0.1 else INT
        specs = {field: odd if field == "y" else INT for field in fields}
        writes = [commands.Write(fields, [8] * len(ids))] if fields else []
        put = {"write_id": self.count * 100, "ttl_s": dice.choice([3.0, 30.0]), "request_id": f"r{self.count}"}
        return commands.BeginPut(self._part(), ids, specs, writes, tags, None, **put)

    def _put(self) -> Command[Any]:
        self._next.append(commands.CommitPut(self.count * 100))
        return self._begin()

    def _commit(self, kind: Any = commands.CommitPut) -> Command[Any] | None:
        ago = self.dice.randrange(4)
        return kind(self._begun.pop(-1 - ago)) if ago < len(self._begun) else None

    def _abort(self) -> Command[Any] | None:
        return self._commit(commands.AbortPut)

    def _clear(self) -> Command[Any]:
        return commands.ClearRequest(self._part(), self.dice.sample(IDS, self.dice.randint(1, 4)))

    def _clear_all(self) -> Command[Any]:
        return commands.ClearRequest(self._part(), None)

    def _locate(self) -> Command[Any]:
        return commands.Locate(self._part(), self.dice.sample(IDS, self.dice.randint(1, 2)), self._fields())

    def _fields(self) -> list[str]:
        return self.dice.choice([["x"], ["y"], ["x", "y"]])

    def _claim(self) -> Command[Any]:
        dice = self.dice
        return commands.ClaimRequest(
            *(self._part(), dice.choice("tttu"), self._fields(), dice.choice([1, 2, 2, 3, 4, 6, 6])),
            all_or_nothing=dice.random() < 0.4,
            lease_s=dice.choice([None, 2.0, 5.0, 5.0, 20.0]),
            tag_filter=dice.choice(FILTERS),
            sampler=dice.choice(["first_write", "first_write", "freshest"]),
            token=f"k{self.count}",
        )

    def _settle(self) -> Command[Any] | None:
        ago, part = self.dice.choice([0, 0, 0, 1, 2, 5]), self.dice.choice([0, 0, 0, 1, 2])
        if ago >= len(self._claims):
            return None
        claim = self._claims[-1 - ago]
        ids, token = self._given[claim.token], claim.token
        ids = ids[part and len(ids) // 2 :] if part < 2 else ids[: max(1, len(ids) // 2)]
        settled = (claim.partition_id, claim.task_name, ids, [token] * len(ids))
        kind = self.dice.choice([commands.AckRequest, commands.NackRequest, commands.RenewRequest])
        return kind(*settled, 4.0) if kind is commands.RenewRequest else kind(*settled)

    def _set_cursor(self) -> Command[Any]:
        some = self.dice.sample(IDS, 4)
        return commands.SetCursorRequest(self._part(), self.dice.choice("tu"), some, self.dice.random() < 0.5)

    def _wait(self) -> None:
        self.now += self.dice.choice([0.125, 0.5, 0.5, 1.0, 3.0, 10.0])
