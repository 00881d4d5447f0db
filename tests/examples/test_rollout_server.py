"""The loss of the example with generation servers."""

import pytest
from grpo import Transformer
from rollout_server.settings import FIELDS, TASK
from rollout_server.train import loss_of

from dataplane_core import connect, stream


@pytest.mark.parametrize("lengths", [[6, 6], [4, 6]], ids=["equal", "ragged"])
def test_answers_are_trained_on_whether_their_lengths_differ_or_not(lengths):
    rows = {
        "input_ids": [[4] * length for length in lengths],
        "logprobs": [[0.0] * 3 + [-2.0] * (length - 3) for length in lengths],
        "prompt_length": [3, 3],
        "reward": [0.0, 1.0],
    }
    with connect({"backend": "noop"}) as client:
        client.register_partition("answers", FIELDS, 2, [TASK], 2)
        client.put_samples(["p_g0", "p_g1"], "answers", rows, tags=[{"input_lengths": length} for length in lengths])
        with stream(client, "answers", TASK, FIELDS, 2) as batches:
            [batch] = batches
            loss = loss_of(Transformer(0), batch, {"clip_ratio": 0.2, "answers_per_prompt": 2})
    assert loss.isfinite()
    assert loss.requires_grad
