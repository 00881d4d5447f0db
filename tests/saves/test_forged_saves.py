"""A save that another program wrote, with the right digests: refused before anything is changed.

Other bytes are tried by `tests/fuzz`, which also has the blocks of a save.
"""

import hashlib
import json

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import CorruptDataError


@pytest.fixture
def save(tmp_path):
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.arange(2)}, tags=[{}, {}])
        client.save(tmp_path)
    return tmp_path


def forge(folder, change):
    """Changes the body of the manifest, and its digest with it."""
    manifest = folder / "manifest.json"
    body = json.loads(manifest.read_bytes().split(b"\n")[1])
    given = change(body)
    text = given if isinstance(given, bytes) else json.dumps(body).encode()
    head = {"format": "dataplane-partitions", "version": 3, "sha256": hashlib.sha256(text).hexdigest()}
    manifest.write_bytes(json.dumps(head).encode() + b"\n" + text + b"\n")


def set_entry(name, value):
    return lambda body: body["partitions"][0].__setitem__(name, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.__setitem__("rows_file", "../secret.bin"),
        lambda body: body.__setitem__("rows_file", "/etc/passwd"),
        lambda body: body.__setitem__("rows_file", 7),
        lambda body: body["blocks"][0].__setitem__("size_bytes", -1),
        lambda body: body["blocks"][0].__setitem__("size_bytes", 2**62),
        lambda body: body["blocks"][0].pop("xxh3_128"),
        lambda body: body.__setitem__("blocks", {}),
        lambda body: body.pop("partitions"),
        lambda body: body.pop("metadata"),
        lambda body: body["partitions"][0]["registration"].pop("grpo_group_size"),
        lambda body: body["partitions"][0]["registration"].__setitem__("fields", "x"),
        set_entry("num_blocks", 2),
        set_entry("num_blocks", -1),
        set_entry("cleared_ids", [1]),
        lambda body: b"[]",
        lambda body: b"[" * 100_000,
    ],
)
def test_a_forged_manifest_is_refused(save, change):
    forge(save, change)
    with connect({"backend": "noop"}) as client:
        with pytest.raises(CorruptDataError):
            client.load(save)
        assert client.list_partitions() == []
