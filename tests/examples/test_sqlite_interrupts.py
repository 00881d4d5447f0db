"""The SQLite example: Ctrl-C at any moment of a call leaves no lock behind, for no process."""

import functools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import dataplane_sqlite_example
import pytest
import torch
from dataplane_sqlite_example import SQLiteOptions, SQLiteStore

from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend

CALLS = {
    "put": lambda store, turn: store.put(f"a{turn}", b"data"),
    "put_many": lambda store, turn: store.put_many({f"b{turn}x{number}": b"data" for number in range(3)}),
    "get": lambda store, turn: store.get("kept"),
    "delete_many": lambda store, turn: store.delete_many([f"a{turn}", f"b{turn}x0"]),
    "append": lambda store, turn: store.append(turn, b"record"),
    "read": lambda store, turn: store.read(0),
}


@pytest.fixture
def store(tmp_path):
    opened = SQLiteStore(SQLiteOptions(path=tmp_path / "store.sqlite"))
    opened.start(bootstrap=True, deadline=time.monotonic() + 30)
    opened.put("kept", b"kept")
    yield opened
    opened.stop()


@pytest.mark.parametrize("name", list(CALLS))
def test_an_interrupt_before_any_instruction_leaves_no_lock(store, name, interrupted):
    other = sqlite3.connect(store.config.path, timeout=0, isolation_level=None)
    at = 0
    call = functools.partial(CALLS[name], store)
    while (error := interrupted(functools.partial(call, at), at, dataplane_sqlite_example)) is not None:
        other.execute("BEGIN IMMEDIATE")  # raises where anybody holds a lock
        other.execute("ROLLBACK")
        assert store.get("kept") == b"kept"
        store.put(f"after{at}", b"")
        del error
        at += 1
    other.close()
    assert at > 50


#: Puts until it is interrupted, says so, and makes no further call until it is told to go on.
WRITER = """
import os
import signal
import sys
import torch
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_sqlite_example import SQLiteStore

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell runs the tests in the background
config = DataPlaneConfig(backend="sqlite_example", options={"path": sys.argv[1]})
client = connect_backend(SQLiteStore, config, bootstrap=False)
parent = os.getppid()
errors = []  # with the frames of all calls
for turn in range(int(sys.argv[2])):
    try:
        print("writing", flush=True)
        while os.getppid() == parent:
            client.put_samples(["theirs"], "train", {"x": torch.tensor([turn])})
    except KeyboardInterrupt as error:
        errors.append(error)
    print("interrupted", flush=True)
    sys.stdin.readline()
print("done", flush=True)
"""
TURNS = 60


def test_other_processes_write_on_whenever_one_is_interrupted(tmp_path, python):
    path = str(tmp_path / "store.sqlite")
    config = DataPlaneConfig(backend="sqlite_example", options={"path": path}, op_timeout_s=5)
    moments = random.Random(0)
    written = []
    failed = []
    over = threading.Event()

    def write_on(client):
        try:
            while not over.is_set():
                client.put_samples(["ours"], "train", {"x": torch.tensor([len(written)])})
                written.append(None)
        except Exception as error:
            failed.append(error)

    def two_more():
        wanted = len(written) + 2
        while len(written) < wanted and not failed:
            time.sleep(0.001)
        assert not failed, failed

    with connect_backend(SQLiteStore, config) as client:
        client.register_partition("train", ["x"], None, ["trainer"])
        beside = threading.Thread(target=write_on, args=(client,))
        beside.start()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with python.start("-c", WRITER, path, TURNS, env=env, **pipes) as writer:
            try:
                for _ in range(TURNS):
                    assert writer.stdout.readline() == "writing\n"
                    time.sleep(moments.uniform(0, 0.02))
                    writer.send_signal(signal.SIGINT)
                    assert writer.stdout.readline() == "interrupted\n"
                    two_more()
                    writer.stdin.write("\n")
                    writer.stdin.flush()
                assert writer.stdout.readline() == "done\n"
            finally:
                writer.kill()
                over.set()
                beside.join()
