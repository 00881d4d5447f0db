"""The lines for slime and miles in docs/trainers.md, with classes and functions of a checkout of each.

``SLIME_CHECKOUT`` and ``MILES_CHECKOUT`` name them, ``SLIME_PYTHON`` and ``MILES_PYTHON`` a Python that can import both
it and dataplane; without it, this one.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")


def run(trainer, code, folder):
    """Runs code beside the page's module for a trainer."""
    checkout = os.environ.get(f"{trainer.upper()}_CHECKOUT")
    if checkout is None:
        pytest.skip(f"{trainer.upper()}_CHECKOUT names no checkout of {trainer}")
    (block,) = re.findall(rf"```python\n(# on_dataplane.py, for {trainer}\n.*?)```", PAGE, re.DOTALL)
    (folder / "on_dataplane.py").write_text(block)
    config = {"backend": "shm_store", "options": {"namespace": f"page-of-{trainer}"}}
    (folder / "config.json").write_text(json.dumps(config))
    paths = [str(folder), checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [os.environ.get(f"{trainer.upper()}_PYTHON", sys.executable), "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DATAPLANE_CONFIG": str(folder / "config.json")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout.splitlines()[-1:] == ["as expected"], done.stderr[-3000:]


SLIME = """
import sys
from argparse import Namespace
import torch
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.utils.misc import load_function
from slime.utils.types import Sample

def sample(i):
    return Sample(
        group_index=i // 2, index=i, prompt=[{"role": "user", "content": "größe"}], tokens=[1, 2, 3], response="ok",
        response_length=2, reward={"score": 0.1}, loss_mask=[1, 0], weight_versions=["7"],
        rollout_log_probs=[-0.1, -0.2], rollout_routed_experts=torch.arange(4, dtype=torch.int32).reshape(2, 2),
        status=Sample.Status.COMPLETED, metadata={"turns": 2, "nested": [None, True]},
    )

def same(a, b):
    a, b = a.to_dict(), b.to_dict()
    routed = [each.pop("rollout_routed_experts") for each in (a, b)]
    return a == b and torch.equal(*routed)

groups = [[sample(0), sample(1)], [sample(2), sample(3)], [sample(4), sample(5)]]
args = Namespace(rollout_batch_size=2, save="saves", load="saves")
source = load_function("on_dataplane.PlaneSource")(args)
import on_dataplane
source.add_samples(groups)
assert len(source) == 3
source.save(0)
taken = source.get_samples(2)
source.add_samples(groups[:1])
assert len(source) == 4
source.load(0)
assert len(source) == 3
on_dataplane.put_groups(taken, "rollouts")
output = call_rollout_fn(load_function("on_dataplane.generate_rollout"), args, 0, source, evaluation=False)
assert isinstance(output, RolloutFnTrainOutput)
assert len(output.samples) == 2
assert all(same(a, b) for one, two in zip(output.samples, groups) for a, b in zip(one, two, strict=True))
task = dict(partition_id="rollouts", task_names=["all"])
assert not on_dataplane.client.check_consumption_status(**task)  # they are acked when the next ones are asked for
on_dataplane.put_groups(taken, "rollouts")
assert on_dataplane.client.list_samples("rollouts").size == 4
on_dataplane.generate_rollout(args, 1, source)
assert on_dataplane.client.list_samples("rollouts").size == 2
on_dataplane.client.close()
print("as expected")
"""


@pytest.mark.long
def test_the_lines_for_slime(tmp_path):
    run("slime", SLIME, tmp_path)


MILES = """
from argparse import Namespace
import sys
import torch
import on_dataplane
from miles.utils import object_store

data = {
    "tokens": [torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)],
    "rewards": [0.5, 1.0], "partition": [0, 1], "prompt": ["hello", "wörld"], "metadata": [{"a": 1}, {"b": None}],
}
args = Namespace(object_store_backend="ray")
store = object_store.init_instance(args, contribute_segment=True)
assert isinstance(store, object_store.BaseObjectStore) and object_store.get_instance() is store
ref = store.put(data, value_spec={"tokens": object_store.ValueSpec("tensor_list", "int32")})
other = store.put({})
with store.get(ref) as value:
    assert [each.tolist() for each in value.pop("tokens")] == [[1, 2, 3], [4, 5]]
    assert value == {name: each for name, each in data.items() if name != "tokens"}
assert store.get(other).value == {}
store.remove(ref)
store.remove(ref)
try:
    store.get(ref)
except KeyError:
    print("as expected")
store.client.close()
"""


@pytest.mark.long
def test_the_lines_for_miles(tmp_path):
    run("miles", MILES, tmp_path)
