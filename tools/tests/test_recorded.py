"""`dataplane read`, `export` and `flow` of a recording: all rows that a run put, also those it cleared."""

import itertools
import json

import pytest
import torch
from contents import recording, rows

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_observe import Recording
from dataplane_tools import _recorded, export_partition

IDS = ["q0_g0", "q0_g1", "q1_g0", "q1_g1"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "recording"


def run_that_puts(folder, *sample_ids, payload="all", tags=None):
    """A recording of samples with ``x``, which is 1, in partition ``train``: a put for each."""
    with connect(recording(folder, payload)) as client:
        client.register_partition("train", ["x"], None, [])
        for sample_id in sample_ids:
            client.put_samples([sample_id], "train", {"x": torch.ones(1)}, tags=tags)


def columns(step):
    """Columns of the four ids: ragged, of objects, images that are shared, and of two dtypes."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 255, (2, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return {
        "tokens": [torch.randint(0, 99, (length,), generator=generator) for length in (3, 0, 5, 2)],
        "info": [{"step": step, "parts": [1, b"\x00"]}, None, "text", torch.ones(2, dtype=torch.bfloat16)],
        "image": [images[0], images[0], images[1], images[1]],
        "source": ["math", "code", "math", "code"],
        "logprobs": torch.rand(4, 3, dtype=torch.float64, generator=generator),
    }


def read(capsys, *arguments):
    """What `dataplane read --json` shows: id -> values and tags; and its remarks."""
    assert main(["read", *map(str, arguments), "--json"]) == 0
    out, err = capsys.readouterr()
    return {each["sample_id"]: {**each["values"], **each["tags"]} for each in json.loads(out)["samples"]}, err


def test_an_export_has_all_rows_that_the_run_put_and_cleared(folder, other, tmp_path, capsys):
    registration = (["tokens", "reward"], None, ["trainer"], 2, {"source": ["math", "code"]})
    other.register_partition("train", *registration)
    with connect(recording(folder)) as client:
        for step in (1, 2, 3):
            client.register_partition("train", *registration)
            for store in (client, other):  # the other one drops nothing
                ids = [f"s{step}_{each}" for each in IDS]
                store.put_samples(ids, "train", columns(step), tags=[{"weights": step, "step": step}] * 4)
                rewards = {"reward": torch.arange(4) / step}
                store.put_samples(ids, "train", rewards, tags=[{"length": row} for row in range(4)])
            client.mark_step(step)
            if step != 2:  # the next registration drops those of step 2
                client.clear_samples(None, "train")
    assert main(["export", str(folder), "train", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == ""
    export_partition(other, "train", tmp_path / "all")
    assert rows(tmp_path / "out") == rows(tmp_path / "all")
    assert len(rows(tmp_path / "out")) == 12


def test_samples_are_shown_as_text_with_the_step_after_their_put_and_on_a_page(folder, tmp_path, capsys):
    with connect(recording(folder)) as client:
        client.register_partition("train", ["text"], None, [])
        client.put_samples(["a"], "train", {"text": ["first"]})
        client.mark_step(1)
        client.put_samples(["b"], "train", {"text": ["second"]})
        client.put_samples(["a"], "train", {"score": torch.tensor([0.5])})
        client.put_samples(["e"], "train", {"text": ["own"]}, tags=[{"step": 9}])
        client.mark_step(2)
        client.clear_samples(["a", "b"], "train")
        client.put_samples(["c"], "train", {"text": ["third"]})
    assert main(["read", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == (
        "train: 4 samples\n\na\n  text first  score 0.5  step 1\n\nb\n  text second  step 2\n\n"
        "e\n  text own  step 9\n\nc\n  text third\n"
    )
    assert main(["read", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert "second" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_of_a_sample_that_was_put_again_the_newest_row_is_shown(folder, capsys):
    with connect(recording(folder)) as client:
        client.register_partition("train", ["x"], None, [])
        client.put_samples(
            ["a", "b"], "train", {"x": torch.tensor([1.0, 2.0]), "y": torch.ones(2)}, tags=[{"r": 1}] * 2
        )
        client.clear_samples(["a"], "train")
        client.put_samples(["a"], "train", {"x": torch.tensor([3.0])}, tags=[{"q": 1}])
        client.put_samples(["b"], "train", {"x": torch.tensor([4.0])})  # it was not cleared
    samples, err = read(capsys, folder, "train")
    assert samples["a"] == {"x": 3.0, "q": 1}
    assert samples["b"] == {"x": 4.0, "y": 1.0, "r": 1}
    assert "put again after they were cleared: 1." in err


def test_registrations_with_other_dtypes_show_the_newest_rows(folder, capsys):
    with connect(recording(folder)) as client:
        for ids, column in ((["a"], torch.ones(1, dtype=torch.int64)), (["b"], ["text"])):
            client.register_partition("train", ["x"], None, [])
            client.put_samples(ids, "train", {"other": torch.ones(1)})
            client.put_samples(ids, "train", {"x": column})
    samples, err = read(capsys, folder)
    assert list(samples) == ["b"]
    assert "Rows of earlier registrations, whose fields had other dtypes, are not shown." in err


@pytest.mark.parametrize("payload", ["none", "digests"])
def test_without_rows_it_says_what_to_record(folder, capsys, payload):
    run_that_puts(folder, "a", payload=payload, tags=[{"r": 1}])
    assert main(["read", str(folder), "train"]) == 1
    err = capsys.readouterr().err
    assert f"has no rows of partition 'train': its clients recorded payload '{payload}'." in err
    assert "Record with payload: all" in err


def test_of_a_share_of_the_samples_the_others_are_counted(folder, capsys):
    ids = [f"s{number}" for number in range(256)]
    with connect(recording(folder, 0.25)) as client:
        client.register_partition("train", ["x", "y"], None, [])
        client.put_samples(ids, "train", {"x": torch.arange(256.0)}, tags=[{"n": row} for row in range(256)])
        client.put_samples(ids, "train", {"y": torch.arange(256.0)})
        client.put_samples(ids, "train", {}, tags=[{"seen": True}] * 256)
    samples, err = read(capsys, folder, "train", "--limit", 256)
    assert 30 < len(samples) < 100
    for sample_id, each in samples.items():
        row = int(sample_id[1:])
        assert each == {"x": row, "y": row, "n": row, "seen": True}
    missing = 2 * (256 - len(samples))
    assert f"were put: 512. Not recorded, so not shown: {missing} of them, by clients that recorded payload 0.25" in err


def test_a_client_that_records_less_is_said(folder, capsys):
    run_that_puts(folder, "a")
    with connect(recording(folder, "digests")) as client:
        client.register_partition("train", ["x"], None, [], if_exists="keep")
        client.put_samples(["a", "b"], "train", {"y": torch.ones(2)}, tags=[{"r": 1}] * 2)
        client.put_samples(["a"], "train", {}, tags=[{"q": 2}])
    samples, err = read(capsys, folder)
    assert samples["a"] == {"x": 1.0, "r": 1, "q": 2}
    assert "Not recorded, so not shown: 2 of them, by clients that recorded payload 'digests'" in err


def test_blocks_of_several_columns_are_read_once_while_their_rows_are_asked_for(folder, monkeypatch):
    ids = [f"s{row}" for row in range(8)]
    with connect(recording(folder)) as client:
        client.register_partition("train", ["x", "y"], None, [])
        for some, name in itertools.product((ids[:4], ids[4:]), ("x", "y")):
            client.put_samples(some, "train", {name: torch.ones(4, 200)})
    with _recorded.opened_recording(str(folder), "train") as client:
        numbers = []
        rows = Recording.rows
        monkeypatch.setattr(Recording, "rows", lambda self, record: numbers.append(record.line) or rows(self, record))
        for sample_id in ids:
            client.get_samples([sample_id], "train", ["x", "y"])
        assert len(numbers) == len(set(numbers)) == 4
        client.get_samples(ids[:1], "train", ["x", "y"])
        assert len(numbers) == 6, "what was read before the last blocks is not kept"


def test_a_folder_is_not_followed_and_a_save_is_exported_too(folder, tmp_path, capsys):
    run_that_puts(folder)
    assert main(["export", str(folder), "train", str(tmp_path / "out"), "--follow"]) == 1
    assert "is a folder, and only a running store goes on" in capsys.readouterr().err
    with connect({"backend": "noop"}) as client:
        client.register_partition("train", ["x"], None, [])
        client.put_samples(["a"], "train", {"x": torch.ones(1)})
        client.save(tmp_path / "save")
    assert main(["export", str(tmp_path / "save"), "train", str(tmp_path / "out")]) == 0
    assert "1 rows of train" in capsys.readouterr().out
