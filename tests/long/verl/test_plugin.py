"""The plugin: one environment variable, and every process of verl uses our module."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
if sys.argv[1] == "hidden":  # as if TransferQueue were not installed
    import importlib.machinery
    class Hide(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name == "transfer_queue" else super().find_spec(name, path, target)
    sys.meta_path[:] = [Hide if each is importlib.machinery.PathFinder else each for each in sys.meta_path]
import verl
import transfer_queue
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base
from verl.utils import transferqueue_utils
modules = (agent_loop_tq, padding_utils, replay_buffer, trainer_base, transferqueue_utils)
print({module.tq.kv_list.__module__.partition(".")[0] for module in modules})
classes = (replay_buffer.KVBatchMeta, transferqueue_utils.KVBatchMeta, transferqueue_utils.BatchMeta)
print({each.__module__.partition(".")[0] for each in (*classes, transfer_queue.KVBatchMeta)})
"""


VARIABLE = {"DATAPLANE_CONFIG": "/no/such/file.yaml"}


@pytest.mark.parametrize(
    ("transfer_queue", "variables", "used"),
    [
        ("installed", VARIABLE, "dataplane_compat"),
        ("hidden", VARIABLE, "dataplane_compat"),
        ("installed", {}, "transfer_queue"),
        ("installed", {**VARIABLE, "VERL_USE_EXTERNAL_PLUGINS": "none"}, "transfer_queue"),
    ],
)
def test_with_the_variable_all_of_verl_uses_ours_unless_verl_leaves_the_plugin_out(transfer_queue, variables, used):
    kept = {name: value for name, value in os.environ.items() if name != "DATAPLANE_CONFIG"}
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, transfer_queue]
    ran = subprocess.run(words, env={**kept, **variables}, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-2:] == [f"{{'{used}'}}"] * 2
