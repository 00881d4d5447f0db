"""`Master` is a `mooncake_master` of this process. `MasterWatch` notices that the master of somebody else is dead."""

from __future__ import annotations

import contextlib
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
from dataplane_mooncake.machine import check_master, master_path
from dataplane_tq_simple.addresses import host_and_port, refuses, with_port

_POLL_S: Final = 0.02
#: Number of starts, each on other ports: another process may take a port between our check and the master's bind.
_NUM_STARTS: Final = 3
#: Seconds to wait for the answer of the master's host: more than a round trip in the cluster's network.
_PROBE_S: Final = 0.05

# Only clients delete rows: the master must evict nothing. ``client_ttl``: a storage unit may be suspended for so many
# seconds before the master takes it for dead.
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
        self._ports = 0, 0
        self.address = ""

    @property
    def pid(self) -> int | None:
        """Process id, or None if it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it does not run."""
        return self._process is None or self._process.ended

    def start(self, deadline: float) -> None:
        """Starts it on free ports and waits until it answers.

        Raises:
            ConfigError: There is no ``mooncake_master``, or it is not executable.
            BackendUnavailableError: It ended at every start.
            OperationTimeoutError: It did not answer in time.
        """
        check_master(mend=True)
        try:
            for _ in range(_NUM_STARTS):
                self._ports = _free_port(self._ip), _free_port("0.0.0.0")
                if self._launch(deadline):
                    return
            raise BackendUnavailableError(
                f"connect failed: mooncake_master ended at each of {_NUM_STARTS} starts, lastly on {self.address}: "
                f"{last_words(self._log)}",
                retryable=False,
            )
        except BaseException:
            self.stop()
            raise

    def start_again(self, deadline: float) -> None:
        """Starts it at the same address, after it has ended. It knows nothing of what its predecessor held.

        Raises:
            BackendUnavailableError: It ended, for example because another process has the port now.
            OperationTimeoutError: It did not answer in time.
        """
        self._end_process()
        try:
            if self._launch(deadline):
                return
        except BaseException:
            self._end_process()
            raise
        raise BackendUnavailableError(
            f"the mooncake_master at {self.address} ended when it was started again: {last_words(self._log)}"
        )

    def _launch(self, deadline: float) -> bool:
        rpc_port, metrics_port = self._ports
        settings = {
            "rpc_address": self._ip,
            "rpc_port": str(rpc_port),
            "metrics_host": "127.0.0.1",
            "undefok": "metrics_host",  # Mooncake before 0.3.13 does not know it
            "metrics_port": str(metrics_port),
            **_SETTINGS,
        }
        words = [f"--{name}={value}" for name, value in settings.items()]
        # it keeps no data, and needs a second to end after SIGTERM: so it is killed
        self._process = OwnedProcess([str(master_path()), *words], log=self._log, folder=self._folder)
        self.address = with_port(self._ip, rpc_port)
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
        """Whether the master itself listens on the port: another process that took the port would also accept."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == port
                for each in psutil.Process(self._process.pid).net_connections("tcp")
            )
        return False

    def stop(self) -> None:
        """Ends it by its process id. Idempotent; has no effect in a fork of the owner."""
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
        self._checked_at = float("-inf")  # on the monotonic clock

    def check(self, *, every_s: float = 1.0) -> None:
        """Checks that something listens at the master's address, at most once in ``every_s`` seconds.

        Blocks at most `_PROBE_S`. A master that is suspended or cannot be reached does not count as dead.

        Raises:
            BackendUnavailableError: The master is dead.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._checked_at < every_s:
                return
            self._checked_at = now
        if refuses(*host_and_port(self._address), _PROBE_S):
            self._checked_at = float("-inf")
            raise BackendUnavailableError(
                f"the mooncake_master at {self._address} of instance {self._instance!r} is dead: nothing listens "
                "there.",
                retryable=False,
                hint="What the instance held is lost. Close this client and bootstrap the instance again.",
            )


def _free_port(ip: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.bind((ip, 0))
        port: int = probe.getsockname()[1]
        return port
