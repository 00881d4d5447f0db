"""`dataplane audit`: what a recorded run trained on, and what went wrong; or where two recorded runs differ."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from rich import filesize

from dataplane_core.codec import scalar_of_digest
from dataplane_core.errors import DataPlaneError, InvalidRequestError, printable
from dataplane_core.spec import FieldSpec
from dataplane_observe import Recording
from dataplane_tools._history import Cell, History, Row, Step
from dataplane_tools._report import drawn, table
from dataplane_tools._sample import json_value
from dataplane_tools._survey import Survey, several, survey

#: Exit statuses: something is wrong, or the runs differ; and that was not found out.
WRONG: Final = 1
UNKNOWN: Final = 2
#: Steps that are shown unless others are asked for: the first ones and the last ones.
_FIRST: Final = 10
_LAST: Final = 30
_MOST_RESUMES: Final = 10


def run(chosen: argparse.Namespace) -> int:
    """Prints what a recording says of a run; or the first difference of two."""
    folder, other, task, html = chosen.folder, chosen.other, chosen.task, chosen.html
    try:
        bounds = _bounds(chosen.steps)
        if html is not None and other is not None:
            raise InvalidRequestError("audit refused: --html is the page of one recording.")
        if other is None:
            report = audit(folder, step=chosen.step, bounds=bounds, task=task)
            lines = _lines(report, cuts=bounds is None)
        else:
            report = compare(folder, other, task=task)
            lines = _lines_of_difference(report)
        if html is not None:
            from dataplane_tools import _picture

            Path(html).write_text(_picture.page(folder, lines), encoding="utf-8")
            lines = [f"{html}: {lines[0]}", *_lines_of_wrong(report)]
    except (DataPlaneError, OSError) as error:  # or the page cannot be written
        print(f"dataplane: {error}", file=sys.stderr)
        return UNKNOWN
    print(json.dumps(report, indent=2) if chosen.json else "\n".join(map(printable, lines)))
    return WRONG if report["wrong"] else 0


def audit(
    folder: str,
    *,
    step: int | None = None,
    bounds: tuple[float, float] | None = None,
    task: str | None = None,
) -> dict[str, Any]:
    """What a recording says of a run, as JSON values."""
    recording = Recording(folder)
    # those that may end meanwhile
    still_open = {writer.client for writer in recording.writers if recording.is_open(writer.client)}
    found = survey(recording, task)
    history = History(recording, found)
    low, high = (step, step) if step is not None else bounds or (-math.inf, math.inf)
    steps: list[dict[str, Any]] = []
    count = 0
    for ended in history.steps():
        count += not ended.is_undone
        number = ended.batch or ended.number
        if (bounds is None and step is None) or (number is not None and low <= number <= high):
            rows = {} if step is None else {"rows": _row_reports(ended)}
            steps.append({**_step_report(ended), **rows})
    if step is not None and not steps:
        raise InvalidRequestError(f"audit refused: no step {step} is in '{folder}'. It has {count} steps.")
    untrained = sorted(history.untrained.values(), key=lambda fate: -fate["count"])
    return {
        "folder": str(folder),
        "run": recording.run,
        "num_steps": count,
        "marked": bool(found.marks),
        "tasks": sorted(found.tasks),
        "begin": min((client.first for client in found.clients.values()), default=None),
        "end": found.end or None,
        "num_records": found.num_records,
        "clients": _client_reports(found, still_open),
        "resumes": [str(resume) for resume in found.resumes],
        "steps": steps,
        "only_step": step,
        "latency": {name: _latency(sorted(values)) for name, values in sorted(history.latency_s.items())},
        "untrained": [] if history.num_misplaced else untrained,
        "wrong": list(history.wrong()),
        "lacks": _lacks(recording, found, history.num_misplaced),
        "failures": [
            {"operation": operation, "error": error, "count": number}
            for (operation, error), number in found.failures.most_common()
        ],
    }


def _bounds(steps: str | None) -> tuple[float, float] | None:
    if steps is None:
        return None
    try:
        low, _, high = steps.partition(":")
        return float(low) if low else float("-inf"), float(high) if high else float("inf")
    except ValueError as error:
        raise InvalidRequestError(f"audit refused: --steps {steps}. Expected A:B, such as 100:120.") from error


# --- as values --------------------------------------------------------------------------------------------------------


def _step_report(step: Step) -> dict[str, Any]:
    writers = Counter("" if row.put is None else str(row.put.writer) for row in step.rows)
    versions, staleness = step.versions(), step.staleness()
    return {
        "name": str(step),
        "step": step.number,
        "batch": step.batch or None,
        "task": step.task or None,
        "at": step.at,
        "samples": len(step.rows),
        "writers": {name or "unknown": count for name, count in writers.most_common()},
        "weight_versions": [versions[0], versions[-1]] if versions else None,
        "staleness": None if staleness is None else list(staleness),
        "values": dict(step.values),
        "undone": step.is_undone,
    }


def _row_reports(step: Step) -> list[dict[str, Any]]:
    return [
        {
            "sample": row.sample_id,
            "partition": row.partition,
            "task": task or None,
            "writer": None if row.put is None else str(row.put.writer),
            "put_at": None if row.put is None else row.put.at,
            "tags": {name: json_value(value) for name, value in row.tags.items()},
            "cells": {
                name: {"value": value_of(name, cell), "writer": str(cell.put.writer)}
                for name, cell in row.cells.items()
            },
        }
        for row, task in step.rows.items()
    ]


def _client_reports(found: Survey, still_open: Set[str]) -> list[dict[str, Any]]:
    operations = ("put_samples", "get_samples", "claim", "ack", "clear_samples")
    return [
        {
            **{name: getattr(client.writer, name) for name in ("client", "role", "host", "pid", "backend", "payload")},
            "begin": client.first,
            "end": client.last,
            "state": "closed" if client.is_closed else "open" if name in still_open else "not closed",
            "samples": {operation: client.counts[operation] for operation in operations},
        }
        for name, client in found.clients.items()
    ]


def _latency(values: Sequence[float]) -> dict[str, float]:
    def share(part: float) -> float:
        return round(values[min(len(values) - 1, int(part * len(values)))], 6)

    return {"samples": len(values), "median_s": share(0.5), "p90_s": share(0.9), "max_s": share(1.0)}


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _lacks(recording: Recording, found: Survey, num_misplaced: int = 0) -> list[str]:
    lacks = []
    if not found.num_records:
        lacks.append("It has no operation.")
    elif not found.marks:
        lacks.append("No step is marked (client.mark_step): the batches of each task are counted instead.")
    if found.others:
        lacks.append(f"{found.others} marks were left out: another client marked steps at the same time.")
    if recording.dropped:
        size = filesize.decimal(sum(segment.size_bytes for segment in recording.dropped))
        until = _time(max(segment.until for segment in recording.dropped))
        lacks.append(
            f"{len(recording.dropped)} segments ({size}) were deleted to keep max_bytes, written until "
            f"{until}: what they held is not judged."
        )
    without = [str(client.writer) for client in found.clients.values() if client.writer.payload == "none"]
    if without:
        lacks.append(f"No digests were recorded by {', '.join(without[:5])}: equal values cannot be told.")
    if num_misplaced:
        lacks.append(
            f"{several(num_misplaced, 'use')} of a sample before its put began, or after its partition ended, by their "
            "times: the clocks of hosts differ. Prompts that were skipped and samples that were not trained on are not "
            "judged."
        )
    return [*lacks, *dict.fromkeys(recording.remarks)]


# --- as text ----------------------------------------------------------------------------------------------------------


def _lines(report: Mapping[str, Any], *, cuts: bool) -> list[str]:
    """``cuts``: leave out the steps in the middle."""
    one, several = ("step", "steps") if report["marked"] else ("batch", "batches")
    size = f"{_count(report['num_steps'], one, several)}, {_count(len(report['clients']), 'client', 'clients')}"
    span = "" if report["begin"] is None else f", {_time(report['begin'])} to {_time(report['end'])}"
    lines = [f"{report['folder']}: {size}{span}"]
    if report["only_step"] is not None:
        for step in report["steps"]:
            lines += ["", *_lines_of_rows(step)]
        return [*lines, *_lines_of_wrong(report)]
    lines += _lines_of_steps(report["steps"], cuts=cuts)
    head = ["role", "process", "host", "put", "claimed", "read", "cleared", "first", "last", "state"]
    counts = ("put_samples", "claim", "get_samples", "clear_samples")
    rows = [
        [
            *(client["role"], str(client["pid"]), client["host"], *(str(client["samples"][name]) for name in counts)),
            *(_time(client["begin"]), _time(client["end"]), client["state"]),
        ]
        for client in report["clients"]
    ]
    lines += ["", *_table(head, rows, right=(1, 3, 4, 5, 6))] if rows else []
    lines += [f"  {resume[0].upper()}{resume[1:]}." for resume in report["resumes"][-_MOST_RESUMES:]]
    rows = [
        [name, str(latency["samples"]), *(f"{latency[key]:.3f}" for key in ("median_s", "p90_s", "max_s"))]
        for name, latency in report["latency"].items()
    ]
    head = ["task", "samples", "median", "p90", "max"]
    failed = [
        f"{failure['operation']} failed: {failure['error']}, {failure['count']}x." for failure in report["failures"]
    ]
    latency = "From the put that made a sample ready to the claim, in seconds:"
    for title, said in (
        (latency, _table(head, rows, right=range(1, 5)) if rows else []),
        ("Not trained on:", [f"  {_fate(fate)}" for fate in report["untrained"]]),
        ("What the recording lacks, and what failed:", [f"  {lack}" for lack in (*report["lacks"], *failed)]),
    ):
        lines += ["", title, *said] if said else []
    return [*lines, *(_lines_of_wrong(report) or ["", "Nothing wrong was found."])]


def _lines_of_wrong(report: Mapping[str, Any]) -> list[str]:
    return ["", "Wrong:", *(f"  {finding['text']}" for finding in report["wrong"])] if report["wrong"] else []


def _lines_of_steps(steps: Sequence[Mapping[str, Any]], *, cuts: bool) -> list[str]:
    cuts = cuts and len(steps) > _FIRST + _LAST
    shown = [*steps[:_FIRST], *steps[-_LAST:]] if cuts else steps
    names = list(dict.fromkeys(name for step in shown for name in step["values"]))[:4]
    rows = []
    for step in shown:
        number = step["batch"] or step["step"]
        name = step["name"] if number is None else f"{step['task']} {number}" if step["task"] else str(number)
        rows.append(
            [
                f"{name} (undone)" if step["undone"] else name,
                str(step["samples"]),
                _range(step["weight_versions"]),
                _range(step["staleness"]),
                *(f"{step['values'][name]:.6g}" if name in step["values"] else "" for name in names),
                ", ".join(f"{name} {count}" for name, count in step["writers"].items()),
            ]
        )
    if not rows:
        return []
    lines = _table(["step", "samples", "weights", "stale", *names, "put by"], rows, right=range(1, 4 + len(names)))
    if cuts:
        lines.insert(1 + _FIRST, "  ...")
    return lines


def _lines_of_rows(step: Mapping[str, Any]) -> list[str]:
    undone = ", undone: the run went on from before it" if step["undone"] else ""
    values = "".join(f", {name} {value:.6g}" for name, value in step["values"].items())
    lines = [f"{step['name']}: {_count(step['samples'], 'sample', 'samples')}{values}{undone}"]
    for row in step["rows"]:
        by = row["writer"] or "a client that is not in the recording"
        lines.append(f"  {row['sample']} of '{row['partition']}', put by {by}")
        lines += [f"    {name}: {value!r}" for name, value in row["tags"].items()]
        lines += [
            f"    {name}: {cell['value']}" + ("" if cell["writer"] == row["writer"] else f", put by {cell['writer']}")
            for name, cell in row["cells"].items()
        ]
    return lines


def _lines_of_difference(report: Mapping[str, Any]) -> list[str]:
    lines = [f"{' and '.join(report['folders'])}: {_count(report['equal_steps'], 'step is', 'steps are')} equal"]
    lines += [f"  {lack}" for lack in (*report["begins"], *report["lacks"])]
    lines += [f"  {finding['text']}" for finding in report["found"]]
    if report["not_compared"]:
        lines.append(f"  Not compared, since a recording lacks their digests: {', '.join(report['not_compared'])}.")
    return lines if report["found"] else [*lines, "They do not differ."]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    return [f"  {line}" for line in drawn(table(head, rows, right)).splitlines()]


def _fate(fate: Mapping[str, Any]) -> str:
    task = f" by '{fate['task']}'" if fate["task"] else ""
    by = "still held" if fate["by"] is None else f"cleared by {fate['by']}"
    last = f", last operation {fate['last']}" if fate["last"] else ""
    return f"{fate['count']}{task}: {fate['reason']}; {by}{last}: {', '.join(fate['examples'])}"


def _range(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else " to ".join(f"{bound:g}" for bound in dict.fromkeys(bounds))


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


# --- two runs ---------------------------------------------------------------------------------------------------------


#: Steps that one run may be ahead in the order of tasks before they are said to be missing in the other.
_MOST_AHEAD: Final = 256


def compare(folder: str, other: str, *, task: str | None = None) -> dict[str, Any]:
    """Compares the steps that count of two runs, in order, until a column or the samples of a step differ.

    Samples are compared by id; if the runs have no id of a step in common, by their place in it.

    Returns:
        ``folders``: the two; ``equal_steps``: how many steps were equal; ``found``: the first difference of each kind,
        in order: dicts with ``step``, ``kind`` (``steps``, ``samples``, ``column``, ``tag``, ``value``) and ``text``,
        and what they name; ``not_compared``: columns whose digests a recording lacks; ``begins``: which run begins
        later, as text; ``lacks``: what a recording lacks, as text; ``wrong``: as ``found``.
    """
    recordings = [Recording(folder), Recording(other)]
    histories = [History(recording, survey(recording, task), check_rows=False) for recording in recordings]
    first, second = histories
    found: dict[str, dict[str, Any]] = {}
    not_compared: set[str] = set()
    equal = 0
    begins: list[str] = []
    for mine, theirs in _pairs(first, second, begins):
        step = str(mine or theirs)
        if mine is None or theirs is None:
            text = f"{step} is in the {'first' if theirs is None else 'second'} recording only"
            found["steps"] = {"step": step, "kind": "steps", "text": text}
            break
        for finding in _in_step(mine, theirs, not_compared):
            found.setdefault(finding["kind"], {"step": step, **finding})
        equal += not found
        if not found.keys().isdisjoint(("column", "samples")):
            break
    differences = list(found.values())
    return {
        "folders": [str(folder), str(other)],
        "equal_steps": equal,
        "found": differences,
        "not_compared": sorted(not_compared),
        "begins": begins,
        "lacks": [
            f"The {which} recording: {text}"
            for which, recording, history in zip(("first", "second"), recordings, histories, strict=True)
            for text in _lacks(recording, history.survey)
        ],
        "wrong": differences,
    }


def _pairs(first: History, second: History, begins: list[str]) -> Iterator[tuple[Step | None, Step | None]]:
    """The steps of one number or batch in both runs, in the order of the first one. None: a run does not have it.

    Steps before both runs have begun are passed over, if the runs have steps in common.
    """
    numbers = [
        [step for (_, step, _), is_undone in zip(found.marks, found.undone, strict=True) if not is_undone]
        for found in (first.survey, second.survey)
    ]
    least = [min(steps, default=-math.inf) for steps in numbers]
    is_common = max(least) <= min(max(steps, default=-math.inf) for steps in numbers)
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
        tags = ((row.sample_id, *tag) for row, another in pairs for tag in _unequal(row.tags, another.tags))
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
            order = max(cell.put.order for cell in (one, other) if cell is not None) if one is None else one.put.order
            if first is None or order < first[0]:
                first = (order, name, mine, one, other)
    if first is not None:
        _, name, row, one, other = first
        values = [value_of(name, cell) for cell in (one, other)]
        if one is not None and other is not None and values[0] == values[1]:  # two NaN, or other types
            more = [
                f"{cell.digest:016x}" if one.digest != other.digest else cell.put.specs[name] for cell in (one, other)
            ]
            values = [f"{value} ({about})" for value, about in zip(values, more, strict=True)]
        text = f"{step}, column '{name}' of sample '{row.sample_id}': {values[0]} and {values[1]}"
        text += f"; of {len(pairs)} samples, it differs in {counts[name]}"
        rest = [f"'{column}' in {count}" for column, count in counts.items() if column != name]
        text += f", {', '.join(rest)}" if rest else ""
        found: dict[str, Any] = {"kind": "column", "text": text, "sample": row.sample_id, "column": name}
        yield found | {"values": values, "counts": dict(counts)}


@lru_cache
def _same_type(*specs: str | None) -> bool:
    """Whether cells are of one dtype and shape, beside their first dim. So are empty lists, and what cannot be told."""
    try:
        found = [FieldSpec.from_text(text) for text in specs if text is not None]
    except DataPlaneError:
        return True
    return len({spec.stored for spec in found if spec.lists != "empty"}) < 2


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
