"""Wrappers around a backend's hooks: metrics, checksums, and the bases that others derive from.

A config lists them by entry-point name, outermost first. The client starts and stops them. ``dataplane_observe`` has
the recorder, Prometheus and OpenTelemetry.
"""

from dataplane_core.middleware.base import (
    EventMiddleware,
    Middleware,
    MiddlewareContext,
    OperationEvent,
    OperationMiddleware,
    log_event,
)
from dataplane_core.middleware.metrics import Metrics, MetricsConfig, merge_snapshots

__all__ = [
    "EventMiddleware",
    "Metrics",
    "MetricsConfig",
    "Middleware",
    "MiddlewareContext",
    "OperationEvent",
    "OperationMiddleware",
    "log_event",
    "merge_snapshots",
]
