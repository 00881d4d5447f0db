from recording_case import RecordingCase

from dataplane_testkit.suites.clients import ClaimSuite, ListingSuite
from dataplane_testkit.suites.concurrency import ProcessSuite, RaceSuite


class TestRecording(RecordingCase, ProcessSuite, RaceSuite, ListingSuite, ClaimSuite, chapter=""):
    """In partitions that the run did not have, the backend keeps the rest of the contract, that of core's ledger."""
