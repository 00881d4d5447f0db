"""ROLL's transfer backend, over the module, with one line changed: the import.

See docs/trainers.md and `checkouts.py`. What ROLL imports there besides ours is `codetiming`.
"""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest
from checkouts import BACKENDS, ITSELF, needs_checkout, over_our_module, run_program
from test_signatures import CALLS_OF_ROLL

CHECKOUT = os.environ.get("ROLL_CHECKOUT")
FILE = "roll/distributed/scheduler/transfer_backend.py"


@needs_checkout("ROLL")
def test_roll_calls_what_is_tested_here():
    calls = {}
    for node in ast.walk(ast.parse((Path(CHECKOUT) / FILE).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("tq."):
            arguments = (*range(len(node.args)), *sorted(keyword.arg for keyword in node.keywords))
            calls.setdefault(ast.unparse(node.func).removeprefix("tq."), []).append(arguments)
    assert {name: sorted(arguments) for name, arguments in calls.items()} == CALLS_OF_ROLL


PROGRAM = """
import json, sys
import numpy as np, ray, torch

config, workers = json.loads(sys.argv[1]), sys.argv[2] == "workers"
ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)

from roll.configs.base_config import TransferBackendArguments
from roll.distributed.scheduler import transfer_backend
from roll.distributed.scheduler.protocol import DataProto

transfer_backend.init_transfer_backend(TransferBackendArguments("TransferQueue", config))
tokens = torch.arange(12).view(4, 3)
texts = np.array([{"text": f"answer {n}", "turns": [n]} for n in range(4)], dtype=object)
data = DataProto.from_dict({"tokens": tokens, "reward": torch.rand(4)}, {"texts": texts})
batch = DataProto.to_remote(data, "step-0")
assert set(batch._remote_batch.keys()) == {"tokens", "reward", "texts"}


def rows(value):
    return [row.tolist() for row in value.unbind()]


class Worker:
    def work(self, batch):
        part = batch.select_idxs([3, 1])
        read = rows(part.batch["tokens"]), [text["text"] for text in part.non_tensor_batch["texts"]]
        more = DataProto.from_dict({"logprobs": torch.ones(4, 3, dtype=torch.bfloat16) * 0.5})
        return read, DataProto.to_remote(more, batch._remote_batch.partition, ref_data=batch)


if workers:
    actors = [ray.remote(Worker).remote() for _ in range(2)]
    (read, more), (again, _) = ray.get([actor.work.remote(batch) for actor in actors])
    assert read == again
else:
    read, more = Worker().work(batch)
assert read == ([[9, 10, 11], [3, 4, 5]], ["answer 3", "answer 1"]), read

whole = batch.union(more)
whole._remote_batch.cache = None  # what this process put is read from the store
logprobs = whole.batch["logprobs"]
assert logprobs.dtype == torch.bfloat16 and rows(logprobs) == [[0.5] * 3] * 4
assert [text["turns"] for text in whole.non_tensor_batch["texts"]] == [[0], [1], [2], [3]]
half = DataProto.concat(list(whole.chunk(2)))
assert rows(half.batch["tokens"]) == tokens.tolist()

DataProto.drop(whole)
try:
    transfer_backend.get(batch._remote_batch.partition, batch._remote_batch.row_ids(), ["tokens"])
except (KeyError, ValueError):
    pass
else:
    raise AssertionError("the rows are still there")
transfer_backend.tq.close()
ray.shutdown()
"""


@needs_checkout("ROLL")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", [ITSELF, *BACKENDS])
def test_remote_batches_of_roll_go_through_the_store(tmp_path, backend):
    shutil.copytree(Path(CHECKOUT) / "roll", tmp_path / "roll")
    config = {"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}  # TransferQueue's own
    if backend != ITSELF:
        source, config = tmp_path / FILE, {"backend": backend, "op_timeout_s": 120}
        source.write_text(over_our_module(source.read_text()))
    workers = "alone" if backend == "noop" else "workers"  # noop is one process
    arguments = ["-W", "ignore", "-c", PROGRAM, json.dumps(config), workers]
    run_program("ROLL", *arguments, cwd=tmp_path, paths=[tmp_path])
