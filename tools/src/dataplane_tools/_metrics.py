"""`dataplane metrics`: the metrics of all processes of a store on one page, for Prometheus."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import IO, Any, Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import DataPlaneError, InvalidRequestError, UnsupportedOperationError, Verdict, printable
from dataplane_core.spec import Capability, ClientInfo, Scope
from dataplane_tools._inspect import SHARE, attach

_LABELS: Final = ("host", "pid", "role")
#: Seconds that a process has to answer. Prometheus waits for 10 by default.
_TIMEOUT_S: Final = 3.0
_MOST_PAGE_BYTES: Final = 16_000_000
_PART_BYTES: Final = 1 << 16
_AT_ONCE: Final = 16


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no answer to another address."""

    def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> None:
        """None: the answer counts as an error."""


#: Without the proxy that the environment may name: processes of a run are reached directly.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def run(config_path: str, *, host: str, port: int) -> int:
    """Serves the page until it is interrupted. Its arguments are those of the command.

    Raises:
        BackendUnavailableError: No store runs.
        InvalidRequestError: The address cannot be listened on.
        UnsupportedOperationError: The clients of this backend do not announce themselves.
    """
    client = attach(config_path)
    with contextlib.closing(Federation(client, lambda: attach(config_path))) as federation:
        if Capability.CLIENTS not in client.capabilities:
            raise UnsupportedOperationError(f"backend '{client.backend_name}' does not declare 'clients'.")
        registry = CollectorRegistry()
        registry.register(federation)
        try:
            server, thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise InvalidRequestError(f"dataplane metrics cannot listen on {host}:{port}: {error}.") from error
        print(f"http://{host}:{server.server_port}/metrics", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()
        server.shutdown()
        server.server_close()
    return 0


class Federation(Collector):
    """Collects what the endpoints of all announced clients say. Each sample gets the labels of its process.

    Besides, it says of each process how long a client was not heard of, and how long the longest operation has been
    under way.
    ``dataplane_process_up`` is 0 for a process whose endpoint does not answer; its other metrics are left out. Only
    endpoints on the loopback address, or on the client's own host, are asked.
    Of each task it says how many samples it has not consumed, how many are ready for it, and for how long it is
    starved and why; over all partitions.
    ``dataplane_store_up`` is 0 while the store does not answer; then there is nothing else.

    Args:
        client: Asks the store. It is closed with this.
        attach: Opens another client where that one fails, since the store may have been started again.
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

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is changes with the clients."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Asks the store for its clients, and all their endpoints at the same time."""
        clients = self._ask()
        store_up = GaugeMetricFamily("dataplane_store_up", "Whether the store answers.")
        store_up.add_metric((), float(clients is not None))
        yield store_up
        if clients is None:
            return
        heard = GaugeMetricFamily("dataplane_client_heard_seconds", "Since a client was heard of.", labels=_LABELS)
        longest = GaugeMetricFamily(
            "dataplane_client_longest_call_seconds", "Of the operation that began first.", labels=_LABELS
        )
        told: dict[tuple[str, ...], tuple[float, float]] = {}
        for each in clients:  # those of a process have the same labels
            running_s = each.calls[0].running_s if each.calls else 0.0
            before = told.get(_labels(each), (0.0, 0.0))
            told[_labels(each)] = max(before[0], each.heard_s), max(before[1], running_s)
        for labels, (heard_s, longest_s) in told.items():
            heard.add_metric(labels, heard_s)
            longest.add_metric(labels, longest_s)
        # clients of a process share an endpoint; a loopback address is one for each host
        processes = {(each.host, each.metrics_address): each for each in clients if each.metrics_address}
        up = GaugeMetricFamily("dataplane_process_up", "Whether an endpoint answers.", labels=_LABELS)
        found: dict[str, Metric] = {}
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            pages = threads.map(self._read, processes.values())
            for each, page in zip(processes.values(), pages, strict=True):
                up.add_metric(_labels(each), float(page is not None))
                _merge(found, page or (), dict(zip(_LABELS, _labels(each), strict=True)))
        yield from (heard, longest, up, *found.values(), *self._of_tasks())

    def _of_tasks(self) -> Iterable[Metric]:
        left = GaugeMetricFamily("dataplane_task_backlog", "Samples that a task has not consumed.", labels=("task",))
        ready = GaugeMetricFamily("dataplane_task_ready", "Samples that are ready for a task.", labels=("task",))
        starved = GaugeMetricFamily(
            "dataplane_starved_seconds", "For which a task has got nothing, and why.", labels=("task", "cause")
        )
        counts: dict[str, tuple[int, int]] = {}
        longest: dict[tuple[str, str], float] = {}
        for each in self._ask_why():
            task = printable(each.task_name)
            before = counts.get(task, (0, 0))
            counts[task] = before[0] + each.backlog, before[1] + each.num_ready
            if each.state == "starved":
                longest[task, each.cause] = max(longest.get((task, each.cause), 0.0), each.waited_s)
        for task, (num_left, num_ready) in counts.items():
            left.add_metric((task,), num_left)
            ready.add_metric((task,), num_ready)
        for labels, waited_s in longest.items():
            starved.add_metric(labels, waited_s)
        return left, ready, starved

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

    def _read(self, client: ClientInfo) -> list[Metric] | None:
        """The metrics of a client's endpoint. None if it must not be asked, does not answer, or not with metrics."""
        until = time.monotonic() + _TIMEOUT_S
        host = client.host if self._client.scope is Scope.CLUSTER else socket.gethostname()
        try:
            with _OPENER.open(_url_of(client.metrics_address, host), timeout=_TIMEOUT_S) as reply:
                if reply.headers.get_content_type() != "text/plain":
                    return None
                page = bytearray()
                while part := reply.read1(_PART_BYTES):
                    page += part
                    if len(page) > _MOST_PAGE_BYTES or time.monotonic() > until:
                        return None
                if reply.length:  # less came than was announced
                    return None
                return list(text_string_to_metric_families(page.decode()))
        except (OSError, ValueError, HTTPException):
            return None

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


def _labels(client: ClientInfo) -> tuple[str, ...]:
    return printable(client.host), str(client.pid), printable(client.role)


def _url_of(address: str, host: str) -> str:
    """The URL of an announced endpoint ``host:port``, with its IP address: what was looked at is what is asked.

    Raises:
        ValueError: It is no ``host:port``, or neither on the loopback address nor on ``host``.
        OSError: A name is not known.
    """
    parts = urlsplit(f"//{address}")
    if not parts.hostname or not parts.port or parts.netloc != address or "@" in address:
        raise ValueError("no host:port")
    for ip in _ips_of(parts.hostname):
        if ipaddress.ip_address(ip).is_loopback or ip in _ips_of(host):
            return f"http://{f'[{ip}]' if ':' in ip else ip}:{parts.port}/metrics"
    raise ValueError("an address of another host")


def _ips_of(name: str) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


def _merge(found: dict[str, Metric], page: Iterable[Metric], labels: dict[str, str]) -> None:
    for family in page:
        merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            merged.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
