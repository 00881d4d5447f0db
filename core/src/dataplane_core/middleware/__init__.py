"""Wrappers around a backend's hooks: metrics, checksums, a recorder. Other packages may add more.

A config lists them by entry-point name, outermost first. The client starts and stops them. The listeners get the events
of the metrics.
"""

from dataplane_core.middleware.base import Middleware, MiddlewareContext, OperationMiddleware
from dataplane_core.middleware.events import EventFile, OperationEvent, is_followed, log_event
from dataplane_core.middleware.metrics import Metrics, merge_snapshots
from dataplane_core.middleware.recorder import Recorder
from dataplane_core.middleware.recording import Record, Recording, Writer, is_recording, row_digests
from dataplane_core.middleware.trackers import TensorBoardListener, WandbListener
from dataplane_core.middleware.wire_guard import WireGuard

__all__ = [
    "EventFile",
    "Metrics",
    "Middleware",
    "MiddlewareContext",
    "OperationEvent",
    "OperationMiddleware",
    "Record",
    "Recorder",
    "Recording",
    "TensorBoardListener",
    "WandbListener",
    "WireGuard",
    "Writer",
    "is_followed",
    "is_recording",
    "log_event",
    "merge_snapshots",
    "row_digests",
]
