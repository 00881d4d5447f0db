"""The lines for slime and miles in docs/trainers.md, with classes and functions of a checkout of each.

See `checkouts.py`.
"""

import os
import re
from pathlib import Path

import pytest
from checkouts import config_file, needs_checkout, run_program

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")


SLIME = """
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
import torch
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.data_source import DataSource
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
    routed = [columns.pop("rollout_routed_experts") for columns in (a, b)]
    return a == b and torch.equal(*routed)

class Source(DataSource):
    def get_samples(self, num_samples):
        return [[sample(2 * i), sample(2 * i + 1)] for i in range(num_samples)]

    add_samples = save = load = __len__ = None

def finish(groups):
    for sample in (sample for group in groups for sample in group):
        sample.response = "done"
    return groups

args, source = Namespace(rollout_batch_size=2), Source()
import on_dataplane
generate_rollout = load_function("on_dataplane.generate_rollout")
for step in range(3):
    with ThreadPoolExecutor() as threads:
        output = threads.submit(call_rollout_fn, generate_rollout, args, step, source, evaluation=False)
        prompts = [next(on_dataplane.groups_of("prompts", 1))[0] for _ in range(2)]
        on_dataplane.put_groups(finish(prompts), "rollouts")
    assert isinstance(output.result(), RolloutFnTrainOutput)
    for one, two in zip(output.result().samples, finish(source.get_samples(2)), strict=True):
        assert all(same(a, b) for a, b in zip(one, two, strict=True))
    # they are acked and cleared when the next ones are asked for
    assert on_dataplane.client.list_samples("rollouts").size == 2
    assert not on_dataplane.client.list_consumed("rollouts", "all")
    assert on_dataplane.client.list_samples("prompts").size == 1
for partition, count in (("prompts", 1), ("rollouts", 2)):
    on_dataplane.groups_of(partition, count).close()
on_dataplane.client.close()
"""
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
    assert [tokens.tolist() for tokens in value.pop("tokens")] == [[1, 2, 3], [4, 5]]
    assert value == {name: column for name, column in data.items() if name != "tokens"}
assert store.get(other).value == {}
store.remove(ref)
store.remove(ref)
try:
    store.get(ref)
except KeyError:
    pass
else:
    raise AssertionError("the object is still there")
store.client.close()
"""


@pytest.mark.parametrize(
    ("trainer", "code"),
    [
        pytest.param("slime", SLIME, marks=needs_checkout("SLIME")),
        pytest.param("miles", MILES, marks=needs_checkout("MILES")),
    ],
)
def test_code_that_uses_the_lines_for_a_trainer(trainer, code, tmp_path):
    (block,) = re.findall(rf"```python\n(# on_dataplane.py, for {trainer}\n.*?)```", PAGE, re.DOTALL)
    assert len([line for line in block.splitlines()[1:] if line]) <= 20
    (tmp_path / "on_dataplane.py").write_text(block)
    paths = [tmp_path, os.environ[f"{trainer.upper()}_CHECKOUT"]]
    config = config_file(tmp_path, "shm_store", f"page-of-{trainer}")
    run_program(trainer.upper(), "-c", code, cwd=tmp_path, paths=paths, DATAPLANE_CONFIG=config)
