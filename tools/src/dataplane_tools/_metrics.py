"""`dataplane metrics`: tells Prometheus where processes serve their metrics, and serves those of the store."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import DataPlaneError, InvalidRequestError, UnsupportedOperationError, Verdict, printable
from dataplane_core.spec import Capability, ClientInfo, Scope
from dataplane_tools._store import SHARE, attach

_LABELS: Final = ("host", "pid", "role")


def run(chosen: argparse.Namespace) -> int:
    """Serves ``/targets``, for Prometheus' discovery over HTTP, and ``/metrics``, until it is interrupted."""
    client = attach(chosen.config)
    with contextlib.closing(Gauges(client, lambda: attach(chosen.config))) as gauges:
        if Capability.CLIENTS not in client.capabilities:
            raise UnsupportedOperationError(f"backend '{client.backend_name}' does not declare 'clients'.")
        registry = CollectorRegistry()
        registry.register(gauges)
        try:
            server, thread = start_http_server(chosen.port, chosen.host, registry)
        except (OSError, OverflowError) as error:
            where = f"{chosen.host}:{chosen.port}"
            raise InvalidRequestError(f"dataplane metrics cannot listen on {where}: {error}.") from error
        server.set_app(_with_targets(gauges, make_wsgi_app(registry)))
        print(f"http://{chosen.host}:{server.server_port}/targets", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()
        server.shutdown()
        server.server_close()
    return 0


def _with_targets(gauges: Gauges, metrics: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/targets":
            return metrics(environ, start_response)
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(gauges.targets()).encode()]

    return answer


class Gauges(Collector):
    """What the store says of its clients, by process, and of its tasks, over all partitions, for Prometheus.

    While the store does not answer, there is nothing but ``dataplane_store_up``, which is 0. ``attach`` then opens
    another client, since the store may have been started again.
    """

    def __init__(self, client: DataPlaneClient, attach: Callable[[], DataPlaneClient]) -> None:
        self._client = client
        self._attach = attach
        self._lock = threading.Lock()  # the server has a thread for each request
        self._verdicts: list[Verdict] = []
        self._asked_at, self._cost_s = float("-inf"), 0.0

    def close(self) -> None:
        """Closes the client."""
        self._client.close()

    def targets(self) -> list[dict[str, Any]]:
        """The endpoints of the processes for Prometheus' discovery over HTTP, without those whose address is neither on
        the loopback interface nor of the client's host.
        """
        targets: dict[tuple[str, str], dict[str, Any]] = {}
        for client in self._ask() or ():  # clients of a process share an endpoint
            host = client.host if self._client.scope is Scope.CLUSTER else socket.gethostname()
            if _is_of(client.metrics_address, host):
                labels = dict(zip(_LABELS, _labels(client), strict=True))
                targets[client.host, client.metrics_address] = {"targets": [client.metrics_address], "labels": labels}
        return list(targets.values())

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is changes with the clients."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Asks the store for its clients and tasks."""
        clients = self._ask()
        yield _gauge("dataplane_store_up", "Whether the store answers.", (), {(): clients is not None})
        if clients is None:
            return
        heard: dict[tuple[str, ...], float] = defaultdict(float)
        longest: dict[tuple[str, ...], float] = defaultdict(float)
        for client in clients:  # those of a process have the same labels
            labels = _labels(client)
            heard[labels] = max(heard[labels], client.heard_s)
            longest[labels] = max(longest[labels], client.calls[0].running_s if client.calls else 0.0)
        yield _gauge("dataplane_client_heard_seconds", "Since a client was heard of.", _LABELS, heard)
        yield _gauge("dataplane_client_longest_call_seconds", "Of the operation that began first.", _LABELS, longest)
        left: dict[tuple[str, ...], float] = defaultdict(float)
        ready: dict[tuple[str, ...], float] = defaultdict(float)
        starved: dict[tuple[str, ...], float] = defaultdict(float)
        for verdict in self._ask_why():
            task = printable(verdict.task_name)
            left[task,] += verdict.backlog
            ready[task,] += verdict.num_ready
            if verdict.state == "starved":
                starved[task, verdict.cause] = max(starved[task, verdict.cause], verdict.waited_s)
        yield _gauge("dataplane_task_backlog", "Samples that a task has not consumed.", ("task",), left)
        yield _gauge("dataplane_task_ready", "Samples that are ready for a task.", ("task",), ready)
        why = "For which a task has got nothing, and why."
        yield _gauge("dataplane_starved_seconds", why, ("task", "cause"), starved)

    def _ask_why(self) -> list[Verdict]:
        """The verdicts; those of the last time if the store would else be asked for too much of its time."""
        with self._lock:
            start = time.monotonic()
            if {Capability.LISTING, Capability.CLAIMS} <= self._client.capabilities and (
                start >= self._asked_at + self._cost_s / SHARE
            ):
                with contextlib.suppress(DataPlaneError):
                    self._verdicts = self._client.why()
                self._asked_at = time.monotonic()
                self._cost_s = self._asked_at - start
            return self._verdicts

    def _ask(self) -> list[ClientInfo] | None:
        """The store's clients. None if it does not answer."""
        with self._lock:
            with contextlib.suppress(DataPlaneError):
                return self._client.list_clients()
            try:
                self._client.close()
                self._client = self._attach()
                return self._client.list_clients()
            except DataPlaneError as error:
                print(f"dataplane: {error}", file=sys.stderr, flush=True)
                return None


def _gauge(name: str, about: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    gauge = GaugeMetricFamily(name, about, labels=labels)
    for key, value in values.items():
        gauge.add_metric(key, float(value))
    return gauge


def _labels(client: ClientInfo) -> tuple[str, ...]:
    return printable(client.host), str(client.pid), printable(client.role)


def _is_of(address: str, host: str) -> bool:
    """Whether an announced ``host:port`` is one, and on the loopback interface or on this host."""
    try:
        parts = urlsplit(f"//{address}")
        if not parts.hostname or not parts.port or parts.netloc != address or "@" in address:
            return False
        ips = _ips_of(parts.hostname)
        return all(ipaddress.ip_address(ip).is_loopback for ip in ips) or set(ips) <= set(_ips_of(host))
    except (OSError, ValueError):  # a name that nobody knows
        return False


def _ips_of(name: str) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
