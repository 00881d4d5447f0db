"""`dataplane flow`: from the operations of real clients to a page, and what it says about folders without any."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_observe import is_followed
from dataplane_observe._lines import sealed
from dataplane_tools._charts import show_bytes, show_seconds

SVG = "{http://www.w3.org/2000/svg}"


def config(folder):
    return {"backend": "noop", "middleware": [{"recorder": {"folder": str(folder), "payload": "none"}}]}


@pytest.fixture
def events(tmp_path):
    """A run of six steps over noop: 64 rows a step are put, claimed, read, acked and cleared."""
    folder = tmp_path / "run" / "events"
    with connect(config(folder)) as client:
        client.register_partition("train", ["tokens", "reward"], None, ["policy"])
        for step in range(1, 7):
            ids = [f"s{step}_p{row}" for row in range(64)]
            client.put_samples(ids, "train", {"tokens": torch.zeros(64, 10, dtype=torch.int64)})
            client.put_samples(ids, "train", {"reward": torch.zeros(64)})
            meta = client.claim_meta("train", "policy", ["reward"], 64, lease_s=60.0)
            client.get_data(meta)
            client.ack(meta)
            client.clear_samples(ids if step < 6 else None, "train")
            client.mark_step(step, staleness=step % 3)
    return folder


def recorded(folder, *lines):
    """A recording with these lines of one client."""
    connect(config(folder)).close()
    (file,) = folder.glob("*.jsonl")
    begin, *_ = file.read_bytes().splitlines()
    file.write_bytes(b"".join(line + b"\n" for line in (begin, *(sealed(json.dumps(each).encode()) for each in lines))))
    return folder


def page(folder):
    """The texts of the picture and the rows of the table, of a page that loads nothing."""
    html = (folder / "flow.html").read_text(encoding="utf-8")
    without_namespace = html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http" not in without_namespace
    assert "<script" not in html
    svg = re.search("<svg.*</svg>", html).group()
    assert (folder / "flow.svg").read_text(encoding="utf-8") == svg
    texts = [each.text for each in ET.fromstring(svg).iter(f"{SVG}text")]
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html)]
    return texts, {row[0]: row[1:] for row in rows if row}, html


def test_the_page_has_every_stage_with_its_rows_and_bytes(events, capsys):
    assert main(["flow", str(events)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{events.parent / 'flow.html'} and flow.svg: 36 operations over ")
    assert err == ""
    texts, table, html = page(events.parent)
    assert {stage: row[:3] for stage, row in table.items()} == {
        "put tokens": ["6", "384", "30.7 kB"],
        "put reward": ["6", "384", "1.54 kB"],
        "claim policy": ["6", "384", "0 B"],
        "get reward": ["6", "384", "1.54 kB"],
        "ack policy": ["6", "384", "0 B"],
        "clear": ["6", "384", "0 B"],
    }
    assert {row[-1] for row in table.values()} == {"0"}
    titles = ["Rows through the stages", "Where the samples were", "Where they waited", "Staleness", "Bytes per second"]
    assert [text for text in texts if text in titles] == titles
    assert "384 claim policy" in texts
    assert "put reward → claim policy" in texts
    assert "1 partition, 6 steps." in html


def areas(folder):
    """How high the areas of the samples in the store are, over time, in pixels above the axis."""
    (panel,) = [
        group
        for group in ET.parse(folder / "flow.svg").getroot().findall(f"{SVG}g")
        if group.findtext(f"{SVG}text") == "Where the samples were"
    ]
    points = [point.split(",") for each in panel.iter(f"{SVG}polygon") for point in each.get("points").split()]
    floor = max(float(y) for _, y in points)
    return [(float(x), floor - float(y)) for x, y in points]


@pytest.mark.parametrize(
    ("drop", "gone"),
    [
        ({"op": "clear_samples", "rows": 2, "ids": [0, 1]}, 1.0),
        ({"op": "clear_samples", "rows": 2, "drops_all": True}, 1.0),
        ({"op": "register_partition", "rows": 0, "drops_all": True}, 1.0),
        ({"op": "clear_samples", "rows": 1, "ids": [0]}, 0.5),
        ({"op": "clear_samples", "rows": 1}, 0.0),  # of a sample that is not followed
    ],
)
def test_samples_are_held_until_they_are_dropped(tmp_path, drop, gone):
    held, other = [name for name in map(str, range(99)) if is_followed(name)][:2], "0"
    assert not is_followed(other)
    if drop.get("ids"):
        drop = {**drop, "ids": [held[number] for number in drop["ids"]]}
    common = {"partition": "p", "bytes": 8, "seconds": 0.0}
    folder = recorded(
        tmp_path / "events",
        {"at": 100.0, "op": "put_samples", "rows": 3, "fields": ["x"], "ids": [*held, other], **common},
        {"at": 150.0, **drop, **common},
        {"at": 200.0, "op": "get_samples", "rows": 1, "fields": ["x"], **common},
    )
    assert main(["flow", str(folder)]) == 0
    found = areas(tmp_path)
    left, right = min(x for x, _ in found), max(x for x, _ in found)
    middle = (left + right) / 2
    before = max(height for x, height in found if x < middle - 10)
    after = max(height for x, height in found if x > middle + 10)
    assert after == pytest.approx(before * (1 - gone), abs=0.2)


def test_failures_are_counted_apart(events, tmp_path, capsys):
    with connect(config(events)) as client:
        client.register_partition("train", ["reward"], None, [])
        with pytest.raises(KeyError):
            client.get_samples(["none"], "train", ["reward"])
    assert main(["flow", str(events), "-o", str(tmp_path / "new" / "folder")]) == 0
    _, table, _ = page(tmp_path / "new" / "folder")
    assert table["get reward"][:2] == ["7", "384"]
    assert table["get reward"][-1] == "1 MissingDataError"


def test_the_recordings_of_several_hosts_are_one_run(events, tmp_path):
    put = {"at": 5.0, "op": "put_samples", "partition": "p", "rows": 8, "bytes": 64, "seconds": 0.5, "fields": ["x"]}
    hosts = [str(recorded(tmp_path / name, {**put, "rows": rows})) for name, rows in (("a", 8), ("b", 3))]
    assert main(["flow", *hosts]) == 0
    assert page(tmp_path)[1]["put x"][:2] == ["2", "11"]


def test_a_last_line_that_is_cut_off_is_left_out_and_said(events, capsys):
    (file,) = events.glob("*.jsonl")
    *whole, _ = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole)[:-20])
    assert main(["flow", str(events)]) == 0
    assert "The last line of " in capsys.readouterr().err
    assert page(events.parent)[1]["clear"][1] == "384"  # the cut line is the last step's


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "has no recording. Expected a folder of the middleware recorder"),
        ([], "has no operation"),
        ([{"at": 1.0, "op": "step", "step": 1}], "has no operation"),
    ],
)
def test_a_folder_without_operations_is_an_error(tmp_path, capsys, lines, said):
    folder = tmp_path / "events"
    if lines is not None:
        recorded(folder, *lines)
    assert main(["flow", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dataplane: flow ")
    assert said in err
    assert not (tmp_path / "flow.html").exists()


def test_one_operation_is_a_dot_and_no_curve(tmp_path):
    line = {"at": 5.0, "op": "put_samples", "partition": "p", "rows": 8, "bytes": 64, "seconds": 0.5, "fields": ["x"]}
    assert main(["flow", str(recorded(tmp_path / "events", line))]) == 0
    rows_panel = ET.parse(tmp_path / "flow.svg").getroot().find(f"{SVG}g")
    assert len(rows_panel.findall(f".//{SVG}circle")) == 1
    assert rows_panel.findall(f".//{SVG}path[@class='line s0']") == []


def test_names_are_escaped(tmp_path):
    line = {"at": 5.0, "op": "claim", "partition": "p", "rows": 8, "bytes": 0, "seconds": 0.5, "task": "<b>&"}
    assert main(["flow", str(recorded(tmp_path / "events", line))]) == 0
    texts, table, _ = page(tmp_path)
    assert "8 claim <b>&" in texts
    assert list(table) == ["claim &lt;b&gt;&amp;"]


def test_a_record_with_a_number_that_no_operation_has_is_left_out(tmp_path, capsys):
    line = {"at": 5.0, "op": "put_samples", "partition": "p", "rows": 8, "bytes": 64, "seconds": 0.5}
    folder = recorded(tmp_path / "events", {**line, "rows": 10**30}, {**line, "op": "claim", "task": "t"})
    assert main(["flow", str(folder)]) == 0
    assert "1 line of" in capsys.readouterr().err
    assert list(page(tmp_path)[1]) == ["claim t"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_the_time_to_look_is_checked(tmp_path, capsys, seconds):
    assert main(["flow", str(tmp_path / "config.yaml"), "--seconds", seconds]) == 1
    assert "Expected a number above 0." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (show_bytes, 0, "0 B"),
        (show_bytes, 1540, "1.54 kB"),
        (show_bytes, 999_700, "1 MB"),
        (show_bytes, 12_345e12, "12,345 TB"),
        (show_seconds, 0.0123, "12.3 ms"),
        (show_seconds, 90, "90 s"),
        (show_seconds, 5000 * 3600, "5,000 h"),
    ],
)
def test_numbers_have_a_unit_and_no_exponent(show, value, text):
    assert show(value) == text
