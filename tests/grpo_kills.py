"""Runs of the GRPO example on a durable store whose processes are killed: what tests of it share."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import write_config

from dataplane_core import DataPlaneClient, connect
from dataplane_core.errors import AlreadyRunningError

ROWS = 32  # of a step
#: A busy machine may take minutes for a start.
PATIENCE = {"start_timeout_s": 400, "step_timeout_s": 400}
Config = dict[str, Any]


def durable(folder: Path) -> Config:
    options = {"namespace": f"killed-{uuid.uuid4().hex[:8]}", "capacity_bytes": 64 << 20, "touch_ahead_bytes": 0}
    return {"backend": "shm_store", "options": {**options, "durable": str(folder / "store")}}


def write_killed_config(folder: Path, plane: Config, every: int = 1, **sections: Any) -> Path:
    return write_config(folder, saving={"every": every, "resume": True}, data_plane=plane, **sections)


def committed(plane: Config) -> dict[int, int]:
    """How many rollouts of each step are in the store. Nobody has it open, but for what still ends of a killed run."""
    with connect_when_free({**plane, "middleware": []}) as client:
        return {int(name.removeprefix("train-")): client.list_samples(name).size for name in client.list_partitions()}


def connect_when_free(plane: Config) -> DataPlaneClient:
    give_up = time.monotonic() + 60
    while True:
        try:
            return connect(plane)
        except AlreadyRunningError:
            assert time.monotonic() < give_up
            time.sleep(0.05)


def wait_for(condition: Callable[[], object], run: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + 400
    while not condition():
        assert time.monotonic() < give_up
        if run.poll() is not None:
            pytest.fail(f"the run ended: {run.communicate()}")
        time.sleep(0.005)


def found_lines(out: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (out / "found.jsonl").read_text().splitlines()]


def check_generated_once(out: Path) -> None:
    """No row was written by a rollout worker twice."""
    rows: Counter[str] = Counter()
    for line in (out / "events.jsonl").read_text().splitlines():
        event = json.loads(line or "{}")
        if event.get("op") == "put_samples" and "input_ids" in event["fields"]:
            rows[event["partition"]] += event["rows"]
    assert max(rows.values()) <= ROWS, rows
