"""verl's `ReplayBuffer` and `ReplayBufferAsync` sample, evict and refill what its agent loops wrote."""

import asyncio

import pytest
from rollouts import Writer, submit
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

pytestmark = pytest.mark.timeout(300)


def make(cls=ReplayBuffer, **changes):
    arguments = {"max_off_policy_threshold": 1, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
    return cls(trainer_mode="sync", trainer_config={}, poll_interval=0.05, **{**arguments, **changes})


def rollout(tq, uids, steps=1, **changes):
    submit(tq, uids, steps)
    asyncio.run(Writer(fail=changes.pop("fail", ())).run(uids, global_steps=steps, **changes))


def prompts_of(batch):
    return {key.split("_")[0] for key in batch.keys}


def test_a_batch_has_every_trajectory_of_the_oldest_prompts(tq):
    rollout(tq, ["new"], steps=2)
    rollout(tq, ["a", "b"], steps=1)
    batch, metrics = make().sample(global_steps=2, partition_id="train", batch_size=2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    assert {tag["seq_len"] for tag in batch.tags} == {3, 4, 5, 6}
    assert metrics == {}
    assert set(tq.kv_list("train")["train"]) == {"new", "new_0_0", "new_1_0", *batch.keys}  # selected prompts are gone
    data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["prompts", "responses", "rm_scores"])
    assert data["responses"].offsets().diff().tolist() == [tag["response_len"] for tag in batch.tags]
    assert data["rm_scores"].sum(dim=1).tolist() == [float(key.split("_")[1]) for key in batch.keys]


def test_prompts_that_are_still_running_are_not_sampled(tq):
    submit(tq, ["slow"])
    rollout(tq, ["done"])
    batch, _ = make().sample(global_steps=1, partition_id="train", batch_size=1)
    assert prompts_of(batch) == {"done"}


def test_a_prompt_whose_loop_failed_is_replaced(tq):
    submitted = []

    def refill(count):
        uids = [f"refill{len(submitted) + place}" for place in range(count)]
        submitted.extend(uids)
        rollout(tq, uids)

    buffer = make(refill_fn=refill, sync_refill_failed_groups=True, gen_batch_size=1)
    rollout(tq, ["bad", "good"], fail=[("bad", 0), ("bad", 1)])
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert submitted == ["refill0"]
    assert prompts_of(batch) == {"good", "refill0"}
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    assert "bad" not in tq.kv_list("train")["train"]


@pytest.mark.parametrize("metric", ["reward", "acc"])
def test_groups_without_a_difference_in_reward_are_filtered(tq, metric):
    """DAPO: rewards are read from the store, tensors (``rm_scores``) or objects (``extra_fields``)."""
    refills = []
    sizes = {"train_batch_size": 1, "gen_batch_size": 1, "max_inflight_gen_batches": 4}
    buffer = make(refill_fn=refills.append, filter_groups_metric=metric, **sizes)
    rollout(tq, ["same"], same_reward=True)
    if metric == "reward":
        rollout(tq, ["differs"])
        batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
        assert prompts_of(batch) == {"differs"}
        assert metrics["training/filter_groups/evicted_samples"] == 1
    else:
        buffer._sync_metadata_from_transfer_queue()
        assert buffer._dapo_filtered_keys("train")[0] == {"same"}


def test_async_sampling_drops_stale_groups(tq):
    refilled = []

    def refill(count):
        refilled.append(count)
        rollout(tq, [f"fresh{len(refilled)}"], steps=9)

    buffer = make(ReplayBufferAsync, max_off_policy_threshold=2, refill_fn=refill)
    rollout(tq, ["stale"], steps=1)
    rollout(tq, ["ok"], steps=8)
    assert buffer.get_sampleable_count(9, "train") == 1
    batch, metrics = buffer.sample(global_steps=9, partition_id="train", batch_size=2)
    assert prompts_of(batch) == {"ok", "fresh1"}
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert refilled == [1]


def test_async_sampling_waits_for_prompts_at_the_threshold(tq):
    buffer = make(ReplayBufferAsync, max_off_policy_threshold=2, max_off_policy_strategy="wait")
    rollout(tq, ["done"], steps=2)
    submit(tq, ["old"], 1)
    buffer._sync_metadata_from_transfer_queue()
    assert not buffer._has_enough_samples(2, "train", 1, buffer.finished_keys["train"])
    asyncio.run(Writer().run(["old"], global_steps=1))
    batch, _ = buffer.sample(global_steps=2, partition_id="train", batch_size=2)
    assert prompts_of(batch) == {"done", "old"}


def test_validation_has_a_partition_of_its_own(tq):
    submit(tq, ["v"], partition_id="val")
    asyncio.run(Writer().run(["v"], validate=True))
    batch, _ = make().sample(global_steps=1, partition_id="val", batch_size=1)
    assert (batch.partition_id, batch.keys) == ("val", ["v_0_0"])
    tq.kv_clear(keys=batch.keys, partition_id="val")
    assert tq.kv_list("val") == {"val": {}}
