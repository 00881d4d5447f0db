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
from rollout_server.settings import FIELDS, TASK, model_of
from rollout_server.train import loss_of

from dataplane_core import connect, stream

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "rollout_server"


@pytest.fixture
def config(tmp_path):
    config = yaml.safe_load((FOLDER / "config.yaml").read_text())
    (tmp_path / "plane.yaml").write_text("{backend: shm_store, options: {capacity_bytes: 50000000}}")
    config["run"] |= {"steps": 6, "prompts_per_step": 8, "groups_per_batch": 4}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("lengths", [[6, 6], [4, 6]], ids=["equal", "ragged"])
def test_answers_are_trained_on_whether_their_lengths_differ_or_not(lengths):
    rows = {
        "input_ids": [[4] * length for length in lengths],
        "logprobs": [[0.0] * 3 + [-2.0] * (length - 3) for length in lengths],
        "prompt_length": [3, 3],
        "reward": [0.0, 1.0],
    }
    with connect({"backend": "noop"}) as client:
        client.register_partition("answers", FIELDS, 2, [TASK], 2)
        client.put_samples(["p_g0", "p_g1"], "answers", rows, tags=[{"input_lengths": length} for length in lengths])
        with stream(client, "answers", TASK, FIELDS, 2) as batches:
            [batch] = batches
            loss = loss_of(model_of(0), batch, {"clip_ratio": 0.2, "answers_per_prompt": 2})
    assert loss.isfinite()
    assert loss.requires_grad


@pytest.mark.long
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
