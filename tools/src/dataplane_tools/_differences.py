"""The first step and the first column in which two recorded runs differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
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
    found: list[dict[str, Any]] = []
    kinds: set[str] = set()
    not_compared: set[str] = set()
    equal = 0
    begins: list[str] = []
    for one, other in _pairs(first, second, begins):
        if one is None or other is None:
            step = one or other
            where = "first" if one is not None else "second"
            text = f"{step} is in the {where} recording only"
            found.append({"step": str(step), "kind": "steps", "text": text})
            break
        here = [each for each in _in_step(one, other, not_compared) if each["kind"] not in kinds]
        kinds |= {each["kind"] for each in here}
        found += here
        equal += not here and not found
        if kinds & {"column", "samples"}:
            break
    return {"equal_steps": equal, "found": found, "not_compared": sorted(not_compared), "begins": begins}


def _pairs(first: History, second: History, begins: list[str]) -> Iterator[tuple[Step | None, Step | None]]:
    """The steps of the same number or batch. With None: one that the other run does not have."""
    runs = _counting(first), _counting(second)
    yield from _by_number(*runs, begins) if first.is_marked and second.is_marked else _by_batch(runs)


def _by_number(
    first: Iterator[Step], second: Iterator[Step], begins: list[str]
) -> Iterator[tuple[Step | None, Step | None]]:
    """Steps whose numbers rise. Those before both runs have begun are passed over, if the runs have steps in common."""
    one, other = next(first, None), next(second, None)
    if one is not None and other is not None and one.number != other.number:
        low, high, late = (first, other, "second") if _number(one) < _number(other) else (second, one, "first")
        begins.append(f"The {late} recording begins at {high}: earlier steps of the other are not compared.")
        step = next((each for each in low if _number(each) >= _number(high)), None)
        if step is None:
            begins.clear()
            step = one if high is other else other
        one, other = (step, other) if high is other else (one, step)
    while one is not None or other is not None:
        if one is not None and other is not None and one.number == other.number:
            yield one, other
            one, other = next(first, None), next(second, None)
        elif other is None or (one is not None and _number(one) < _number(other)):
            yield one, None
            one = next(first, None)
        else:
            yield None, other
            other = next(second, None)


def _number(step: Step) -> int:
    return step.number or 0


def _by_batch(runs: Sequence[Iterator[Step]]) -> Iterator[tuple[Step | None, Step | None]]:
    """Batches of tasks, of which one run may be ahead."""
    waiting: list[dict[Any, Step]] = [{}, {}]
    over = [False, False]
    while not all(over) and max(map(len, waiting)) <= _MOST_AHEAD:
        for side in (0, 1):
            step = next(runs[side], None)
            if step is None:
                over[side] = True
                continue
            match = waiting[1 - side].pop(step.key, None)
            if match is None:
                waiting[side][step.key] = step
            else:
                yield (step, match) if side == 0 else (match, step)
    left = [next(iter(each.values()), None) for each in waiting]
    if left[0] is not None:
        yield left[0], None
    elif left[1] is not None:
        yield None, left[1]


def _counting(history: History) -> Iterator[Step]:
    return (step for step in history.steps() if not step.is_undone and step.key[1] is not None)


def _in_step(one: Step, other: Step, not_compared: set[str]) -> Iterator[dict[str, Any]]:
    pairs = _rows(one, other)
    if pairs is None:
        mine, theirs = ([row.sample_id for row in step.rows] for step in (one, other))
        only = [
            next((name for name in names if name not in set(rest)), None)
            for names, rest in ((mine, theirs), (theirs, mine))
        ]
        text = f"{one} is of {len(mine)} samples in the first recording and of {len(theirs)} in the second"
        text += "".join(
            f"; '{name}' is in the {where} only"
            for name, where in zip(only, ("first", "second"), strict=True)
            if name is not None
        )
        yield {"step": str(one), "kind": "samples", "text": text, "samples": only, "counts": [len(mine), len(theirs)]}
    else:
        yield from _column(one, pairs, not_compared)
        yield from _tag(one, pairs)
    for name in dict.fromkeys((*one.values, *other.values)):
        values = [one.values.get(name), other.values.get(name)]
        if values[0] != values[1]:
            text = f"{one}, value '{name}': {values[0]} and {values[1]}"
            yield {"step": str(one), "kind": "value", "text": text, "value": name, "values": values}
            break


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
        found: dict[str, Any] = {"step": str(step), "kind": "column", "text": text, "sample": row.sample_id}
        yield found | {"column": name, "values": values, "counts": dict(counts)}


@lru_cache
def _same_type(*specs: str | None) -> bool:
    """Whether cells are of one dtype and shape, beside their first dim. So are empty lists, and what cannot be told."""
    try:
        found = [FieldSpec.from_text(each) for each in specs if each is not None]
    except DataPlaneError:
        return True
    return len({each.stored for each in found if each.lists != "empty"}) < 2


def _tag(step: Step, pairs: Sequence[tuple[Row, Row]]) -> Iterator[dict[str, Any]]:
    for mine, theirs in pairs:
        for name in dict.fromkeys((*mine.tags, *theirs.tags)):
            values = [mine.tags.get(name), theirs.tags.get(name)]
            if repr(values[0]) != repr(values[1]):
                text = f"{step}, tag '{name}' of sample '{mine.sample_id}': {values[0]!r} and {values[1]!r}"
                found: dict[str, Any] = {"step": str(step), "kind": "tag", "text": text, "sample": mine.sample_id}
                yield found | {"tag": name, "values": values}
                return


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
