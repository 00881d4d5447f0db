"""Sharding stays near-linear. Times are of this process alone, and the gates leave room for a busy machine."""

import time

import numpy as np
import pytest

from dataplane_core.meta import KVBatchMeta
from dataplane_core.sharding import PACKERS, shard_meta_for_dp

KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}


def seconds(num_rows, args):
    lengths = np.random.RandomState(0).randint(1, 4097, num_rows).tolist()
    meta = KVBatchMeta("p", None, [str(i) for i in range(num_rows)], sequence_lengths=lengths)
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        shard_meta_for_dp(meta, dp_world=8, **args)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("name", ["dynamic", *PACKERS])
@pytest.mark.parametrize("capacity", [4096, 131072])
def test_eight_times_the_rows_take_no_more_than_a_few_times_eight_times_as_long(name, capacity):
    if name == "dynamic":
        args = {"dynamic_batching_args": {"max_tokens_per_microbatch": capacity, "sequence_length_round": 1, **KEYS}}
    else:
        args = {
            "sequence_packing_args": {
                "algorithm": name,
                "max_tokens_per_microbatch": capacity,
                "sequence_length_pad_multiple": 1,
                **KEYS,
            }
        }
    # quadratic cost would be 64 times as much
    assert seconds(32768, args) < 30 * max(seconds(4096, args), 0.001)
