"""Charts as SVG, without a library: what `dataplane flow` draws."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dataplane_core.errors import printable

Points: TypeAlias = Sequence[tuple[float, float]]

#: Colours of series that people with colour blindness can tell apart (Okabe and Ito), on white and on black.
COLORS: Final = 8
_LIGHT: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c2a300", "#7a3fb0", "#666666", "#7f4a21")
_DARK: Final = ("#56b4e9", "#ff8c42", "#2ac89a", "#e59ac4", "#f0e442", "#b58ae0", "#b0b0b0", "#c49a6c")
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1080, 74, 290, 52, 40
#: Pixels of the chart itself.
_PLOT: Final = _WIDTH - _LEFT - _RIGHT


def _rules(ink: str, muted: str, grid: str, paper: str, colors: Sequence[str]) -> str:
    series = "".join(f".s{i}{{stroke:{color}}}.f{i}{{fill:{color}}}" for i, color in enumerate(colors))
    return (
        f"body,.paper{{background:{paper};fill:{paper};color:{ink}}}.ink{{fill:{ink}}}.muted{{fill:{muted};color:{muted}}}"
        f".grid{{stroke:{grid}}}td,th{{border-color:{grid}}}{series}"
    )


STYLE: Final = (
    "text{font:12px system-ui,sans-serif}.title{font-size:15px;font-weight:600}"
    ".end{text-anchor:end}.mid{text-anchor:middle}.grid{stroke-width:1}.line{fill:none;stroke-width:1.8}"
    ".area{fill-opacity:.75;stroke:none}"
    + _rules("#1a1a1a", "#5f5f5f", "#dedede", "#ffffff", _LIGHT)
    + f"@media (prefers-color-scheme:dark){{{_rules('#ececec', '#a6a6a6', '#3a3a3a', '#161616', _DARK)}}}"
)


def escape(text: str) -> str:
    """Text of a run as text of a page. What XML does not allow, such as control characters, is shown by its escape."""
    return html.escape(printable(text))


def show_count(value: float) -> str:
    """``12,300``, with a fraction only below ten."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _digits(value: float) -> str:
    """Three of them, or all of a larger number."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def show_bytes(value: float) -> str:
    """``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{_digits(value)} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def show_seconds(value: float) -> str:
    """``12 ms``, ``3.4 s``, ``5 min``."""
    if value == 0:
        return "0 s"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (math.inf, "h", 3600)):
        if value < limit:
            return f"{_digits(value / size)} {unit}"
    raise AssertionError("unreachable")


