"""The first step and the first column in which two recorded runs differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Final

from dataplane_core.codec import scalar_of_digest
from dataplane_core.errors import DataPlaneError
from dataplane_core.spec import FieldSpec
from dataplane_tools._history import History
from dataplane_tools._samples import Cell, Row, Step

#: Steps that one run may be ahead in the order of tasks before they are said to be missing in the other.
_MOST_AHEAD: Final = 256


def differences(first: History, second: History) -> dict[str, Any]:
    """Compares the steps that count of two runs, in order, until a column or the samples of a step differ.

    Samples are compared by id; if the runs have no id of a step in common, by their place in it.

    Returns:
        ``equal_steps``: how many steps were equal; ``found``: the first difference of each kind, in order: dicts with
        ``step``, ``kind`` (``steps``, ``samples``, ``column``, ``tag``, ``value``) and ``text``, and what they name;
        ``not_compared``: columns whose digests a recording lacks; ``begins``: which run begins later, as text.
    """
    found: dict[str, dict[str, Any]] = {}
    not_compared: set[str] = set()
    equal = 0
    begins: list[str] = []
    for one, other in _pairs(first, second, begins):
        step = str(one or other)
        if one is None or other is None:
            text = f"{step} is in the {'first' if other is None else 'second'} recording only"
            found["steps"] = {"step": step, "kind": "steps", "text": text}
            break
        for each in _in_step(one, other, not_compared):
            found.setdefault(each["kind"], {"step": step, **each})
        equal += not found
        if not found.keys().isdisjoint(("column", "samples")):
            break
    return {
        "equal_steps": equal,
        "found": list(found.values()),
        "not_compared": sorted(not_compared),
        "begins": begins,
    }


def _pairs(first: History, second: History, begins: list[str]) -> Iterator[tuple[Step | None, Step | None]]:
    """The steps of one number or batch in both runs, in the order of the first one. None: a run does not have it.

    Steps before both runs have begun are passed over, if the runs have steps in common.
    """
    numbers = [
        [step for (_, step, _), is_undone in zip(found.marks, found.undone, strict=True) if not is_undone]
        for found in (first.survey, second.survey)
    ]
    least = [min(each, default=-math.inf) for each in numbers]
    is_common = max(least) <= min(max(each, default=-math.inf) for each in numbers)
    start = max(least) if is_common else -math.inf
    if start > min(least):
        late = "first" if start == least[0] else "second"
        begins.append(f"The {late} recording begins at step {start}: earlier steps of the other are not compared.")
    mine, theirs = (
        (step for step in history.steps() if not step.is_undone and step.key[1] is not None and step.key[1] >= start)
        for history in (first, second)
    )
    waiting: dict[tuple[str, int | None], Step] = {}  # of the second run, which may be ahead in the order of tasks
    for one in mine:
        while one.key not in waiting and len(waiting) <= _MOST_AHEAD and (step := next(theirs, None)) is not None:
            waiting[step.key] = step
        match = waiting.pop(one.key, None)
        yield from ((None, step) for step in islice(waiting.values(), 1) if (step.number or 0) < (one.number or 0))
        yield one, match
    yield from ((None, step) for step in chain(waiting.values(), theirs))


def _in_step(one: Step, other: Step, not_compared: set[str]) -> Iterator[dict[str, Any]]:
    pairs = _rows(one, other)
    if pairs is None:
        mine, theirs = ({row.sample_id: None for row in step.rows} for step in (one, other))
        only = [
            next((name for name in names if name not in rest), None) for names, rest in ((mine, theirs), (theirs, mine))
        ]
        counts = [len(one.rows), len(other.rows)]
        text = f"{one} is of {counts[0]} samples in the first recording and of {counts[1]} in the second"
        for name, where in zip(only, ("first", "second"), strict=True):
            text += "" if name is None else f"; '{name}' is in the {where} only"
        yield {"kind": "samples", "text": text, "samples": only, "counts": counts}
    else:
        yield from _column(one, pairs, not_compared)
        tags = ((row.sample_id, *each) for row, another in pairs for each in _unequal(row.tags, another.tags))
        for sample_id, name, values in islice(tags, 1):
            text = f"{one}, tag '{name}' of sample '{sample_id}': {values[0]!r} and {values[1]!r}"
            yield {"kind": "tag", "text": text, "sample": sample_id, "tag": name, "values": values}
    for name, values in islice(_unequal(one.values, other.values), 1):
        text = f"{one}, value '{name}': {values[0]} and {values[1]}"
        yield {"kind": "value", "text": text, "value": name, "values": values}


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for name in dict.fromkeys((*one, *other)):
        values = [one.get(name), other.get(name)]
        if repr(values[0]) != repr(values[1]):  # NaN is NaN
            yield name, values


def _rows(one: Step, other: Step) -> Sequence[tuple[Row, Row]] | None:
    """The samples of two steps, side by side. None: the steps are of different samples."""
    mine, theirs = ({row.sample_id: row for row in step.rows} for step in (one, other))
    if mine.keys() == theirs.keys():
        return [(row, theirs[name]) for name, row in mine.items()]
    if len(mine) != len(theirs) or mine.keys() & theirs.keys():
        return None
    return list(zip(_in_order(one), _in_order(other), strict=True))


def _in_order(step: Step) -> list[Row]:
    rows = list({row.sample_id: row for row in step.rows}.values())
    if not any(step.rows.values()):  # several processes read them, in any order
        rows.sort(key=lambda row: -1 if row.put is None else row.put.order)
    return rows


def _column(step: Step, pairs: Sequence[tuple[Row, Row]], not_compared: set[str]) -> Iterator[dict[str, Any]]:
    counts: Counter[str] = Counter()
    first: tuple[int, str, Row, Cell | None, Cell | None] | None = None
    for mine, theirs in pairs:
        for name in dict.fromkeys((*mine.cells, *theirs.cells)):
            one, other = mine.cells.get(name), theirs.cells.get(name)
            if one is not None and other is not None:
                if one.digest is None or other.digest is None:
                    not_compared.add(name)
                    continue
                if one.digest == other.digest and _same_type(one.put.specs.get(name), other.put.specs.get(name)):
                    continue
            counts[name] += 1
            order = max(each.put.order for each in (one, other) if each is not None) if one is None else one.put.order
            if first is None or order < first[0]:
                first = (order, name, mine, one, other)
    if first is not None:
        _, name, row, one, other = first
        values = [value_of(name, each) for each in (one, other)]
        if one is not None and other is not None and values[0] == values[1]:  # two NaN, or other types
            more = [
                f"{each.digest:016x}" if one.digest != other.digest else each.put.specs[name] for each in (one, other)
            ]
            values = [f"{value} ({each})" for value, each in zip(values, more, strict=True)]
        text = f"{step}, column '{name}' of sample '{row.sample_id}': {values[0]} and {values[1]}"
        text += f"; of {len(pairs)} samples, it differs in {counts[name]}"
        rest = [f"'{each}' in {count}" for each, count in counts.items() if each != name]
        text += f", {', '.join(rest)}" if rest else ""
        found: dict[str, Any] = {"kind": "column", "text": text, "sample": row.sample_id, "column": name}
        yield found | {"values": values, "counts": dict(counts)}


@lru_cache
def _same_type(*specs: str | None) -> bool:
    """Whether cells are of one dtype and shape, beside their first dim. So are empty lists, and what cannot be told."""
    try:
        found = [FieldSpec.from_text(each) for each in specs if each is not None]
    except DataPlaneError:
        return True
    return len({each.stored for each in found if each.lists != "empty"}) < 2


def value_of(name: str, cell: Cell | None) -> str:
    """A cell as text: the number of a scalar, which is its own digest; else the digest."""
    if cell is None:
        return "not put"
    if cell.digest is None:
        return "not recorded"
    try:
        value = scalar_of_digest(cell.digest, FieldSpec.from_text(cell.put.specs[name]))
    except (DataPlaneError, KeyError):  # a forged line
        value = None
    if value is None:
        return f"{cell.digest:016x}"
    return f"{value:.9g}" if value.is_floating_point() and value.itemsize < 8 else str(value.item())
