"""Watches a run: the recorder and the reader of recordings, Prometheus, OpenTelemetry, experiment trackers.

A config lists `recorder`, `prometheus` and `opentelemetry` as middleware. Tools and the backend ``recording`` read
recordings; a trainer gives a listener to `Metrics`. All of them see the one event per operation of
`dataplane_core.middleware`.
"""

from dataplane_observe.recorder import Recorder
from dataplane_observe.recording import Record, Recording, Writer, is_followed, is_recording, row_digests
from dataplane_observe.trackers import TensorBoardListener, WandbListener

__all__ = [
    "Record",
    "Recorder",
    "Recording",
    "TensorBoardListener",
    "WandbListener",
    "Writer",
    "is_followed",
    "is_recording",
    "row_digests",
]
