"""`dataplane top`: what it asks, what it shows, and the terminal."""

import io
import os
import pty
import re
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dataplane_core import connect
from dataplane_core.config import load_config
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_tools import _watch
from dataplane_tools._top import Looks, screen
from dataplane_tools._watch import Watcher


@pytest.fixture
def client():
    with connect({"backend": "noop", "options": {"capacity_bytes": 10_000}, "role": "driver"}) as client:
        client.register_partition("step-1", ["x"], 16, ["score", "train"])
        ids = [f"s{row}" for row in range(8)]
        client.put_samples(ids, "step-1", {"x": torch.zeros(8)})
        client.ack(client.claim_meta("step-1", "score", ["x"], 6, lease_s=60.0))
        client.claim_meta("step-1", "train", ["x"], 2, lease_s=60.0)
        yield client


def shown(looks):
    console = Console(width=118, file=io.StringIO())
    console.print(screen(looks))
    return console.file.getvalue()


@pytest.mark.parametrize("name", ["exp[/1]", "pool[train]", "a[bold red]b"])
def test_names_with_brackets_are_shown_as_they_are(name):
    with connect({"backend": "noop", "role": name, "announce_s": None}) as client:
        client.register_partition(name, ["x"], 16, [name])
        client.put_samples(["a"], name, {"x": torch.zeros(1)})
        client.claim_meta(name, name, ["x"], 1, lease_s=60.0)
        looks = Looks(client)
        for _ in range(4):
            looks.ask()
        assert shown(looks).count(name) == 2  # the partition and the task


def test_the_flow_and_the_stage_that_lags(client):
    looks = Looks(client)
    for _ in range(4):
        looks.ask()
    lines = [" ".join(line.replace("━", "").replace("─", "").split()) for line in shown(looks).splitlines()]
    holder = f"process {os.getpid()} on "
    assert lines[0].startswith("noop 1 partition 32 B of 10.0 kB")
    assert lines[3:5] == ["written 8/16", "→ score 6/16 2 2 0"]
    assert lines[5].startswith(f"→ train 0/16 8 6 2 lags {holder}")


def test_one_question_at_a_time(client):
    looks = Looks(client)
    asked = []
    for name in ("list_partitions", "why", "describe", "list_clients"):
        method = getattr(client, name)

        def noted(*args, name=name, method=method, **more):
            asked.append(name)
            return method(*args, **more)

        setattr(client, name, noted)
    for count in range(1, 10):
        looks.ask()
        assert len(asked) == count
    assert asked == ["list_partitions", "why", "describe", "list_clients"] * 2 + ["list_partitions"]


@pytest.mark.parametrize(("cost_s", "pause_s"), [(0.01, 1.0), (0.4, 20.0)])
def test_it_asks_once_a_second_and_more_rarely_if_it_costs_much(client, monkeypatch, cost_s, pause_s):
    watcher, pauses = Watcher(""), []
    watcher._looks = Looks(client)
    watcher._wake = SimpleNamespace(wait=pauses.append, clear=watcher._ends.set)
    clock = iter([0.0, cost_s, cost_s, cost_s])
    monkeypatch.setattr(_watch, "time", SimpleNamespace(monotonic=clock.__next__))
    watcher.run()
    assert pauses == [pause_s]


def test_rates_and_partitions_that_are_cleared(client):
    now = 0.0
    looks = Looks(client, clock=lambda: now)
    for _ in range(4):
        looks.ask()
    client.put_samples(["s8", "s9"], "step-1", {"x": torch.zeros(2)})
    now += 4.0
    for _ in range(4):
        looks.ask()
    assert looks.partitions["step-1"]["written_per_s"] == 0.5
    client.clear_samples(None, "step-1")
    for _ in range(4):
        looks.ask()
    assert looks.partitions == {}
    assert "0 partitions" in shown(looks)


def test_a_killed_stage_is_the_one_that_lags_and_is_shown_as_gone(tmp_path, python):
    path = tmp_path / "config.yaml"
    path.write_text("{backend: shm_store, announce_s: 0.2, options: {capacity_bytes: 50000000}}")
    stages = {}
    with connect({**load_config(str(path)).model_dump(), "role": "driver"}) as client:
        client.register_partition("step-1", ["x", "reward"], 16, ["train", "reward"])
        client.put_samples([f"s{row}" for row in range(8)], "step-1", {"x": torch.zeros(8)})
        for task, field in (("reward", "x"), ("train", "reward")):
            code = (
                "import sys; from dataplane_core import connect; from dataplane_core.config import load_config\n"
                f"config = load_config({str(path)!r}).model_copy(update={{'role': {task!r}}})\n"
                "client = connect(config, bootstrap=False)\n"
                f"client.claim_meta('step-1', {task!r}, [{field!r}], 16, timeout_s=600)"
            )
            stages[task] = python.start("-c", code)
        try:
            looks = Looks(client)

            def screen_after(count):
                for _ in range(count):
                    looks.ask()
                return " ".join(shown(looks).replace("━", "").replace("─", "").split())

            def all_wait():
                screen_after(4)
                calling = {each["pid"] for each in looks.clients if each["calls"]}
                return calling >= {each.pid for each in stages.values()}

            eventually(all_wait, STARTS_S, "stages that wait")
            killed = stages["reward"]
            killed.kill()
            said = (
                rf"reward is starved for \d+ s: 8 samples of it are left, and nobody claims them: process {killed.pid} "
            )
            gone = rf" {killed.pid} reward gone, heard of \d+ s ago"
            rows = ("→ reward 0/16 0.0 8 8 0 lags", "→ train 0/16 0.0 8 0 0 ")

            def shows_it():
                seen = screen_after(4)
                return re.search(said, seen) and re.search(gone, seen) and all(row in seen for row in rows)

            eventually(shows_it, STARTS_S, "a stage that is starved and lags, and its process that is gone")
        finally:
            for stage in stages.values():
                stage.kill()
                stage.wait()


def read_until(terminal, pattern):
    """What the terminal shows, from now until it shows the text of this pattern."""
    seen = ""
    until = time.monotonic() + 120.0
    while not re.search(pattern, seen) and time.monotonic() < until:
        if select.select([terminal], [], [], 1.0)[0]:
            seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(terminal, 65536).decode(errors="replace"))
    assert re.search(pattern, seen), seen


def store(path, partition):
    client = connect(path)
    client.register_partition(partition, ["x"], 16, ["train"])
    client.put_samples(["a"], partition, {"x": torch.zeros(1)})
    return client


def test_in_a_terminal_it_waits_for_the_next_store_when_one_ends(tmp_path, python):
    path = str(tmp_path / "config.yaml")
    Path(path).write_text("{backend: shm_store, options: {capacity_bytes: 50000000}}")
    terminal, inside = pty.openpty()
    size = {"TERM": "xterm", "COLUMNS": "118", "LINES": "30"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), inside)
    with store(path, "step-1"):
        top = python.start("-m", "dataplane_core", "top", path, env={**os.environ, **size}, **streams)
        os.close(inside)
        read_until(terminal, r"step-1[\s\S]*written +1/16")
    read_until(terminal, "waiting for the store: ")
    with store(path, "step-2"):
        read_until(terminal, "step-2")
        top.send_signal(signal.SIGINT)
        with suppress(OSError):  # its last words must be read, or it cannot end
            while os.read(terminal, 65536):
                pass
        assert top.wait() == 0
        os.close(terminal)
