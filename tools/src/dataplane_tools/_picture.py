"""The page of `dataplane audit --html`: what `audit` prints, a picture of how samples moved, and totals.

It is drawn from a recording with any payload. One sample in 16 is followed by its id.
"""

from __future__ import annotations

import html
import math
import statistics
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Final, NamedTuple

from dataplane_core.errors import DataPlaneError, UnsupportedOperationError, printable
from dataplane_observe import Recording, is_followed
from dataplane_tools._store import size_text

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter
except ImportError as error:
    raise UnsupportedOperationError(
        "audit --html refused: there is no matplotlib, which draws the picture.",
        hint="pip install 'dataplane-tools[charts]'",
    ) from error

#: Operations that move samples on. Others, such as lists and renewals, appear in the table only.
_FLOW: Final = frozenset({"put", "get", "claim", "ack", "nack", "clear"})
#: Operations that take a sample to work on it. After any other, it waits.
_TAKES: Final = frozenset({"get", "claim"})
#: Steps that the closer look shows, and how few operations need none.
_CLOSE_STEPS: Final = 4
_FEW: Final = 40
#: Stages that the charts show, pairs of stages, parts of the time that averages are taken over, points of a curve.
_MOST_STAGES, _MOST_BARS, _NUM_PARTS, _MOST_POINTS = 8, 12, 120, 1500
_WIDTH_INCHES: Final = 13.0
#: Text stays text, and is none of mathematics.
_STYLE: Final = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 9, "axes.spines.right": False}
#: Legends stand beside their panels, where they cover nothing.
_BESIDE: Final[dict[str, Any]] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "frameon": False}
_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body{{font:14px/1.5 system-ui,sans-serif;max-width:1200px;margin:24px auto;padding:0 16px}}h1{{font-size:20px}}
svg{{width:100%;height:auto}}pre{{overflow-x:auto}}table{{border-collapse:collapse;width:100%}}
td,th{{border-bottom:1px solid #ddd;padding:4px 10px;text-align:right}}
td:first-child,th:first-child{{text-align:left}}</style></head>
<body><h1>{title}</h1>{svg}{table}<pre>{text}</pre></body></html>
"""


class _Move(NamedTuple):
    """An operation, as it is drawn: times in seconds since the first one began, and the samples that are followed."""

    end: float
    seconds: float
    kind: str
    stage: str
    rows: int
    size_bytes: int
    error: str
    samples: Sequence[tuple[str, str]]  # partition and id
    drops: str  # the partition of which it dropped all samples


@dataclass
class _Run:
    moves: list[_Move] = field(default_factory=list)
    steps: list[tuple[float, int, float | None]] = field(default_factory=list)  # end, number, staleness

    @property
    def end(self) -> float:
        """When the last operation or step ended."""
        return max(*(move.end for move in self.moves), *(at for at, _, _ in self.steps), 1e-3)


def page(folder: str, lines: Iterable[str]) -> str:
    """The page of a recording, as HTML.

    Args:
        folder: Its folder.
        lines: What `audit` says of it.

    Raises:
        DataPlaneError: It cannot be read, or has no operation.
    """
    run = _read(Recording(folder))
    shown = [move for move in run.moves if move.rows or move.error]  # a registration only drops samples
    if not shown:
        raise DataPlaneError(f"audit --html refused: the recording in '{folder}' has no operation.")
    with rc_context(_STYLE), warnings.catch_warnings(action="ignore"):  # of glyphs that its own font lacks
        svg = _svg(run, shown)
    title = html.escape(printable(f"Run {folder}"))
    text = html.escape("\n".join(map(printable, lines)))
    return _PAGE.format(title=title, svg=svg, table=_totals(shown), text=text)


def _read(recording: Recording) -> _Run:
    run = _Run()
    records = [record for record in recording.records() if record.op not in ("end", "lost")]
    zero = min((record.at - record.seconds for record in records), default=0.0)
    for record in records:
        if record.op == "step":
            run.steps.append((record.at - zero, record.step or 0, record.values.get("staleness")))
            continue
        kind = record.op.removesuffix("_samples")
        names = record.fields if kind in ("put", "get") else []
        what = record.task or (names[0] if names else "tags" if kind == "put" else "")
        more = f"+{len(names) - 1}" if len(names) > 1 else ""
        move = _Move(
            end=record.at - zero,
            seconds=record.seconds,
            kind=kind,
            stage=printable(" ".join(filter(None, (kind, what, more)))),
            rows=record.rows,
            size_bytes=record.bytes,
            error=record.error,
            samples=[(record.partition, name) for name in record.ids if is_followed(name)],
            drops=record.partition if record.drops_all else "",
        )
        run.moves.append(move)
    run.moves.sort(key=lambda move: move.end)
    run.steps.sort()
    return run


# --- where the followed samples were ----------------------------------------------------------------------------------


@dataclass
class _Stays:
    """From an operation on a followed sample to the next."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)  # last stage, from, until
    between: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))


