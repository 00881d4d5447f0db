"""`dataplane flow`: from the operations of real clients to a page, and what it says about files that are none."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.middleware import EventFile
from dataplane_tools._charts import show_bytes, show_seconds

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def events(tmp_path):
    """A run of six steps over noop: 64 rows a step are put, claimed, read, acked and cleared."""
    path = tmp_path / "run" / "events.jsonl"
    config = {"backend": "noop", "middleware": [{"metrics": {"events_file": str(path)}}]}
    marks = EventFile(path)
    with connect(config) as client:
        client.register_partition("train", ["tokens", "reward"], None, ["policy"])
        for step in range(1, 7):
            ids = [f"s{step}_p{row}" for row in range(64)]
            client.put_samples(ids, "train", {"tokens": torch.zeros(64, 10, dtype=torch.int64)})
            client.put_samples(ids, "train", {"reward": torch.zeros(64)})
            meta = client.claim_meta("train", "policy", ["reward"], 64, lease_s=60.0)
            client.get_data(meta)
            client.ack(meta)
            client.clear_samples(ids if step < 6 else None, "train")
            marks.step(step, staleness=step % 3)
    marks.close()
    return path


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
        ({"op": "clear_samples", "rows": 2, "ids": ["a", "b"]}, 1.0),
        ({"op": "clear_samples", "rows": 2, "drops_all": True}, 1.0),
        ({"op": "register_partition", "rows": 0, "drops_all": True}, 1.0),
        ({"op": "clear_samples", "rows": 1, "ids": ["a"]}, 0.5),
        ({"op": "clear_samples", "rows": 1}, 0.0),  # of a sample that is not followed
    ],
)
def test_samples_are_held_until_they_are_dropped(tmp_path, drop, gone):
    common = {"partition": "p", "bytes": 8, "seconds": 0.0}
    path = tmp_path / "events.jsonl"
    events = [
        {"at": 100.0, "op": "put_samples", "rows": 3, "fields": ["x"], "ids": ["a", "b"], **common},
        {"at": 150.0, **drop, **common},
        {"at": 200.0, "op": "get_samples", "rows": 1, "fields": ["x"], **common},
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in events))
    assert main(["flow", str(path)]) == 0
    found = areas(tmp_path)
    left, right = min(x for x, _ in found), max(x for x, _ in found)
    middle = (left + right) / 2
    before = max(height for x, height in found if x < middle - 10)
    after = max(height for x, height in found if x > middle + 10)
    assert after == pytest.approx(before * (1 - gone), abs=0.2)


def test_failures_are_counted_apart(events, tmp_path, capsys):
    config = {"backend": "noop", "middleware": [{"metrics": {"events_file": str(events)}}]}
    with connect(config) as client:
        client.register_partition("train", ["reward"], None, [])
        with pytest.raises(KeyError):
            client.get_samples(["none"], "train", ["reward"])
    assert main(["flow", str(events), "-o", str(tmp_path / "new" / "folder")]) == 0
    _, table, _ = page(tmp_path / "new" / "folder")
    assert table["get reward"][:2] == ["7", "384"]
    assert table["get reward"][-1] == "1 MissingDataError"


def test_the_files_of_several_hosts_are_one_run(events, tmp_path):
    lines = events.read_text().splitlines(keepends=True)
    for name, part in (("a.jsonl", lines[::2]), ("b.jsonl", lines[1::2])):
        (tmp_path / name).write_text("".join(part))
    assert main(["flow", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0
    assert main(["flow", str(events)]) == 0
    assert page(tmp_path)[1] == page(events.parent)[1]


def test_a_last_line_that_is_cut_off_is_left_out_and_said(events, capsys):
    events.write_bytes(events.read_bytes()[:-20])
    assert main(["flow", str(events)]) == 0
    assert "The last line of " in capsys.readouterr().err
    assert page(events.parent)[1]["clear"][1] == "384"  # the cut line is the last step's


def test_broken_lines_in_the_middle_are_counted(events, capsys):
    lines = events.read_text().splitlines()
    lines[3] = lines[3][:30]
    lines[4:4] = ["[1, 2]", '{"at": "x", "op": "put_samples"}']
    events.write_text("\n".join(lines) + "\n")
    assert main(["flow", str(events)]) == 0
    err = capsys.readouterr().err
    assert "1 line of " in err
    assert "left out: not JSON." in err
    assert "2 lines of " in err
    assert "left out: not an operation." in err


def test_the_metrics_of_a_run_lead_to_the_events_beside_it(events, capsys):
    metrics = events.with_name("metrics.jsonl")
    metrics.write_text('{"step": 1, "reward": 0.5}\n')
    assert main(["flow", str(metrics)]) == 0
    assert "has no operations of the data plane; " in capsys.readouterr().err
    assert page(events.parent)[1]["clear"][1] == "384"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "flow cannot read "),
        ("", "is empty"),
        ('{"step": 1, "reward": 0.5}\n', "has no line with an operation"),
        ("backend: noop\n", "For the config of a running store, add --seconds."),
        ('{"at": 1.0, "op": "step", "step": 1}\n', "has no line with an operation"),
    ],
)
def test_a_file_without_operations_is_an_error(tmp_path, capsys, content, said):
    path = tmp_path / "some.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["flow", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dataplane: flow ")
    assert said in err
    assert not (tmp_path / "flow.html").exists()


def test_one_operation_is_a_dot_and_no_curve(tmp_path):
    line = {"at": 5.0, "op": "put_samples", "partition": "p", "rows": 8, "bytes": 64, "seconds": 0.5, "fields": ["x"]}
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert main(["flow", str(path)]) == 0
    rows_panel = ET.parse(tmp_path / "flow.svg").getroot().find(f"{SVG}g")
    assert len(rows_panel.findall(f".//{SVG}circle")) == 1
    assert rows_panel.findall(f".//{SVG}path[@class='line s0']") == []


def test_names_are_escaped(tmp_path):
    line = {"at": 5.0, "op": "claim", "partition": "p", "rows": 8, "bytes": 0, "seconds": 0.5, "task": "<b>&"}
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert main(["flow", str(path)]) == 0
    texts, table, _ = page(tmp_path)
    assert "8 claim <b>&" in texts
    assert list(table) == ["claim &lt;b&gt;&amp;"]


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


@pytest.mark.parametrize(
    "values",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"at": 1e999, "op": "put_samples", "partition": "p", "rows": 1, "bytes": 1, "seconds": 1}',
        '{"at": 1, "op": "put_samples", "partition": "p", "rows": 1e999, "bytes": 1, "seconds": 1}',
        f'{{"at": 1, "op": "put_samples", "partition": "p", "rows": 1{"0" * 400}, "bytes": 1, "seconds": 1}}',
        f'{{"at": 1, "op": "put_samples", "partition": "p", "rows": 1{"0" * 5000}, "bytes": 1, "seconds": 1}}',
        '{"at": 1, "op": "step", "step": 1, "staleness": NaN}',
        '{"at": 1, "op": "step", "step": 1e999}',
        '{"at": 1, "op": "put_samples", "partition": "p", "rows": 1, "bytes": 1, "seconds": 1, "ids": 1}',
        "null",
    ],
    ids=["deep", "deep_maps", "late", "inf", "huge", "longer", "nan", "step", "ids", "null"],
)
def test_a_line_of_json_that_is_no_operation_is_left_out(events, tmp_path, capsys, values):
    lines = events.read_text()
    events.write_text(f"{values}\n{lines}")
    assert main(["flow", str(events), "-o", str(tmp_path / "out")]) == 0
    assert "1 line of" in capsys.readouterr().err
