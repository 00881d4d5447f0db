"""`dataplane flow` of a store that runs or ends, and `dataplane read` of a durable folder that nobody has open."""

import json
import re
import threading

import torch
from test_flow_command import page

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.ownership import is_open
from dataplane_tools import _inspect


def test_a_running_store_is_looked_at_for_a_while(store, config, tmp_path, capsys):
    store.register_partition("train", ["x"], None, ["policy"])
    stop = threading.Event()

    def write():
        row = 0
        while not stop.wait(0.01):
            store.put_samples([f"s{row}"], "train", {"x": torch.zeros(1, 4)})
            row += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for seconds in ("2.5", "10", "40"):
            assert main(["flow", config, "--seconds", seconds, "-o", str(tmp_path)]) == 0
            (looks,) = re.findall(r": (\d+) looks? over ", capsys.readouterr().out)
            if int(looks) >= 2:  # a busy machine has fewer than one per second
                break
    finally:
        stop.set()
        writer.join()
    assert int(looks) >= 2
    texts, table, _ = page(tmp_path)
    assert "train: written" in texts
    assert texts.count("train: policy") == 3
    assert int(table["train"][0]) > 3
    assert table["train"][-1].endswith(" ready, 0 leased, 0 consumed")


def test_what_was_seen_of_a_store_that_ends_is_drawn(nowhere, tmp_path, capsys, monkeypatch):
    client = connect(nowhere)
    client.register_partition("train", ["x"], None, ["policy"])
    look = _inspect.look

    def look_and_end(attached, **more):
        seen = look(attached, **more)
        client.close()
        return seen

    monkeypatch.setattr(_inspect, "look", look_and_end)
    assert main(["flow", nowhere, "--seconds", "60", "-o", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert re.search(r" and flow.svg: 1 look over ", out)
    assert "The store could not be looked at any more: " in err
    assert "could not be looked at any more" in page(tmp_path)[2]


def test_a_folder_that_nobody_has_open_is_read(tmp_path, capsys):
    folder = tmp_path / "store"
    options = {"namespace": "read-closed", "capacity_bytes": "50MB", "durable": str(folder)}
    config = {"backend": "shm_store", "options": options}
    with connect(config) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.tensor([7, 8])})
    file = tmp_path / "data_plane.json"
    file.write_text(json.dumps(config))
    assert main(["inspect", str(file)]) == 0
    assert "p" in capsys.readouterr().out
    assert main(["read", str(file), "p", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [each["sample_id"] for each in samples] == ["a", "b"]
    assert "7" in json.dumps(samples[0])
    assert not is_open(folder)
