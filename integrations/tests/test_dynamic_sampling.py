"""Dynamic sampling: on tags alone, with exactly the unwanted rows cleared from the store."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from dataplane_core import KVBatchMeta
from dataplane_core.errors import BackendUnavailableError, InvalidRequestError
from dataplane_integrations.errors import SamplingExhaustedError
from dataplane_integrations.rollout import DynamicSampling, RolloutReceipt, all_match, mint_sample_ids, tag_varies

GOOD, SOLVED, HOPELESS = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]
Generate = Callable[[Sequence[list[float]]], KVBatchMeta]


@pytest.fixture
def generate(client):
    """Writes a generation of groups with the given rewards, under new ids."""
    client.register_partition("train", ["input_ids"], None, ["train"])
    numbers = itertools.count()

    def write(rewards):
        generation = next(numbers)
        ids = mint_sample_ids([f"r{generation}p{i}" for i in range(len(rewards))], 2)
        lengths = list(range(1, len(ids) + 1))
        meta = client.put_samples(ids, "train", {"input_ids": torch.ones(len(ids), 8, dtype=torch.int64)})
        meta.sequence_lengths = lengths
        meta.stamp_tags({"reward": [value for group in rewards for value in group], "input_lengths": lengths})
        return meta

    return write


def _clears(client):
    """Calls, and rows named."""
    total = client.metrics.snapshot()["operations"].get("clear_samples", {})
    return total.get("calls", 0), total.get("n_keys", 0)


@pytest.mark.parametrize("group_size", [2, None])
def test_a_group_of_rollouts_is_judged_by_rollouts(client, group_size):
    client.register_partition("train", ["x"], None, ["train"], rollouts=True)
    ids = ["a_g0/0", "a_g0/1", "a_g1/0", "b_g0/0", "b_g1/0", "b_g1/1"]
    tags = [{}, {"reward": 1.0}, {"reward": 0.0}, {"reward": 1.0}, {"reward": 0.5}, {"reward": 1.0}]
    meta = client.put_samples(ids, "train", {"x": torch.zeros(6)}, tags)
    sampling = DynamicSampling(client, num_groups=1, group_size=group_size)
    assert sampling.add(meta)
    assert sampling.take().sample_ids == client.list_sample_ids("train") == ids[:3]
    with pytest.raises(InvalidRequestError, match="3 rows, 3 of them different, of 2 rollouts"):
        DynamicSampling(client, num_groups=1, group_size=3).add(meta)


def test_survivors_and_their_carry_accumulate_and_everything_else_is_cleared(client, generate):
    plan = [[GOOD, SOLVED, GOOD], [HOPELESS, SOLVED, HOPELESS], [SOLVED, GOOD, GOOD]]
    sampling = DynamicSampling(client, num_groups=3, group_size=2)
    before = []

    def with_carry(number):
        before.append((sampling.missing, *_clears(client)))
        meta = generate(plan[number])
        rewards = torch.tensor(plan[number]).flatten()
        prompts = torch.full((meta.size, number + 1), number + 1)  # as wide as the generation's longest prompt
        turns = [[f"turn of {sample_id}"] for sample_id in meta.sample_ids]
        return RolloutReceipt(meta=meta, carry={"total_reward": rewards, "prompts": prompts, "turns": turns})

    meta = sampling.collect(with_carry)
    assert before == [(3, 0, 0), (1, 1, 2), (1, 2, 8)]
    assert _clears(client) == (3, 12)
    kept = ["r0p0_g0", "r0p0_g1", "r0p2_g0", "r0p2_g1", "r2p1_g0", "r2p1_g1"]
    assert meta.sample_ids == kept
    assert meta.sequence_lengths == [1, 2, 5, 6, 3, 4]
    assert meta.tags is not None
    assert [row["reward"] for row in meta.tags] == GOOD * 3
    assert sampling.carry["total_reward"].tolist() == GOOD * 3
    assert sampling.carry["prompts"].tolist() == [[1, 0, 0]] * 4 + [[3, 3, 3]] * 2
    assert sampling.carry["turns"] == [[f"turn of {sample_id}"] for sample_id in kept]
    assert sorted(client.list_samples("train").sample_ids) == sorted(kept)
    counts = sampling.counts
    assert (counts.generations, counts.generated, counts.dropped, counts.overflow, counts.held) == (3, 9, 5, 1, 3)
    assert "get_samples" not in client.metrics.snapshot()["operations"], "on tags alone"


def test_collect_gives_up_after_the_last_generation_and_leaves_no_row_unless_fewer_are_allowed(client, generate):
    meta = DynamicSampling(client, num_groups=2, group_size=2).collect(lambda _: generate([GOOD, GOOD]))
    assert (meta.size, _clears(client)) == (4, (0, 0)), "nothing was lost"
    client.clear_samples(meta.sample_ids, "train")
    before = _clears(client)
    sampling = DynamicSampling(client, num_groups=3, group_size=2, max_generations=2)
    with pytest.raises(SamplingExhaustedError, match=r"1 of 3 groups after 2 of at most 2 generations") as caught:
        sampling.collect(lambda n: generate([GOOD if n == 0 else SOLVED, HOPELESS]))
    assert sampling.counts.generations == 2
    assert (caught.value.counts.held, caught.value.counts.dropped) == (1, 3)
    assert client.list_samples("train").size == 0
    assert _clears(client) == (before[0] + 3, before[1] + 8)
    fewer = DynamicSampling(client, num_groups=3, group_size=2, max_generations=2, allow_fewer=True)
    meta = fewer.collect(lambda n: generate([GOOD if n == 0 else SOLVED]))
    assert fewer.exhausted
    assert len(meta.sample_ids) == 2
    assert client.list_samples("train").sample_ids == meta.sample_ids
    none = DynamicSampling(client, num_groups=1, group_size=2, max_generations=1, allow_fewer=True)
    with pytest.raises(SamplingExhaustedError, match="0 of 1 groups"):
        none.collect(lambda _: generate([SOLVED]))


@pytest.mark.parametrize("breaks_in", ["generate", "tags"])
def test_any_error_on_the_way_clears_the_rows_of_the_step(client, generate, breaks_in):
    def broken(number):
        meta = generate([GOOD, GOOD])
        if number == 1 and breaks_in == "generate":
            client.clear_samples(meta.sample_ids, "train")
            raise RuntimeError("the rollout worker died")
        if number == 1:
            meta.tags = None
        return meta

    with pytest.raises((RuntimeError, InvalidRequestError), match=r"rollout worker died|4 rows without tags"):
        DynamicSampling(client, num_groups=3, group_size=2).collect(broken)
    assert client.list_samples("train").size == 0


def test_a_generation_whose_rows_could_not_be_cleared_is_added_again(client, generate, no_clears):
    sampling = DynamicSampling(client, num_groups=2, group_size=2)
    sampling.add(generate([GOOD]))
    second = generate([HOPELESS, GOOD, GOOD])
    with no_clears():
        for call in (lambda: sampling.add(second), sampling.discard):
            with pytest.raises(BackendUnavailableError):
                call()
    assert (sampling.counts.generations, sampling.counts.held) == (1, 1)
    assert sampling.add(second)
    kept = sampling.take().sample_ids
    sampling.discard()
    assert client.list_samples("train").sample_ids == kept == ["r0p0_g0", "r0p0_g1", "r1p1_g0", "r1p1_g1"]


def test_a_refused_generation_leaves_the_store_as_it_was(client, generate):
    sampling = DynamicSampling(client, num_groups=9, group_size=2)
    first = generate([GOOD, SOLVED])
    sampling.add(first)
    second = generate([GOOD, SOLVED])
    before = _clears(client), client.list_samples("train").sample_ids

    elsewhere = KVBatchMeta("other", None, ["x_g0", "x_g1"], tags=[{"reward": 0.0}, {"reward": 1.0}])
    untagged = KVBatchMeta("train", None, ["x_g0", "x_g1"], tags=[{"reward": 0.0}, {}])
    nan = KVBatchMeta("train", None, ["x_g0", "x_g1"], tags=[{"reward": 0.0}, {"reward": float("nan")}])
    no_group = KVBatchMeta("train", None, ["x", "y"], tags=[{"reward": 0.0}, {"reward": 1.0}])
    for meta, message in [
        (second.slice(0, 3), "group 'r1p1' has 1 rows, 1 of them different, of 1 rollouts. Expected whole groups of 2"),
        (second.subset([0, 0, 2, 3]), "group 'r1p0' has 2 rows, 1 of them different"),
        (first.slice(0, 2), "'r0p0_g0', 'r0p0_g1' came in an earlier generation"),
        (elsewhere, "partition_ids must match, got 'train' and 'other'"),
        (untagged, "tag 'reward' is None"),
        (nan, "tag 'reward' is nan"),
        (no_group, "'x' holds no '_g'"),
        (second.slice(0, 0), "0 rows with tags"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            sampling.add(meta)
    assert (_clears(client), client.list_samples("train").sample_ids) == before
    assert sampling.counts.generations == 1
    assert not sampling.add(second)


def test_a_complete_step_takes_no_more_and_gives_its_rows_away_once_in_the_order_of_groups(client, generate):
    sampling = DynamicSampling(client, num_groups=2, group_size=2)
    sampling.add(generate([GOOD, SOLVED, GOOD]).subset([5, 0, 3, 1, 4, 2]))  # members need not lie side by side
    before = _clears(client)
    with pytest.raises(InvalidRequestError, match="the step is complete"):
        sampling.add(generate([GOOD]))
    client.clear_samples(["r1p0_g0", "r1p0_g1"], "train")
    assert sampling.take().sample_ids == ["r0p2_g1", "r0p2_g0", "r0p0_g0", "r0p0_g1"]
    sampling.discard()
    assert _clears(client)[0] == before[0] + 1, "only the test's own"
    assert sorted(client.list_samples("train").sample_ids) == ["r0p0_g0", "r0p0_g1", "r0p2_g0", "r0p2_g1"]


def test_a_carry_that_does_not_fit_is_refused_before_anything_is_cleared(client, generate):
    sampling = DynamicSampling(client, num_groups=3, group_size=2)
    sampling.add(RolloutReceipt(meta=generate([GOOD]), carry={"total_reward": torch.ones(2)}))
    with pytest.raises(InvalidRequestError, match=r"the carry has 3 rows. Expected 4"):
        sampling.add(RolloutReceipt(meta=generate([SOLVED, GOOD]), carry={"total_reward": torch.ones(3)}))
    with pytest.raises(InvalidRequestError, match=r"the columns none. Expected those .*: total_reward"):
        sampling.add(generate([SOLVED, GOOD]))
    assert _clears(client) == (0, 0)
    assert (sampling.counts.generations, sampling.carry.size) == (1, 2)
    sampling.discard()
    assert not sampling.carry


def test_rules():
    varies = tag_varies("score", tolerance=0.1)
    assert not varies([{"score": 0.5}, {"score": 0.55}])
    assert varies([{"score": 0.5}, {"score": 0.65}])
    whole = all_match({"truncated": False, "weight_version": (">=", 3)})
    assert whole([{"truncated": False, "weight_version": 3}] * 2)
    assert not whole([{"truncated": False, "weight_version": 3}, {"truncated": True, "weight_version": 3}])
    assert all_match({"reward": ("any >", 0)})([{"reward": 0.0}, {"reward": 1.0}])


@pytest.mark.parametrize("name", ["num_groups", "group_size", "max_generations"])
def test_numbers_below_one_are_refused(client, name):
    with pytest.raises(InvalidRequestError, match=f"{name} must be at least 1"):
        DynamicSampling(client, **{"num_groups": 1, "group_size": 1, name: 0})
