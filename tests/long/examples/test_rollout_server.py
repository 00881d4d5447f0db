"""The example with generation servers: a short run as a program, of which one server is killed."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "rollout_server"


@pytest.fixture
def config(tmp_path):
    config = yaml.safe_load((FOLDER / "config.yaml").read_text())
    (tmp_path / "plane.yaml").write_text("{backend: shm_store, options: {capacity_bytes: 50000000}}")
    config["run"] |= {"steps": 6, "prompts_per_step": 8, "groups_per_batch": 4}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.timeout(400)
def test_a_killed_server_loses_nothing(config, tmp_path, python):
    command = [FOLDER / "train.py", "--config", config, "--out", tmp_path]
    run = python.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, servers = [], []
    for line in run.stdout:
        lines.append(line)
        found = re.match(r"server \d+ on port \d+, process (\d+)", line)
        if found:
            servers.append(int(found[1]))
        if line.startswith("step   2 of 6"):
            os.kill(servers[0], signal.SIGKILL)
    assert run.wait() == 0, "".join(lines)
    run.stdout.close()
    assert sum(line.startswith("step ") for line in lines) == 6
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["reward_of_step"]) == 6
    (left,) = summary["servers"]
    assert left["name"] == "server-1"
    assert left["weight_version"] >= 4  # it follows the trainer
    assert left["requests"] >= 3 * 8  # what was asked after the kill
    assert not any(psutil.pid_exists(pid) for pid in servers)