def _stays(moves: Iterable[_Move], end: float) -> _Stays:
    stays = _Stays()
    last: dict[tuple[str, str], tuple[str, float]] = {}  # sample -> its last stage, and since when
    for move in moves:
        samples = [sample for sample in last if sample[0] == move.drops] if move.drops else move.samples
        for sample in samples:
            if (before := last.pop(sample, None)) is not None:
                stays.spans.append((*before, move.end))
                if move.kind in _FLOW:
                    stays.between[before[0], move.stage].append(max(move.end - move.seconds - before[1], 0.0))
            if move.kind != "clear" and not move.drops:
                last[sample] = (move.stage, move.end)
    stays.spans += [(*before, end) for before in last.values()]
    return stays


def _averages(spans: Iterable[tuple[str, float, float]], edges: Sequence[float]) -> dict[str, list[float]]:
    """Stage -> how many samples were in it, on average over each part of the time."""
    averages: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(edges) - 1))
    for stage, since, until in spans:
        part = max(bisect_right(edges, since) - 1, 0)
        while part < len(edges) - 1 and edges[part] < until:
            inside = min(until, edges[part + 1]) - max(since, edges[part])
            averages[stage][part] += inside / (edges[part + 1] - edges[part])
            part += 1
    return averages


def _parts(run: _Run) -> list[float]:
    """The bounds of the parts that averages are taken over: a step each, or several."""
    if len(run.steps) < 3:
        return [run.end * part / _NUM_PARTS for part in range(_NUM_PARTS + 1)]
    every = math.ceil(len(run.steps) / _NUM_PARTS)
    return sorted({0.0, *(at for at, _, _ in run.steps[every - 1 :: every] if at < run.end), run.end})


# --- the picture ------------------------------------------------------------------------------------------------------


def _svg(run: _Run, shown: Sequence[_Move]) -> str:
    flow = [move for move in shown if move.kind in _FLOW and not move.error]
    by_rows = Counter[str]()
    for move in flow:
        by_rows[move.stage] += move.rows
    most = [stage for stage, _ in by_rows.most_common(_MOST_STAGES)]
    stages = [stage for stage in by_rows if stage in most]  # in the order in which a sample goes through them
    colors = {stage: f"C{number}" for number, stage in enumerate(stages)}
    stays = _stays((move for move in run.moves if not move.error and (move.kind in _FLOW or move.drops)), run.end)
    panels: list[tuple[float, Callable[[Axes], None]]] = []
    panels.append((2.6, lambda axes: _draw_rows(axes, flow, by_rows, colors, run.end)))
    if len(flow) > _FEW and (not run.steps or len(run.steps) >= 2 * _CLOSE_STEPS):
        begin = run.steps[-_CLOSE_STEPS - 1][0] if run.steps else 0.97 * run.end
        panels.append((2.6, lambda axes: _draw_close(axes, flow, by_rows, colors, run, begin)))
    if stays.spans:
        panels.append((2.0, lambda axes: _draw_stays(axes, stays, _parts(run), colors)))
    if stays.between:
        panels.append((0.4 + 0.2 * min(len(stays.between), _MOST_BARS), lambda axes: _draw_waits(axes, stays)))
    stale = [(at, staleness) for at, _, staleness in run.steps if staleness is not None]
    if stale:
        panels.append((1.2, lambda axes: _draw_staleness(axes, stale, run.end)))
    panels.append((1.6, lambda axes: _draw_bytes(axes, shown, run.end)))

    heights = [height for height, _ in panels]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.8 * len(panels)), layout="constrained")
    places: Any = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, (_, draw) in zip(places[:, 0], panels, strict=True):
        axes.set_xlabel("seconds")
        draw(axes)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(**_BESIDE)
    text = StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw_rows(axes: Axes, flow: Sequence[_Move], by_rows: Counter[str], colors: dict[str, str], end: float) -> None:
    axes.set_title("Rows through the stages so far. Between two curves are the rows that wait", loc="left")
    for stage, color in colors.items():
        total, points = 0, {-1: (0.0, 0)}
        for move in flow:
            if move.stage == stage:
                total += move.rows
                points[round(move.end / end * _MOST_POINTS)] = move.end, total
        axes.step(*zip(*points.values(), strict=True), where="post", color=color, label=f"{by_rows[stage]:,} {stage}")


