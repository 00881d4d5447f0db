"""The SQLite example: Ctrl-C at any moment of a call leaves no lock behind, for no process."""

import functools
import sqlite3
import time

import dataplane_sqlite_example
import pytest
from dataplane_sqlite_example import SQLiteOptions, SQLiteStore

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
