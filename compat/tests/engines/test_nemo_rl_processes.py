"""A script of NeMo RL that is run by our command, and a worker in a process of its own, over the stand-in."""

import os
import subprocess
from pathlib import Path

STAND_IN = Path(__file__).parents[1] / "nemo_rl_stand_in"

DRIVER = """
import pathlib, pickle, sys
import torch
from tensordict import TensorDict
from nemo_rl.trainer import MasterConfig, build_data_plane_client

config = MasterConfig(data_plane={"enabled": True, "impl": "dataplane", "dataplane": {"backend": "shm_store",
    "options": {"namespace": sys.argv[1]}}})
client = build_data_plane_client(config.data_plane, bootstrap=True)
client.put_samples(["a", "b"], "rollout_data", TensorDict({"x": torch.arange(2)}, batch_size=[2]))
pathlib.Path("given").write_bytes(pickle.dumps((config.data_plane, client)))
print("given", flush=True)
assert sys.stdin.readline() == "done\\n"
assert client.get_samples(["b"], "rollout_data", ["y"])["y"].tolist() == [7]
client.close()
"""
WORKER = """
import pickle, sys
import dataplane_compat.nemo_rl
assert "nemo_rl" not in sys.modules
with open("given", "rb") as file:
    section, sent = pickle.load(file)
from nemo_rl.data_plane import build_data_plane_client

client = build_data_plane_client(section, bootstrap=False)
read = client.get_samples(["b", "a"], "rollout_data", ["x"])
assert read["x"].tolist() == [1, 0]
sent.put_samples(["b"], "rollout_data", {"y": [7]})
client.close()
sent.close()
"""


def test_a_script_runs_activated_and_its_workers_are_reached_by_config_and_client(tmp_path, python):
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "worker.py").write_text(WORKER)
    paths = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": paths}}
    command = ["-m", "dataplane_compat.nemo_rl", "driver.py", f"nemo-{os.getpid()}"]
    with python.start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **place) as driver:
        assert driver.stdout.readline() == "given\n"
        assert python.run("worker.py", **place).stdout == ""
        assert driver.communicate("done\n", timeout=120) == ("", None)
    assert driver.returncode == 0
