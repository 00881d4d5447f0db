"""Random histories: plain steps with every operation of a store and every option of it, see `differential`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataplane_core.spec import FieldSpec

__all__ = ["EPISODE", "NAMES", "History", "Step"]

NAMES = ["p", "q"]
FIELDS = ["x", "y", "z"]
TASKS = ["t", "u", "v"]
IDS = [f"k{group}_g{member}" for group in range(6) for member in range(3)]
SPEC, SCALARS, FLOATS = (FieldSpec("tensor", *each) for each in (("int64", 1), ("float32", 0), ("float32", 1)))
LISTS = [FieldSpec.of_empty_lists(), FieldSpec.of_ints(1)]
BIG = 2**60 + 1
TAGS: list[dict[str, Any]] = [
    *({"n": each} for each in (0, 1, 2, -1, 1.5, True, None, "a", "b\xff", BIG, BIG + 1)),
    *({"n": 2, "rare": "r"}, {"n": 1, "rare": None}, {"rare": "r"}, {}),
]
FILTERS: list[dict[str, tuple[str, Any]] | None] = [
    *({"n": (symbol, 1)} for symbol in ("==", "!=", "<", "<=", ">", ">=")),
    *({"n": ("in", [0, 2, "a", BIG])}, {"n": (">", BIG)}, {"n": ("<=", "a")}, {"n": ("!=", None)}),
    *({"n": (">=", 1), "rare": ("==", "r")}, {"rare": ("in", ["r", None])}),
    *({"n": (f"any {symbol}", 1)} for symbol in ("==", "<", ">=")),
    {"n": ("any in", [0, "a"]), "rare": ("!=", "r")},
]
#: Steps of a history.
EPISODE = 200
#: An operation and what it is called with.
Step = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class History:
    """The options of a store, and steps."""

    options: dict[str, Any]
    steps: list[Step]

    @classmethod
    def drawn(cls, seed: int, num_steps: int = EPISODE) -> History:
        """The history of a seed."""
        dice = random.Random(seed)
        options = {"capacity_bytes": dice.choice([None, 150, 400]), "in_turns": dice.random() < 0.5}
        names, weights = list(_DRAW), [weight for weight, _ in _DRAW.values()]
        steps: list[Step] = [("register", _register(dice) | {"name": name, "keep": False}) for name in NAMES]
        for name in dice.choices(names, weights, k=num_steps):
            steps.append((name, _DRAW[name][1](dice)))
        return cls(options, steps)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def _part(dice: random.Random) -> dict[str, Any]:
    return {"name": dice.choice("ppppppqqn") if dice.random() < 0.98 else "nobody"}


def _named(dice: random.Random) -> dict[str, Any]:
    return {"name": "nobody" if dice.random() < 0.02 else dice.choice("ppppqq")}


def _task(dice: random.Random) -> dict[str, Any]:
    return _named(dice) | {"task": dice.choice("tttttuuv")}


def _ids(dice: random.Random, most: int = 6) -> list[str]:
    if dice.random() < 0.5:  # whole groups
        first = dice.randrange(6)
        return [each for each in IDS if int(each[1]) in (first, (first + 1) % 6)][: dice.choice([2, 3, 6])]
    return dice.sample(IDS, dice.randint(1, most))


def _register(dice: random.Random) -> dict[str, Any]:
    return {
        "name": dice.choice(NAMES),
        "fields": dice.sample(FIELDS, dice.randint(0, 3)),
        "tasks": dice.sample(TASKS, dice.randint(1, 3)),
        "total": dice.choice([None, 4, 8, 12, 18]),
        "group": dice.choice([None, None, 2, 3]),
        "enums": dice.choice([{}, {"x": ["a", "b"]}, {"x": ["b", "c"], "y": ["d"]}]),
        "keep": dice.random() < 0.6,
    }


def _finish(dice: random.Random) -> dict[str, Any]:
    """As `finish_partition`: the group size is that of the partition."""
    return {"name": dice.choice(NAMES), "total": dice.choice([0, 0, 20])}


def _put(dice: random.Random) -> dict[str, Any]:
    ids = _ids(dice)
    fields = dice.choice([["x"], ["y"], ["x", "y"], ["y", "x"], ["x", "y", "z"], ["z"]])
    strange = [SCALARS, *LISTS] if dice.random() < 0.05 else [SPEC]
    shared = None
    if dice.random() < 0.2:  # the last field's cells are equal for some samples
        count = dice.randint(1, len(ids))
        shared = [*range(count), *(dice.randrange(count) for _ in range(len(ids) - count))]
        dice.shuffle(shared)
    return _named(dice) | {
        "ids": ids,
        "shared": shared,
        "sizes": [dice.choice([8, 8, 8, 16, 60]) for _ in ids],
        "specs": {name: dice.choice([*LISTS, *LISTS, FLOATS] if name == "z" else strange) for name in fields},
        "tags": [dice.choice(TAGS) for _ in ids] if dice.random() < 0.6 else None,
        "ttl_s": dice.choice([3.0, 8.0, 33.0]),
        "epoch": dice.choice([None, None, None, "now", "old"] if dice.random() < 0.2 else [None, "now"]),
    }


def _tags(dice: random.Random) -> dict[str, Any]:
    ids = _ids(dice)
    return _named(dice) | {"ids": ids, "tags": [dice.choice(TAGS) for _ in ids]}


def _claim(dice: random.Random) -> dict[str, Any]:
    all_or_nothing = dice.random() < 0.6
    return _task(dice) | {
        "fields": dice.choice([["x"], ["y"], ["x", "y"], ["y", "x"], []]),
        "size": dice.choice([1, 2, 2, 3, 4, 6, 6, 12]),
        "all_or_nothing": all_or_nothing,
        "lease_s": dice.choice([None, 2.0, 5.0, 5.0, 20.0]),
        "tag_filter": dice.choice(FILTERS) if dice.random() < 0.5 else None,
        "explain": all_or_nothing and dice.random() < 0.4,
    }


def _settle(dice: random.Random) -> dict[str, Any]:
    return {
        "op": dice.choice(["ack", "nack", "renew"]),
        "ago": dice.choice([0, 0, 0, 1, 2, 5]),
        "part": dice.choice([0, 0, 0, 1, 2]),
        "more": dice.choice([0, 0, 0, 1, 2]),  # samples of an older claim, too
        "lease_s": dice.choice([1.0, 4.0, 30.0]),
        "wrong": dice.random() < 0.04,
    }


def _ago(dice: random.Random) -> dict[str, Any]:
    return {"ago": dice.randrange(4)}


#: Operation -> how often, and what it is called with.
_DRAW: dict[str, tuple[float, Callable[[random.Random], dict[str, Any]]]] = {
    "register": (1.0, _register),
    "finish": (0.4, _finish),
    "describe": (0.5, _named),
    "put": (20, lambda dice: _put(dice) | {"at_once": dice.random() < 0.6}),
    "put_tags": (4, _tags),
    "begin": (6, _put),
    "commit": (5, _ago),
    "abort": (1, _ago),
    "wait_for_room": (3, _put),
    "ask_for_room": (4, _ago),
    "give_up_waiting": (1, _ago),
    "repeat": (2, _ago),
    "locate": (
        6,
        lambda dice: _named(dice) | {"ids": _ids(dice, 3), "fields": dice.sample(FIELDS, dice.randint(1, 2))},
    ),
    "list_samples": (
        3,
        lambda dice: (
            _named(dice)
            | {"tag_filter": dice.choice([None, *FILTERS]), "ids": dice.choice([None, dice.sample(IDS, 5)])}
        ),
    ),
    "list_partitions": (0.5, lambda dice: {}),
    "inspect": (4, _named),
    "list_fields": (2, lambda dice: _named(dice) | {"ids": dice.sample(IDS, dice.randint(1, 3))}),
    "export": (2, _named),
    "set_cursor": (0.8, lambda dice: _task(dice) | {"ids": dice.sample(IDS, 5), "create": dice.random() < 0.5}),
    "claim": (26, _claim),
    "settle": (16, _settle),
    "consumed": (2, lambda dice: _named(dice) | {"tasks": dice.sample(TASKS, dice.randint(0, 2))}),
    "clear": (6, lambda dice: _named(dice) | {"ids": dice.sample(IDS, dice.randint(1, 4))}),
    "clear_all": (0.15, _named),
    "announce": (1, lambda dice: {"client": dice.choice("abc"), "ttl_s": dice.choice([0.0, 2.0, 9.0])}),
    "list_clients": (1, lambda dice: {}),
    "wait": (8, lambda dice: {"seconds": dice.choice([0.125, 0.5, 0.5, 1.0, 3.0, 10.0])}),
}
