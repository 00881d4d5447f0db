"""Whole runs of the GRPO example: they repeat bit for bit over every backend, and train alike with all options."""

import itertools

import pytest
from grpo.train import main
from grpo_runs import Finished, assert_like, run, write_config

pytestmark = pytest.mark.timeout(540)

MEGATRON = ("--workers", "megatron")


def assert_trains_like(in_memory, options):
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
    assert_trains_like(in_memory, made)


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
    assert_trains_like(in_memory, plain)


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


# --- over every backend, and with rollouts ahead of training ----------------------------------------------------------


@pytest.mark.parametrize("backend", ["tq_simple", "redis_store", "tq_mooncake"])
def test_a_run_over_a_backend_equals_the_run_in_memory_bit_for_bit(tmp_path, in_memory, ray_server, backend):
    config = write_config(tmp_path, ray={"address": ray_server})
    assert_like(in_memory, run(config, tmp_path / "out", path=backend), backend)


def run_ahead(folder, config, staleness, path):
    """An asynchronous run: its results, its evaluation, itself."""
    made = run(config, folder, "--mode", "async", "--staleness", str(staleness), path=path)
    return made.results, made.evaluation, made


def ahead(made):
    """Per step but the last, whether generating for the next one began before training on this one had ended."""
    pairs = itertools.pairwise(made.metrics)
    return [later["spans"]["generate"][0] < step["spans"]["train"][1] for step, later in pairs]


def overlap(made):
    """Whether answers of some step were being generated while the workers trained on an earlier one."""
    steps = itertools.combinations(made.metrics, 2)
    pairs = [(step["spans"]["train"], later["spans"]["generate"]) for step, later in steps]
    return any(generating < ended and began < generated for (began, ended), (generating, generated) in pairs)


@pytest.mark.parametrize("path", ["tq_simple", "tq_mooncake"])
def test_staleness_0_is_the_synchronous_run_bit_for_bit(tmp_path, in_memory, path):
    records, evaluation, made = run_ahead(tmp_path / "out", write_config(tmp_path), 0, path)
    assert [record.pop("staleness") for record in records] == [0, 0, 0, 0]
    assert (records, evaluation) == (in_memory.results, in_memory.evaluation)
    assert ahead(made) == [False] * 3
    assert not overlap(made)


@pytest.mark.parametrize(
    ("staleness", "made_with", "others"),
    [(1, [0, 1, 1, 1], ["tq_simple"]), (3, [0, 1, 2, 3], ["tq_simple", "tq_mooncake"])],
)
def test_stale_rollouts_are_made_with_the_weights_of_a_fixed_step_and_repeat_over_backends(
    tmp_path, in_memory, ray_server, staleness, made_with, others
):
    config = write_config(tmp_path, ray={"address": ray_server})
    runs = {path: run_ahead(tmp_path / path, config, staleness, path) for path in ("redis_store", *others)}
    records, evaluation, made = runs["redis_store"]
    assert [record["staleness"] for record in records] == made_with
    for record in records:
        fresh = record["generation_logprob_error"] < 1e-5
        assert fresh == (record["staleness"] == 0), "the rollout worker had the weights that it should have"
    for other in others:
        assert runs[other][:2] == (records, evaluation), other
    assert records[0]["loss"] == in_memory.results[0]["loss"]
    assert records[2]["loss"] != in_memory.results[2]["loss"]
    for record in made.metrics:
        (generating, generated), (began, ended) = record["spans"]["generate"], record["spans"]["train"]
        assert generating < generated <= began < ended
    assert [ahead(each) for *_, each in runs.values()] == [[True] * 3] * len(runs)
    assert any(overlap(each) for *_, each in runs.values()), "both at the same time, not only in another order"
    assert (made.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
