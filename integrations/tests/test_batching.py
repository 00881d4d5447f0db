"""Settings for dynamic batching and packing, read from a policy's config."""

import pytest

from dataplane_core.errors import ConfigError
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking

KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}


def test_dynamic_batching_is_read_with_a_limit_for_each_stage():
    section = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 128, "sequence_length_round": 8}
    balance = {"cost": "flops", "hidden_size": 64}
    batching = Batching.from_config({"dynamic_batching": section, "lr": 1e-4, "balance": balance})
    train = {**KEYS, "max_tokens_per_microbatch": 64, "sequence_length_round": 8}
    assert batching.shard_args("train") == {
        "dynamic_batching_args": train,
        "sequence_packing_args": None,
        "balance": balance,
    }
    logprob = batching.shard_args("logprob")["dynamic_batching_args"]
    assert logprob == {**train, "max_tokens_per_microbatch": 128}
    assert batching.length_round == 8


def test_packing_pads_to_the_configs_multiple_unless_told_otherwise():
    cfg = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64}, "make_sequence_length_divisible_by": 16}
    batching = Batching.from_config(cfg)
    name = "modified_first_fit_decreasing"
    assert batching.packing == SequencePacking(train_mb_tokens=64, algorithm=name, sequence_length_pad_multiple=16)
    assert batching.pad_multiple == 16
    assert batching.shard_args("logprob")["sequence_packing_args"] == {
        **KEYS,
        "algorithm": name,
        "max_tokens_per_microbatch": 64,
        "sequence_length_pad_multiple": 16,
        "microbatch_order": "packer",
    }


@pytest.mark.parametrize("cfg", [{}, {"dynamic_batching": None}, {"sequence_packing": {"enabled": False}}])
def test_what_is_not_enabled_is_off_and_sizes_of_training_batches_are_read(cfg):
    batching = Batching.from_config({**cfg, "train_global_batch_size": 512, "train_micro_batch_size": 4})
    assert not batching.plans
    assert batching.shard_args("train") == {
        "dynamic_batching_args": None,
        "sequence_packing_args": None,
        "balance": None,
    }
    assert (batching.global_batch_size, batching.micro_batch_size) == (512, 4)
    assert Batching.from_config(cfg).global_batch_size is None


def _enabled(**limit):
    return lambda: Batching.from_config({"dynamic_batching": {"enabled": True, **limit}})


TWO = {"dynamic": DynamicBatching(train_mb_tokens=4), "packing": SequencePacking(train_mb_tokens=4)}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Batching(**TWO), "both on"),
        (lambda: Batching(pad_multiple=0), "pad_multiple is 0"),
        (_enabled(), "'dynamic_batching' is enabled without 'train_mb_tokens'"),
        (_enabled(train_mb_tokens=None), "without 'train_mb_tokens'"),
        (_enabled(train_mb_tokens=0), "without 'train_mb_tokens'"),
    ],
)
def test_what_makes_no_sense_is_refused(make, named):
    with pytest.raises(ConfigError, match=named):
        make()
