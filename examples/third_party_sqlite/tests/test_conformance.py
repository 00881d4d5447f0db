"""The SQLite store keeps the whole contract."""

import sqlite3
import time

import pytest
from dataplane_sqlite_example import SQLiteStore

from dataplane_core.codec import split_rows
from dataplane_core.ledger import commands
from dataplane_testkit import BackendConformance, kill_owner


class TestSQLite(BackendConformance):
    backend = "sqlite_example"
    backend_class = SQLiteStore

    @pytest.fixture
    def options(self, tmp_path_factory):
        return {"path": str(tmp_path_factory.getbasetemp() / "store.sqlite")}

    def conflicting_options(self, options):
        return {**options, "capacity_bytes": 1 << 20}

    def raw_get(self, backend, partition_id, sample_id, field):
        (part,) = backend.call_ledger(time.monotonic() + 60, commands.Locate(partition_id, [sample_id], [field])).parts
        handle = part.write_id + part.positions[0]
        with sqlite3.connect(backend.config.path) as database:
            ((row,),) = database.execute("SELECT data FROM rows WHERE handle = ?", (handle,)).fetchall()
        return split_rows([row])[0][part.slots[0]]

    def restart(self, backend):
        """All that runs is the owner of the ledger."""
        kill_owner(backend)
