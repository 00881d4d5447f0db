"""`dataplane audit --html`: from the operations of real clients to a page, and what it says without any."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from contents import recording

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_observe import is_followed
from dataplane_observe._lines import sealed
from dataplane_tools import _picture

SVG = "{http://www.w3.org/2000/svg}"
PUT = {"at": 5.0, "op": "put_samples", "partition": "p", "rows": 8, "bytes": 64, "seconds": 0.5, "fields": ["x"]}


@pytest.fixture
def events(tmp_path):
    """A run of eight steps over noop: 64 rows a step are put, claimed, read, acked and cleared."""
    folder = tmp_path / "events"
    with connect(recording(folder, "none")) as client:
        client.register_partition("train", ["tokens", "reward"], None, ["policy"])
        for step in range(1, 9):
            ids = [f"s{step}_p{row}" for row in range(64)]
            client.put_samples(ids, "train", {"tokens": torch.zeros(64, 10, dtype=torch.int64)})
            client.put_samples(ids, "train", {"reward": torch.zeros(64)})
            meta = client.claim_meta("train", "policy", ["reward"], 64, lease_s=60.0)
            client.get_data(meta)
            client.ack(meta)
            client.clear_samples(ids, "train")
            client.mark_step(step, staleness=step % 3)
        with pytest.raises(KeyError):
            client.get_samples(["none"], "train", ["reward"])
    return folder


def recorded(folder, *lines):
    """A recording with these lines of one client."""
    connect(recording(folder, "none")).close()
    (file,) = folder.glob("*.jsonl")
    begin, *_ = file.read_bytes().splitlines()
    file.write_bytes(b"".join(line + b"\n" for line in (begin, *(sealed(json.dumps(each).encode()) for each in lines))))
    return folder


def drawn(folder, status=0):
    """The texts of the picture, the rows of the table, and the page, which loads nothing."""
    path = folder.with_suffix(".html")
    assert main(["audit", str(folder), "--html", str(path)]) == status
    html = path.read_text(encoding="utf-8")
    assert "<script" not in html
    assert re.findall(r'(?:href|src)="(?!#)', html) == []
    svg = ET.fromstring(re.search("<svg.*</svg>", html, re.DOTALL).group())
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html)]
    return [text.text for text in svg.iter(f"{SVG}text")], {row[0]: row[1:] for row in rows if row}, html


def test_the_page_has_every_stage_with_its_rows_and_bytes(events, capsys):
    texts, table, html = drawn(events)
    out, err = capsys.readouterr()
    assert out.startswith(f"{events}.html: {events}: 8 steps, 1 client, ")
    assert err == ""
    assert {stage: [*row[:3], row[-1]] for stage, row in table.items()} == {
        "put tokens": ["8", "512", "41.0 kB", "0"],
        "put reward": ["8", "512", "2.0 kB", "0"],
        "claim policy": ["8", "512", "0 bytes", "0"],
        "get reward": ["9", "512", "2.0 kB", "1 MissingDataError"],
        "ack policy": ["8", "512", "0 bytes", "0"],
        "clear": ["8", "512", "0 bytes", "0"],
    }
    titles = ["Rows through", "The end of", "Where the samples", "Where they waited", "Staleness", "Bytes per second"]
    assert [title for title in titles if any(text.startswith(title) for text in texts)] == titles
    assert {"512 claim policy", "put reward → claim policy", "step 8"} <= set(texts)
    blue, orange = "#1f77b4", "#ff7f0e"  # a sample is worked on after a claim and after a get, else it waits
    bars = re.findall("fill: (#[0-9a-f]+)", html[: html.index("Where they waited")])[-5:]
    assert bars == [blue, blue, orange, orange, blue]
    assert "Nothing wrong was found." in html


@pytest.mark.parametrize(
    ("drop", "gone"),
    [
        ({"op": "clear_samples", "rows": 2, "ids": [0, 1]}, 2),
        ({"op": "clear_samples", "rows": 2, "drops_all": True}, 2),
        ({"op": "register_partition", "rows": 0, "drops_all": True}, 2),
        ({"op": "clear_samples", "rows": 1, "ids": [0]}, 1),
        ({"op": "clear_samples", "rows": 1}, 0),  # of a sample that is not followed
    ],
)
def test_samples_are_held_until_they_are_dropped(tmp_path, monkeypatch, drop, gone):
    spans = {}
    monkeypatch.setattr(_picture._Picture, "_draw_stays", lambda self, axes: spans.update(self._stays))
    held = [name for name in map(str, range(99)) if is_followed(name)][:2]
    assert not is_followed("0")
    if drop.get("ids"):
        drop = {**drop, "ids": [held[number] for number in drop["ids"]]}
    lines = [
        {**PUT, "at": 100.0, "rows": 3, "seconds": 0.0, "ids": [*held, "0"]},
        {**PUT, "fields": [], "at": 150.0, "seconds": 0.0, **drop},
        {**PUT, "op": "get_samples", "at": 200.0, "rows": 1, "seconds": 0.0},
    ]
    drawn(recorded(tmp_path / "events", *lines))
    ends = [until for since, until in spans["put x"] if since == 0.0]
    assert sorted(ends) == [50.0] * gone + [100.0] * (2 - gone)


def test_operations_that_took_no_time_are_drawn_and_their_times_are_told(tmp_path):
    texts, table, _ = drawn(recorded(tmp_path / "events", *({**PUT, "seconds": seconds} for seconds in (0.5, 0.0))))
    assert "16 put x" in texts
    assert table["put x"] == ["2", "16", "128 bytes", "0.5", "0.25", "0.5", "0"]


def test_names_are_text_of_the_page_and_no_mathematics(tmp_path):
    line = {**PUT, "op": "claim", "fields": [], "task": "<b>&$x^2$\x1b"}
    texts, table, html = drawn(recorded(tmp_path / "events", line))
    assert "8 claim <b>&$x^2$\\x1b" in texts
    assert list(table) == ["claim &lt;b&gt;&amp;$x^2$\\x1b"]
    assert "<b>" not in html
    assert all(line.isprintable() for line in html.split("\n"))


@pytest.mark.parametrize(
    ("lines", "said"),
    [(None, "no recording"), ([], "has no operation"), ([{"at": 1.0, "op": "step", "step": 1}], "has no operation")],
)
def test_a_folder_without_operations_is_an_error(tmp_path, capsys, lines, said):
    folder = tmp_path / "events" if lines is None else recorded(tmp_path / "events", *lines)
    assert main(["audit", str(folder), "--html", str(tmp_path / "page.html")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_what_cannot_be_a_page_is_refused(events, tmp_path, capsys):
    assert main(["audit", str(events), str(events), "--html", str(tmp_path / "page.html")]) == 2
    assert "--html is the page of one recording" in capsys.readouterr().err
    assert main(["audit", str(events), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "No such file" in capsys.readouterr().err
