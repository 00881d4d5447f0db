"""The listener for Weights & Biases, with the real package."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the package wandb")
def test_wandb_has_scalars_per_step(tmp_path):
    places = {f"WANDB_{name}": str(tmp_path) for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR")}
    code = """
import wandb
from test_trackers import WandbListener, train
with wandb.init(project="p", mode="offline") as run:
    train(WandbListener(run))
"""
    done = subprocess.run(  # wandb keeps a process and threads until its process ends
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **places, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = dict(re.findall(r"(dataplane/\S+) (\S+)$", done.stderr.partition("Run summary:")[2], re.MULTILINE))
    last = {name: printed[f"dataplane/{name}"] for name in ("put/rows", "put/bytes", "get/errors")}
    assert last == {"put/rows": "2", "put/bytes": "16", "get/errors": "1"}
    (saved,) = tmp_path.rglob("run-*.wandb")
    assert saved.read_bytes().count(b"dataplane/put/rows") >= 3
