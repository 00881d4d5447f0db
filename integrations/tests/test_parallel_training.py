"""Tensor parallelism with `fully_shard` over a store of several processes: who fetches, who writes, what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import split_steps
import tiny_policy
import torch
from split_steps import check_split_step, try_split_step
from tensordict import TensorDict
from tiny_policy import TinyPolicy, TinyWorker, loss_of, padded_logprobs

from dataplane_core import KVBatchMeta, connect, kv_first_write, shard_meta_for_dp
from dataplane_core.batch import BatchedDataDict
from dataplane_core.client import DataPlaneClient
from dataplane_core.codec import ALL_DTYPES
from dataplane_core.errors import MissingDataError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations.errors import ReplicaLeaderError
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking

LENGTHS = [5, 2, 7, 3, 6, 4, 8, 2]
STEPS = 3
DTYPES = sorted(ALL_DTYPES, key=str)
OP_TIMEOUT_S = 120.0

LAYOUTS = [
    pytest.param((2, 1, 2), Batching(dynamic=DynamicBatching(train_mb_tokens=16, sequence_length_round=4)), id="2x1x2"),
    pytest.param(
        (1, 2, 2), Batching(packing=SequencePacking(train_mb_tokens=16)), id="1x2x2-packed", marks=pytest.mark.long
    ),
]


def _batch() -> BatchedDataDict:
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    generator = torch.Generator().manual_seed(3)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(1, tiny_policy.VOCAB, inside.shape, generator=generator) * inside,
            "input_lengths": torch.tensor(LENGTHS),
            "token_mask": inside.float(),
            "sample_mask": torch.ones(len(LENGTHS)),
            "advantages": torch.randn(inside.shape, generator=generator).where(inside, 0.0),
        }
    )


def _every_dtype() -> dict[str, torch.Tensor]:
    """A column (N, 3) of each dtype, with bits of every kind."""
    generator = torch.Generator().manual_seed(7)
    columns = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 256, (len(LENGTHS), 3 * dtype.itemsize), generator=generator, dtype=torch.uint8)
        columns[f"as_{dtype}"] = raw.bool()[:, :3] if dtype is torch.bool else raw.view(dtype)
    return columns


def _raw(column: torch.Tensor) -> bytes:
    return column.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def store(local_ray: Any) -> Iterator[tuple[DataPlaneClient, dict[str, Any]]]:
    """The driver's client of a running store, and the config by which other processes attach to it."""
    for module in (tiny_policy, split_steps):
        cloudpickle.register_pickle_by_value(module)
    options = {"instance": "parallel-training"}
    address = local_ray.get_runtime_context().gcs_address
    with connect({"backend": "tq_simple", "options": options, "op_timeout_s": OP_TIMEOUT_S}) as client:
        yield (
            client,
            {
                "backend": "tq_simple",
                "options": {**options, "ray_address": address},
                "middleware": ["metrics"],
                "op_timeout_s": OP_TIMEOUT_S,
            },
        )
    for module in (tiny_policy, split_steps):
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def attached_ranks(ranks: Any, store: Any) -> Iterator[Any]:
    """Ranks that started after Ray: how to authenticate is in the environment that they inherit."""
    pool = type(ranks)()
    yield pool
    pool.close()


@pytest.fixture
def written(store: Any) -> KVBatchMeta:
    client, _ = store
    client.register_partition("train", [], None, ["train"])
    ids = [f"p{i // 2}_g{i % 2}" for i in range(len(LENGTHS))]
    meta = kv_first_write(_batch(), sample_ids=ids, dp_client=client, partition_id="train")
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = max(LENGTHS)
    client.put_samples(ids, "train", TensorDict(_every_dtype(), batch_size=[len(ids)]))
    return meta


