"""`dataplane read` and `top` of a durable folder that nobody has open."""

import json

import torch

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.ownership import is_open


def test_a_folder_that_nobody_has_open_is_read(tmp_path, capsys):
    folder = tmp_path / "store"
    options = {"namespace": "read-closed", "capacity_bytes": "50MB", "durable": str(folder)}
    config = {"backend": "shm_store", "options": options}
    with connect(config) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.tensor([7, 8])})
    file = tmp_path / "data_plane.json"
    file.write_text(json.dumps(config))
    assert main(["top", str(file)]) == 0
    assert "p" in capsys.readouterr().out
    assert main(["read", str(file), "p", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [each["sample_id"] for each in samples] == ["a", "b"]
    assert "7" in json.dumps(samples[0])
    assert not is_open(folder)
