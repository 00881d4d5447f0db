"""No part of the project has more lines than budget.toml gives it."""

import runpy
from pathlib import Path

BUDGET = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "budget.py"))


def test_no_part_has_more_lines_than_its_budget():
    assert not BUDGET["over"](BUDGET["lines"](), BUDGET["budgets"]())
