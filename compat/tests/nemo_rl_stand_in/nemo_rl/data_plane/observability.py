"""A client that tells a callback of each operation."""

from nemo_rl.data_plane.interfaces import DataPlaneClient


def log_event(event):
    print(event)


class MetricsDataPlaneClient(DataPlaneClient):
    def __init__(self, inner, on_event):
        assert isinstance(inner, DataPlaneClient)
        self.inner, self.on_event = inner, on_event

    def __getattribute__(self, name):
        if name.startswith("_") or name in ("inner", "on_event"):
            return object.__getattribute__(self, name)
        self.on_event(name)
        return getattr(self.inner, name)


MetricsDataPlaneClient.__abstractmethods__ = frozenset()
