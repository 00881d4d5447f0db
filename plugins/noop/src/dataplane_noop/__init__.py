"""The in-process reference backend: `NoopBackend`."""

from dataplane_noop._backend import NoopBackend

__all__ = ["NoopBackend"]
