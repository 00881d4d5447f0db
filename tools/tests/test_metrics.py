"""What `dataplane metrics` asks of the store, and how often. Its endpoint is in `engines`."""

from types import SimpleNamespace

from dataplane_core.client import DataPlaneClient
from dataplane_tools import _metrics


def test_the_store_is_asked_for_verdicts_in_a_small_part_of_the_time_only(client, monkeypatch):
    now, asked = [0.0], []

    def why(self):
        asked.append(now[0])
        now[0] += 10.0
        return []

    monkeypatch.setattr(DataPlaneClient, "why", why)
    monkeypatch.setattr(_metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gauges = _metrics.Gauges(client, lambda: client)
    for wait_s in (0.0, 1.0, 1000.0):
        now[0] += wait_s
        list(gauges.collect())
    assert asked == [0.0, 1011.0]
