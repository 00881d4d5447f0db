"""The picture of a run: the reward curve, and where the time of every step went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a display may not be there

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

__all__ = ["lanes", "plot_run"]

_SMOOTHING_STEPS = 10
#: Fewer points than this are not joined.
_LEAST_OF_A_CURVE = 3
#: Legends stand beside their panels, where they cover nothing.
_BESIDE: Any = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0, "frameon": False}
#: Steps that the lanes show: so many that each can be told from the next.
_LANE_STEPS = 12


def plot_run(
    records: Sequence[dict[str, Any]], evaluation: dict[str, dict[str, float]], title: str, path: Path
) -> None:
    """Writes a PNG with the mean reward per step above and the seconds per phase, stacked, below.

    Where rollouts ran ahead of training, a third panel shows what ran when in the last steps.

    Args:
        records: One per step, as in ``metrics.jsonl``; at least one.
        evaluation: ``before`` and ``after``, each with ``sampled`` and ``greedy``: shares of exact answers.
        title: Above the picture.
        path: Where to write.
    """
    steps = [record["step"] for record in records]
    rewards = [record["reward"] for record in records]
    ahead = "spans" in records[0]
    figure, panels = plt.subplots(2 + ahead, 1, figsize=(10.5, 8 + 2 * ahead), height_ratios=[3, 2, 1][: 2 + ahead])
    above, below = panels[:2]
    below.sharex(above)
    above.tick_params(labelbottom=False)
    if len(records) < _LEAST_OF_A_CURVE:
        above.plot(steps, rewards, "o", color="tab:blue", label="mean reward of the\nstep's answers")
    else:
        above.plot(steps, rewards, color="tab:blue", alpha=0.3, linewidth=1, label="mean reward of the\nstep's answers")
        above.plot(steps, _smooth(rewards), color="tab:blue", linewidth=2, label=f"mean of {_SMOOTHING_STEPS} steps")
    for kind, marker, color in (("sampled", "o", "tab:orange"), ("greedy", "D", "tab:green")):
        ends = [evaluation["before"][kind], evaluation["after"][kind]]  # two points, so no line between them
        label = f"exact on held-out prompts,\n{kind}, before and after"
        above.plot([steps[0], steps[-1]], ends, marker, color=color, label=label)
    above.set_ylim(-0.03, 1.03)
    above.set_ylabel("mean reward, share of exact answers")
    above.legend(**_BESIDE)
    above.set_title(title)

    phases = list(records[0]["seconds"])
    tops = [0.0] * len(records)
    for phase in phases:
        seconds = [record["seconds"][phase] for record in records]
        below.bar(steps, seconds, bottom=tops, width=1.0, linewidth=0, label=phase)
        tops = [top + value for top, value in zip(tops, seconds, strict=True)]
    below.set_ylim(0, 1.05 * max(tops))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xlabel("step")
    below.set_ylabel("seconds per step")
    below.legend(reverse=True, **_BESIDE)
    if ahead:
        _draw_lanes(panels[2], lanes(records, _LANE_STEPS))
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def lanes(records: Sequence[dict[str, Any]], most: int) -> dict[str, list[tuple[int, float, float]]]:
    """When which step was generated, and when it was trained on.

    Args:
        records: One per step, with ``spans``.
        most: The last so many steps; fewer where the clock began anew since, as it does when a run is resumed.

    Returns:
        By lane, per step: its number, its begin in seconds from the first that is shown, and how long it took.
    """
    shown: list[dict[str, Any]] = []
    for record in reversed(records[-most:]):
        if shown and record["spans"]["train"][0] > shown[0]["spans"]["train"][0]:
            break
        shown.insert(0, record)
    chosen = {
        lane: [(record["step"], *record["spans"][name]) for record in shown if record["spans"][name] is not None]
        for lane, name in (("generating", "generate"), ("training", "train"))
    }
    start = min(begin for spans in chosen.values() for _, begin, _ in spans)
    return {lane: [(step, begin - start, end - begin) for step, begin, end in spans] for lane, spans in chosen.items()}


def _draw_lanes(axes: Axes, shown: dict[str, list[tuple[int, float, float]]]) -> None:
    for row, spans in enumerate(shown.values()):
        colors = [("tab:orange", "tab:blue")[step % 2] for step, _, _ in spans]  # one colour per step in both lanes
        axes.broken_barh([(begin, length) for _, begin, length in spans], (row - 0.4, 0.8), color=colors)
        for step, begin, length in spans:
            axes.text(begin + length / 2, row, str(step), ha="center", va="center", fontsize="small")
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel("seconds; a bar is a step, and bears its number")


def _smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, end - _SMOOTHING_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
