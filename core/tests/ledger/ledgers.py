"""Ledgers with a partition ``p``, commands of its clients, and ledgers that take the steps of one history.

The kit has the generator of histories. Time jumps forward, so leases and puts end; puts are begun and committed apart;
partitions are registered anew; the store is full now and then. The kit compares the rules with what backends do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import Command, Ledger, commands
from dataplane_core.ledger.state import pack_state, unpack_state
from dataplane_core.spec import FieldSpec, new_id
from dataplane_testkit import histories
from dataplane_testkit.histories import TASKS, Put, Wait

INT = FieldSpec("tensor", "int64", 1)


def register(num_samples=None, group=None, tasks=("t",), epoch="e"):
    return commands.RegisterRequest("p", ["x"], num_samples, list(tasks), group, {}, epoch)


def ledger(num_samples=None, group=None, tasks=("t",), **options):
    made = Ledger(**options)
    made.apply(register(num_samples, group, tasks), 0.0)
    return made


def begin(ids, fields=("x",), size=8, ttl_s=10.0, **more):
    """The begin of a put of cells of this size, in one write."""
    write = commands.Write(list(fields), [size] * len(ids))
    return commands.BeginPut("p", list(ids), dict.fromkeys(fields, INT), [write], ttl_s=ttl_s, **more)


def put(made, ids, fields=("x",), now=0.0, **more):
    """Returns the id of the write, and what its commit replied."""
    write_id = made.apply(begin(ids, fields, **more), now)
    return write_id, made.apply(commands.CommitPut(write_id), now)


def claim(count=1, fields=("x",), task="t", **options):
    options = {"all_or_nothing": True, "lease_s": None, "token": new_id(), **options}
    return commands.ClaimRequest("p", task, list(fields), count, **options)


# --- histories --------------------------------------------------------------------------------------------------------


def answer(ledger: Ledger, command: Command[Any], now: float) -> Any:
    """The reply, or the refusal with all that it says.

    Garbage has no order. Of several oldest leases that are alike, a description may name any.
    """
    try:
        reply = ledger.apply(command, now)
    except DataPlaneError as error:
        return type(error).__name__, str(error)
    if isinstance(command, commands.ClearRequest):
        return reply[0], sorted(reply[1])
    if isinstance(command, commands.InspectRequest):
        return replace(reply, tasks={name: replace(each, oldest_lease=None) for name, each in reply.tasks.items()})
    return reply


def contents(ledger: Ledger, now: float) -> Any:
    """All that clients can ask for."""
    reads = [commands.ListRequest, commands.ExportRequest, commands.InspectRequest]
    reads += [lambda name: commands.FieldsRequest(name, ledger.apply(commands.ListRequest(name), now).sample_ids)]
    reads += [lambda name, task=task: commands.ConsumptionRequest(name, [task]) for task in TASKS]
    found = {}
    # gives up what puts reserved whose time is over
    ledger.apply(commands.ClearRequest("nobody", None, request_id=None), now)
    for name in ledger.apply(commands.ListPartitionsRequest(), now):
        found[name] = [answer(ledger, read(name), now) for read in reads]
    return found, ledger.held_bytes


def state_of(ledger: Ledger) -> Any:
    """All that a ledger knows, however its rows share it. Garbage has no order, nor have the tasks that hold a row."""
    next_write, next_seq, fields, writes, partitions, pending, garbage, done = msgspec.msgpack.decode(
        pack_state(ledger), strict=False, type=tuple[int, int, list, list, list, dict[int, Any], list, dict]
    )
    for partition in partitions:
        cells, holds, rows = partition[-3:]
        partition[-3:] = [
            (*row[:3], fields[cells[row[3]][0]], cells[row[3]][1], *row[4:6], sorted(holds[row[6]].items()))
            for row in rows
        ]
    writes = [(write_id, fields[place], *rest) for write_id, place, *rest in writes]
    return next_write, next_seq, writes, partitions, pending, sorted(map(repr, garbage)), done


def is_alike(command: Command[Any], reply: Any, again: Any) -> bool:
    """Whether a command that came again was answered as the first time. What it freed is said once."""
    refused = isinstance(reply, tuple) and isinstance(reply[0], str)
    match command:
        case commands.CommitPut():
            return again[0] == "StalePartitionError" if refused and reply[0] != "AlreadyDoneError" else again == []
        case commands.PutTags():
            return again == reply if refused else again[0] == "AlreadyDoneError"
        case commands.RegisterRequest() | commands.ClearRequest():
            return again[0] == reply[0]
    return again == reply


def saved_and_loaded(ledger: Ledger) -> Ledger:
    """The ledger in another process."""
    loaded = unpack_state(pack_state(ledger))
    loaded._capacity_bytes, loaded._overwrite = ledger._capacity_bytes, ledger._overwrite
    return loaded


class History:
    """The commands of a history, one after another, and the time of each."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.options = {"capacity_bytes": dice.choice([None, 200, 400]), "overwrite": dice.random() < 0.8}
        self.now = 0.0
        self._drawn = histories.History(dice)

    def commands(self, ledger: Ledger) -> Iterator[Command[Any]]:
        """The commands of the next step, drawn with a look at a ledger that has taken those before."""
        step = self._drawn.step(ledger, self.now)
        if isinstance(step, Wait):
            self.now += step.seconds
        elif isinstance(step, Put):
            yield from step.commands(ledger, self.now, ttl_s=30.0, size_bytes=8)
        else:
            yield step

    def heard(self, command: Command[Any], reply: Any) -> Command[Any] | None:
        """What a command was answered. Returns the command that follows: what a clear freed is deleted."""
        refused = isinstance(reply, tuple) and isinstance(reply[0], str)
        self._drawn.heard(command, None if refused else reply)
        return commands.Collected(reply[1]) if isinstance(command, commands.ClearRequest) and not refused else None
