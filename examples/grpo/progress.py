"""What the run shows while it runs: a line per step.

On a terminal it has columns, colours (not with ``NO_COLOR``) and an estimate of the time left. In a pipe or a file it
is plain, and each step says how long each phase took.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any, TextIO

__all__ = ["StepLines"]

_GREEN, _DIM = "32", "2"
#: The time left follows from the mean of so many steps.
_RECENT_STEPS = 10


class StepLines:
    """Prints a line per step.

    Args:
        total_steps: Number of steps of the run.
        stream: Where to. Default: standard output.
    """

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._stream = stream or sys.stdout
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._before = time.monotonic()

    def show(self, record: dict[str, Any]) -> None:
        """Prints a step: reward, loss, KL, tokens, bytes handed over, seconds; in a pipe also those of each phase."""
        now = time.monotonic()
        self._recent.append(now - self._before)
        self._before = now
        seconds = record["seconds"]
        step = f"step {record['step']:>{len(str(self._total))}}/{self._total}"
        reward, total = f"reward {record['reward']:.3f}", f"{sum(seconds.values()):.2f} s"
        put, get = _format_bytes(record["bytes_put"]), _format_bytes(record["bytes_get"])
        if self._stream.isatty():
            left = _format_left(sum(self._recent) / len(self._recent) * (self._total - record["step"]))
            line = (
                f"{step}  {_colored(reward, _GREEN, self._stream)}  loss {record['loss']:+.4f}  kl {record['kl']:.4f}"
                f"  tokens {record['tokens']:>5}  put {put:>8}  get {get:>8}  {total:>7}  "
                + _colored(f"{left:>11}", _DIM, self._stream)
            )
        else:
            phases = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
            line = (
                f"{step}  {reward}  loss {record['loss']:+.4f}  kl {record['kl']:.4f}  tokens {record['tokens']}"
                f"  put {put}  get {get}  {total} ({phases})"
            )
        print(line, file=self._stream, flush=True)


def _format_left(seconds: float) -> str:
    """A time to wait, for people: ``45 s left``."""
    if seconds < 100:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min left"


def _format_bytes(size_bytes: float) -> str:
    """A size for people: ``1.5 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    raise AssertionError("unreachable")


def _colored(text: str, code: str, stream: TextIO) -> str:
    """The text in a colour, where ``stream`` is a terminal and nobody asked for none."""
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"