def _draw_close(
    axes: Axes, flow: Sequence[_Move], by_rows: Counter[str], colors: dict[str, str], run: _Run, begin: float
) -> None:
    _draw_rows(axes, [move for move in flow if move.end >= begin], by_rows, colors, run.end)
    axes.set_title("The end of the run closely", loc="left")
    axes.set_xlim(begin, run.end)
    for at, number, _ in run.steps:
        if at > begin:
            axes.axvline(at, color="grey", linestyle=":")
            axes.annotate(f"step {number}", (at, 1), xycoords=("data", "axes fraction"), ha="right", va="top")


def _draw_stays(axes: Axes, stays: _Stays, edges: Sequence[float], colors: dict[str, str]) -> None:
    averages = _averages(stays.spans, edges)
    stages = [stage for stage in colors if stage in averages]
    axes.set_title("Where the samples were: how many of the followed ones, since which operation", loc="left")
    layers = [[*averages[stage], averages[stage][-1]] for stage in stages]
    names = [f"since {stage}" for stage in stages]
    axes.stackplot(edges, layers, labels=names, colors=[colors[stage] for stage in stages], step="post")


def _draw_waits(axes: Axes, stays: _Stays) -> None:
    longest = sorted(stays.between, key=lambda pair: -sum(stays.between[pair]))[:_MOST_BARS]
    pairs = [pair for pair in stays.between if pair in longest]
    title = "Where they waited (blue) or were worked on (orange), until the next operation: median, and 90th percentile"
    axes.set_title(title, loc="left")
    for place, pair in enumerate(pairs):
        median, p90 = statistics.median(stays.between[pair]), _p90(stays.between[pair])
        axes.barh(place, median, color=("C0", "C1")[pair[0].split()[0] in _TAKES])
        axes.plot([median, p90], [place, place], color="black", linewidth=1)
        axes.annotate(f" {median:.3g} s, p90 {p90:.3g} s", (p90, place), va="center")
    axes.set_yticks(range(len(pairs)), [f"{before} → {after}" for before, after in pairs])
    axes.invert_yaxis()


def _draw_staleness(axes: Axes, stale: Sequence[tuple[float, float]], end: float) -> None:
    axes.set_title("Staleness: how many weight versions old the rows of each step were", loc="left")
    axes.plot(*zip(*stale, strict=True), "o", markersize=4)
    axes.set_xlim(0, end)
    axes.set_ylim(-0.5, max(value for _, value in stale) + 0.5)


def _draw_bytes(axes: Axes, shown: Sequence[_Move], end: float) -> None:
    num_parts = min(max(round(end), 5), _NUM_PARTS)
    axes.set_title(f"Bytes per second, over parts of {end / num_parts:.3g} s", loc="left")
    edges = [end * part / num_parts for part in range(num_parts + 1)]
    for kind in ("put", "get"):
        sizes = [0.0] * num_parts
        for move in shown:
            if move.kind == kind and not move.error:
                sizes[min(int(move.end / end * num_parts), num_parts - 1)] += move.size_bytes * num_parts / end
        if any(sizes):
            axes.stairs(sizes, edges, label=f"{kind}: {size_text(sum(sizes) * end / num_parts)} in all")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{size_text(value)}/s"))


# --- the table --------------------------------------------------------------------------------------------------------


def _totals(shown: Sequence[_Move]) -> str:
    rows = [["operation", "calls", "rows", "bytes", "seconds in calls", "median", "p90", "failed"]]
    for stage in dict.fromkeys(move.stage for move in shown):
        moves = [move for move in shown if move.stage == stage]
        done, times = [move for move in moves if not move.error], [move.seconds for move in moves]
        failed = Counter(move.error for move in moves if move.error)
        rows.append(
            [
                stage,
                f"{len(moves):,}",
                f"{sum(move.rows for move in done):,}",
                size_text(sum(move.size_bytes for move in done)),
                *(f"{value:.3g}" for value in (sum(times), statistics.median(times), _p90(times))),
                ", ".join(f"{count} {error}" for error, count in failed.items()) or "0",
            ]
        )
    cells = (("th" if row is rows[0] else "td", row) for row in rows)
    lines = ("".join(f"<{tag}>{html.escape(printable(cell))}</{tag}>" for cell in row) for tag, row in cells)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]
