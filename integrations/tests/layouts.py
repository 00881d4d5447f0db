"""What workers of any layout of ranks promise: who fetches, who writes, what is learned, also in a split step.

`train_as_rank` runs on each rank; tests send it there by value. The functions that check get what the ranks saw.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tiny_megatron import loss_of
from torch.distributed.device_mesh import init_device_mesh

from dataplane_core import DataPlaneConfig, KVBatchMeta, connect, shard_meta_for_dp
from dataplane_core.batch import BatchedDataDict
from dataplane_core.middleware import Metrics
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations.trainer.batching import Batching
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin

STEPS = 3
#: Per data-parallel rank: all its rows, and its rows of each portion of a split step.
Shards = tuple[list[KVBatchMeta], list[list[KVBatchMeta]]]


class TokenWorker(FSDP2DataPlaneMixin):
    """Without a model: its logprobs are the tokens below 0, and it keeps the tokens of its portions."""

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> dict[str, Any]:
        return {"logprobs": -data["input_ids"].float()}

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        self.seen: list[Any] = []

    def train_microbatch(self, data: BatchedDataDict) -> None:
        self.seen.append(data["input_ids"].tolist())

    def finish_train_step(self) -> dict[str, Any]:
        return {}

    def abort_train_step(self) -> None: ...


def told(call: Callable[[], Any]) -> tuple[str, str, str]:
    """What a call raised: its class, that of its cause, and both their texts. Empty if it raised nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, type(error.__cause__).__name__, f"{error}\n{error.__cause__}"
    return "", "", ""


def worker_of_rank(
    shape: tuple[int, int, int], columns: dict[str, Any], lengths: list[int]
) -> tuple[Any, Metrics, KVBatchMeta]:
    """A worker whose process has a store of its own with the same rows as the others': what counts is who asks it."""
    metrics = Metrics()
    client = connect(DataPlaneConfig(backend="noop", middleware=[metrics]))
    client.register_partition("train", list(columns), None, [])
    meta = client.put_samples([f"p{row}_g0" for row in range(len(lengths))], "train", columns)
    meta.sequence_lengths = lengths
    worker = TokenWorker()
    worker.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    worker.setup_data_plane(client)
    return worker, metrics, meta


def ids_of(lengths: Sequence[int]) -> list[str]:
    return [f"p{row // 2}_g{row % 2}" for row in range(len(lengths))]


def shards_of(meta: KVBatchMeta, batching: Batching, dp_size: int, width: int) -> Shards:
    """The rows of every data-parallel rank, and those of the two halves of the rows."""
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = width
    half = meta.size // 2
    parts = (meta, meta.slice(0, half), meta.slice(half, meta.size))
    whole, *portions = (shard_meta_for_dp(part, dp_world=dp_size, **batching.shard_args("train"))[0] for part in parts)
    return whole, portions


def train_as_rank(make_worker: Callable[[], Any], config: Any, shards: Shards) -> dict[str, Any]:
    """Logprobs, some training steps and a split step of one rank. Collective over all ranks.

    Returns:
        What it saw, to assert.
    """
    worker = make_worker()
    worker.setup_data_plane(config)
    try:
        client = worker._require_dp_client()
        coords = worker._local_coords()
        whole, *portions = (each[coords["data_parallel"]] for each in (shards[0], *shards[1]))
        worker.get_logprobs_presharded(whole)
        whole = whole.with_fields(["prev_logprobs"])
        results = [worker.train_presharded(whole, loss_of) for _ in range(STEPS)]
        operations = client.middleware[0].snapshot()["operations"]
        totals = {op: operations.get(op, {"calls": 0, "n_keys": 0}) for op in ("get_samples", "put_samples")}

        def another() -> Any:
            fresh = make_worker()
            fresh.setup_data_plane(client)
            return fresh

        portions = [portion.with_fields(["prev_logprobs"]) for portion in portions]
        return {
            "coords": coords,
            "leads": worker._is_replica_leader(),
            "ids": whole.sample_ids,
            "results": results,
            **{op: (total["calls"], total["n_keys"]) for op, total in totals.items()},
            "counts": worker.counts,
            "split step": try_split_step(another, whole, portions),
        }
    finally:
        worker.close_data_plane()


def check_training(
    ranks: Sequence[dict[str, Any]], dp_size: int, ids: Sequence[str], losses: Sequence[float], norms: Sequence[float]
) -> None:
    """Asserts what all ranks saw: one fetch per replica group, one writer per key, what one process learns."""
    leaders = [rank for rank in ranks if rank["leads"]]
    assert [rank["coords"]["data_parallel"] for rank in leaders] == list(range(dp_size))
    for rank in ranks:
        rows = len(rank["ids"])
        assert rank["get_samples"] == ((1 + STEPS, (1 + STEPS) * rows) if rank["leads"] else (0, 0))
        assert rank["put_samples"] == ((1, rows) if rank["leads"] else (0, 0))
        assert {result["is_replica_leader"] for result in rank["results"]} == {rank["leads"]}
    assert sorted(each for rank in leaders for each in rank["ids"]) == sorted(ids), "one writer per key"
    assert losses[0] != losses[-1]
    for rank in ranks:
        for name, expected in (("global_loss", losses), ("grad_norm", norms)):
            found = [result[name].item() for result in rank["results"]]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        check_split_step(rank["split step"])


def try_split_step(
    make_worker: Callable[[], Any], whole: KVBatchMeta, portions: Sequence[KVBatchMeta]
) -> dict[str, Any]:
    """Compares a step over portions with one over all rows, from the same weights. Collective over all ranks.

    Returns:
        Facts to assert: differences between the two ways.
    """
    at_once = make_worker()
    expected = at_once.train_presharded(whole, loss_of)
    gradients = at_once.gradients()

    worker, seen = make_worker(), {}
    worker.begin_train_step_presharded(loss_of)
    for portion in portions:
        worker.train_microbatch_presharded(portion)
    result = worker.finish_train_step_presharded()
    seen["loss"] = (result["global_loss"] - expected["global_loss"]).abs().max().item()
    seen["gradients"] = max((worker.gradients()[name] - grad).abs().max().item() for name, grad in gradients.items())
    seen["largest_gradient"] = max(grad.abs().max().item() for grad in gradients.values())
    seen["tags"] = (result["is_replica_leader"], worker._is_replica_leader())

    # now the optimizer has something to lose
    before = worker.state()
    worker.begin_train_step_presharded(loss_of)
    worker.train_microbatch_presharded(portions[0])
    worker.abort_train_step_presharded()
    seen["untouched"] = all(map(torch.equal, before, worker.state()))
    seen["state_size"] = len(before)
    # and nothing of the aborted step is left in the next
    at_once.train_presharded(whole, loss_of)
    worker.train_presharded(whole, loss_of)
    after = at_once.gradients()
    seen["gradients_after"] = max((worker.gradients()[name] - grad).abs().max().item() for name, grad in after.items())
    return seen


def check_split_step(seen: dict[str, Any]) -> None:
    """Asserts what `try_split_step` found on one rank."""
    assert seen["largest_gradient"] > 1e-2
    assert seen["gradients"] <= 1e-6
    assert seen["loss"] <= 1e-6
    assert seen["tags"][0] == seen["tags"][1]
    assert seen["state_size"] > 2
    assert seen["untouched"]
    assert seen["gradients_after"] <= 1e-6
