"""`examples/compaction.py`: groups of rollouts of several rows, of which some die, and so does a process."""

import re

import pytest
from grpo_runs import EXAMPLES


@pytest.mark.timeout(540)
@pytest.mark.parametrize("backend", ["shm_store", "redis_store"])
def test_dead_rollouts_and_a_killed_process_cost_no_task(python, backend):
    printed = python.run(EXAMPLES / "compaction.py", "--steps", "6", "--backend", backend).stdout
    steps = re.findall(r"^step +\d/6  reward [\d.]+  16 tasks, (\d+) rollouts, (\d+) rows$", printed, re.MULTILINE)
    assert len(steps) == 6, printed
    assert sum(int(rollouts) for rollouts, _ in steps) < 6 * 16 * 8, "none died"
    assert all(int(rows) > int(rollouts) for rollouts, rows in steps)
    assert printed.endswith("trained on 96 of 96 tasks, 96 groups\n")
