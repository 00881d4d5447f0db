"""The page of `dataplane audit --html`: what `audit` prints, a picture of how samples moved, and totals.

It is drawn from a recording with any payload. One sample in 16 is followed by its id.
"""

from __future__ import annotations

import html
import math
import statistics
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import Any, Final, NamedTuple

import numpy as np
from rich import filesize

from dataplane_core.errors import DataPlaneError, UnsupportedOperationError, printable
from dataplane_observe import Recording, is_followed

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
    """An operation, as it is drawn."""

    end: float  # in seconds since the first operation began
    seconds: float
    kind: str
    stage: str
    rows: int
    size_bytes: int
    error: str
    samples: Sequence[tuple[str, str]]  # partition and id of those that are followed
    drops: str  # the partition of which it dropped all samples


class _Step(NamedTuple):
    end: float
    number: int
    staleness: float | None


def page(folder: str, lines: Iterable[str]) -> str:
    """The page of a recording, as HTML. ``lines``: what `audit` says of it."""
    moves, steps = _read(Recording(folder))
    shown = [move for move in moves if move.rows or move.error]  # a registration only drops samples
    if not shown:
        raise DataPlaneError(f"audit --html refused: the recording in '{folder}' has no operation.")
    with rc_context(_STYLE), warnings.catch_warnings(action="ignore"):  # of glyphs that its own font lacks
        svg = _Picture(moves, shown, steps).svg()
    title = html.escape(printable(f"Run {folder}"))
    text = html.escape("\n".join(map(printable, lines)))
    return _PAGE.format(title=title, svg=svg, table=_totals(shown), text=text)


def _read(recording: Recording) -> tuple[list[_Move], list[_Step]]:
    """The operations and the steps, in the order of their ends."""
    moves, steps = [], []
    records = [record for record in recording.records() if record.op not in ("end", "lost")]
    zero = min((record.at - record.seconds for record in records), default=0.0)
    for record in records:
        if record.op == "step":
            steps.append(_Step(record.at - zero, record.step or 0, record.values.get("staleness")))
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
        moves.append(move)
    return sorted(moves, key=lambda move: move.end), sorted(steps)


