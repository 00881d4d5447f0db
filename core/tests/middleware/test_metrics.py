"""The metrics middleware: one event per operation, totals, bytes that live."""

import json
import logging

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import ClaimTimeoutError, ConfigError, InvalidRequestError, InvalidTypeError
from dataplane_core.middleware import Metrics, OperationEvent, merge_snapshots
from dataplane_testkit._timing import Background


@pytest.fixture
def events():
    return []


@pytest.fixture
def client(events):
    with connect({"backend": "noop", "middleware": [Metrics(on_event=events.append)]}) as client:
        client.register_partition("p", ["x", "y"], None, ["t"])
        yield client


@pytest.fixture
def metrics(client):
    return client.middleware[0]


def columns(num_samples=2):
    return {"x": torch.zeros(num_samples, 3), "y": torch.zeros(num_samples)}


def test_a_claim_is_one_event_however_often_it_asks(client, events, metrics):
    with pytest.raises(ClaimTimeoutError):
        client.claim_meta("p", "t", ["x"], 1, timeout_s=0.2)
    (event,) = [each for each in events if each.op == "claim"]
    assert (event.status, event.error) == ("timeout", "ClaimTimeoutError")
    told = metrics.snapshot()["operations"]["claim"]
    assert (told["calls"], told["errors"]) == (1, 1)
    claim = Background(lambda: client.claim_meta("p", "t", ["x"], 2))
    for name in "ab":
        client.put_samples([name], "p", {"x": torch.zeros(1)})
    claim.result()
    assert [each.status for each in events if each.op == "claim"] == ["timeout", "ok"]


def test_every_operation_is_one_event_and_counts_in_the_totals(client, events, metrics):
    client.put_samples(["a", "b"], "p", columns())
    client.get_samples(["b", "a", "b"], "p", ["x"])
    client.claim_meta("p", "t", ["x"], 2)
    client.put_samples(["b"], "p", tags=[{"reward": 1.0}])
    with pytest.raises(KeyError):
        client.get_samples(["zz"], "p", ["x"])
    client.clear_samples(["a"], "p")
    client.register_partition("q", ["r"], None, ["t"])
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5)], layout=torch.jagged)
    client.put_samples(["a", "b"], "q", {"r": ragged})
    assert [(each.op, each.partition_id, each.n_keys, each.n_bytes, each.error) for each in events[1:]] == [
        ("put_samples", "p", 2, 32, ""),
        ("get_samples", "p", 2, 24, ""),  # unique ids reach the hook
        ("claim", "p", 2, 0, ""),
        ("put_samples", "p", 1, 0, ""),
        ("get_samples", "p", 1, 0, "MissingDataError"),
        ("describe_partition", "p", 0, 0, ""),  # did another client register it meanwhile?
        ("clear_samples", "p", 1, 0, ""),
        ("register_partition", "q", 0, 0, ""),
        ("put_samples", "q", 2, 28, ""),
    ]
    totals = metrics.snapshot()
    reads = totals.pop("operations")["get_samples"]
    assert (reads["calls"], reads["errors"]) == (2, 1)
    del totals["partitions"]
    assert totals == {
        "total_ops": 10,
        "total_keys": 11,
        "total_bytes": 84,
        "bytes_outstanding": 16 + 28,
        "peak_bytes_outstanding": 16 + 28,
        "n_keys_outstanding": 3,
        "max_bytes_per_key_seen": 20,
        "last_put_bytes_per_key": 14,
        "moved_rows": {},
        "num_clients": 1,
    }


def test_live_bytes_are_those_that_the_store_holds_and_the_peak_stays(client, metrics):
    def live():
        found = metrics.snapshot()["partitions"]["p"]
        assert found["live_bytes"] == client.describe("p").held_bytes
        return found["live_bytes"], found["peak_bytes"]

    image = torch.ones(200_000)
    client.put_samples(["a", "b"], "p", columns())
    assert live() == (32, 32)
    client.put_samples(["a"], "p", {"x": torch.zeros(1, 5)})  # replaces 12 bytes by 20
    client.clear_samples(["a", "unheard"], "p")
    assert live() == (16, 40)
    client.clear_samples(["b"], "p")
    client.put_samples(["a", "b", "c"], "p", {"x": torch.stack([image] * 3)})  # stored once
    assert live() == (image.nbytes, image.nbytes)
    client.clear_samples(["a", "b", "c"], "p")
    assert live() == (0, image.nbytes)
    client.put_samples(["a"], "p", columns(1))
    client.register_partition("p", ["x"], None, ["t"])
    assert live() == (0, image.nbytes)
    assert metrics.snapshot()["n_keys_outstanding"] == 0


