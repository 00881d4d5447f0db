"""The rules of the ledger once more, as short as can be: lists that are searched, nothing that is kept up to date.

Names as in the ledger. Every answer is computed from the rows; an error is only the name of its class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dataplane_core.spec import FieldSpec

__all__ = ["EMPTY", "FLOAT", "INT", "INTS", "NaiveLedger", "Refused"]

INT, FLOAT = FieldSpec("tensor", "int64", 1), FieldSpec("tensor", "float32", 1)
EMPTY, INTS = FieldSpec.of_empty_lists(), FieldSpec.of_ints(1)
#: What a field holds, and what is written to it -> what it holds then.
FITS = {
    **{(INT, written): INT for written in (INT, EMPTY, INTS)},
    **{(FLOAT, written): FLOAT for written in (FLOAT, EMPTY)},
    **{(EMPTY, written): written for written in (INT, FLOAT, EMPTY, INTS)},
    **{(INTS, written): written for written in (INT, FLOAT, INTS)},
    (INTS, EMPTY): INTS,
}
#: What a field holds, and what was written to it before -> how that is read.
READINGS = {
    **{(each, each): each for each in (INT, FLOAT, EMPTY, INTS)},
    **{(each, EMPTY): replace(each, lists="empty") for each in (INT, FLOAT, INTS)},
    (INT, INTS): INT,
    (FLOAT, INTS): replace(FLOAT, lists="ints"),
}
_TESTS = {">=": lambda a, b: a >= b, "in": lambda a, b: a in b, "==": lambda a, b: a == b}


class Refused(Exception):
    """An operation is refused, with the name of the error's class and the ids that it names."""

    def __init__(self, name: str, ids: list[str] | None = None) -> None:
        super().__init__(name)
        self.answer = (name, ids or [])


