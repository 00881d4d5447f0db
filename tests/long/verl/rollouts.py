"""What verl's driver and agent loops write, for the tests."""

import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

AgentLoopWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class Writer(AgentLoopWorker):
    """verl's agent-loop worker. Only the language model is ours: an answer is its prompt, once more and longer."""

    def __init__(self, n=2, fail=(), image=False):
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": n, "val_kwargs": {"n": 1}}}})
        self.fail, self.image = set(fail), image
        self.reward_loop_worker_handles = self.processor = None
        self.background_tasks = set()

    async def _run_agent_loop(self, sampling_params, trajectory, *, session_id, uid, prompt_ids, trace=False, **kwargs):
        if (uid, session_id) in self.fail:
            raise RuntimeError("the model failed")
        answer = [*prompt_ids, *range(session_id + 1)]
        output = AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer,
            response_mask=[1] * len(answer),
            response_logprobs=[-0.5] * len(answer),
            reward_score=float(session_id if not kwargs.get("same_reward") else 1),
            num_turns=2,
            metrics={},
            extra_fields={
                "min_global_steps": kwargs["global_steps"],
                "max_global_steps": kwargs["global_steps"],
                "reward_extra_info": {"acc": 1.0},
            },
        )
        await self._agent_loop_postprocess(
            output, trajectory["validate"], uid=uid, session_id=session_id, raw_prompt=[{"role": "user"}], **kwargs
        )

    async def _compute_teacher_logprobs(self, *args, **kwargs):
        """There is no teacher."""

    def _compute_position_ids(self, input_ids, attention_mask, multi_modal_inputs):
        positions = super()._compute_position_ids(input_ids, attention_mask, multi_modal_inputs)
        return positions.unsqueeze(1).expand(-1, 4, -1) if self.image else positions  # M-RoPE: (1, 4, tokens)

    def _compute_multi_modal_inputs(self, output, input_ids):
        return {"pixel_values": torch.ones(3, 2)} if self.image else {}

    async def run(self, uids, global_steps=1, validate=False, same_reward=False):
        """Answers prompts, as `generate_sequences` does for each of its batch."""
        for place, uid in enumerate(uids):
            prompt = {
                "uid": uid,
                "prompt_ids": list(range(1, place % 3 + 2)),
                "global_steps": global_steps,
                "same_reward": same_reward,
                "data_source": "sums",
            }
            await self._run_prompt(prompt, {}, {"validate": validate})


def submit(tq, uids, global_steps=1, partition_id="train"):
    """Registers prompts as verl's trainer does before it dispatches them."""
    tags = [{"is_prompt": True, "status": "pending", "global_steps": global_steps} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id=partition_id, tags=tags)
