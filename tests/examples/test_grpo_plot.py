"""The picture of the GRPO example's run."""

from __future__ import annotations

from typing import Any

from grpo.plot import lanes


def test_the_lanes_show_the_newest_steps_of_one_process() -> None:
    def record(step: int, generate: list[float] | None, train: list[float]) -> dict[str, Any]:
        return {"step": step, "spans": {"generate": generate, "train": train}}

    before = [record(1, [0.0, 2.0], [2.0, 3.0]), record(2, [2.0, 4.0], [4.0, 5.0])]
    after = [record(3, None, [1.0, 2.0]), record(4, [1.0, 3.0], [3.0, 4.0]), record(5, [3.0, 5.0], [5.0, 6.5])]
    assert lanes([*before, *after], most=10) == {
        "generating": [(4, 0.0, 2.0), (5, 2.0, 2.0)],
        "training": [(3, 0.0, 1.0), (4, 2.0, 1.0), (5, 4.0, 1.5)],
    }
    assert lanes(before, most=1) == {"generating": [(2, 0.0, 2.0)], "training": [(2, 2.0, 1.0)]}
