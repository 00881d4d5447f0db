"""The file of events: what its lines have. Files that several processes share: engines/middleware/."""

import json
import socket

import pytest
import torch

from dataplane_core import connect
from dataplane_core.middleware import EventFile, Metrics, OperationEvent, events


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def event(**changes):
    values = {"op": "put_samples", "partition_id": "p", "n_keys": 2, "n_bytes": 8, "wall_ms": 1.5, "status": "ok"}
    return OperationEvent(**{**values, **changes})


@pytest.fixture
def file(tmp_path):
    made = EventFile(tmp_path / "events.jsonl")
    yield made
    made.close()


def test_a_line_says_what_was_moved_where_and_how_long_it_took(file, tmp_path):
    ids = [f"q{number}" for number in range(200)]
    file(event(fields=("x", "~sums"), sample_ids=ids))
    file.step(7, staleness=1)
    put, step = lines(tmp_path / "events.jsonl")
    assert put.pop("at") <= step.pop("at")
    followed = put.pop("ids")
    assert set(followed) < set(ids)
    assert 4 <= len(followed) <= 25  # one in 16
    assert put == {
        "op": "put_samples", "partition": "p", "rows": 2, "bytes": 8, "seconds": 0.0015, "fields": ["x"]
    }  # fmt: skip
    assert step == {"op": "step", "step": 7, "staleness": 1}


def test_operations_of_no_sample_leave_a_line_only_if_they_fail(file, tmp_path):
    file(event(op="claim", n_keys=0))
    file(event(op="claim", n_keys=0, task="t", status="timeout", error="ClaimTimeoutError"))
    (line,) = lines(tmp_path / "events.jsonl")
    assert (line["task"], line["status"], line["error"]) == ("t", "timeout", "ClaimTimeoutError")


def test_the_middleware_writes_for_all_its_operations_and_still_calls_on_event(tmp_path):
    path, seen = tmp_path / "of_{host}" / "events.jsonl", []
    metrics = Metrics(on_event=seen.append, events_file=path)
    with connect({"backend": "noop", "middleware": [metrics, "wire_guard"]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.register_partition("p", ["x"], None, ["t"], if_exists="keep")
        client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})
        client.claim_meta("p", "t", ["x"], 2)
        client.clear_samples(["a"], "p")
        client.clear_samples(None, "p")
    place = tmp_path / f"of_{socket.gethostname()}" / "events.jsonl"
    found = [tuple(map(line.get, ("op", "rows", "fields", "task", "drops_all"))) for line in lines(place)]
    assert found == [
        ("register_partition", 0, ["x"], None, True),
        ("put_samples", 2, ["x"], None, None),
        ("claim", 2, None, "t", None),
        ("clear_samples", 1, None, None, None),
        ("clear_samples", 1, None, None, True),
    ]
    assert [(each.op, each.n_keys) for each in seen if each.n_keys] == [each[:2] for each in found[1:]]
    assert [each.fields for each in seen if each.op == "put_samples"] == [("x",)]


def test_a_file_that_cannot_be_written_ends_no_operation(caplog):
    file = EventFile("/dev/full")
    for _ in range(3):
        file(event())
    file.close()
    assert caplog.text.count("the events of the data plane cannot be written: ") == 1


def test_a_file_counts_as_held_only_by_its_writer(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "lines.jsonl"
    file = events.LineFile(path)
    with path.open("rb") as asking:
        fcntl.flock(asking.fileno(), fcntl.LOCK_SH)
        assert not events.is_held(path), "another process asks the same"
        pauses = []

        def pause(seconds):
            pauses.append(seconds)
            if len(pauses) == 3:
                fcntl.flock(asking.fileno(), fcntl.LOCK_UN)

        monkeypatch.setattr(events.time, "sleep", pause)
        file.hold()
        assert len(pauses) == 3
    assert events.is_held(path)
    file.close()
    assert not events.is_held(path)
