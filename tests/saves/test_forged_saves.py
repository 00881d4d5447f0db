"""A save that another program wrote, with the right digests, is refused. `tests/fuzz` tries this at random."""

import json
import struct

import pytest
import torch
import xxhash

from dataplane_core import connect
from dataplane_core.errors import CorruptDataError


def set_entry(name, value):
    return lambda body: body["partitions"][0].__setitem__(name, value)


#: What is forged -> changes the body of the save.
CHANGES = {
    "no digest of a block": lambda body: body["blocks"][0].pop(),
    "blocks that are no list": lambda body: body.__setitem__("blocks", {}),
    "a huge size": lambda body: body["blocks"][0].__setitem__(0, 2**62),
    "a negative size": lambda body: body["blocks"][0].__setitem__(0, -1),
    "more blocks than there are": set_entry("num_blocks", 2),
    "fewer than no blocks": set_entry("num_blocks", -1),
    "a partition without a name": set_entry("partition_id", ""),
    "ids that are numbers": set_entry("cleared_ids", [1]),
}


@pytest.fixture(scope="module")
def client():
    with connect({"backend": "noop"}) as client:
        yield client


@pytest.fixture(scope="module")
def save(tmp_path_factory, client):
    """A folder with a save. The store is empty."""
    folder = tmp_path_factory.mktemp("save")
    client.register_partition("p", ["x"], None, ["t"])
    client.put_samples(["a", "b"], "p", {"x": torch.arange(2)}, tags=[{}, {}])
    client.save(folder)
    client.clear_samples(None, "p")
    return folder / "dataplane-partitions.save"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_forged_save_is_refused(client, save, change):
    right = save.read_bytes()
    head, size = right.split(b"\n")[0] + b"\n", struct.unpack("<Q", right[-24:-16])[0]
    body = json.loads(right[-24 - size : -24])
    change(body)
    text = json.dumps(body).encode()
    end = struct.pack("<Q", len(text)) + xxhash.xxh3_128_digest(head + text)
    save.write_bytes(right[: -24 - size] + text + end)
    with pytest.raises(CorruptDataError):
        client.load(save.parent)
    assert client.list_partitions() == []
    save.write_bytes(right)
