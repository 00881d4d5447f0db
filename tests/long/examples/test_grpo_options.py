"""Whole runs of the GRPO example with its options: tensor parallelism, packing, Megatron, portions and others."""

import pytest
from grpo.train import main
from grpo_runs import Finished, run, write_config

MEGATRON = ("--workers", "megatron")


def assert_like(in_memory, options):
    """The run with options computed what the first steps of the plain one did, but for rounding."""
    for expected, record in zip(in_memory.results, options.results, strict=False):
        for what in ("reward", "advantages_sha256", "tokens", "mean_length"):
            assert record[what] == expected[what]
        for what in ("loss", "grad_norm", "kl"):
            assert record[what] == pytest.approx(expected[what], abs=1e-5), what
        assert record["generation_logprob_error"] < 1e-5, "the rollout worker had the newest weights, whole"


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("tq_simple", ("--tp", "2", "--packing")),
        ("tq_simple", ("--tp", "2")),
        ("in-memory", ("--tp", "2", "--packing")),
        ("in-memory", ("--packing",)),
        ("redis_store", (*MEGATRON, "--tp", "2", "--packing")),
        ("tq_mooncake", (*MEGATRON, "--tp", "2")),
        ("tq_simple", (*MEGATRON, "--tp", "2")),
        ("in-memory", MEGATRON),
    ],
)
def test_a_run_with_options_trains_as_the_plain_run_does(in_memory, tmp_path, path, arguments):
    made = run(write_config(tmp_path, grpo={"steps": 2}), tmp_path / "out", *arguments, path=path)
    assert [record["path"] for record in made.metrics] == [path] * 2
    assert_like(in_memory, made)


@pytest.mark.parametrize("arguments", [("--tp", "2"), (), MEGATRON], ids=" ".join)
def test_portions_train_as_the_plain_run_does_and_reading_ahead_changes_no_bit(in_memory, tmp_path, arguments):
    plain, ahead = (
        run(
            write_config(tmp_path, grpo={"steps": 2}, portions={"per_step": 3, "read_ahead": depth}),
            tmp_path / str(depth),
            *arguments,
            path="shm_store",
        )
        for depth in (0, 2)
    )
    assert plain.results == ahead.results
    assert_like(in_memory, plain)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--backend", "shm_store"),
        ("--backend", "tq_simple", *MEGATRON),
        ("--backend", "redis_store", *MEGATRON, "--tp", "2"),
        ("--backend", "tq_mooncake", *MEGATRON, "--tp", "2"),
    ],
    ids=" ".join,
)
def test_a_whole_run_learns(tmp_path, arguments):
    assert main(["--out", str(tmp_path), *arguments]) == 0
    evaluation = Finished(tmp_path, "").evaluation
    for kind in ("sampled", "greedy"):
        assert evaluation["before"][kind] < 0.1
        assert evaluation["after"][kind] > 0.8


def test_dynamic_sampling_trains_on_groups_whose_rewards_differ(tmp_path):
    config = write_config(tmp_path, grpo={"steps": 2})
    records = run(config, tmp_path / "out", "--dynamic-sampling", path="tq_simple").results
    for record in records:
        assert 1 <= record["generations"] <= 4
        assert record["answers"] == record["groups"] * 4 <= 32
        drawn = 8 * record["generations"]
        assert record["groups"] + record["groups_dropped"] + record["groups_overflow"] == drawn
        assert 0.0 < record["reward_generated"] <= record["reward"] < 1.0  # dropped: groups with nothing right as yet
        assert record["grad_norm"] > 0
    assert sum(record["groups_dropped"] for record in records) > 0
