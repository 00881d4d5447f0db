"""A pytest plugin that puts our two classes under TRL's own tests of AsyncGRPOTrainer, for `test_trainer_checkouts.py`.

The samples are those of TRL's stub. A thread with a client of its own writes them, as a rollout process would, with the
version of the weights that it has read. The tests download a model and data, and need a GPU: instead, they get the
small model of the example, a few prompts, and ordinary attention.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/trl"))

import toy
import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
import trl.experimental.async_grpo.async_rollout_worker as worker_module
from datasets import Dataset
from over_dataplane import CONFIG, owner, pytest_unconfigure as pytest_unconfigure

from dataplane_core import connect
from dataplane_core.errors import UnknownPartitionError
from dataplane_integrations.trl_async import SAMPLE_FIELDS, StoreRolloutWorker, StoreWeightTransfer, put_rollouts
from dataplane_integrations.weights import WeightReader

TEMPLATE = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
_transfers: list[StoreWeightTransfer] = []


class Worker(StoreRolloutWorker):
    """With the arguments of TRL's stub. Its rollout process is a thread, which ends with it."""

    def __init__(self, stub: Any, num_generations: int, fork_k: int) -> None:
        self.name, client = f"answers-{len(_transfers)}", owner()
        _transfers.append(StoreWeightTransfer(client, f"weights-{len(_transfers)}"))
        client.register_partition(self.name, SAMPLE_FIELDS, None, ["train"], num_generations, rollouts=True)
        super().__init__(client, self.name, "train", claim_size=1, weights=_transfers[-1])
        args = (self.name, _transfers[-1]._partition_id, stub._sample_iter, num_generations, fork_k)
        self._rollouts = threading.Thread(target=write, args=args, daemon=True)

    def start(self) -> None:
        super().start()
        self._rollouts.start()

    def stop(self) -> None:
        super().stop()
        print(f"acked {self.acked} samples, published {_transfers[-1].version} versions")
        owner().clear_samples(None, self.name)
        self._rollouts.join(60)


def write(name: str, weights: str, samples: Any, num_generations: int, fork_k: int) -> None:
    """Each conversation has as many samples as TRL's stub forks it into."""
    with connect(CONFIG, bootstrap=False) as client, suppress(UnknownPartitionError):
        reader = WeightReader(client, name, weights)
        reader.wait(60)
        for group in itertools.count():
            reader.newest()
            rows = itertools.islice(samples, num_generations * fork_k)
            rows = [dataclasses.replace(row, model_version=reader.version) for row in rows]
            put_rollouts(client, name, f"p{group}", [rows[at : at + fork_k] for at in range(0, len(rows), fork_k)])
            while client.describe(name, count_rows=False).tasks["train"].num_ready > 2 * len(rows):
                time.sleep(0.01)


def tokenizer(*_: Any, **__: Any) -> Any:
    tokenizer = toy.build_tokenizer()
    tokenizer.add_tokens([" "])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def model(*_: Any, **__: Any) -> Any:
    model = toy.build_model(seed=0)
    model.resize_token_embeddings(13)
    return model


def dataset(*_: Any, **__: Any) -> Dataset:
    numbers = [str(number) for number in range(10, 20)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": number}] for number in numbers],
            "completion": [[{"role": "assistant", "content": number[::-1]}] for number in numbers],
        }
    )


def pytest_configure() -> None:
    import tests.testing_utils

    tests.testing_utils.is_ampere_or_newer = lambda *_: True
    trainer_module.create_model_from_path = model  # of 1.16.0
    trainer_module.AutoModelForCausalLM = SimpleNamespace(from_pretrained=model)  # before
    trainer_module.WeightTransferClient = lambda **_: _transfers[-1]
    trainer_module.get_peak_flops_per_device = lambda *_: None
    sample = worker_module.RolloutSample
    if "enqueued_at" not in {each.name for each in dataclasses.fields(sample)}:  # before 1.16.0
        worker_module.RolloutSample = lambda *row, enqueued_at=None, **named: sample(*row, **named)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items}:
        stub, module.load_dataset, module.AutoTokenizer.from_pretrained = module._StubRolloutWorker, dataset, tokenizer

        def worker(tokenizer: Any, dataset: Any, num_generations: int = 8, fork_k: int = 1, stub: Any = stub) -> Worker:
            return Worker(stub(tokenizer, dataset, num_generations, fork_k=fork_k), num_generations, fork_k)

        module._StubRolloutWorker = worker
        module._StubWeightTransfer = lambda: _transfers[-1]
