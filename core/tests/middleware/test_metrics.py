"""The metrics middleware: one event per operation, totals, bytes that live."""

import pytest
import torch
from tensordict import TensorDict

from dataplane_core import connect
from dataplane_core.middleware import Metrics


@pytest.fixture
def events():
    return []


@pytest.fixture
def metrics(events):
    return Metrics(on_event=events.append)


@pytest.fixture
def client(metrics):
    with connect({"backend": "noop", "middleware": [metrics]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        yield client


def columns(num_samples=2):
    return TensorDict({"x": torch.zeros(num_samples, 3), "y": torch.zeros(num_samples)}, [num_samples])


def test_every_operation_is_one_event_with_its_keys_and_bytes(client, events):
    client.put_samples(["a", "b"], "p", columns())
    client.get_samples(["b", "a", "b"], "p", ["x"])
    client.claim_meta("p", "t", ["x"], 2)
    client.clear_samples(["a"], "p")
    seen = [(each.op, each.partition_id, each.n_keys, each.n_bytes, each.status) for each in events[1:]]
    assert seen == [
        ("put_samples", "p", 2, 2 * (3 + 1) * 4, "ok"),
        ("get_samples", "p", 2, 2 * 3 * 4, "ok"),  # unique ids reach the hook
        ("claim", "p", 2, 0, "ok"),
        ("clear_samples", "p", 1, 0, "ok"),
    ]
    assert all(each.wall_ms >= 0 for each in events)


def test_a_failure_is_an_event_with_the_errors_name_and_still_raises(client, events, metrics):
    with pytest.raises(KeyError):
        client.get_samples(["zz"], "p", ["x"])
    assert (events[-1].op, events[-1].status) == ("get_samples", "MissingDataError")
    assert metrics.snapshot()["operations"]["get_samples"]["errors"] == 1


def test_live_bytes_follow_puts_overwrites_and_clears_and_the_peak_stays(client, metrics):
    def live():
        return metrics.snapshot()["partitions"]["p"]

    client.put_samples(["a", "b"], "p", columns())
    assert live() == {"live_bytes": 32, "peak_bytes": 32}
    client.put_samples(["a"], "p", TensorDict({"x": torch.zeros(1, 5)}, [1]))  # replaces 12 bytes by 20
    assert live() == {"live_bytes": 40, "peak_bytes": 40}
    client.clear_samples(["a", "unheard"], "p")
    assert live() == {"live_bytes": 16, "peak_bytes": 40}
    client.clear_samples(None, "p")
    assert live() == {"live_bytes": 0, "peak_bytes": 40}


def test_ragged_and_object_columns_are_counted(client, events):
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5)], layout=torch.jagged)
    client.put_samples(["a", "b"], "p", {"r": ragged})
    assert events[-1].n_bytes == 7 * 4


def test_it_can_be_named_in_a_config():
    with connect({"backend": "noop", "middleware": ["metrics"]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        (metrics,) = client.middleware
        assert metrics.snapshot()["operations"]["register_partition"]["calls"] == 1
