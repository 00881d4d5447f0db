"""What the run shows while it runs: a bar for the warm start, then a line per step."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

__all__ = ["ProgressBar", "format_bytes", "step_line"]

_BAR_WIDTH = 30


class ProgressBar:
    """A bar that redraws itself on a terminal, and prints ten lines in all elsewhere (a log file, CI)."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._stream = stream or sys.stdout
        self._redraws = self._stream.isatty()
        self._start = time.monotonic()

    def update(self, done: int, note: str = "") -> None:
        """Shows that ``done`` of the total are done."""
        if not self._redraws and done * 10 // self._total == (done - 1) * 10 // self._total:
            return
        filled = _BAR_WIDTH * done // self._total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        line = f"{self._label} [{bar}] {done}/{self._total}  {note}  {time.monotonic() - self._start:.0f} s"
        end = "\n" if not self._redraws or done == self._total else ""
        self._stream.write((f"\r\x1b[K{line}" if self._redraws else line) + end)
        self._stream.flush()


def step_line(record: dict[str, Any], total_steps: int) -> str:
    """One step as a line: reward, loss, KL, tokens, bytes handed over, seconds per phase."""
    seconds = record["seconds"]
    phases = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    return (
        f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"
        f"  reward {record['reward']:.3f}  loss {record['loss']:+.4f}  kl {record['kl']:.4f}"
        f"  tokens {record['tokens']}  put {format_bytes(record['bytes_put'])}"
        f"  get {format_bytes(record['bytes_get'])}  {sum(seconds.values()):.2f} s ({phases})"
    )


def format_bytes(size_bytes: float) -> str:
    """A size for people: ``1.5 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    raise AssertionError("unreachable")
