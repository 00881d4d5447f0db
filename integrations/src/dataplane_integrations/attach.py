"""`DataPlaneClientMixin`: the data-plane client of a worker process, attached once and closed once."""

from __future__ import annotations

from typing import Any

from dataplane_core.client import DataPlaneClient
from dataplane_core.config import ConfigSource, DataPlaneConfig, load_config
from dataplane_core.connecting import connect
from dataplane_core.errors import ClientClosedError, InvalidRequestError
from dataplane_core.middleware import Metrics

#: What a process attaches to: the config of a running backend, or a client of this process.
DataPlaneSource = ConfigSource | DataPlaneClient


class DataPlaneClientMixin:
    """Gives a class the client of its process. Runs in the worker or rollout process."""

    _dp_client: DataPlaneClient | None = None
    _dp_source: DataPlaneConfig | DataPlaneClient | None = None

    def setup_data_plane(self, cfg: DataPlaneSource) -> None:
        """Attaches to the running data plane (``bootstrap=False``). Further calls with the same config do nothing.

        Args:
            cfg: The config that the driver connected with; or a client of this process, which is used but not closed.
                So workers in the driver's process can share a backend of scope ``process``.

        Raises:
            InvalidRequestError: Already attached to something else.
            BackendUnavailableError: There was nothing to attach to within ``attach_wait_s`` of the config.
        """
        source = cfg if isinstance(cfg, DataPlaneClient) else load_config(cfg)
        if self._dp_client is not None:
            if source == self._dp_source:
                return
            raise InvalidRequestError(
                f"setup_data_plane refused: this {type(self).__name__} is attached to backend "
                f"'{self._dp_client.backend_name}' with another config. Expected the same config, or a call of "
                "close_data_plane() first."
            )
        self._dp_client = source if isinstance(source, DataPlaneClient) else connect(source, bootstrap=False)
        self._dp_source = source

    def close_data_plane(self, cfg: DataPlaneSource | None = None) -> None:
        """Detaches. Idempotent. A client that was passed to `setup_data_plane` stays open.

        Args:
            cfg: Only if attached to this; None: in any case.
        """
        if cfg is not None and self._dp_source != (cfg if isinstance(cfg, DataPlaneClient) else load_config(cfg)):
            return
        client, self._dp_client = self._dp_client, None
        source, self._dp_source = self._dp_source, None
        if client is not None and client is not source:
            client.close()

    def data_plane_metrics(self, reset: bool = False) -> dict[str, Any]:
        """What this process' client did: `Metrics.snapshot`, or an empty dict without that middleware.

        Args:
            reset: As for `Metrics.snapshot`.

        Raises:
            ClientClosedError: Not attached.
        """
        return metrics_of(self._require_dp_client(), reset)

    def _require_dp_client(self) -> DataPlaneClient:
        """The client of this process.

        Raises:
            ClientClosedError: `setup_data_plane` was not called, or `close_data_plane` was.
        """
        if self._dp_client is None:
            raise ClientClosedError(
                f"{type(self).__name__} is not attached to a data plane. Expected setup_data_plane(cfg) before the "
                "first fetch or write.",
                hint="DataPlanePolicy attaches its workers when it is made.",
            )
        return self._dp_client


def metrics_of(client: DataPlaneClient, reset: bool = False) -> dict[str, Any]:
    """The snapshot of the first middleware of a client that has one; else an empty dict."""
    metrics = next((middleware for middleware in client.middleware if isinstance(middleware, Metrics)), None)
    return {} if metrics is None else metrics.snapshot(reset=reset)
