"""`dataplane top` and `why`: what they ask and show; how rarely `metrics` asks. Live in a terminal: test_live.py."""

import io
import json
import os
import re
import socket
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.client import DataPlaneClient
from dataplane_core.spec import Capability, ClientInfo, UnitInfo
from dataplane_tools import _live, _metrics, _report
from dataplane_tools._live import Watcher
from dataplane_tools._report import Looks, Screen, newest, stacks_of


@pytest.fixture
def client():
    with connect({"backend": "noop", "options": {"capacity_bytes": 10_000}, "role": "driver"}) as client:
        client.register_partition("step-1", ["x"], 16, ["score", "train"])
        ids = [f"s{row}" for row in range(8)]
        client.put_samples(ids, "step-1", {"x": torch.zeros(8)})
        client.ack(client.claim_meta("step-1", "score", ["x"], 6, lease_s=60.0))
        client.claim_meta("step-1", "train", ["x"], 2, lease_s=60.0)
        yield client


def shown(report, width=118):
    console = Console(width=width, file=io.StringIO())
    console.print(Screen(report, newest(report["partitions"])))
    return console.file.getvalue()


def test_the_flow_and_the_stage_that_lags(client):
    found = shown(Looks(client).look()).replace("━", "").replace("─", "")
    lines = [" ".join(line.split()) for line in found.splitlines()]
    holder = f"process {os.getpid()} on "
    assert lines[0].startswith("noop 1 partition 32 bytes of 10.0 kB")
    assert lines[3:5] == ["written 8/16", "→ score 6/16 2 2 0"]
    assert re.match(rf"→ train 0/16 8 6 2 lags s0 for \d+ s, \d+ s left: {holder}", lines[5])
    assert re.fullmatch(r"8 held \(32 bytes, the oldest \d+ s old\), 0 cleared", lines[6])


@pytest.mark.parametrize("width", [50, 61, 80])
def test_where_there_is_little_room_the_counts_are_still_whole(client, width):
    lines = [" ".join(line.split()) for line in shown(Looks(client).look(), width).splitlines()]
    assert lines[2:6] == ["step-1 done left ready leased", "written 8/16", "→ score 6/16 2 2 0", "→ train 0/16 8 6 2"]


@pytest.mark.parametrize(("cost_s", "pause_s"), [(0.01, 1.0), (0.4, 20.0)])
def test_it_asks_once_a_second_and_more_rarely_if_it_costs_much(client, monkeypatch, cost_s, pause_s):
    watcher, pauses = Watcher(""), []
    watcher._looks = Looks(client)
    watcher._wake = SimpleNamespace(wait=pauses.append, clear=watcher._ends.set)
    clock = iter([8.0, *[8.0 + cost_s] * 3])
    monkeypatch.setattr(_live, "time", SimpleNamespace(monotonic=clock.__next__))
    watcher.run()
    assert pauses == [pytest.approx(pause_s)]


def test_metrics_asks_for_verdicts_in_a_small_part_of_the_time_only(client, monkeypatch):
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


def test_rates_and_partitions_that_are_cleared(client, monkeypatch):
    now = 0.0
    monkeypatch.setattr(_report, "time", SimpleNamespace(monotonic=lambda: now))
    looks = Looks(client)
    assert looks.look()["partitions"][0]["written_per_s"] is None
    client.put_samples(["s8", "s9"], "step-1", {"x": torch.zeros(2)})
    client.register_partition("step-2", ["x"], None, [])
    now += 4.0
    assert [partition["written_per_s"] for partition in looks.look()["partitions"]] == [0.5, None]
    assert [partition["partition_id"] for partition in Looks(client, "step-1").look()["partitions"]] == ["step-1"]
    client.clear_samples(None, "step-1")
    client.put_samples(["a", "b", "c"], "step-2", {"x": torch.zeros(3)})
    client.clear_samples(["a", "b"], "step-2")
    client.finish_partition("step-2")
    assert re.search(r"written +3/3 ", shown(looks.look())), "what was cleared before the end counts too"
    client.clear_samples(None, "step-2")
    assert looks.look()["partitions"] == []
    assert "0 partitions" in shown(looks.look())


def test_storage_units_and_the_rows_that_were_lost_with_them(client, monkeypatch):
    unit = UnitInfo(name="unit-1", state="serving", node="77a10c3e99", address="10.1.0.8:1", num_rows=7, num_lost=5)
    looks = Looks(client)
    assert "unit" not in shown(looks.look())
    monkeypatch.setattr(client, "list_units", lambda: [unit])
    monkeypatch.setattr(type(client), "capabilities", {Capability.UNITS})
    lines = [" ".join(line.split()) for line in shown(looks.look()).splitlines()]
    assert "unit-1 serving 10.1.0.8:1 77a10c3e 7 0 bytes 5 1" in lines
    assert lines[-1] == "5 rows were lost with unit-1: clear and produce these samples again."


def test_stacks_are_read_of_open_clients_on_this_host(monkeypatch):
    here = socket.gethostname()
    clients = [
        ClientInfo(client_id=str(pid), host=host, pid=pid, role="", open_s=1.0, state=state)
        for pid, (host, state) in enumerate([(here, "open"), (here, "silent"), ("elsewhere", "open")])
    ]
    monkeypatch.setattr("dataplane_tools._report._stacks_of", str)
    assert stacks_of(clients) == {"0": "0"}


def test_why(store, config, nowhere, capsys):
    assert main(["why", config]) == 0
    assert capsys.readouterr().out == "No task is registered.\n"
    store.register_partition("step", ["x"], 2, ["trainer", "reward"])
    store.put_samples(["a", "b"], "step", {"x": torch.zeros(2)})
    store.claim_meta("step", "trainer", ["x"], 2)
    assert main(["why", config, "--json"]) == 0
    found = {each["task_name"]: each for each in json.loads(capsys.readouterr().out)}
    assert (found["trainer"]["state"], found["reward"]["state"], found["reward"]["backlog"]) == ("done", "idle", 2)
    assert main(["why", config, "trainer", "--watch"]) == 0
    assert capsys.readouterr().out.startswith("step / trainer: done (0 left")
    assert main(["why", config, "trainr"]) == 2
    assert "has a consumer task 'trainr'" in capsys.readouterr().err
    assert main(["why", nowhere]) == 2