def _run(
    rank: int, shape: tuple[int, int, int], config: dict[str, Any], shards: Any, portions: Any, plain: Any
) -> dict[str, Any]:
    """What one rank does; returns what it saw."""
    packed = shards[0].extra_info.get("elem_counts_per_gb") is not None
    worker = TinyWorker(shape, packed)
    worker.setup_data_plane(config)
    try:
        coords = worker._local_coords()
        mine = shards[coords["data_parallel"]]
        seen: dict[str, Any] = {"coords": coords, "leads": worker._is_replica_leader(), "ids": mine.sample_ids}
        fetched = worker._fetch(plain, dp_aligned_seq_len=False)  # these columns have no tokens to align
        seen["raw"] = {name: (str(column.dtype), _raw(column)) for name, column in fetched.items()}
        worker.get_logprobs_presharded(mine)
        mine = mine.with_fields(["prev_logprobs"])
        results = [worker.train_presharded(mine, loss_of) for _ in range(STEPS)]
        seen["losses"] = [result["global_loss"].item() for result in results]
        seen["norms"] = [result["grad_norm"].item() for result in results]
        seen["tags"] = {result["is_replica_leader"] for result in results}
        operations = worker._require_dp_client().middleware[0].snapshot()["operations"]
        for op in ("get_samples", "put_samples"):
            total = operations.get(op, {"calls": 0, "n_keys": 0})
            seen[op] = (total["calls"], total["n_keys"])

        def another() -> TinyWorker:
            fresh = TinyWorker(shape, packed)
            fresh.setup_data_plane(worker._require_dp_client())
            return fresh

        portions = [part[coords["data_parallel"]].with_fields(["prev_logprobs"]) for part in portions]
        seen["split step"] = try_split_step(another, loss_of, mine, portions)

        try:
            worker._fetch(mine.with_fields(["nobody_wrote_this"]))
        except Exception as error:
            seen["failure"] = (type(error), type(error.__cause__), str(error))
        return seen
    finally:
        worker.close_data_plane()


def _one_process() -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the same steps, everything at once, nothing sharded."""
    model, data = TinyPolicy(), _batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with torch.no_grad():
        data["prev_logprobs"] = padded_logprobs(model, data["input_ids"], data["input_lengths"])
    losses, norms = [], []
    for _ in range(STEPS):
        logprobs = padded_logprobs(model, data["input_ids"], data["input_lengths"])
        loss = loss_of(logprobs, data, data["token_mask"].sum().item())
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize(("shape", "batching"), LAYOUTS)
def test_a_mesh_trains_as_one_process_with_one_fetch_per_group_and_one_writer_per_key(
    attached_ranks: Any, store: Any, written: KVBatchMeta, shape: tuple[int, int, int], batching: Batching
) -> None:
    client, config = store
    shards, _ = shard_meta_for_dp(written, dp_world=shape[0], **batching.shard_args("train"))
    half = len(LENGTHS) // 2
    portions = [
        shard_meta_for_dp(part, dp_world=shape[0], **batching.shard_args("train"))[0]
        for part in (written.slice(0, half), written.slice(half, len(LENGTHS)))
    ]
    plain = written.with_fields([])
    plain.fields = list(_every_dtype())

    seen = attached_ranks(4, _run, shape, config, shards, portions, plain, timeout_s=60)

    # what came: bit for bit, by the leader's fetch or by its broadcast
    expected = {name: (str(column.dtype), _raw(column)) for name, column in _every_dtype().items()}
    assert {"torch.float8_e4m3fn", "torch.bfloat16", "torch.bool"} <= {dtype for dtype, _ in expected.values()}
    assert all(rank["raw"] == expected for rank in seen)

    # who asked the store: each replica group's first rank, once for each of 2 + STEPS fetches
    leaders = [rank for rank in seen if rank["leads"]]
    assert [rank["coords"]["data_parallel"] for rank in leaders] == list(range(shape[0]))
    for rank in seen:
        rows = len(rank["ids"])
        assert rank["get_samples"] == ((2 + STEPS, len(LENGTHS) + (1 + STEPS) * rows) if rank["leads"] else (0, 0))
        assert rank["put_samples"] == ((1, rows) if rank["leads"] else (0, 0))
        assert rank["tags"] == {rank["leads"]}
    assert sorted(i for rank in leaders for i in rank["ids"]) == sorted(written.sample_ids), "one writer per key"

    # what was learned
    losses, norms = _one_process()
    for rank in seen:
        np.testing.assert_allclose(rank["losses"], losses, rtol=0, atol=1e-5)
        np.testing.assert_allclose(rank["norms"], norms, rtol=0, atol=1e-5)
    assert losses[0] != losses[-1]
    for rank in seen:
        check_split_step(rank["split step"])

    # a failed fetch fails the whole group
    for rank in seen:
        kind, cause, message = rank["failure"]
        assert kind is (MissingDataError if rank["leads"] else ReplicaLeaderError)
        assert rank["leads"] or cause is MissingDataError
        assert "nobody_wrote_this" in message
    stored = client.get_samples(written.sample_ids, "train", ["prev_logprobs"])["prev_logprobs"]
    assert [len(row) for row in stored.unbind()] == LENGTHS
