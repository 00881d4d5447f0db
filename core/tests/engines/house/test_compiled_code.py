"""A trainer may compile the function that writes and reads."""

import torch

from dataplane_core import connect, kv_first_write, read_columns, write_columns


def test_a_trainers_helpers_work_in_compiled_code():
    ids, tokens = ["a", "b"], torch.tensor([[1, 2, 0], [1, 2, 3]])
    batch = {"input_ids": tokens, "input_lengths": torch.tensor([2, 3]), "logprobs": [[0.5], [1, 2.0]]}
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", [], None, [])

        def step():
            meta = kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="p")
            meta = write_columns(client, meta, {"prev_logprobs": tokens * 0.5})
            return read_columns(client, meta)

        found = torch.compile(step, backend="eager")()
    assert found["input_ids"].equal(tokens)
    assert found["prev_logprobs"].equal(tokens * 0.5)
