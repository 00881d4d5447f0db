"""`dataplane flow`: draws how samples moved through the data plane, as an HTML page and as an SVG.

It reads the recordings of the middleware `recorder`, with any payload; or it looks at a running store for a while.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from dataplane_core.errors import DataPlaneError, InvalidRequestError, printable
from dataplane_observe import Record, Recording, is_followed, is_recording
from dataplane_tools._charts import COLORS, STYLE, Bars, Panel, escape, picture, show_bytes, show_count, show_seconds

#: No number of an operation is greater.
_MOST: Final = 1e18
#: Steps that the closer look shows; without marks of steps, this share of the run.
_CLOSE_STEPS: Final = 4
_CLOSE_SHARE: Final = 0.03
#: Parts of the time that averages are taken over, at most.
_NUM_PARTS: Final = 120
#: Fewer values than this are not drawn as a curve.
_LEAST_OF_A_CURVE: Final = 3
_MOST_BARS: Final = 12


def draw_files(paths: Sequence[str], *, folder: str | None) -> int:
    """Draws a run from its recordings, which may be those of several hosts.

    Args:
        paths: Their folders.
        folder: Where to write ``flow.html`` and ``flow.svg``. None: beside the first recording.

    Raises:
        DataPlaneError: A folder has no recording, or that has no operation; or as `Recording` and its `records`.
    """
    run = _Run()
    for path in paths:
        _read(Path(path), run)
    run.operations.sort(key=lambda each: each.end)
    target = Path(paths[0]).parent if folder is None else Path(folder)
    return _write(target, _page_of_run(run, ", ".join(Path(path).name for path in run.names)), run.remarks)


def draw_store(config_path: str, *, seconds: float, folder: str | None) -> int:
    """Draws what a running store holds, looking at it once a second. Its arguments are those of the command.

    Raises:
        BackendUnavailableError: No store runs.
        InvalidRequestError: ``seconds`` is not a positive number.
    """
    from dataplane_tools._inspect import attach, look

    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"flow refused: --seconds {seconds:g}. Expected a number above 0.")
    looks: list[tuple[float, dict[str, Any]]] = []
    remarks: list[str] = []
    with attach(config_path) as client:
        start = time.monotonic()
        while True:
            now = time.monotonic() - start
            try:
                looks.append((now, look(client, count_rows=False)))
            except DataPlaneError as error:
                if not looks:
                    raise
                remarks.append(f"The store could not be looked at any more: {error}")
                break
            if now >= seconds:
                break
            time.sleep(min(1.0, seconds - now))
    if not any(found for _, found in looks):
        remarks.append("The store had no partition.")
    return _write(Path(folder or "."), _page_of_store(looks, client.backend_name, remarks), remarks)


def _write(folder: Path, page: tuple[str, str, str], remarks: Sequence[str]) -> int:
    html, svg, said = page
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "flow.html").write_text(html, encoding="utf-8")
        (folder / "flow.svg").write_text(svg, encoding="utf-8")
    except OSError as error:
        raise DataPlaneError(f"flow cannot write to '{folder}': {error}.") from error
    for remark in remarks:
        print(printable(f"dataplane: {remark}"), file=sys.stderr)
    print(printable(f"{folder / 'flow.html'} and flow.svg: {said}"))
    return 0


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Operation:
    """A record, as it is drawn."""

    end: float
    stage: str
    kind: str
    rows: int
    n_bytes: int
    seconds: float
    error: str
    partition: str
    ids: tuple[str, ...]
    drops_all: bool

    @property
    def counts(self) -> bool:
        """Whether it is shown. A registration only ends the stay of the samples that it drops."""
        return self.rows > 0 or bool(self.error)


@dataclass
class _Run:
    operations: list[_Operation] = field(default_factory=list)
    steps: list[tuple[float, int, float | None]] = field(default_factory=list)  # end, number, staleness
    names: list[Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def _read(folder: Path, run: _Run) -> None:
    if not is_recording(folder):
        raise DataPlaneError(
            f"flow refused: '{folder}' has no recording. Expected a folder of the middleware recorder: "
            "middleware: [{recorder: {folder: FOLDER, payload: none}}]. For the config of a running store, add "
            "--seconds."
        )
    recording = Recording(folder)
    num_shown = num_odd = 0
    for record in recording.records():
        numbers = (record.at, record.seconds, record.rows, record.bytes, record.step or 0, *record.values.values())
        if not all(abs(number) <= _MOST for number in numbers):
            num_odd += 1
        elif record.op == "step":
            run.steps.append((record.at, record.step or 0, record.values.get("staleness")))
        elif record.op not in ("end", "lost"):
            operation = _operation(record)
            run.operations.append(operation)
            num_shown += operation.counts
    if not num_shown:
        raise DataPlaneError(f"flow refused: the recording in '{folder}' has no operation.")
    if num_odd:
        run.remarks.append(f"{_count(num_odd, 'line')} of '{folder}' left out: a number that no operation has.")
    run.remarks += recording.remarks
    run.names.append(folder)


def _operation(record: Record) -> _Operation:
    kind = record.op.removesuffix("_samples")
    names = record.fields if kind in ("put", "get") else []
    what = record.task or (names[0] if names else "tags" if kind == "put" else "")
    return _Operation(
        end=record.at,
        stage=" ".join(filter(None, (kind, what, f"+{len(names) - 1}" if len(names) > 1 else ""))),
        kind=kind,
        rows=record.rows,
        n_bytes=record.bytes,
        seconds=record.seconds,
        error=record.error,
        partition=record.partition,
        ids=tuple(name for name in record.ids if is_followed(name)),
        drops_all=record.drops_all,
    )


# --- counting ---------------------------------------------------------------------------------------------------------


#: Operations that move samples on. Others, such as lists and renewals, appear in the table only.
_FLOW: Final = frozenset({"put", "get", "claim", "ack", "nack", "clear"})
#: Operations that take a sample to work on it. After any other, it waits.
_TAKES: Final = frozenset({"get", "claim"})


@dataclass
class _Stays:
    """Where the followed samples were: from an operation on them to the next."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)  # last stage, from, until
    between: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))


