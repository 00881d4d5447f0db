"""A checkpoint of verl's async trainer: what was in flight survives, in a store that is new."""

import asyncio
from types import SimpleNamespace

import pytest
import verl.utils.tensordict_utils as tu
from omegaconf import OmegaConf
from rollouts import Writer, submit
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

pytestmark = pytest.mark.timeout(300)


class Trainer(PPOTrainer):
    """verl's async trainer as far as it saves and resumes. The models are not there."""

    on_sample_end = on_step_end = None

    def __init__(self, folder, step):
        nothing = SimpleNamespace(save_checkpoint=lambda *_, **__: None, load_checkpoint=lambda *_, **__: None)
        self.trainer_mode, self.global_steps, self.use_critic = "async", step, False
        self.actor_rollout_wg = nothing
        self.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
        self.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
        self.dispatched = []
        self.agent_loop_manager = SimpleNamespace(generate_sequences=self.dispatched.append)
        saved = {"default_local_dir": str(folder), "default_hdfs_dir": None, "resume_mode": "auto"}
        saved["del_local_ckpt_after_load"] = False
        self.config = OmegaConf.create({"trainer": saved, "actor_rollout_ref": {"actor": {}}})


def test_in_flight_prompts_are_saved_restored_and_dispatched_again(tq, tmp_path):
    prompts = tu.get_tensordict({"uid": ["done", "half"], "raw_prompt": [[{"role": "user"}]] * 2})
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 3}] * 2
    tq.kv_batch_put(["done", "half"], "train", prompts, tags)
    asyncio.run(Writer().run(["done"], global_steps=3))
    asyncio.run(Writer(n=1).run(["half"], global_steps=3))
    tq.kv_put("half", "train", tag={"status": "running"})  # one of its sessions has written, the other has not
    before = tq.kv_list()
    responses = tq.kv_batch_get(["done_0_0", "done_1_0"], "train", "responses")["responses"]

    Trainer(tmp_path, 3)._save_checkpoint()
    submit(tq, ["later"])
    tq.get_client().clear_partition("train")  # the store of the next start is empty

    resumed = Trainer(tmp_path, 0)
    resumed._load_checkpoint()
    assert tq.kv_list() == before
    assert resumed._restored_tq_prompt_count == 2
    again = tq.kv_batch_get(["done_0_0", "done_1_0"], "train", "responses")["responses"]
    assert [row.tolist() for row in again.unbind()] == [row.tolist() for row in responses.unbind()]

    assert resumed._reissue_inflight_prompts() == 1
    listed = tq.kv_list("train")["train"]
    assert set(listed) == {"done", "done_0_0", "done_1_0", "half"}
    assert listed["half"] == {"is_prompt": True, "status": "pending", "global_steps": resumed.global_steps}
    (batch,) = resumed.dispatched
    assert list(batch["uid"]) == ["half"]
    assert list(batch["raw_prompt"]) == [[{"role": "user"}]]
