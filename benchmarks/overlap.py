"""How much time rollouts ahead of training save: the GRPO example, synchronous and asynchronous.

Every round runs both once, each in a process tree of its own, and leaves out the first steps. Printed per run:

- ms per sample: time between two steps' ends over the answers of a step;
- generating: its share of the time, as the rollout worker takes it;
- overlapped: the part of generating during which the policy workers trained;
- cores busy: CPU time of all processes of the run over the time that the cores offered.

Then the phases of a step, as the driver waits for them, and the gain with what bounds it. Overlap hides the shorter of
the two sides behind the longer: the rollout side (the weights sent over, the answers made and written) and the rest. So
with a core for every process it gains at most the smaller of their shares. And it can only use what the synchronous run
left idle: with fewer cores than processes that want one, the second bound may be the lower.

Run it with ``python benchmarks/overlap.py`` on an otherwise quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TRAIN = Path(__file__).resolve().parent.parent / "examples" / "grpo" / "train.py"
#: Steps that are not counted: first calls allocate, and connections open.
WARM_UP = 5
#: Phases of the synchronous step that the asynchronous one does beside training.
ROLLOUT_SIDE = ("weights", "generate")


@dataclass(frozen=True)
class Figures:
    """One run's, over its counted steps."""

    ms_per_sample: float
    generating: float
    overlapped: float
    cores_busy: float
    ms_per_step: float
    phases_ms: dict[str, float]


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time so far of a process and of all that descend from it and live."""
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.Error:
            continue  # it has just ended
        total += times.user + times.system
    return total


def run(options: argparse.Namespace, mode: str, folder: Path) -> Figures:
    """One run of the example, from its start to its end."""
    command = [sys.executable, str(TRAIN), "--config", str(options.config), "--backend", options.backend]
    command += ["--steps", str(WARM_UP + options.steps), "--out", str(folder), "--mode", mode]
    if mode == "async":
        command += ["--staleness", str(options.staleness)]
    marks = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tree = psutil.Process(process.pid)
        for line in process.stdout:
            found = re.match(r"step +(\d+)/", line)
            if found and int(found[1]) in (WARM_UP, WARM_UP + options.steps):
                marks.append((time.monotonic(), cpu_seconds(tree)))
    if process.returncode or len(marks) != 2:
        sys.exit(f"the {mode} run ended with status {process.returncode}")
    (start, cpu_start), (end, cpu_end) = marks
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    generating_s, overlapped_s = generating(records)
    phases = {
        name: 1e3 * statistics.fmean(record["seconds"][name] for record in records) for name in records[0]["seconds"]
    }
    return Figures(
        ms_per_sample=1e3 * (end - start) / sum(record["answers"] for record in records),
        generating=generating_s / (end - start),
        overlapped=overlapped_s / generating_s,
        cores_busy=(cpu_end - cpu_start) / (end - start) / (os.cpu_count() or 1),
        ms_per_step=1e3 * (end - start) / len(records),
        phases_ms=phases,
    )


def generating(records: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of generating, and how many of them a step was being trained on."""
    if "spans" not in records[0]:
        return sum(record["seconds"]["generate"] for record in records), 0.0
    generated = [record["spans"]["generate"] for record in records]
    trained = [record["spans"]["train"] for record in records]
    both = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in generated for since, until in trained)
    return sum(end - begin for begin, end in generated), both


def report(name: str, runs: list[Figures]) -> None:
    """A line per run."""
    for figures in runs:
        print(
            f"{name:6} {figures.ms_per_sample:8.3f} ms per sample   generating {figures.generating:6.1%}   "
            f"overlapped {figures.overlapped:6.1%}   cores busy {figures.cores_busy:6.1%}"
        )


def report_phases(name: str, runs: list[Figures]) -> None:
    """Medians over the runs, in milliseconds per step."""
    medians = {phase: statistics.median(each.phases_ms[phase] for each in runs) for phase in runs[0].phases_ms}
    print(f"{name:6} ms per step: " + ", ".join(f"{phase} {value:.0f}" for phase, value in medians.items()))


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="counted steps of a run (default: %(default)s)")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--backend", default="tq_simple")
    parser.add_argument("--config", type=Path, default=TRAIN.parent / "config.yaml")
    options = parser.parse_args()
    runs: dict[str, list[Figures]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for mode, figures in runs.items():  # alternate, so that other load on the machine affects both
                figures.append(run(options, mode, Path(folder) / f"{mode}{number}"))
    print(f"{options.backend}, staleness {options.staleness}, {options.steps} steps after {WARM_UP}")
    for mode, figures in runs.items():
        report(mode, figures)
    for mode, figures in runs.items():
        report_phases(mode, figures)
    sync, ahead = (statistics.median(each.ms_per_sample for each in runs[mode]) for mode in ("sync", "async"))
    share = statistics.median(
        sum(each.phases_ms[phase] for phase in ROLLOUT_SIDE) / each.ms_per_step for each in runs["sync"]
    )
    idle = 1 - statistics.median(each.cores_busy for each in runs["sync"])
    print(f"medians: sync {sync:.3f}, async {ahead:.3f} ms per sample: a gain of {1 - ahead / sync:.1%}")
    print(
        f"bounds: {min(share, 1 - share):.1%} by what can be hidden, {idle:.1%} by what the synchronous run left idle "
        f"of {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