class _Picture:
    """A picture of a run, one panel below the other. ``shown``: those of its operations that a reader counts."""

    def __init__(self, moves: Sequence[_Move], shown: Sequence[_Move], steps: Sequence[_Step]) -> None:
        self._shown, self._steps = shown, steps
        self._end = max(*(move.end for move in moves), *(step.end for step in steps), 1e-3)
        self._flow = [move for move in shown if move.kind in _FLOW and not move.error]
        self._num_rows = Counter[str]()
        for move in self._flow:
            self._num_rows[move.stage] += move.rows
        most = [stage for stage, _ in self._num_rows.most_common(_MOST_STAGES)]
        stages = [stage for stage in self._num_rows if stage in most]  # in the order in which a sample goes through
        self._colors = {stage: f"C{number}" for number, stage in enumerate(stages)}
        #: Of the followed samples, stage -> since when and until when one was in it.
        self._stays: dict[str, list[tuple[float, float]]] = defaultdict(list)
        #: Two stages -> the seconds between them, of each sample.
        self._waits: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._follow(move for move in moves if not move.error and (move.kind in _FLOW or move.drops))

    def _follow(self, moves: Iterable[_Move]) -> None:
        last: dict[tuple[str, str], tuple[str, float]] = {}  # sample -> its last stage, and since when
        for move in moves:
            samples = [sample for sample in last if sample[0] == move.drops] if move.drops else move.samples
            for sample in samples:
                if (before := last.pop(sample, None)) is not None:
                    self._stays[before[0]].append((before[1], move.end))
                    if move.kind in _FLOW:
                        self._waits[before[0], move.stage].append(max(move.end - move.seconds - before[1], 0.0))
                if move.kind != "clear" and not move.drops:
                    last[sample] = (move.stage, move.end)
        for stage, since in last.values():
            self._stays[stage].append((since, self._end))

    def svg(self) -> str:
        """The picture."""
        panels: list[tuple[float, Callable[[Axes], None]]] = [(2.6, self._draw_rows)]
        if len(self._flow) > _FEW and (not self._steps or len(self._steps) >= 2 * _CLOSE_STEPS):
            panels.append((2.6, self._draw_close))
        if self._stays:
            panels.append((2.0, self._draw_stays))
        if self._waits:
            panels.append((0.4 + 0.2 * min(len(self._waits), _MOST_BARS), self._draw_waits))
        if any(step.staleness is not None for step in self._steps):
            panels.append((1.2, self._draw_staleness))
        panels.append((1.6, self._draw_bytes))
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

    def _draw_rows(self, axes: Axes, begin: float = 0.0) -> None:
        axes.set_title("Rows through the stages so far. Between two curves are the rows that wait", loc="left")
        for stage, color in self._colors.items():
            total, points = 0, {-1: (0.0, 0)}
            for move in self._flow:
                if move.stage == stage and move.end >= begin:
                    total += move.rows
                    points[round(move.end / self._end * _MOST_POINTS)] = move.end, total
            label = f"{self._num_rows[stage]:,} {stage}"
            axes.step(*zip(*points.values(), strict=True), where="post", color=color, label=label)

    def _draw_close(self, axes: Axes) -> None:
        begin = self._steps[-_CLOSE_STEPS - 1].end if self._steps else 0.97 * self._end
        self._draw_rows(axes, begin)
        axes.set_title("The end of the run closely", loc="left")
        axes.set_xlim(begin, self._end)
        for step in self._steps:
            if step.end > begin:
                axes.axvline(step.end, color="grey", linestyle=":")
                name = f"step {step.number}"
                axes.annotate(name, (step.end, 1), xycoords=("data", "axes fraction"), ha="right", va="top")

    def _draw_stays(self, axes: Axes) -> None:
        axes.set_title("Where the samples were: how many of the followed ones, since which operation", loc="left")
        edges = self._parts()
        stages = [stage for stage in self._colors if stage in self._stays]
        layers = []
        for stage in stages:
            since, until = np.array(self._stays[stage]).T
            stayed = [np.clip(edge, since, until).sum() for edge in edges]  # of all, up to each edge
            averages = np.diff(stayed) / np.diff(edges)
            layers.append([*averages, averages[-1]])
        names, colors = [f"since {stage}" for stage in stages], [self._colors[stage] for stage in stages]
        axes.stackplot(edges, layers, labels=names, colors=colors, step="post")

    def _parts(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The bounds of the parts of the time that averages are taken over: a step each, or several."""
        if len(self._steps) < 3:
            return np.linspace(0.0, self._end, _NUM_PARTS + 1)
        every = math.ceil(len(self._steps) / _NUM_PARTS)
        ends = [step.end for step in self._steps[every - 1 :: every] if step.end < self._end]
        return np.unique([0.0, *ends, self._end])

    def _draw_waits(self, axes: Axes) -> None:
        longest = sorted(self._waits, key=lambda pair: -sum(self._waits[pair]))[:_MOST_BARS]
        pairs = [pair for pair in self._waits if pair in longest]
        title = "Where they waited (blue) or were worked on (orange), until the next operation"
        axes.set_title(f"{title}: median, and 90th percentile", loc="left")
        for place, pair in enumerate(pairs):
            median, p90 = statistics.median(self._waits[pair]), _p90(self._waits[pair])
            axes.barh(place, median, color=("C0", "C1")[pair[0].split()[0] in _TAKES])
            axes.plot([median, p90], [place, place], color="black", linewidth=1)
            axes.annotate(f" {median:.3g} s, p90 {p90:.3g} s", (p90, place), va="center")
        axes.set_yticks(range(len(pairs)), [f"{before} → {after}" for before, after in pairs])
        axes.invert_yaxis()

    def _draw_staleness(self, axes: Axes) -> None:
        axes.set_title("Staleness: how many weight versions old the rows of each step were", loc="left")
        stale = [(step.end, step.staleness) for step in self._steps if step.staleness is not None]
        axes.plot(*zip(*stale, strict=True), "o", markersize=4)
        axes.set_xlim(0, self._end)
        axes.set_ylim(-0.5, max(staleness for _, staleness in stale) + 0.5)

    def _draw_bytes(self, axes: Axes) -> None:
        edges = np.linspace(0.0, self._end, min(max(round(self._end), 5), _NUM_PARTS) + 1)
        axes.set_title(f"Bytes per second, over parts of {edges[1]:.3g} s", loc="left")
        for kind in ("put", "get"):
            moves = [move for move in self._shown if move.kind == kind and not move.error]
            sizes = [move.size_bytes for move in moves]
            if any(sizes):
                in_parts, _ = np.histogram([move.end for move in moves], edges, weights=sizes)
                axes.stairs(in_parts / edges[1], edges, label=f"{kind}: {filesize.decimal(sum(sizes))} in all")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{filesize.decimal(int(value))}/s"))


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
                filesize.decimal(sum(move.size_bytes for move in done)),
                *(f"{value:.3g}" for value in (sum(times), statistics.median(times), _p90(times))),
                ", ".join(f"{count} {error}" for error, count in failed.items()) or "0",
            ]
        )
    cells = (("th" if row is rows[0] else "td", row) for row in rows)
    lines = ("".join(f"<{tag}>{html.escape(printable(cell))}</{tag}>" for cell in row) for tag, row in cells)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]
