"""The SQLite store keeps the whole contract."""

import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from dataplane_sqlite_example import SQLiteStore

from dataplane_core.codec import split_rows
from dataplane_core.ledger import commands
from dataplane_testkit import BackendConformance


class TestSQLite(BackendConformance):
    backend = "sqlite_example"
    backend_class = SQLiteStore

    @pytest.fixture
    def options(self, tmp_path_factory):
        return {"path": str(tmp_path_factory.getbasetemp() / "store.sqlite")}

    def raw_get(self, backend, partition_id, sample_id, field):
        (part,) = backend.call_ledger(time.monotonic() + 60, commands.Locate(partition_id, [sample_id], [field])).parts
        key = f"row{part.write_id + part.positions[0]:x}"
        with sqlite3.connect(backend.config.path) as database:
            ((row,),) = database.execute("SELECT data FROM blobs WHERE key = ?", (key,)).fetchall()
        return split_rows([row])[0][part.slots[0]]

    def restart(self, backend):
        """A process that opens the files as they lie now, which is what a kill leaves, and knows nothing else."""
        path = Path(backend.config.path)
        left = [file for file in (path, Path(f"{path}-wal")) if file.exists()]
        kept = [file.with_name(f"{file.name}.kept") for file in left]
        for file, copy in zip(left, kept, strict=True):
            shutil.copy(file, copy)
        backend.stop()  # tidies the files up, as a kill would not
        for file, copy in zip(left, kept, strict=True):
            copy.replace(file)
        backend.__init__(backend.config)
        backend.start(bootstrap=True, deadline=time.monotonic() + 60)