class Panel:
    """One chart: a title, what it says, axes with units, series, and their legend to the right.

    Args:
        title: What it shows.
        subtitle: How to read it.
        start: The least time, in seconds.
        end: The greatest.
        show_y: How a value of the y axis is written.
        height: Of the chart itself, in pixels.
    """

    def __init__(
        self,
        title: str,
        subtitle: str,
        start: float,
        end: float,
        show_y: Callable[[float], str] = show_count,
        height: int = 200,
    ) -> None:
        self._title = title
        self._subtitle = subtitle
        self._start = start
        self._span = max(end - start, 1e-3)
        self._show_y = show_y
        self._plot_height = height
        self._draw: list[tuple[str, int, Callable[[], str]]] = []
        self._marks: list[tuple[float, str]] = []
        self._top = 0.0

    @property
    def height(self) -> int:
        """Pixels with title and axis."""
        return _TOP + self._plot_height + _BOTTOM

    def steps(self, label: str, color: int, points: Points, until: float) -> None:
        """Adds a curve that stays where it is until its next point, up to ``until``."""

        def draw() -> str:
            thin = self._thin(points)
            path = [f"M{self._x(thin[0][0]):.1f},{self._y(thin[0][1]):.1f}"]
            path += [f"H{self._x(at):.1f}V{self._y(value):.1f}" for at, value in thin[1:]]
            return f'<path class="line s{color}" d="{"".join(path)}H{self._x(until):.1f}"/>'

        if points:
            self._add(label, color, max(value for _, value in points), draw)

    def dots(self, label: str, color: int, points: Points) -> None:
        """Adds points that nothing joins."""

        def draw() -> str:
            return "".join(
                f'<circle class="f{color}" cx="{self._x(at):.1f}" cy="{self._y(value):.1f}" r="2.5"/>'
                for at, value in points
            )

        if points:
            self._add(label, color, max(value for _, value in points), draw)

    def stack(self, edges: Sequence[float], layers: Sequence[tuple[str, int, Sequence[float]]]) -> None:
        """Adds areas on top of each other: label, color, and the values between each two ``edges``."""
        below = [0.0] * (len(edges) - 1)
        for label, color, layer in layers:
            above = [low + value for low, value in zip(below, layer, strict=True)]

            def draw(low: Sequence[float] = below, high: Sequence[float] = above, color: int = color) -> str:
                def side(values: Sequence[float], bounds: Sequence[float]) -> list[str]:
                    pairs = zip(values, bounds[:-1], bounds[1:], strict=True)
                    return [f"{self._x(a):.1f},{self._y(v):.1f} {self._x(b):.1f},{self._y(v):.1f}" for v, a, b in pairs]

                outline = " ".join(side(high, edges) + side(low[::-1], edges[::-1]))
                return f'<polygon class="area f{color}" points="{outline}"/>'

            self._add(label, color, max(above, default=0.0), draw)
            below = above

    def mark(self, at: float, label: str) -> None:
        """Adds a vertical line with a label at its top."""
        self._marks.append((at, label))

    def svg(self, y: int) -> str:
        """The panel, ``y`` pixels below the top of the picture."""
        parts = [f'<g transform="translate(0,{y})">', _title(self._title, self._subtitle)]
        for value in _ticks(self._top, least=1.0 if self._show_y is show_count else 0.0):
            height = self._y(value)
            parts.append(f'<path class="grid" d="M{_LEFT},{height:.1f}h{_PLOT}"/>')
            parts.append(f'<text class="muted end" x="{_LEFT - 8}" y="{height + 4:.1f}">{self._show_y(value)}</text>')
        floor = _TOP + self._plot_height
        unit, size = ("s", 1) if self._span <= 600 else ("min", 60) if self._span <= 36000 else ("h", 3600)
        for tick in _ticks(self._span / size, 8):
            x = _LEFT + tick * size / self._span * _PLOT
            text = f"{self._start / size + tick:.6g}" if self._start == 0 else f"+{tick:.6g}"
            parts.append(f'<path class="grid" d="M{x:.1f},{floor}v5"/>')
            parts.append(f'<text class="muted mid" x="{x:.1f}" y="{floor + 19}">{text}</text>')
        since = "" if self._start == 0 else f" after {show_seconds(self._start)}"
        parts.append(f'<text class="muted end" x="{_LEFT + _PLOT}" y="{floor + 35}">time{since} [{unit}]</text>')
        room = -math.inf
        for at, label in self._marks:
            x = self._x(at)
            parts.append(f'<path class="grid" stroke-dasharray="3 3" d="M{x:.1f},{_TOP}V{floor}"/>')
            if x - room > 8 * len(label) + 6:
                parts.append(f'<text class="muted mid" x="{x:.1f}" y="{_TOP - 3}">{escape(label)}</text>')
                room = x
        for row, (label, color, draw) in enumerate(self._draw):
            y_legend = _TOP + 10 + 19 * row
            parts += [
                f"<g><title>{escape(label)}</title>{draw()}",
                f'<rect class="f{color}" x="{_LEFT + _PLOT + 18}" y="{y_legend - 8}" width="12" height="10" rx="2"/>',
                f'<text class="ink" x="{_LEFT + _PLOT + 36}" y="{y_legend + 1}">{escape(_cut(label, 38))}</text></g>',
            ]
        return "".join([*parts, "</g>"])

    def _add(self, label: str, color: int, top: float, draw: Callable[[], str]) -> None:
        self._draw.append((label, color, draw))
        self._top = max(self._top, top)

    def _x(self, at: float) -> float:
        return _LEFT + min(max((at - self._start) / self._span, 0.0), 1.0) * _PLOT

    def _y(self, value: float) -> float:
        return _TOP + self._plot_height * (1 - value / (1.06 * self._top or 1.0))

    def _thin(self, points: Points) -> list[tuple[float, float]]:
        """The last point of every pixel, and the very first."""
        kept = {round(2 * self._x(at)): (at, value) for at, value in points}
        return [points[0], *(each for each in kept.values() if each != points[0])]


@dataclass
class Bars:
    """Horizontal bars of durations: a median, and a thin line up to the 90th percentile.

    Attributes:
        title: What they show.
        subtitle: How to read it.
        rows: Label, color, median and 90th percentile in seconds, and what to say at the end.
    """

    title: str
    subtitle: str
    rows: list[tuple[str, int, float, float, str]] = field(default_factory=list)

    @property
    def height(self) -> int:
        """Pixels with the title."""
        return _TOP + 22 * len(self.rows) + 24

    def svg(self, y: int) -> str:
        """The bars, ``y`` pixels below the top of the picture."""
        left, room = 400, 330
        top = max((p90 for _, _, _, p90, _ in self.rows), default=0.0) or 1.0
        parts = [f'<g transform="translate(0,{y})">', _title(self.title, self.subtitle)]
        for number, (label, color, median, p90, words) in enumerate(self.rows):
            middle = _TOP + 12 + 22 * number
            parts += [
                f'<text class="ink end" x="{left - 10}" y="{middle + 4}">{escape(_cut(label, 56))}</text>',
                f'<rect class="f{color}" x="{left}" y="{middle - 7}" width="{median / top * room:.1f}" height="14"/>',
                f'<path class="line s{color}" d="M{left},{middle}h{p90 / top * room:.1f}"/>',
                f'<text class="muted" x="{left + p90 / top * room + 8:.1f}" y="{middle + 4}">{escape(words)}</text>',
            ]
        return "".join([*parts, "</g>"])


def picture(panels: Sequence[Panel | Bars]) -> str:
    """An SVG of panels, one below the other. It stands alone."""
    height = sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="The flow of samples"><style>{STYLE}</style>'
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>'
    ]
    y = 0
    for panel in panels:
        parts.append(panel.svg(y))
        y += panel.height
    return "".join([*parts, "</svg>"])


def _title(title: str, subtitle: str) -> str:
    return (
        f'<text class="ink title" x="{_LEFT}" y="18">{escape(title)}</text>'
        f'<text class="muted" x="{_LEFT}" y="35">{escape(subtitle)}</text>'
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _ticks(top: float, most: int = 5, least: float = 0.0) -> list[float]:
    """About ``most`` round numbers from 0 up to ``top``, at least ``least`` apart."""
    if top <= 0:
        return [0.0]
    rough = top / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    step = max(step, least)
    return [step * number for number in range(math.floor(top / step + 1e-9) + 1)]
