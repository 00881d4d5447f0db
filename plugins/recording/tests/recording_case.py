"""What the conformance kit needs to know of recording."""

from __future__ import annotations

import pytest
from stored_cells import StoresRows

from dataplane_core import connect


class RecordingCase(StoresRows):
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
