"""The GRPO example's model on Megatron."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_weights_reach_a_megatron_model_and_come_back_as_they_were() -> None:
    """In a process of a group of one; two ranks cut them in the runs above, where the rollout worker gets them back."""
    program = """
import torch, torch.distributed as dist
from grpo.config import ModelConfig
from grpo.megatron_model import build_megatron_model, load_state, megatron_token_logprobs, whole_state
from grpo.model import build_model, token_logprobs
from megatron.core import parallel_state

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel(1)
sizes = ModelConfig(width=32, layers=2, heads=4)
whole = build_model(sizes, seed=3)
state = dict(whole.named_parameters())
model = build_megatron_model(sizes, 1)
load_state(model, state, sizes.heads)
back = whole_state(model, list(state), sizes.heads)
assert list(back) == list(state)
assert all(torch.equal(back[name], state[name]) for name in state)
lengths = torch.tensor([7, 2, 5])
ids = torch.randint(1, 14, (3, 8)) * (torch.arange(8) < lengths.unsqueeze(1))
expected = token_logprobs(whole(ids), ids, lengths)
for packed in (False, True):
    torch.testing.assert_close(megatron_token_logprobs(model, ids, lengths, packed), expected, rtol=0, atol=1e-5)
dist.destroy_process_group()
"""
    examples = str(Path(__file__).resolve().parents[3] / "examples")
    environment = {**os.environ, "PYTHONPATH": examples}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
