"""A trainer may compile the function that writes and reads, and may have set a default device for its own model."""

import pytest
import torch

from dataplane_core import connect, kv_first_write, read_columns, write_columns


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "under a default device"])
def test_a_trainers_helpers_do_the_same(compiled):
    ids, tokens = ["a", "b"], torch.tensor([[1, 2, 0], [1, 2, 3]])
    batch = {"input_ids": tokens, "input_lengths": torch.tensor([2, 3]), "logprobs": [[0.5], [1, 2.0]]}
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", [], None, [])

        def step():
            meta = kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="p")
            meta = write_columns(client, meta, {"prev_logprobs": tokens * 0.5})
            return read_columns(client, meta)

        if compiled:
            found = torch.compile(step, backend="eager")()
        else:
            with torch.device("meta"):
                found = step()
    assert found["input_ids"].equal(tokens)
    assert found["prev_logprobs"].equal(tokens * 0.5)
