"""The leader broadcasts what it read, unpadded and in small buckets, and every rank pads it to the same bits."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bits import bits, random_bits
from layouts import worker_of_rank
from torch.distributed import distributed_c10d

from dataplane_core.batch import BatchedDataDict, stack_or_nest
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations.errors import ReplicaLeaderError
from dataplane_integrations.trainer.broadcast import broadcast_from_leader

PAD_ID = 7


def _rows(lengths, dtype, *trailing):
    """Bits of every kind; for int16 experts' numbers."""
    seeds = range(sum(lengths), sum(lengths) + len(lengths))
    rows = [random_bits(dtype, length, *trailing, seed=seed) for seed, length in zip(seeds, lengths, strict=True)]
    return [row % 2 for row in rows] if dtype is torch.int16 else rows


def _columns(lengths):
    """Rows of every kind by field."""
    return {
        "input_ids": _rows(lengths, torch.int64),
        "token_mask": _rows(lengths, torch.bool),
        "generation_logprobs": _rows(lengths, torch.bfloat16),
        "routed_experts": _rows(lengths, torch.int16, 2, 3),
        "advantages": _rows(lengths, torch.float32),
        "sample_mask": _rows([1] * len(lengths), torch.float64),
        "pixel_values": _rows([3 * (row % 3) for row in range(len(lengths))], torch.float16, 4),
        "same_shape": _rows([20] * len(lengths), torch.float8_e4m3fn),
        "note": [{"answer": f"é{row}", "box": torch.arange(row)} for row in range(len(lengths))],
    }


#: The field's value where a padded column has no token; the others are not padded.
PAD_VALUES = {"input_ids": PAD_ID, "token_mask": 0, "generation_logprobs": 0, "routed_experts": -1, "advantages": 0}


def _worker(lengths, columns=None):
    fields = {
        name: stack_or_nest(rows) if isinstance(rows[0], torch.Tensor) else np.array([*rows, None], dtype=object)[:-1]
        for name, rows in (_columns(lengths) if columns is None else columns).items()
    }
    worker, metrics, meta = worker_of_rank((1, 1, 2), fields, lengths)
    worker.tokenizer = SimpleNamespace(pad_token_id=PAD_ID)
    return worker, metrics, meta


def _by_hand(lengths, layout, width):
    """What a fetch should return, made row by row."""
    expected = []
    for name, rows in _columns(lengths).items():
        if name == "note":
            expected.append((name, ("objects", [bits(row) for row in rows])))
            continue
        column = stack_or_nest(rows)
        if layout == "padded" and name in PAD_VALUES:
            value = PAD_VALUES[name]
            column = torch.full((len(rows), width, *rows[0].shape[1:]), value, dtype=rows[0].dtype)
            for row, cells in zip(column, rows, strict=True):
                row[: len(cells)] = cells
        expected.append((name, bits(column)))
    return expected


@pytest.mark.parametrize(
    "lengths", [[3, 9, 1, 6], [0, 4, 0], [5], [4, 4], [0]], ids=["ragged", "empty rows", "one row", "equal", "nothing"]
)
def test_leader_and_siblings_get_the_bits_that_a_rank_reads_alone(ranks, lengths):
    def fetch(rank):
        worker, _, meta = _worker(lengths)
        found = {}
        for layout in ("padded", "jagged"):
            for pad, aligned in ((0, True), (16, True), (16, False)):
                meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = pad
                options: Any = {"layout": layout, "dp_aligned_seq_len": aligned}
                batch = worker._fetch(meta, **options)
                alone = worker._fetch(meta, fetch_policy="independent", **options)
                assert bits(batch) == bits(alone), (layout, pad, aligned)
                assert vars(batch).keys() == vars(alone).keys() == vars(BatchedDataDict()).keys()
                found[layout, pad, aligned] = bits(batch)
        return found

    leader, sibling = ranks(2, fetch)
    assert leader == sibling
    for (layout, pad, aligned), found in leader.items():
        width = max(*lengths, pad if aligned else 0)
        assert found == _by_hand(lengths, layout, width), (layout, pad, aligned)


