"""A backend that hands out again what a run recorded, without its rollouts: `RecordingBackend`."""

from dataplane_recording._backend import DifferenceError, RecordingBackend

__all__ = ["DifferenceError", "RecordingBackend"]
