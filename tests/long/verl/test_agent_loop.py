"""What verl's agent loops write comes back as the trainer's steps expect it."""

import asyncio

import pytest
import torch
from omegaconf import OmegaConf
from rollouts import Writer, submit
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def batch(tq):
    submit(tq, ["a", "b"])
    asyncio.run(Writer().run(["a", "b"]))
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    tags = tq.kv_list("train")["train"]
    return tq.KVBatchMeta(partition_id="train", keys=keys, tags=[tags[key] for key in keys])


class Trainer(PPOTrainer):
    """The steps of verl's trainer between its workers."""

    on_sample_end = on_step_end = None

    def __init__(self):
        algorithm = {"use_kl_in_reward": False, "adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True}
        algorithm |= {"gamma": 1.0, "lam": 1.0}
        self.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}})


def test_prompts_end_as_finished_and_trajectories_come_back_with_all_fields_and_tags(tq, batch):
    listed = tq.kv_list()["train"]
    assert listed["a"] == {"is_prompt": True, "status": "finished", "global_steps": 1}
    lengths = {"prompt_len": 2, "response_len": 4, "seq_len": 6}
    steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 1)
    assert listed["b_1_0"] == {"status": "success", **lengths, **steps}
    data = tq.kv_batch_get(batch.keys, "train")
    assert data["input_ids"].unbind()[3].tolist() == [1, 2, 1, 2, 0, 1]
    assert data["position_ids"].unbind()[0].tolist() == [0, 1, 2]
    assert data["rollout_log_probs"].dtype == torch.float32
    assert data["extra_fields"][0]["reward_extra_info"] == {"acc": 1.0}
    assert list(data["uid"]) == ["a", "a", "b", "b"]
    assert list(data["raw_prompt"]) == [[{"role": "user"}]] * 4
    assert list(data["num_turns"]) == [2] * 4


def test_a_failed_session_marks_its_prompt(tq):
    submit(tq, ["a"])
    asyncio.run(Writer(fail=[("a", 1)]).run(["a"]))
    listed = tq.kv_list()["train"]
    assert listed["a"]["status"] == "failure"
    assert set(listed) == {"a", "a_0_0"}


def test_mrope_positions_and_images_come_back(tq):
    """Rows (4, tokens): the dim that differs between rows is the second one."""
    asyncio.run(Writer(image=True).run(["a", "b"]))
    keys = ["a_0_0", "b_1_0"]
    data = tq.kv_batch_get(keys, "train", ["position_ids", "multi_modal_inputs"])
    rows = data["position_ids"].unbind()
    assert [tuple(row.shape) for row in rows] == [(4, 3), (4, 6)]
    assert rows[1].tolist() == [list(range(6))] * 4
    assert data["position_ids"].values().shape == (4, 9)  # as verl's engines read it
    assert torch.equal(data["multi_modal_inputs"][0]["pixel_values"], torch.ones(3, 2))


def test_advantages_are_written_for_the_fields_that_there_are(tq, batch):
    """The trainer asks for ``values`` and ``ref_log_prob`` too, which no one wrote."""
    metrics = {}
    data = tq.kv_batch_get(batch.keys, "train", ["rollout_log_probs"])
    tq.kv_batch_put(batch.keys, "train", data.rename_key_("rollout_log_probs", "old_log_probs"))
    written = Trainer()._compute_advantage(batch, metrics)
    assert written.keys == batch.keys
    assert {"advantages", "returns", "old_log_probs", "responses"} <= set(written.fields)
    assert [tag["seq_len"] for tag in written.tags] == [tag["seq_len"] for tag in batch.tags]
    advantages = tq.kv_batch_get(batch.keys, "train", "advantages")["advantages"]
    assert advantages.offsets().diff().tolist() == [tag["response_len"] for tag in batch.tags]
    low, high = (row.mean().item() for row in advantages.unbind()[:2])
    assert low < 0 < high


def test_padding_samples_fill_a_batch(tq, batch):
    filled = upsample_batch_to_divisible_size(batch, 3, eos_token_id=0)
    assert len(filled) == 6
    assert [tag.get("is_padding", False) for tag in filled.tags] == [False] * 4 + [True] * 2
    lengths = tq.kv_batch_get(filled.keys, "train", "input_ids")["input_ids"].offsets().diff().tolist()
    assert lengths == [3, 4, 5, 6, 128, 128]
