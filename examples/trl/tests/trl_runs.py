"""Runs of the example as processes, for the tests: start one, wait for its end, read what it logged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[1]
#: A busy machine may take minutes for a start.
PATIENCE_S = 400


def start(program: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(program), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], timeout_s: float = PATIENCE_S) -> str:
    """Waits for a process that must end well; what it printed."""
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, said[-4000:]
    return said


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_of(out: Path) -> list[dict[str, Any]]:
    """What the trainer logged, without times."""
    return [{key: line[key] for key in line if "time" not in key} for line in read_lines(out / "metrics.jsonl")]
