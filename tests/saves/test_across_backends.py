"""A save of one backend is loaded into stores of the others, also of another size."""

import pytest
import torch
from tensordict import NonTensorStack
from tiers import in_long

from dataplane_core import connect

pytestmark = pytest.mark.timeout(600)  # Ray and two stores on it start within a test

CONFIGS = {
    "noop": {"backend": "noop"},
    "shm_store": {"backend": "shm_store", "options": {"capacity_bytes": 64 << 20}},
    "redis_store": {"backend": "redis_store"},
    "tq_simple": {"backend": "tq_simple", "op_timeout_s": 120.0},
    "one unit": {"backend": "tq_simple", "op_timeout_s": 120.0},
    "tq_mooncake": {
        "backend": "tq_mooncake",
        "options": {"segment_size_bytes": 64 << 20, "local_buffer_size_bytes": 16 << 20, "master_start_s": 85},
        "op_timeout_s": 120.0,
    },
}
ON_RAY = ["tq_simple", "one unit", "tq_mooncake"]
TARGETS = ["noop", "redis_store", *in_long("shm_store", "one unit", "tq_mooncake")]

GROUPS, SIZE = 40, 4
IDS = [f"p{group}_g{member}" for group in range(GROUPS) for member in range(SIZE)]


def content(client):
    """All that a save keeps of the partition, as values that can be compared."""
    listed = client.list_samples("train")
    columns = client.get_samples(listed.sample_ids, "train", None)
    found = client.describe("train")
    return {
        "samples": list(zip(listed.sample_ids, listed.tags, strict=True)),
        "fields": client.list_fields(listed.sample_ids, "train"),
        "tokens": [row.tolist() for row in columns["tokens"].unbind()],
        "loss": (columns["loss"].dtype, columns["loss"].view(torch.int16).tolist()),
        "pixels": [row.sum().item() for row in columns["pixels"].unbind()],
        "info": columns["info"].tolist() if hasattr(columns["info"], "tolist") else columns["info"],
        "specs": {name: spec.to_text() for name, spec in found.specs.items()},
        "registration": found.info.registration(),
        "consumed": client.list_consumed("train", "trainer"),
        "cleared": found.num_cleared,
        "unfinished": client.check_consumption_status("train", ["trainer"]),
    }


@pytest.fixture(scope="module", params=["shm_store", *in_long("tq_simple")])
def saved(request, tmp_path_factory):
    """A folder with a save, and what it contains."""
    if request.param in ON_RAY:
        request.getfixturevalue("ray_address")
    folder = tmp_path_factory.mktemp("save")
    with connect(CONFIGS[request.param]) as client:
        client.register_partition(
            "train", ["tokens", "loss", "pixels", "info"], len(IDS) + SIZE, ["trainer"], SIZE, {"source": ["a", "b"]}
        )
        lengths = [1 + 37 * row % 501 for row in range(len(IDS))]
        columns = {
            "tokens": torch.nested.as_nested_tensor([torch.arange(each) for each in lengths], layout=torch.jagged),
            "loss": torch.randn(len(IDS), dtype=torch.bfloat16),
            "pixels": torch.stack([torch.full((27_000,), row // SIZE, dtype=torch.float32) for row in range(len(IDS))]),
            "info": NonTensorStack(*[{"row": row, "of": [None, b"x", "ü"]} for row in range(len(IDS))]),
        }
        client.put_samples(IDS, "train", columns, [{"input_lengths": each, "source": "b"} for each in lengths])
        client.put_samples(IDS[:2], "train", {"late": [1, 2]})  # a field that few rows have, and that is still open
        client.claim_meta("train", "trainer", ["tokens"], 3 * SIZE)
        client.claim_meta("train", "trainer", ["tokens"], SIZE, lease_s=600.0)
        client.clear_samples(IDS[SIZE : 2 * SIZE], "train")
        client.save(folder, {"step": 7})
        before = content(client)
    return folder, before


@pytest.mark.parametrize("target", TARGETS)
def test_a_save_is_loaded_into(target, saved, tmp_path, request):
    if target in ON_RAY:
        request.getfixturevalue("ray_address")
    folder, before = saved
    with connect(CONFIGS[target]) as client:
        assert client.load(folder) == {"step": 7}
        assert content(client) == before
        given = client.claim_meta("train", "trainer", ["tokens"], SIZE)
        assert given.sample_ids == IDS[3 * SIZE : 4 * SIZE]  # a lease is not saved: its group is given again
        client.clear_samples(None, "train")
        client.load(folder)
        client.save(tmp_path, None)
    with connect({"backend": "noop"}) as client:  # and back
        client.load(tmp_path)
        assert content(client) == before
