"""What the conformance kit needs to know of recording."""

from __future__ import annotations

import time

import pytest

from dataplane_core import connect
from dataplane_core.codec import split_rows
from dataplane_core.ledger import commands
from dataplane_testkit import AuthorsClass


class RecordingCase(AuthorsClass):
    backend = "recording"

    @pytest.fixture(scope="class")
    @classmethod
    def recording(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("recording")
        with connect({"backend": "noop", "middleware": [{"recorder": {"folder": str(folder)}}]}) as client:
            client.register_partition("of-the-run", ["x"], None, [])
        return folder

    @pytest.fixture
    def options(self, recording):
        return {"folder": str(recording), "other_partitions": "serve"}

    def raw_get(self, backend, partition_id, sample_id, field):
        (part,) = backend.call_ledger(time.monotonic() + 60, commands.Locate(partition_id, [sample_id], [field])).parts
        return split_rows([backend._rows[part.write_id + part.positions[0]]])[0][part.slots[0]]
