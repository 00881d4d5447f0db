"""The picture of a run: the reward curve above; below, what ran when in the middle of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a display may not be there

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

#: Steps that the timeline shows: so many that each can be told from the next.
_SHOWN_STEPS = 8
_COLORS = ("tab:blue", "tab:orange", "tab:green")


def plot_run(
    metrics: Sequence[dict[str, Any]],
    timeline: Sequence[dict[str, Any]],
    evaluation: dict[str, dict[str, float]],
    path: Path,
) -> None:
    """Writes the PNG.

    Args:
        metrics: A dict per step, with ``step`` and ``reward``.
        timeline: What `DataPlaneRollouts.timeline` holds.
        evaluation: ``before`` and ``after``, each with ``sampled`` and ``greedy``.
        path: Where to write.
    """
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), height_ratios=[3, 2])
    steps = [line["step"] for line in metrics]
    above.plot(steps, [line["reward"] for line in metrics], color="tab:blue", label="mean reward of the step's answers")
    for kind, color in (("sampled", "tab:orange"), ("greedy", "tab:green")):
        ends = [evaluation[when][kind] for when in ("before", "after")]
        above.plot([steps[0], steps[-1]], ends, "o", color=color, label=f"held-out prompts, {kind}")
    above.set_ylim(0, 1.02)
    above.set_xlabel("step")
    above.set_ylabel("share of right digits")
    above.legend(loc="lower right")
    above.set_title("TRL's GRPOTrainer with rollouts in other processes")
    above.grid(alpha=0.3)
    _draw_lanes(below, timeline)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_lanes(axes: Axes, timeline: Sequence[dict[str, Any]]) -> None:
    """A lane for the trainer and one for each rollout process; a bar bears the number of its batch."""
    trained = [span for span in timeline if span["what"] == "train"]
    shown = trained[len(trained) // 2 :][:_SHOWN_STEPS]
    start, end = shown[0]["began"], shown[-1]["ended"]
    spans = {(span["began"], span.get("worker", "")): span for span in timeline}  # the prompts of a claim have one
    visible = [span for span in spans.values() if span["ended"] > start and span["began"] < end]
    lanes = sorted({span.get("worker", "") for span in visible})  # the trainer has no name: first
    for span in visible:
        row, begin, length = lanes.index(span.get("worker", "")), span["began"] - start, span["ended"] - span["began"]
        axes.broken_barh([(begin, length)], (row - 0.4, 0.8), color=_COLORS[span["batch"] % 3], edgecolor="white")
        axes.text(begin + length / 2, row, str(span["batch"]), ha="center", va="center", fontsize="small", clip_on=True)
    axes.set_yticks(range(len(lanes)), [name or "training" for name in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, end - start)
    axes.set_xlabel("seconds; a bar bears the number of its generation batch")
