"""`dataplane audit` on a run of many samples: how long it takes, and the most memory it has beside Python and torch.

python benchmarks/audit.py --samples 1000000
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dataplane_core import connect

_ROWS = 512
_GROUP = 8
_AUDIT = """
import re, sys
from dataplane_tools import _audit, _differences
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = most()
status = _audit.run(sys.argv[1])
print(f"{(most() - before) / 1e3:.0f} MB")
sys.exit(status)
"""


def record(folder: Path, num_samples: int) -> None:
    """A run on noop: each step puts 512 rows of four columns, claims and reads them, puts two more and clears them."""
    recorder = {"recorder": {"folder": str(folder)}}
    with connect({"backend": "noop", "role": "trainer", "middleware": [recorder]}) as client:
        client.register_partition("train", [], None, ["trainer"], _GROUP)
        for step in range(num_samples // _ROWS):
            groups = range(step * _ROWS // _GROUP, (step + 1) * _ROWS // _GROUP)
            ids = [f"q{group}_g{member}" for group in groups for member in range(_GROUP)]
            names = ("input_ids", "mask", "logprobs")
            columns = {name: torch.rand(_ROWS, 16) for name in names} | {"reward": torch.rand(_ROWS)}
            client.put_samples(ids, "train", columns, tags=[{"weight_version": step}] * _ROWS)
            meta = client.claim_meta("train", "trainer", ["input_ids", "reward"], _ROWS, lease_s=600.0)
            client.get_data(meta)
            client.put_samples(ids, "train", {"advantages": torch.rand(_ROWS), "prev_logprobs": torch.rand(_ROWS, 16)})
            client.ack(meta)
            client.mark_step(step, loss=1.0)
            client.clear_samples(ids, "train")


def main() -> None:
    """Records a run and audits it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), chosen.samples)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        start = time.perf_counter()
        words = [sys.executable, "-c", _AUDIT, folder]
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        seconds = time.perf_counter() - start
        print(f"{chosen.samples} samples, {size / 1e6:.0f} MB of lines: {seconds:.0f} s, {said.splitlines()[-1]}")


if __name__ == "__main__":
    main()
