"""Wrappers around a backend's hooks: metrics and checksums. Other packages may add more.

A config lists them by entry-point name, outermost first. The client starts and stops them.
"""

from dataplane_core.middleware.base import Middleware, MiddlewareContext
from dataplane_core.middleware.metrics import Metrics, log_event
from dataplane_core.middleware.wire_guard import WireGuard

__all__ = ["Metrics", "Middleware", "MiddlewareContext", "WireGuard", "log_event"]
