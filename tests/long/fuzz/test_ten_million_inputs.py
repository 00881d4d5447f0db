"""Ten million forged inputs to all decoders together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from targets import TARGETS

RUN = Path(__file__).resolve().parents[2] / "fuzz" / "run.py"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_ten_million_forged_inputs(name: str, tmp_path: Path) -> None:
    """In a process of its own for each decoder, with Atheris where it is installed."""
    command = [sys.executable, str(RUN), name, "--inputs", str(10_000_000 // len(TARGETS)), "--corpus", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