class NaiveLedger:
    """A partition is a dict, and so is a row: id, seq, cells (field -> ref), tags, holds (task -> token, end, done)."""

    def __init__(self, capacity_bytes: int | None, overwrite: bool, self_expiring: bool) -> None:
        self.capacity_bytes, self.overwrite, self.self_expiring = capacity_bytes, overwrite, self_expiring
        self.parts: dict[str, dict[str, Any]] = {}
        self.pending: dict[int, dict[str, Any]] = {}
        self.sizes: dict[tuple[int, int], int] = {}  # ref -> bytes, of all puts ever
        self.seq = 0

    # --- what is there ------------------------------------------------------------------------------------------------

    def part(self, name: str) -> dict[str, Any]:
        if name not in self.parts:
            raise Refused("UnknownPartitionError")
        return self.parts[name]

    def row(self, part: dict[str, Any], sample_id: str) -> Any:
        return next((row for row in part["rows"] if row["id"] == sample_id), None)

    def task(self, part: dict[str, Any], task: str) -> None:
        if task not in part["tasks"]:
            raise Refused("UnknownTaskError")

    def held_bytes(self) -> int:
        refs = {ref for part in self.parts.values() for row in part["rows"] for ref in row["cells"].values()}
        return sum(self.sizes[ref] for ref in refs) + sum(put["size"] for put in self.pending.values())

    def units(self, part: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Rows, or groups with what is there of them, in order of first write."""
        if not part["group"]:
            return [[row] for row in part["rows"]]
        names = list(dict.fromkeys(group_of(row["id"]) for row in part["rows"]))
        return [[row for row in part["rows"] if group_of(row["id"]) == name] for name in names]

    def free(self, part: dict[str, Any], task: str, tag_filter: Any) -> list[list[dict[str, Any]]]:
        """Units that the task may be given, now or when their fields are written."""
        return [
            unit
            for unit in self.units(part)
            if not part["group"] or (len(unit) == part["group"] and group_of(unit[0]["id"]) not in part["broken"])
            if not any(task in row["holds"] for row in unit)
            if all(accepts(row["tags"], tag_filter) for row in unit)
        ]

    def ready(self, part: dict[str, Any], task: str, fields: list[str], tag_filter: Any) -> list[list[dict[str, Any]]]:
        return [unit for unit in self.free(part, task, tag_filter) if all(has(row, fields) for row in unit)]

    # --- time ---------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        for part in self.parts.values():
            for row in part["rows"]:
                row["holds"] = {task: hold for task, hold in row["holds"].items() if hold[2] or hold[1] > now}
        if not self.self_expiring:
            self.reap(now)

    def reap(self, now: float) -> None:
        self.pending = {write: put for write, put in self.pending.items() if put["end"] > now}

    # --- operations ---------------------------------------------------------------------------------------------------

    def register(self, name: str, tasks: list[str], total: int | None, group: int | None, keep: bool) -> None:
        if keep and name in self.parts:
            if self.parts[name]["group"] != group:
                raise Refused("InvalidRequestError")
            self.parts[name]["tasks"] = list(dict.fromkeys([*self.parts[name]["tasks"], *tasks]))
            if self.parts[name]["total"] is None and total is not None:
                held = [row["id"] for row in self.parts[name]["rows"]]
                self.parts[name] |= {"total": max(total, len(held)), "seen": held}
            return
        self.parts[name] = {"rows": [], "tasks": list(tasks), "total": total, "group": group, "seen": [], "broken": []}
        self.parts[name] |= {"specs": {}, "cleared": 0}

    def check_put(self, part: dict[str, Any], ids: list[str], specs: dict[str, Any]) -> None:
        for field, spec in specs.items():
            if (part["specs"].get(field, spec), spec) not in FITS:
                raise Refused("SchemaMismatchError")
        if part["group"]:
            new = [each for each in ids if not self.row(part, each)]
            there = [group_of(row["id"]) for row in part["rows"]] + [group_of(each) for each in new]
            if any(there.count(group_of(each)) > part["group"] for each in new):
                raise Refused("InvalidRequestError")
        if part["total"] is not None and len({*part["seen"], *ids}) > part["total"]:
            raise Refused("InvalidRequestError")
        rows = [row for each in ids if (row := self.row(part, each))]
        if not self.overwrite and any(field in row["cells"] for row in rows for field in specs):
            raise Refused("UnsupportedOperationError")

    def begin(
        self, write: int, name: str, ids: list[str], specs: Any, size: int, tags: Any, end: float, now: float
    ) -> None:
        self.reap(now) if self.self_expiring else None
        part = self.part(name)
        self.check_put(part, ids, specs)
        total = size * len(ids)
        if total and self.capacity_bytes is not None and self.held_bytes() + total > self.capacity_bytes:
            raise Refused("CapacityExceededError")
        known = [self.row(part, each) for each in ids]
        put = {"part": part, "name": name, "ids": ids, "specs": specs, "size": total, "tags": tags, "end": end}
        self.pending[write] = put | {"known": known}
        self.sizes |= {(write, place): size for place in range(len(ids))}

    def commit(self, write: int, now: float) -> None:
        self.reap(now) if self.self_expiring else None
        put = self.pending.pop(write, None)
        if put is None or self.parts.get(put["name"]) is not put["part"]:
            raise Refused("StalePartitionError")
        part = put["part"]
        if any(row is not None and not any(row is each for each in part["rows"]) for row in put["known"]):
            raise Refused("StalePartitionError")
        self.check_put(part, put["ids"], put["specs"])
        for field, spec in put["specs"].items():
            part["specs"][field] = FITS[part["specs"].get(field, spec), spec]
        for place, sample_id in enumerate(put["ids"]):
            row = self.row(part, sample_id)
            if row is None:
                row = {"id": sample_id, "seq": self.seq, "cells": {}, "written": {}}
                row |= {"tags": {}, "holds": {}}
                part["rows"].append(row)
                part["seen"].append(sample_id)
            self.seq += 1
            row["cells"] |= dict.fromkeys(put["specs"], (write, place))
            row["written"] |= put["specs"]
            row["tags"] |= put["tags"][place] if put["tags"] is not None else {}

    def locate(self, name: str, ids: list[str], fields: list[str]) -> list[Any]:
        """Of each field, where its cells are, and the spec by which they are read."""
        part = self.part(name)
        rows = [self.row(part, each) for each in ids]
        readings = [[READINGS[part["specs"][field], row["written"][field]] for field in fields] for row in rows]
        if any(each != readings[0] for each in readings):
            raise Refused("OpenCellsError")
        return [[[row["cells"][field] for row in rows] for field in fields], readings[0]]

    def abort(self, write: int) -> None:
        self.pending.pop(write, None)

    def clear(self, name: str, ids: list[str] | None, now: float) -> int:
        part = self.parts.get(name)
        gone = [] if part is None else [row for row in part["rows"] if ids is None or row["id"] in ids]
        if part is not None and ids is None:
            del self.parts[name]
        elif part is not None:
            part["rows"] = [row for row in part["rows"] if row["id"] not in ids]
            part["cleared"] += len(gone)
            part["broken"] += [group_of(row["id"]) for row in gone] if part["group"] else []
        self.reap(now) if self.self_expiring else None
        return len(gone)

    def claim(self, name: str, task: str, fields: list[str], size: int, now: float, **asked: Any) -> Any:
        part = self.part(name)
        self.task(part, task)
        if size % (part["group"] or 1):
            raise Refused("InvalidRequestError")
        wanted = size // (part["group"] or 1)
        ready = self.ready(part, task, fields, asked["tag_filter"])
        ready = ready[:wanted] if asked["sampler"] == "first_write" else ready[::-1][:wanted]
        all_written = part["total"] is not None and len(set(part["seen"])) >= part["total"]
        exhausted = (
            len(ready) < wanted and all_written and len(self.free(part, task, asked["tag_filter"])) == len(ready)
        )
        num_ready = sum(map(len, ready))
        if asked["all_or_nothing"] and len(ready) < wanted and not exhausted:
            ready = []
        rows = [row for unit in ready for row in unit]
        tags = [dict(row["tags"]) for row in rows]
        for row in rows:
            lease_s = asked["lease_s"]
            row["holds"][task] = ("", 0.0, True) if lease_s is None else (asked["token"], now + lease_s, False)
        return [row["id"] for row in rows], tags, exhausted, num_ready

    def settle(self, op: str, name: str, task: str, ids: list[str], tokens: list[str], end: float) -> None:
        part = self.part(name)
        self.task(part, task)
        rows = [self.row(part, each) for each in ids]
        holds = [row["holds"].get(task) if row else None for row in rows]
        good = [
            hold and hold[0] == token and (not hold[2] or op == "ack")
            for hold, token in zip(holds, tokens, strict=True)
        ]
        if not all(good):
            raise Refused("LeaseExpiredError", [each for each, fine in zip(ids, good, strict=True) if not fine])
        if part["group"]:
            held = [group_of(row["id"]) for row in part["rows"] if task in row["holds"]]
            named = [group_of(each) for each in ids]
            if any(held.count(group) != named.count(group) for group in named):
                raise Refused("InvalidRequestError")
        for row, hold in zip(rows, holds, strict=True):
            if op == "nack":
                del row["holds"][task]
            elif op == "ack":
                row["holds"][task] = (hold[0], hold[1], True)
            else:
                row["holds"][task] = (hold[0], end, False)

    def set_cursor(self, name: str, task: str, ids: list[str], create: bool) -> int:
        part = self.part(name)
        if create:
            part["tasks"] = list(dict.fromkeys([*part["tasks"], task]))
        self.task(part, task)
        for row in part["rows"]:
            row["holds"].pop(task, None)
            row["holds"] |= {task: ("", 0.0, True)} if row["id"] in ids else {}
        return sum(row["id"] in ids for row in part["rows"])

    def consumed(self, name: str, task: str) -> bool:
        part = self.parts.get(name)
        if part is None or task not in part["tasks"]:
            return False
        if len(set(part["seen"])) < part["total"] if part["total"] is not None else not part["rows"]:
            return False
        return all(row["holds"].get(task, ("", 0.0, False))[2] for row in part["rows"])


def group_of(sample_id: str) -> str:
    return sample_id.rpartition("_g")[0]


def has(row: dict[str, Any], fields: list[str]) -> bool:
    return all(field in row["cells"] for field in fields)


def accepts(tags: dict[str, Any], tag_filter: Any) -> bool:
    return all(
        name in tags and _TESTS[symbol](tags[name], value) for name, (symbol, value) in (tag_filter or {}).items()
    )
