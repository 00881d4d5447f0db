"""Tensor parallelism with `fully_shard` over a store of several processes: who fetches, who writes, what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bits import bits, random_bits
from layouts import STEPS, Shards, check_training, ids_of, shards_of, train_as_rank
from tiny_policy import TinyWorker, batch_of, in_one_process

from dataplane_core import KVBatchMeta, connect, kv_first_write
from dataplane_core.batch import BatchedDataDict
from dataplane_core.client import DataPlaneClient
from dataplane_core.codec import ALL_DTYPES
from dataplane_core.errors import MissingDataError
from dataplane_integrations.errors import ReplicaLeaderError
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking

LENGTHS = [5, 2, 7, 3, 6, 4, 8, 2]
IDS = ids_of(LENGTHS)
LAYOUTS = [
    pytest.param((2, 1, 2), Batching(dynamic=DynamicBatching(train_mb_tokens=16, sequence_length_round=4)), id="2x1x2"),
    pytest.param(
        (1, 2, 2), Batching(packing=SequencePacking(train_mb_tokens=16)), id="1x2x2-packed", marks=pytest.mark.long
    ),
]


@pytest.fixture(scope="module")
def store() -> Iterator[DataPlaneClient]:
    """The driver's client of a private Redis server."""
    options = {"namespace": "parallel-training"}
    config = {"backend": "redis_store", "options": options, "middleware": ["metrics"], "op_timeout_s": 60}
    with connect(config) as client:
        yield client


def _run(
    rank: int, shape: tuple[int, int, int], packed: bool, config: Any, shards: Shards, plain: KVBatchMeta
) -> dict[str, Any]:
    """What one rank does; returns what it saw."""
    seen = train_as_rank(lambda: TinyWorker(shape, packed), config, shards)
    worker: Any = TinyWorker(shape, packed)
    worker.setup_data_plane(config)
    try:
        seen["plain"] = bits(worker._fetch(plain, dp_aligned_seq_len=False))  # columns without tokens to align
        worker._fetch(plain.with_fields(["nobody_wrote_this"]))
    except Exception as error:
        seen["failure"] = (type(error), type(error.__cause__), str(error))
    finally:
        worker.close_data_plane()
    return seen


@pytest.mark.parametrize(("shape", "batching"), LAYOUTS)
def test_a_mesh_trains_as_one_process_with_one_fetch_per_group_and_one_writer_per_key(
    ranks: Any, store: DataPlaneClient, shape: tuple[int, int, int], batching: Batching
) -> None:
    store.register_partition("train", [], None, ["train"])
    batch = batch_of(LENGTHS, seed=3)
    meta = kv_first_write(batch, sample_ids=IDS, dp_client=store, partition_id="train")
    every_dtype = {f"as_{dtype}": random_bits(dtype, len(IDS), 3) for dtype in sorted(ALL_DTYPES, key=str)}
    plain = store.put_samples(IDS, "train", every_dtype)
    shards = shards_of(meta, batching, shape[0], max(LENGTHS))

    seen = ranks(4, _run, shape, batching.packing is not None, store.config, shards, plain, timeout_s=150)

    check_training(seen, shape[0], IDS, *in_one_process(batch, STEPS))
    stored = store.get_samples(IDS, "train", ["prev_logprobs"])["prev_logprobs"]
    assert [len(row) for row in stored.unbind()] == LENGTHS
    for rank in seen:
        assert rank["plain"] == bits(BatchedDataDict(every_dtype)), "by the leader's fetch or by its broadcast"
        # a failed fetch fails the whole group
        kind, cause, message = rank["failure"]
        assert kind is (MissingDataError if rank["leads"] else ReplicaLeaderError)
        assert rank["leads"] or cause is MissingDataError
        assert "nobody_wrote_this" in message