def test_all_ranks_pad_as_the_leader_says(ranks):
    def fetch(rank):
        worker, _, meta = _worker([2, 1])
        if rank:
            worker.tokenizer = SimpleNamespace(pad_token_id=PAD_ID + 1)
            meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 64
        return bits(worker._fetch(meta))

    leader, sibling = ranks(2, fetch)
    assert leader == sibling == _by_hand([2, 1], "padded", 2)


def _count_broadcasts():
    """Sizes in bytes of what this process gives to broadcast from now on; the descriptor counts too."""
    sizes: list[int] = []
    broadcast = distributed_c10d.broadcast

    def count(tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    dist.broadcast = distributed_c10d.broadcast = count
    return sizes


@pytest.fixture
def fresh_ranks(ranks):
    """Ranks whose `_count_broadcasts` does not outlive the test."""
    yield ranks
    ranks.close()


def test_no_more_is_broadcast_than_was_read(fresh_ranks):
    lengths = [16 + 37 * row % 500 for row in range(48)]

    def fetch(rank):
        worker, metrics, meta = _worker(lengths)
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 1024
        sizes = _count_broadcasts()
        batch = worker._fetch(meta)
        padded = sum(column.nbytes for name, column in batch.items() if name in PAD_VALUES)
        return metrics.snapshot()["operations"].get("get_samples", {}).get("n_bytes", 0), sizes, padded

    (read, sizes, padded), (_, received, _) = fresh_ranks(2, fetch)
    assert sizes == received, "every rank takes part in every broadcast"
    assert sum(sizes) <= 1.05 * read
    assert padded > 3 * read, "or this test proves nothing"


def _resident_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("kind", ["one tensor", "tensors of objects"])
def test_a_broadcast_takes_the_leader_little_memory_and_goes_in_buckets(fresh_ranks, kind):
    payload = 48 << 20

    def send(rank):
        count = 1 if kind == "one tensor" else 768
        rows = [torch.full((payload // count,), number % 251, dtype=torch.uint8) for number in range(count)]
        batch = BatchedDataDict({"column": rows[0].unsqueeze(0) if count == 1 else rows})
        broadcast_from_leader(lambda: BatchedDataDict({"warm up": [1]}), group=dist.group.WORLD)
        sizes = _count_broadcasts()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = _resident_bytes("VmRSS")
        received = broadcast_from_leader(lambda: batch, group=dist.group.WORLD)
        right = all(torch.equal(row, sent) for row, sent in zip(received["column"], rows, strict=True))
        return _resident_bytes("VmHWM") - before, sizes, right

    (more, sizes, _), (_, _, right) = fresh_ranks(2, send)
    assert right
    assert payload <= sum(sizes) <= 1.01 * payload
    assert max(sizes) <= 4 << 20
    assert more < payload / 2


def test_offsets_that_columns_share_are_broadcast_once_and_stay_shared(ranks):
    def fetch(rank):
        worker, _, meta = _worker([3, 1], columns={name: _rows([3, 1], torch.float32) for name in ("advantages", "b")})
        batch = worker._fetch(meta, layout="jagged")
        together = batch["advantages"] + batch["b"]  # torch combines only columns of the same offsets
        return together.values().shape, batch["advantages"].offsets() is batch["b"].offsets()

    assert ranks(2, fetch) == [((4,), True)] * 2


def test_a_length_that_the_leader_refuses_fails_every_rank(ranks):
    def fetch(rank):
        worker, metrics, meta = _worker([3, 1])
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 2
        with pytest.raises((InvalidRequestError, ReplicaLeaderError), match="at least 3, the longest") as caught:
            worker._fetch(meta)
        return caught.type, metrics.snapshot()["operations"].get("get_samples")

    assert ranks(2, fetch) == [(InvalidRequestError, None), (ReplicaLeaderError, None)]


def test_a_pad_value_that_does_not_fit_fails_every_rank(ranks):
    def fetch(rank):
        worker, _, meta = _worker([3, 1])
        worker.tokenizer.pad_token_id = 1 << 70
        with pytest.raises(InvalidRequestError, match=r"'input_ids' of torch\.int64 cannot be padded"):
            worker._fetch(meta)

    ranks(2, fetch)
