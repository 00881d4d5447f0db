"""`dataplane top`, printed, over a store that other clients use."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from contents import config_in
from msgspec.structs import replace

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.ownership import is_open
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_tools import _report, _top


@pytest.fixture
def client(store):
    """A store with the partition ``step-1``: 6 of 8 samples written, 2 consumed, 2 leased, one without its reward."""
    store.register_partition("step-1", ["tokens", "reward", "later"], 8, ["train", "score"], 2)
    ids = [f"p{row // 2}_g{row % 2}" for row in range(6)]
    store.put_samples(ids, "step-1", {"tokens": torch.arange(60).view(6, 10)})
    store.put_samples(ids[:5], "step-1", {"reward": torch.zeros(5)})
    store.claim_meta("step-1", "train", ["reward"], 2)
    store.claim_meta("step-1", "train", ["reward"], 2, lease_s=60.0)
    return store


def test_counts_and_what_a_task_waits_for(client, config, capsys):
    assert main(["top", config, "step-1", "--once"]) == 0
    lines = [" ".join(line.split()).strip("━─ ") for line in capsys.readouterr().out.splitlines()]
    assert re.fullmatch(r"shm_store 1 partition .+ of 50\.0 MB", lines[0])
    assert lines[2:4] == ["step-1 done per s left ready leased oldest lease", "written 6/8"]
    assert re.fullmatch(rf"→ train 2/8 4 0 2 \W+ p1_g0 for \d+ s, \d+ s left: process {os.getpid()} on .+", lines[4])
    assert lines[5] == "→ score 0/8 6 0 0"
    assert re.fullmatch(r"6 held \(.+, the oldest \d+ s old\), 0 cleared", lines[6])
    assert lines[7:9] == [
        "The oldest sample that train has not consumed is p1_g0; it has all registered fields but later.",
        "The oldest sample that score has not consumed is p0_g0; it has all registered fields but later.",
    ]
    assert lines[-4:] == [
        "field samples cells",
        "tokens 6 int64 cells of shape (L,)",
        "reward 5 float32 scalars",
        "later 0 not written",
    ]


_COMMANDS = [["top", "--once"], ["read", "p"], ["export", "p", "out"], ["why"], ["metrics"]]


@pytest.mark.parametrize(
    ("backend", "ledgers", "journal", "command"),
    [
        *(("shm_store", 1, "run/journal", command) for command in _COMMANDS),
        ("shm_store", 2, "run-0of2/journal", ["top"]),
        ("tq_simple", 1, "run/i/journal", ["top"]),
    ],
)
def test_a_durable_folder_that_holds_no_store_is_refused_and_nothing_is_made(
    tmp_path, monkeypatch, capsys, command, backend, ledgers, journal
):
    monkeypatch.chdir(tmp_path)
    name = {"instance": "i"} if backend == "tq_simple" else {"namespace": "not-there"}
    options = {"durable": str(tmp_path / "run"), "capacity_bytes": 1 << 20, **name}
    config = {"backend": backend, "num_ledgers": ledgers, "options": options}
    assert main([command[0], config_in(tmp_path, **config), *command[1:]]) in (1, 2)
    said = capsys.readouterr().err
    assert f"the durable folder holds none: there is no {tmp_path / journal}." in said
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_durable_folder_that_nobody_has_open_is_looked_at(tmp_path, capsys):
    options = {"namespace": "read-closed", "capacity_bytes": "50MB", "durable": str(tmp_path / "store")}
    config = {"backend": "shm_store", "options": options}
    with connect(config) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.tensor([7, 8])})
    path = config_in(tmp_path, **config)
    assert main(["top", path]) == 0
    assert "p" in capsys.readouterr().out
    assert main(["read", path, "p", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [(each["sample_id"], each["values"]) for each in samples] == [("a", {"x": 7}), ("b", {"x": 8})]
    assert not is_open(tmp_path / "store")


def test_json_has_the_same_with_rates_and_looking_changes_nothing(client, config, capsys, monkeypatch):
    now = [0.0]

    def write_meanwhile(seconds):
        client.put_samples([f"n{number}" for number in range(8)], "other", {"x": torch.ones(8)})
        client.claim_meta("other", "train", ["x"], 4)
        now[0] += seconds

    def seen():
        found = client.describe("step-1")
        tasks = {name: replace(task, oldest_lease=None) for name, task in found.tasks.items()}
        return replace(found, oldest_s=None, tasks=tasks)

    before = seen()
    client.register_partition("other", ["x"], None, ["train"])
    monkeypatch.setattr(_report, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(_top, "time", SimpleNamespace(sleep=write_meanwhile))
    assert main(["top", config, "--json", "--interval", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    other, step = report["partitions"]
    assert (other["written_per_s"], other["tasks"]["train"]["consumed_per_s"]) == (4.0, 2.0)
    assert (step["written_per_s"], step["tasks"]["train"]["consumed_per_s"]) == (0.0, 0.0)
    assert step["tasks"]["train"]["leased"] == 2
    told = {"kind": "tensor", "dtype": "int64", "cells": "int64 cells of shape (L,)", "rows": 6}
    assert step["fields"]["tokens"] == told
    assert report["held_bytes"] == other["held_bytes"] + step["held_bytes"]
    assert seen() == before


def test_an_empty_store_and_the_capacity_of_several_ledgers(store, config, tmp_path, capsys):
    assert main(["top", config]) == 0
    assert capsys.readouterr().out.startswith("shm_store  0 partitions  0 bytes of 50.0 MB  ─")
    path = config_in(tmp_path, num_ledgers=2, announce_s=None, options={"capacity_bytes": "50000000"})
    with connect(path):
        assert main(["top", path]) == 0
    assert capsys.readouterr().out.startswith("shm_store  0 partitions  0 bytes of 100.0 MB  ─")


def test_it_ends_quietly_once_nobody_reads_its_output_and_when_it_is_interrupted(
    client, config, python, capsys, monkeypatch
):
    read, write = os.pipe()
    os.close(read)
    command = ["-m", "dataplane_core", "top", config]
    with python.start(*command, stdout=write, stderr=subprocess.PIPE) as ended:
        os.close(write)
        assert (ended.communicate()[1], ended.returncode) == (b"", 128 + signal.SIGPIPE)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_report.Looks, "look", interrupted)
    assert main(["top", config]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("backend", ["redis_store", "shm_store"])
def test_what_only_asks_imports_no_torch(tmp_path, backend):
    """It takes seconds."""
    options = {"namespace": "no-torch", "capacity_bytes": "50MB"}
    path = config_in(tmp_path, backend=backend, announce_s=None, options=options)
    code = (
        "import sys; from dataplane_core.cli import main\n"
        "print([main([*words, sys.argv[1]]) for words in (['top', '--once'], ['why'])], 'torch' in sys.modules)"
    )
    with connect(path) as client:
        client.register_partition("step-1", ["x"], None, ["train"])
        client.put_samples(["a"], "step-1", {"x": torch.ones(1)})
        words = [sys.executable, "-c", code, path]  # a process of the fixture would have it
        done = subprocess.run(words, capture_output=True, text=True, timeout=STARTS_S, check=True)
        assert done.stdout.splitlines()[-1] == "[0, 0] False"


@pytest.mark.parametrize("interval", ["-1", "1e12", "nan"])
def test_the_interval_is_checked(config, capsys, interval):
    assert main(["top", config, "--interval", interval]) == 1
    assert "Expected a number of seconds from 0 to 86400." in capsys.readouterr().err


def test_watch_prints_what_changed_until_all_are_done(store, config, capsys, monkeypatch):
    store.register_partition("step-1", ["x"], 1, ["train"])

    def proceeds(_):
        if not store.describe("step-1").num_samples:
            store.put_samples(["a"], "step-1", {"x": torch.ones(1)})
        else:
            store.claim_meta("step-1", "train", ["x"], 1)

    monkeypatch.setattr(_top, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=proceeds))
    assert main(["top", config, "--watch", "--json"]) == 0
    looks = [json.loads(line)["partitions"][0] for line in capsys.readouterr().out.splitlines()]
    assert [(look["written"], look["tasks"]["train"]["consumed"]) for look in looks] == [(0, 0), (1, 1)]
    assert main(["top", config, "step-2", "--watch"]) == 2  # it is not known
    assert "'step-2'" in capsys.readouterr().err


@pytest.fixture
def worker(config, client, python):
    """A process that waits in a phase for samples that nobody writes, and has announced so."""
    program = (
        "import sys; from dataplane_core import connect; from dataplane_core.config import load_config\n"
        "config = load_config(sys.argv[1]).model_copy(update={'role': 'rollout 3', 'announce_s': 1.0})\n"
        "def wait_for_samples(client):\n"
        "    with client.phase('score'):\n"
        "        client.claim_meta('step-1', 'score', ['later'], 2, timeout_s=600)\n"
        "wait_for_samples(connect(config, bootstrap=False))\n"
    )
    process = python.start("-c", program, config)
    eventually(
        lambda: any(each.calls for each in client.list_clients() if each.pid == process.pid),
        within_s=STARTS_S,
        what="a client that waits",
    )
    yield process
    process.kill()
    process.wait()


def test_it_names_the_process_that_waits_until_it_is_gone(client, worker, config, capsys, monkeypatch):
    assert main(["top", config, "--stacks"]) == 0
    text, _, stacks = capsys.readouterr().out.partition(f"stacks of process {worker.pid}:")
    (line,) = [line.split() for line in text.splitlines() if "rollout 3" in line]
    assert line[:4] == [socket.gethostname(), str(worker.pid), "rollout", "3"]
    assert re.match(r"score for \d+ s, claim_meta step-1 for \d+ s$", " ".join(line[6:]))
    assert "wait_for_samples" in stacks or "Permission denied" in stacks  # a host may forbid ptrace
    monkeypatch.setattr("dataplane_tools._report.shutil.which", lambda *args, **kwargs: None)
    assert main(["top", config, "--stacks"]) == 1
    assert "pip install 'dataplane-tools[stacks]'" in capsys.readouterr().err
    worker.kill()
    worker.wait()

    def is_gone():
        main(["top", config])
        said = capsys.readouterr().out
        assert f"process {worker.pid} on {socket.gethostname()} (rollout 3)" in said or "is starved" not in said
        shown = f"{socket.gethostname()} {worker.pid} rollout 3 "
        (line,) = [each for line in said.splitlines() if (each := " ".join(line.split())).startswith(shown)]
        return re.search(r" gone, heard of \d+ s ago, in score for \d+ s$", line)

    eventually(is_gone, within_s=STARTS_S, what="a killed client that is shown as gone")
    eventually(
        lambda: worker.pid not in {each.pid for each in client.list_clients()},
        within_s=STARTS_S,
        what="the end of a killed client",
    )
