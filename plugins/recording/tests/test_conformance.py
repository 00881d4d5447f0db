from __future__ import annotations

from recording_case import RecordingCase

from dataplane_testkit import EngineConformance


class TestRecording(RecordingCase, EngineConformance):
    """In partitions that the run did not have, the backend keeps the contract as far as core's ledger does not."""
