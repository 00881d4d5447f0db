"""A save that another program wrote, with the right digests, is refused. `tests/fuzz` tries this at random."""

import hashlib
import json
import shutil

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import CorruptDataError


def set_entry(name, value):
    return lambda body: body["partitions"][0].__setitem__(name, value)


#: What is forged -> changes the body of the manifest.
CHANGES = {
    "rows of a folder above": lambda body: body.__setitem__("rows_file", "../rows.bin"),
    "rows of any file": lambda body: body.__setitem__("rows_file", "/etc/passwd"),
    "no digest of a block": lambda body: body["blocks"][0].pop("xxh3_128"),
    "blocks that are no list": lambda body: body.__setitem__("blocks", {}),
    "a huge size": lambda body: body["blocks"][0].__setitem__("size_bytes", 2**62),
    "more blocks than there are": set_entry("num_blocks", 2),
    "fewer than no blocks": set_entry("num_blocks", -1),
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
    (rows,) = folder.glob("rows-*.bin")
    shutil.copy(rows, folder.parent / "rows.bin")  # the right rows, in a place that no save names
    client.clear_samples(None, "p")
    return folder


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_forged_manifest_is_refused(client, save, change):
    manifest = save / "manifest.json"
    right = manifest.read_bytes()
    body = json.loads(right.split(b"\n")[1])
    change(body)
    text = json.dumps(body).encode()
    head = {"format": "dataplane-partitions", "version": 3, "sha256": hashlib.sha256(text).hexdigest()}
    manifest.write_bytes(json.dumps(head).encode() + b"\n" + text + b"\n")
    with pytest.raises(CorruptDataError):
        client.load(save)
    assert client.list_partitions() == []
    manifest.write_bytes(right)
