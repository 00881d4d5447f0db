"""`examples/async.py` and `examples/compaction.py`: a process is killed, and the run goes on to its end."""

import re
import subprocess

import psutil
import pytest
from grpo_runs import EXAMPLES


@pytest.mark.timeout(540)
def test_a_killed_rollout_process_costs_no_prompt(python):
    run = python.start(EXAMPLES / "async.py", "--steps", "6", stdout=subprocess.PIPE, text=True)
    lines, family = [], []
    try:
        for line in run.stdout:
            lines.append(line)
            family += psutil.Process(run.pid).children(recursive=True) if len(lines) == 1 else []
        assert run.wait() == 0, "".join(lines)
    finally:
        run.kill()
        run.stdout.close()
    printed = "".join(lines)
    assert re.findall(r"^step +(\d+)/6  reward ", printed, re.MULTILINE) == ["1", "2", "3", "4", "5", "6"]
    killed = int(re.search(r"^killed rollout-0, process (\d+)$", printed, re.MULTILINE)[1])
    assert killed in [process.pid for process in family]
    assert lines[-1] == "trained on 192 of 192 prompts; rollout-0: -9\n"
    assert ("rollout-0" in lines[-2], "rollout-1" in lines[-2]) == (False, True)
    psutil.wait_procs(family, timeout=60)  # some end when they notice that the program has ended
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


@pytest.mark.timeout(540)
@pytest.mark.parametrize("backend", ["shm_store", "redis_store"])
def test_dead_rollouts_of_several_rows_and_a_killed_process_cost_no_task(python, backend):
    printed = python.run(EXAMPLES / "compaction.py", "--steps", "6", "--backend", backend).stdout
    steps = re.findall(r"^step +\d/6  reward [\d.]+  16 tasks, (\d+) rollouts, (\d+) rows$", printed, re.MULTILINE)
    assert len(steps) == 6, printed
    assert sum(int(rollouts) for rollouts, _ in steps) < 6 * 16 * 8, "none died"
    assert all(int(rows) > int(rollouts) for rollouts, rows in steps)
    assert printed.endswith("trained on 96 of 96 tasks, 96 groups\n")
