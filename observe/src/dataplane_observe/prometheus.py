"""The middleware `prometheus`: a client's operations as Prometheus metrics, on one HTTP endpoint per process.

Labels are the backend, the operation and the class of an error, never a partition or a sample, whose number has no
bound. It needs the package ``prometheus_client``, which ``dataplane-observe[prometheus]`` installs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import BaseModel, Field

from dataplane_core.middleware import Metrics, MetricsConfig, MiddlewareContext, OperationEvent

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
except ImportError as error:
    raise ImportError(
        "the middleware 'prometheus' needs prometheus_client: pip install 'dataplane-observe[prometheus]'"
    ) from error

_LABELS: Final = ("backend", "operation")
_BUCKETS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)


class PrometheusConfig(MetricsConfig):
    """The options of `Prometheus`, besides those of `Metrics`."""

    host: str = "127.0.0.1"
    """The address on which the endpoint listens."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port. 0: a free one, so that many processes of a host can have one each."""
    targets_folder: Path | None = None
    """Where each process writes the address of its endpoint, as a file for Prometheus' ``file_sd_configs``. It removes
    the file when its last client closes."""


class Prometheus(Metrics):
    """Counts the operations of a client in Prometheus metrics.

    All clients of a process share one endpoint and one set of metrics: the options of the first of them count.

    - ``dataplane_operations_total``: operations that ended; ``status`` is ``ok``, ``error`` or ``timeout``, and
      ``error`` the error's class. The questions of a claim that waits count as one operation, which is ended by its
      answer.
    - ``dataplane_operation_seconds``: a histogram of the time in the hook.
    - ``dataplane_samples_total``, ``dataplane_bytes_total``: samples named or handed out, payload bytes moved.
    - ``dataplane_operations_in_flight``: operations under way, without claims that wait.
    - ``dataplane_waiting_claims``: claims that wait.
    - ``dataplane_moved_rows``: rows put and read; ``path`` is ``memory`` or ``wire``, on backends that have both.
    - ``dataplane_live_bytes``: payload bytes that this process put and has not cleared.

    Args:
        options: As `PrometheusConfig`.
    """

    Config: ClassVar[type[BaseModel]] = PrometheusConfig
    config: Any  # a PrometheusConfig
    _endpoint: _Endpoint | None = None

    def start(self, context: MiddlewareContext) -> None:
        """Opens the endpoint, unless the process has one."""
        super().start(context)
        self._endpoint = _Endpoint.join(self, self.config)
        self.metrics_address = self._endpoint.address

    def stop(self) -> None:
        """Closes the endpoint with the last client of the process."""
        super().stop()
        endpoint, self._endpoint, self.metrics_address = self._endpoint, None, ""
        if endpoint is not None:
            endpoint.leave(self)

    def around(self, operation: str, request: Any) -> Generator[None, Any, Any]:
        """Counts an operation, and that it is under way."""
        assert self._endpoint is not None
        with self._endpoint.in_flight.labels(self.context.backend, operation).track_inprogress():
            return (yield from super().around(operation, request))

    def note(self, event: OperationEvent, request: Any, outcome: Any) -> None:
        """Counts an operation that has ended."""
        super().note(event, request, outcome)
        endpoint = self._endpoint
        if endpoint is None:
            return
        labels = (self.context.backend, event.op)
        endpoint.operations.labels(*labels, event.status, event.error).inc()
        endpoint.seconds.labels(*labels).observe(event.wall_ms / 1e3)
        endpoint.samples.labels(*labels).inc(event.n_keys)
        endpoint.bytes.labels(*labels).inc(event.n_bytes)


class _Endpoint:
    """The endpoint of a process, its metrics, and the clients that use it."""

    _shared: ClassVar[_Endpoint | None] = None
    _sharing = threading.RLock()  # a signal handler may close another client of the process

    @classmethod
    def join(cls, client: Prometheus, config: PrometheusConfig) -> _Endpoint:
        """The endpoint of this process, with one more client. It is opened if there is none. A fork has none."""
        with cls._sharing:
            if cls._shared is None or cls._shared._pid != os.getpid():
                cls._shared = cls(config)
            cls._shared.clients.append(client)
            return cls._shared

    def __init__(self, config: PrometheusConfig) -> None:
        self._pid = os.getpid()
        self.clients: list[Prometheus] = []
        registry = CollectorRegistry()
        self.operations = Counter(
            "dataplane_operations", "Operations that ended.", (*_LABELS, "status", "error"), registry=registry
        )
        self.seconds = Histogram(
            "dataplane_operation_seconds", "Time in the hook.", _LABELS, buckets=_BUCKETS_S, registry=registry
        )
        self.samples = Counter("dataplane_samples", "Samples named or handed out.", _LABELS, registry=registry)
        self.bytes = Counter("dataplane_bytes", "Payload bytes moved.", _LABELS, registry=registry)
        self.in_flight = Gauge("dataplane_operations_in_flight", "Operations under way.", _LABELS, registry=registry)
        waiting = Gauge("dataplane_waiting_claims", "Claims that wait.", registry=registry)
        waiting.set_function(lambda: sum(len(client.context.waiting) for client in list(self.clients)))
        moved = Gauge("dataplane_moved_rows", "Rows put and read, by their path.", ("path",), registry=registry)
        for path in ("memory", "wire"):
            moved.labels(path).set_function(partial(self._moved_rows, path))
        live = Gauge("dataplane_live_bytes", "Payload bytes put and not cleared by this process.", registry=registry)
        live.set_function(lambda: sum(client.snapshot()["bytes_outstanding"] for client in list(self.clients)))
        self._server, self._thread = start_http_server(config.port, config.host, registry)
        port = self._server.server_port
        host = socket.gethostname() if config.host in ("", "0.0.0.0", "::") else config.host
        self.address = f"{host}:{port}"
        self._file: Path | None = None
        if config.targets_folder is not None:
            config.targets_folder.mkdir(parents=True, exist_ok=True)
            self._file = config.targets_folder / f"{socket.gethostname()}-{os.getpid()}.json"
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps([{"targets": [self.address], "labels": {"pid": str(os.getpid())}}]))
            new.replace(self._file)  # Prometheus never reads half a file

    def _moved_rows(self, path: str) -> int:
        return sum(client.snapshot()["moved_rows"].get(path, 0) for client in list(self.clients))

    def leave(self, client: Prometheus) -> None:
        """A client closes."""
        with self._sharing:
            self.clients.remove(client)
            if self.clients:
                return
            type(self)._shared = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
