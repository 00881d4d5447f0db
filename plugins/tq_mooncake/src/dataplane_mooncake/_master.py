"""A `mooncake_master` of our own: on free ports, awaited until it answers, ended by process id."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_core.owned_process import OwnedProcess, last_words
from dataplane_mooncake.machine import check_master, master_path

__all__ = ["Master"]

_POLL_S: Final = 0.02
#: Starts with other ports, where another process took one between our looking and the master's binding.
_TRIES: Final = 3

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


def _free_port(ip: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.bind((ip, 0))
        port: int = probe.getsockname()[1]
        return port
