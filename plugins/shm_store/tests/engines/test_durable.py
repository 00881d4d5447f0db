"""A store in a folder, with real processes: all are killed at once, and the next owner has what was promised."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import uuid
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from durable_roles import check, notes_in
from tiers import in_long

from dataplane_core import connect
from dataplane_core.errors import AlreadyRunningError, ConfigError
from dataplane_core.host_memory import Arena
from dataplane_core.hosting import Session
from dataplane_testkit._timing import STARTS_S, eventually

ROLES = Path(__file__).with_name("durable_roles.py")


@pytest.fixture
def config(tmp_path):
    options = {"namespace": f"durable-{uuid.uuid4().hex[:8]}", "capacity_bytes": 32 << 20}
    return {"backend": "shm_store", "options": {**options, "durable": str(tmp_path / "store")}}


def ledger_of(config):
    """The process id of the ledger's process, which has the folder open."""
    return json.loads((Path(config["options"]["durable"]) / "lock").read_bytes())["pid"]


@pytest.mark.parametrize("num_rounds", [2, *in_long(int(os.environ.get("DATAPLANE_KILL_ROUNDS", "1000")))])
@pytest.mark.timeout(7200)
def test_all_processes_may_be_killed_at_any_moment(python, runs, config, tmp_path, num_rounds):
    """In each round they are started, all are killed at a random moment, and the store is looked at."""
    noted = defaultdict(Counter)
    for number in range(num_rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        processes = []
        for role in ("own", "write", "write", "consume", "consume"):
            notes = folder / f"{len(processes)}.notes"
            processes.append(python.start(ROLES, role, json.dumps(config), notes))
            if role == "own":
                eventually(lambda f=folder: "ready" in notes_in(f), STARTS_S, "the owner is ready")
        least = random.randint(0, 60)
        eventually(lambda f=folder, n=least: notes_in(f)["acked"].total() >= n, STARTS_S, "some acks")
        victims = [ledger_of(config), *(process.pid for process in processes)]
        random.shuffle(victims)
        for pid in victims:
            with suppress(ProcessLookupError):  # the ledger's process ends with its owner
                os.kill(pid, signal.SIGKILL)
        eventually(lambda pids=victims: not any(map(runs, pids)), STARTS_S, "their end")
        for process in processes:
            process.wait()
        for word, ids in notes_in(folder).items():
            noted[word].update(ids)
        check(config, noted)


def test_a_store_that_was_closed_comes_back_and_others_are_refused_meanwhile(config):
    other = {**config, "options": {**config["options"], "namespace": f"other-{uuid.uuid4().hex[:8]}"}}
    with connect(config) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.arange(2)}, [{"n": 1}, {"n": 2}])
        client.ack(client.claim_meta("p", "t", ["x"], 1, lease_s=60))
        with pytest.raises(AlreadyRunningError, match=f"in use by process {ledger_of(config)}"):
            connect(other)
    with connect(other) as client:
        assert client.list_samples("p").tags == [{"n": 1}, {"n": 2}]
        assert client.claim_meta("p", "t", ["x"], 1, lease_s=60).sample_ids == ["b"]
    with connect(config) as client:  # the lease is over, since its holder is
        assert client.claim_meta("p", "t", ["x"], 1, lease_s=60).sample_ids == ["b"]


def test_a_folder_that_became_read_only_is_refused_and_kept(config, tmp_path):
    with connect(config) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.ones(1)})
    program = tmp_path / "program.py"
    program.write_text("import json, sys; from dataplane_core import connect; connect(json.loads(sys.argv[1]))")
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    folder = config["options"]["durable"]
    if shutil.which("unshare") is None or subprocess.run([*apart, mount, folder], capture_output=True).returncode:
        pytest.skip("this machine lets no program mount a folder")
    command = [*apart, f'{mount} && exec "$@"', folder, sys.executable, program, json.dumps(config)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "BackendUnavailableError" in run.stderr
    assert f"the folder {folder} cannot be used: [Errno 30] Read-only file system" in run.stderr
    with connect(config) as client:
        assert client.list_samples("p").sample_ids == ["a"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sync": "commit"}, "'sync' needs 'durable'"),
        ({"durable": ""}, r"durable[\s\S]*names no folder"),
        ({"durable": "~nobody-has-this-name/x"}, r"durable[\s\S]*home directory"),
    ],
)
def test_a_folder_that_is_named_wrongly_or_not_at_all_is_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        connect({"backend": "shm_store", "options": options})


def test_a_client_gets_the_store_of_the_folder_that_it_names_or_none(config, tmp_path):
    options = config["options"]
    with connect(config) as client:
        client.register_partition("p", ["x"], None, ["t"])
        Path(tmp_path, "link").symlink_to(options["durable"])
        for same in (str(tmp_path / "link"), None):
            with connect({**config, "options": {**options, "durable": same}}, bootstrap=False) as other:
                assert other.list_partitions() == ["p"]
        for bootstrap in (False, "auto"):
            with pytest.raises(ConfigError, match="Give each store a `namespace` of its own"):
                connect({**config, "options": {**options, "durable": str(tmp_path / "another")}}, bootstrap=bootstrap)
        with pytest.raises(AlreadyRunningError, match=f"that store, namespace '{options['namespace']}',"):
            connect({**config, "options": {**options, "namespace": "another"}})
    with (
        connect({**config, "options": {**options, "durable": None}}) as client,
        pytest.raises(ConfigError, match="in memory"),
    ):
        connect(config, bootstrap=False)


def test_a_client_syncs_and_digests_what_it_wrote_before_it_commits(config, monkeypatch, tmp_path):
    """The ledger's process relies on that. A copy of the folder, which other memory has, is served if digests agree."""
    done = []
    sync, call_all = Arena.sync, Session.call_all
    monkeypatch.setattr(Arena, "sync", lambda *args: done.append("sync") or sync(*args))
    monkeypatch.setattr(
        Session, "call_all", lambda self, *args: done.append(type(args[-1][-1]).__name__) or call_all(self, *args)
    )
    lengths = (1, 1 << 20)
    with connect(config | {"options": {**config["options"], "sync": "commit"}}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        for length in lengths:
            done.clear()
            client.put_samples([str(length)], "p", {"x": torch.full((1, length), length)})
            assert done == ["Allocate", "sync", "CommitPut"]
        shutil.copytree(config["options"]["durable"], tmp_path / "copy")
    with connect(config | {"options": {**config["options"], "durable": str(tmp_path / "copy")}}) as client:
        for length in lengths:
            assert client.get_samples([str(length)], "p", ["x"])["x"].tolist() == [[length] * length]
