"""The picture of a run: the reward curve, and where the time of every step went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a display may not be there

from matplotlib import pyplot as plt

__all__ = ["plot_run"]

_SMOOTHING_STEPS = 10


def plot_run(
    records: Sequence[dict[str, Any]], evaluation: dict[str, dict[str, float]], title: str, path: Path
) -> None:
    """Writes a PNG with the mean reward per step above and the seconds per phase, stacked, below.

    Args:
        records: One per step, as in ``metrics.jsonl``; at least one.
        evaluation: ``before`` and ``after``, each with ``sampled`` and ``greedy``: shares of exact answers.
        title: Above the picture.
        path: Where to write.
    """
    steps = [record["step"] for record in records]
    rewards = [record["reward"] for record in records]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, height_ratios=[3, 2])
    above.plot(steps, rewards, color="tab:blue", alpha=0.3, linewidth=1, label="mean reward of the step's answers")
    above.plot(steps, _smooth(rewards), color="tab:blue", linewidth=2, label=f"mean of {_SMOOTHING_STEPS} steps")
    for kind, color in (("sampled", "tab:orange"), ("greedy", "tab:green")):
        ends = [evaluation["before"][kind], evaluation["after"][kind]]
        above.plot([steps[0], steps[-1]], ends, "o--", color=color, linewidth=1, label=f"held-out prompts, {kind}")
    above.set_ylim(0, 1)
    above.set_ylabel("share of exact answers")
    above.legend(loc="lower right")
    above.set_title(title)

    phases = list(records[0]["seconds"])
    seconds = [[record["seconds"][phase] for record in records] for phase in phases]
    below.stackplot(steps, seconds, labels=phases, step="mid", linewidth=0)
    below.set_ylim(0, 1.5 * sorted(map(sum, zip(*seconds, strict=True)))[len(records) // 2])
    below.set_xlabel("step")
    below.set_ylabel("seconds per step")
    below.legend(loc="upper right", ncols=3, fontsize="small")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, end - _SMOOTHING_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