def _stays(operations: Iterable[_Operation], end: float) -> _Stays:
    stays = _Stays()
    last: dict[tuple[str, str], tuple[str, float]] = {}

    def leave(key: tuple[str, str], until: float) -> tuple[str, float] | None:
        former = last.pop(key, None)
        if former is not None and until > former[1]:
            stays.spans.append((former[0], former[1], until))
        return former

    for each in operations:
        keys = [(each.partition, name) for name in each.ids]
        if each.drops_all:
            keys = [key for key in last if key[0] == each.partition]
        for key in keys:
            former = leave(key, each.end)
            if former is not None and each.kind in _FLOW:
                spent = max(each.end - each.seconds - former[1], 0.0)
                stays.between[former[0], each.stage].append(spent)
            if each.kind != "clear" and not each.drops_all:
                last[key] = (each.stage, each.end)
    for key in list(last):
        leave(key, end)
    return stays


def _averages(spans: Iterable[tuple[str, float, float]], edges: Sequence[float]) -> dict[str, list[float]]:
    """Stage -> how many samples were in it, on average over each part of the time."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(edges) - 1))
    for stage, since, until in spans:
        part = max(bisect_right(edges, since) - 1, 0)
        while part < len(edges) - 1 and edges[part] < until:
            inside = min(until, edges[part + 1]) - max(since, edges[part])
            found[stage][part] += inside / (edges[part + 1] - edges[part])
            part += 1
    return found


def _cumulative(operations: Iterable[_Operation], stage: str, start: float) -> list[tuple[float, float]]:
    """Rows of a stage so far."""
    points, total = [(start, 0.0)], 0.0
    for each in operations:
        if each.stage == stage and each.end >= start:
            total += each.rows
            points.append((each.end, total))
    return points


# --- the page of a run ------------------------------------------------------------------------------------------------


def _page_of_run(run: _Run, name: str) -> tuple[str, str, str]:
    zero = min(each.end - each.seconds for each in run.operations if each.counts)
    everything = [replace(each, end=each.end - zero) for each in run.operations]
    shifted = [each for each in everything if each.counts]
    steps = sorted((at - zero, number, stale) for at, number, stale in run.steps)
    end = max([each.end for each in shifted] + [at for at, _, _ in steps])
    flow = [each for each in shifted if each.kind in _FLOW and not each.error]
    stages = list(dict.fromkeys(each.stage for each in flow))
    by_rows = Counter[str]()
    for each in flow:
        by_rows[each.stage] += each.rows
    shown = [stage for stage in stages if stage in dict(by_rows.most_common(COLORS))]
    stays = _stays((each for each in everything if not each.error and (each.kind in _FLOW or each.drops_all)), end)

    panels: list[Panel | Bars] = [_rows_panel("Rows through the stages", flow, shown, 0.0, end, by_rows)]
    close = steps[-_CLOSE_STEPS - 1][0] if len(steps) > _CLOSE_STEPS else end * (1 - _CLOSE_SHARE)
    if len(flow) > 40 and close > 0.4 * end:
        title = f"The last {_CLOSE_STEPS} steps closely" if len(steps) > _CLOSE_STEPS else "The end of the run closely"
        near = _rows_panel(title, [each for each in flow if each.end >= close], shown, close, end, None)
        for at, number, _ in steps:
            if at >= close:
                near.mark(at, f"step {number}")
        panels.append(near)
    followed = len({(each.partition, name) for each in flow for name in each.ids})
    if followed:
        panels += _stays_panels(stays, shown, _parts([at for at, _, _ in steps], end), followed)
    if any(stale is not None for _, _, stale in steps):
        panel = Panel("Staleness", "How many weight versions old the rows of each step were", 0.0, end, show_count, 90)
        panel.dots("a step", 0, [(at, stale) for at, _, stale in steps if stale is not None])
        panels.append(panel)
    panels.append(_bytes_panel(shifted, end))

    rates = f"{_count(len(shifted), 'operation')} over {show_seconds(end)}"
    partitions = _count(len({each.partition for each in shifted}), "partition")
    facts = [f"{name}: {rates}, {partitions}, {_count(len(steps), 'step')}."]
    if len(stages) > len(shown):
        facts.append(f"The charts show the {len(shown)} stages with the most rows; the table has all {len(stages)}.")
    if not any(stale is not None for _, _, stale in steps):
        facts.append("No line tells the staleness of a step (client.mark_step(number, staleness=...)).")
    svg = picture(panels)
    return _html("Flow of samples", facts + run.remarks, svg, _totals(shifted)), svg, rates


def _rows_panel(
    title: str,
    flow: Sequence[_Operation],
    shown: Sequence[str],
    start: float,
    end: float,
    totals: Mapping[str, int] | None,
) -> Panel:
    subtitle = "Rows so far, by operation; between two curves are the rows that wait, or are worked on"
    panel = Panel(title, subtitle, start, end, show_count, 260)
    for color, stage in enumerate(shown):
        points = _cumulative(flow, stage, start)
        label = stage if totals is None else f"{totals[stage]:,} {stage}"
        if len(points) > _LEAST_OF_A_CURVE:
            panel.steps(label, color, points, end)
        else:
            panel.dots(label, color, points[1:])
    return panel


def _parts(step_ends: Sequence[float], end: float) -> list[float]:
    """The bounds of the parts that averages are taken over: a step each, or several."""
    if len(step_ends) < _LEAST_OF_A_CURVE:
        return [end * part / _NUM_PARTS for part in range(_NUM_PARTS + 1)]
    every = math.ceil(len(step_ends) / _NUM_PARTS)
    inside = [at for at in step_ends[every - 1 :: every] if at < end]
    return sorted({0.0, *inside, end})


def _stays_panels(stays: _Stays, stages: Sequence[str], edges: Sequence[float], followed: int) -> list[Panel | Bars]:
    panels: list[Panel | Bars] = []
    if stays.spans:
        averages = _averages(stays.spans, edges)
        panel = Panel(
            "Where the samples were",
            f"How many of the {followed:,} followed samples were held at a time, since which operation, on average",
            0.0,
            edges[-1],
        )
        shown = [(f"since {stage}", color, averages[stage]) for color, stage in enumerate(stages) if stage in averages]
        panel.stack(edges, shown)
        panels.append(panel)
    bars = Bars(
        "Where they waited",
        "From an operation on a sample to the next: median, and line to the 90th percentile. "
        "Blue: it waited. Orange: it had been taken, and was worked on",
    )
    longest = sorted(stays.between, key=lambda key: -sum(stays.between[key]))[:_MOST_BARS]
    for (before, after), values in stays.between.items():
        if (before, after) not in longest:
            continue
        median, p90 = statistics.median(values), _p90(values)
        words = f"{show_seconds(median)}, p90 {show_seconds(p90)}"
        bars.rows.append((f"{before} → {after}", int(before.split()[0] in _TAKES), median, p90, words))
    return [*panels, bars] if bars.rows else panels


def _bytes_panel(operations: Sequence[_Operation], end: float) -> Panel:
    num_parts = min(max(round(end), 5), _NUM_PARTS)
    width = max(end, 1e-3) / num_parts
    panel = Panel("Bytes per second", f"Over parts of {show_seconds(width)}", 0.0, end, lambda v: f"{show_bytes(v)}/s")
    for color, kind in enumerate(("put", "get")):
        sums = Counter[int]()
        for each in operations:
            if each.kind == kind and not each.error:
                sums[min(int(each.end / width), num_parts - 1)] += each.n_bytes
        if sums:
            points = [(part * width, sums[part] / width) for part in range(num_parts)]
            panel.steps(f"{kind}: {show_bytes(sum(sums.values()))} in all", color, points, end)
    return panel


def _totals(operations: Sequence[_Operation]) -> str:
    rows: list[list[str]] = []
    for stage in dict.fromkeys(each.stage for each in operations):
        mine = [each for each in operations if each.stage == stage]
        done = [each for each in mine if not each.error]
        times = [each.seconds for each in mine]
        failed = Counter(each.error for each in mine if each.error)
        rows.append(
            [
                stage,
                f"{len(mine):,}",
                f"{sum(each.rows for each in done):,}",
                show_bytes(sum(each.n_bytes for each in done)),
                show_seconds(sum(times)),
                show_seconds(statistics.median(times)),
                show_seconds(_p90(times)),
                ", ".join(f"{count} {error}" for error, count in failed.items()) or "0",
            ]
        )
    return _table(["stage", "calls", "rows", "bytes", "time in calls", "median", "p90", "failed"], rows)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


# --- the page of a store ----------------------------------------------------------------------------------------------


def _page_of_store(
    looks: Sequence[tuple[float, Mapping[str, Any]]], backend: str, remarks: Sequence[str]
) -> tuple[str, str, str]:
    end = looks[-1][0]
    names = list(dict.fromkeys(name for _, found in looks for name in found))
    tasks = list(dict.fromkeys(task for _, found in looks for each in found.values() for task in each.tasks))
    said = f"{_count(len(looks), 'look')} over {show_seconds(end)}"
    facts = [f"{said}, {_count(len(names), 'partition')}. Each dot is a look.", *remarks]

    def panel(title: str, subtitle: str, show: Any, values: Mapping[str, Callable[[Any], float | None]]) -> Panel:
        chart = Panel(title, subtitle, 0.0, end, show, 130)
        wanted = [(name, label, read) for name in names for label, read in values.items()]
        if len(wanted) > COLORS:
            facts.append(f"{title}: the chart shows the first {COLORS} of {len(wanted)}.")
        for color, (name, label, read) in enumerate(wanted[:COLORS]):
            points = [(at, read(found[name])) for at, found in looks if name in found]
            known = [(at, number) for at, number in points if number is not None]
            chart.dots(f"{name}: {label}" if label else name, color, known)
        return chart

    def by_task(count: str) -> dict[str, Callable[[Any], float | None]]:
        def read(each: Any, task: str) -> float | None:
            return getattr(each.tasks[task], count) if task in each.tasks else None

        return {task: partial(read, task=task) for task in tasks}

    panels = [
        panel(
            "Rows written and cleared",
            "Since the partition was registered",
            show_count,
            {"written": lambda each: each.num_samples + each.num_cleared, "cleared": lambda each: each.num_cleared},
        ),
        panel("Rows that wait for a task", "It could claim them now", show_count, by_task("num_ready")),
        panel("Rows that a task works on", "It holds them under a lease", show_count, by_task("num_leased")),
        panel("Rows that a task has consumed", "Not cleared yet", show_count, by_task("num_consumed")),
        panel("Bytes held", "Payload", show_bytes, {"": lambda each: each.held_bytes}),
        panel("Age of the oldest sample", "Since its first write", show_seconds, {"": lambda each: each.oldest_s}),
    ]
    rows = []
    for name in names:
        last = next(found[name] for _, found in reversed(looks) if name in found)
        counts = "; ".join(
            f"{task}: {each.num_ready} ready, {each.num_leased} leased, {each.num_consumed} consumed"
            for task, each in last.tasks.items()
        )
        written = last.num_samples + last.num_cleared
        rows.append(
            [
                name,
                f"{written:,}",
                f"{last.num_samples:,}",
                f"{last.num_cleared:,}",
                show_bytes(last.held_bytes),
                counts,
            ]
        )
    table = _table(["partition", "written", "held", "cleared", "bytes held", "tasks"], rows)
    svg = picture(panels)
    return _html(f"Flow of samples in {backend}", facts, svg, table), svg, said


# --- HTML -------------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    parts = ["<table><thead><tr>", *(f"<th>{escape(name)}</th>" for name in head), "</tr></thead><tbody>"]
    for row in rows:
        parts += ["<tr>", *(f"<td>{escape(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*parts, "</tbody></table>"])


def _html(title: str, facts: Iterable[str], svg: str, table: str) -> str:
    style = (
        f"{STYLE} body{{font:14px/1.5 system-ui,sans-serif;max-width:1080px;margin:24px auto;padding:0 16px}}"
        "h1{font-size:20px}svg{width:100%;height:auto}table{border-collapse:collapse;width:100%;"
        "font-variant-numeric:tabular-nums}td,th{border-bottom:1px solid;padding:4px 10px;text-align:right}"
        "td:first-child,th:first-child{text-align:left}"
    )
    paragraphs = "".join(f'<p class="muted">{escape(fact)}</p>' for fact in facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><h1>{escape(title)}</h1>{paragraphs}{svg}{table}</body></html>\n"
    )
