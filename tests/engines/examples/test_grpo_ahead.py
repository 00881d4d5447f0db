"""`examples/grpo.py` with rollouts ahead of training, by a replay buffer: how stale is fixed, and runs repeat."""

import math
import random
import threading
from pathlib import Path

import grpo
import pytest
import ray
from grpo_runs import SEED, STEPS, answered, plane_of, run_actors, run_in_memory, train_on
from tiers import in_long

from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.ray import RayWorkerGroup
from dataplane_integrations.replay import Collector, InOrderPolicy, ReplayBuffer

pytestmark = pytest.mark.timeout(540)
WAIT_S = 400.0


class ReservedRollout(grpo.RolloutWorker):
    """Writes the rows that a replay buffer has reserved."""

    def reserved(self, step, prompts, ids, tags):
        rows = answered(self, prompts, grpo.seed_of(self.seed, "rollout", step))
        return self._first_write(rows, sample_ids=ids, partition_id="replay", tags=tags).meta


def run_ahead(backend, folder, staleness):
    """The results of each step, and how many versions old its weights were."""
    folder.mkdir()
    prompts = Path(grpo.__file__).with_name("prompts.txt").read_text().split()
    held_out = {prompts[number * len(prompts) // grpo.NUM_EVAL] for number in range(grpo.NUM_EVAL)}
    prompts = [prompt for prompt in prompts if prompt not in held_out]
    begun, num_begun, results = threading.Semaphore(0), 0, []

    def roll_out(reservations):
        step = reservations[0].prompt // grpo.PROMPTS_PER_STEP + 1
        chosen = random.Random(grpo.seed_of(SEED, "prompts", step)).sample(prompts, grpo.PROMPTS_PER_STEP)
        ids = [sample_id for reservation in reservations for sample_id in reservation.sample_ids]
        tags = [reservation.tags for reservation in reservations for _ in reservation.sample_ids]
        call = generator.reserved.remote(step, chosen, ids, tags)  # an actor does its calls in order
        begun.release()
        return ray.get(call)

    with (
        run_actors(folder, ReservedRollout) as (workers, generator),
        DataPlanePolicy(RayWorkerGroup(workers), plane_of(backend, folder), batching=grpo.BATCHING) as policy,
    ):
        ray.get(generator.setup_data_plane.remote(policy.client.config))
        policy.prepare_step(group_size=grpo.ANSWERS_PER_PROMPT, partition_id="replay")
        rule = InOrderPolicy(max_staleness=staleness, groups_per_version=grpo.PROMPTS_PER_STEP)
        size = {"group_size": grpo.ANSWERS_PER_PROMPT, "num_prompts": STEPS * grpo.PROMPTS_PER_STEP}
        buffer = ReplayBuffer(policy.client, "replay", rule, **size)
        with Collector(buffer, roll_out, groups_per_call=grpo.PROMPTS_PER_STEP, max_failures=1):
            for step in range(1, STEPS + 1):
                meta = buffer.select(grpo.PROMPTS_PER_STEP, timeout_s=WAIT_S)
                rewards_n, result = train_on(policy, meta)
                metrics = {name: math.fsum(parts) for name, parts in result["all_mb_metrics"].items()}
                metrics |= {name: result[name].item() for name in ("loss", "grad_norm")}
                age = step - 1 - min(tags["weight_version"] for tags in meta.tags)
                results.append(({**metrics, "reward": rewards_n.mean().item()}, age))
                buffer.consume(meta)
                while num_begun < min(step + staleness, STEPS):  # with the weights that were there before
                    assert begun.acquire(timeout=WAIT_S)
                    num_begun += 1
                weights = [worker.weights.remote() for worker in workers]
                ray.get(generator.update.remote(weights[0], ["1="]))
                buffer.set_weight_version(step)
        buffer.close()
    return results


@pytest.fixture(scope="module")
def in_memory(ray_address, tmp_path_factory):
    """The results of the synchronous run without a data plane."""
    return run_in_memory(tmp_path_factory.mktemp("in-memory"))


def test_staleness_0_is_the_synchronous_run_bit_for_bit(tmp_path, in_memory):
    for expected, (record, age) in zip(in_memory, run_ahead("shm_store", tmp_path / "ahead", 0), strict=True):
        assert age == 0
        assert record == {name: expected[name] for name in record}


@pytest.mark.parametrize(("staleness", "ages"), [(1, [0, 1, 1]), *in_long((2, [0, 1, 2]))])
def test_stale_rollouts_are_made_with_the_weights_of_a_fixed_step_and_repeat_over_backends(
    tmp_path, in_memory, staleness, ages
):
    results = run_ahead("shm_store", tmp_path / "first", staleness)
    assert [age for _, age in results] == ages
    for record, age in results:
        assert (record["generation_logprob_error"] < 1e-5) == (age == 0)
    assert run_ahead("redis_store", tmp_path / "second", staleness) == results
    assert results[0][0]["loss"] == in_memory[0]["loss"]
    assert results[2][0]["loss"] != in_memory[2]["loss"]
