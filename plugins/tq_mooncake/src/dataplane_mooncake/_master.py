"""A `mooncake_master`: one of our own, on free ports, awaited until it answers, ended by process id; and whether one
that is in use is dead.
"""

from __future__ import annotations

import contextlib
import errno
import select
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import psutil

from dataplane_core.backends import OwnedProcess, last_words
from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_mooncake._ending import parse_endpoint
from dataplane_mooncake.machine import check_master, master_path

__all__ = ["Master", "MasterWatch"]

_POLL_S: Final = 0.02
#: Starts with other ports, where another process took one between our looking and the master's binding.
_TRIES: Final = 3
#: How long the answer to a look may take, in seconds: a round trip in the cluster's network.
_LOOK_S: Final = 0.05

# Rows are deleted by those who put them and by nobody else: the master shall evict nothing. It takes a storage unit for
# dead only after as long as one that stands still may stand.
_SETTINGS: Final = {
    "eviction_high_watermark_ratio": "1.0",
    "eviction_ratio": "0.0",
    "allow_evict_soft_pinned_objects": "false",
    "client_ttl": "60",
    "enable_metric_reporting": "false",
    "logtostderr": "true",
}


class Master:
    """A `mooncake_master` that belongs to this process.

    Args:
        ip: The address that it listens on.

    Attributes:
        address: ``host:port`` of its RPC service.
    """

    def __init__(self, ip: str) -> None:
        self._ip = ip
        self._folder = Path(tempfile.mkdtemp(prefix="dataplane-mooncake-"))
        self._log = self._folder / "log"
        self._process: OwnedProcess | None = None
        self.address = ""

    @property
    def pid(self) -> int | None:
        """Process id, or None where it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, deadline: float) -> None:
        """Starts it and waits until it answers.

        Raises:
            ConfigError: There is no ``mooncake_master``, or it may not be executed.
            BackendUnavailableError: It ended at its start.
            OperationTimeoutError: It did not answer in time.
        """
        check_master()
        try:
            for _ in range(_TRIES):
                if self._launch(deadline):
                    return
            raise BackendUnavailableError(
                f"connect failed: mooncake_master ended at each of {_TRIES} starts, lastly on {self.address}: "
                f"{last_words(self._log)}",
                retryable=False,
            )
        except BaseException:
            self.stop()
            raise

    def _launch(self, deadline: float) -> bool:
        rpc_port, metrics_port = _free_port(self._ip), _free_port("127.0.0.1")
        settings = {
            "rpc_address": self._ip,
            "rpc_port": str(rpc_port),
            "metrics_host": "127.0.0.1",
            "metrics_port": str(metrics_port),
            **_SETTINGS,
        }
        words = [f"--{name}={value}" for name, value in settings.items()]
        # it keeps nothing, and asked politely it takes a second to end: so it is killed
        self._process = OwnedProcess([str(master_path()), *words], log=self._log, folder=self._folder)
        self.address = f"[{self._ip}]:{rpc_port}" if ":" in self._ip else f"{self._ip}:{rpc_port}"
        while not self._process.ended:
            if self._serves(rpc_port):
                return True
            if time.monotonic() + _POLL_S >= deadline:
                raise OperationTimeoutError(
                    f"connect timed out: the mooncake_master at {self.address} does not answer.",
                    hint="Raise master_start_s, or the client's op_timeout_s.",
                )
            time.sleep(_POLL_S)
        self._end_process()
        return False

    def _serves(self, port: int) -> bool:
        """Whether it listens there: it itself, since another process that took the port would accept as well."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == port
                for each in psutil.Process(self._process.pid).net_connections("tcp")
            )
        return False

    def stop(self) -> None:
        """Ends it by its process id. May be called again; a fork of the owner leaves it alone."""
        self._end_process()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


class MasterWatch:
    """Notices that the master of an instance is dead. Thread-safe.

    Args:
        instance: The instance's name, for messages.
        address: ``host:port`` of the master.
    """

    def __init__(self, instance: str, address: str) -> None:
        self._instance = instance
        self._address = address
        self._lock = threading.Lock()
        self._looked = float("-inf")  # when, on the monotonic clock

    def check(self, *, every_s: float = 1.0) -> None:
        """Looks whether something listens at its address, unless it did within the last ``every_s`` seconds.

        Blocks for no longer than a round trip. A master that stands still, or cannot be reached, is not dead.

        Raises:
            BackendUnavailableError: It is dead.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._looked < every_s:
                return
            self._looked = now
        if self._refuses():
            self._looked = float("-inf")
            raise BackendUnavailableError(
                f"the mooncake_master at {self._address} of instance {self._instance!r} is dead: nothing listens "
                "there.",
                retryable=False,
                hint="What the instance held is lost. Close this client and bootstrap the instance again.",
            )

    def _refuses(self) -> bool:
        try:
            family, _, _, _, address = socket.getaddrinfo(*parse_endpoint(self._address), type=socket.SOCK_STREAM)[0]
        except OSError:
            return False
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(address)
            if code == errno.EINPROGRESS:
                select.select([], [probe], [], _LOOK_S)
                code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return code == errno.ECONNREFUSED


def _free_port(ip: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.bind((ip, 0))
        port: int = probe.getsockname()[1]
        return port
