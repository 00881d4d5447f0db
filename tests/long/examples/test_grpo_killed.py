"""The GRPO example on a durable store: all its processes are killed, again and again, and the same command goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from grpo_kills import (
    PATIENCE,
    ROWS,
    check_generated_once,
    committed,
    durable,
    found_lines,
    wait_for,
    write_killed_config,
)
from grpo_runs import finish, read_metrics, results, start, without_ray_agents, write_config


def kill_all(run: subprocess.Popen[str]) -> None:
    """Kills a run with all its processes, those of its Ray too, in any order. Meanwhile it can start no others."""
    run.send_signal(signal.SIGSTOP)
    family = psutil.Process(run.pid).children(recursive=True)
    lasting = without_ray_agents(family)
    for process in random.sample([psutil.Process(run.pid), *family], len(family) + 1):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.communicate()
    _, alive = psutil.wait_procs(lasting, timeout=150)
    assert not alive


def count_events(out: Path) -> int:
    events = out / "events.jsonl"
    return events.read_bytes().count(b"\n") if events.exists() else 0


@pytest.mark.timeout(7200)
def test_a_run_that_is_killed_at_twenty_random_moments_gives_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    plane, kills = durable(tmp_path), int(os.environ.get("DATAPLANE_KILLS", "20"))
    steps = 2 * kills
    config, out = write_killed_config(tmp_path, plane, grpo={"steps": steps}, ray=PATIENCE), tmp_path / "out"
    left: list[dict[int, int]] = []
    for _ in range(kills):
        run = start(config, out, path="shm_store")
        try:
            if random.random() < 0.2:  # while it starts
                time.sleep(random.uniform(0, 10))
            else:
                lines = count_events(out) + random.randint(1, 60)
                wait_for(lambda lines=lines: count_events(out) >= lines, run)
            kill_all(run)
        finally:
            run.kill()
        left.append(committed(plane))
    code, said, err = finish(start(config, out, path="shm_store"), 400)
    assert (code, err) == (0, "")
    found = found_lines(out)
    print(said[said.index("after GRPO") :], left, found)
    check_generated_once(out)
    # each step that a start began again found what was there after the kill before
    seen = [each for each in left if each]
    for line in found:
        assert {line["step"]: line["found"]} in seen, (line, left)
    assert sum(line["wanted"] for line in found) == ROWS * len(found)
    uncut = tmp_path / "uncut"
    plain = write_config(tmp_path, grpo={"steps": steps}, ray=PATIENCE)
    assert finish(start(plain, uncut), 400)[0] == 0
    assert results(read_metrics(out)) == results(read_metrics(uncut))
