"""Wrappers around a backend's hooks: metrics, checksums, and whatever third parties ship.

A config lists them by entry-point name, outermost first; the client starts and stops them.
"""

from dataplane_core.middleware.base import Middleware, MiddlewareContext
from dataplane_core.middleware.metrics import Metrics
from dataplane_core.middleware.wire_guard import WireGuard

__all__ = ["Metrics", "Middleware", "MiddlewareContext", "WireGuard"]