def test_of_very_many_partitions_those_that_hold_nothing_are_forgotten(client, metrics, monkeypatch):
    monkeypatch.setattr("dataplane_core.middleware.metrics._MOST_PARTITIONS", 3)
    client.put_samples(["a"], "p", columns(1))
    for step in range(9):
        client.register_partition(f"step-{step}", ["x"], None, ["t"])
        client.put_samples(["a"], f"step-{step}", columns(1))
        client.clear_samples(None, f"step-{step}")
    kept = metrics.snapshot()["partitions"]
    assert len(kept) <= 3
    assert {"p", "step-8"} <= kept.keys()
    assert metrics.snapshot()["bytes_outstanding"] == 16


@pytest.mark.parametrize("separator", [":", "."])
def test_a_config_can_name_it_and_the_function_that_gets_the_events(caplog, separator):
    options = {"on_event": f"dataplane_core.middleware{separator}log_event"}
    caplog.set_level(logging.INFO, logger="dataplane_core")
    with connect({"backend": "noop", "middleware": ["metrics", {"metrics": options}]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        for metrics in client.middleware:
            assert metrics.snapshot()["operations"]["register_partition"]["calls"] == 1
    assert "op='register_partition'" in caplog.text


@pytest.mark.parametrize(
    ("name", "said"), [("dataplane_core.nothing:f", "No module named"), ("dataplane_core.middleware", "callable")]
)
def test_a_function_that_is_not_there_is_refused_before_anything_starts(name, said):
    with pytest.raises(ConfigError, match=said):
        connect({"backend": "noop", "middleware": [{"metrics": {"on_event": name}}]})
    with pytest.raises(ValueError, match=said):
        Metrics(on_event=name)


def test_joined_snapshots_are_the_snapshot_of_one_client_that_made_all_calls():
    def snapshot_of(*times_ms):
        metrics = Metrics()
        for time_ms in times_ms:
            event = OperationEvent(op="get_samples", partition_id="p", n_keys=2, n_bytes=10, wall_ms=time_ms)
            metrics.note(event, None, None)
        return metrics.snapshot()

    joined = merge_snapshots([snapshot_of(1.0, 400.0), json.loads(json.dumps(snapshot_of(8.0)))])
    one = snapshot_of(1.0, 400.0, 8.0)
    del one["last_put_bytes_per_key"]
    assert joined == one | {"num_clients": 2}
    assert merge_snapshots([joined]) == joined
    assert joined["operations"]["get_samples"]["max_ms"] == 400.0


@pytest.mark.parametrize("wrong", [3, {"operations": 3}, {"total_ops": "3"}, {"partitions": {"p": None}}])
def test_what_no_client_told_is_refused(metrics, wrong):
    with pytest.raises(InvalidRequestError, match="number 1 is no snapshot"):
        merge_snapshots([metrics.snapshot(), wrong])


def test_no_snapshots_give_one_without_operations():
    assert merge_snapshots([])["operations"] == {}
    with pytest.raises(InvalidTypeError, match="snapshots must be a list, got NoneType"):
        merge_snapshots(None)


def test_a_snapshot_that_resets_gives_the_operations_of_a_step_and_keeps_what_lives(client, metrics):
    client.put_samples(["a", "b"], "p", columns())
    assert metrics.snapshot(reset=True)["operations"]["put_samples"]["calls"] == 1
    client.get_samples(["a"], "p", ["x"])
    step = metrics.snapshot(reset=True)
    assert list(step["operations"]) == ["get_samples"]
    assert step["total_ops"] == 1
    assert step["bytes_outstanding"] == 32
