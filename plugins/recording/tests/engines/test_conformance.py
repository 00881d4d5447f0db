from __future__ import annotations

from recording_case import RecordingCase

from dataplane_testkit import BackendConformance


class TestRecording(RecordingCase, BackendConformance):
    """In partitions that the run did not have, the backend keeps the whole contract."""
