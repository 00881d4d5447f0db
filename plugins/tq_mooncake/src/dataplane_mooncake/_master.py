"""`Master` is a `mooncake_master` of this process. `MasterWatch` notices, in any process, that it is dead."""

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
from dataplane_core.ownership import OwnedProcess, last_words
from dataplane_mooncake._calls import listening_ports
from dataplane_mooncake.machine import master_path
from dataplane_tq_simple.addresses import host_and_port, with_port

_POLL_S: Final = 0.02
#: Number of starts, each on other ports: another process may take a port between our check and the master's bind.
_NUM_STARTS: Final = 3

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
    """A `mooncake_master` that belongs to this process."""

    def __init__(self, ip: str) -> None:
        self._ip = ip  # that it listens on
        self._folder = Path(tempfile.mkdtemp(prefix="dataplane-mooncake-"))
        self._log = self._folder / "log"
        self._process: OwnedProcess | None = None
        self.address = ""  # of its RPC service

    @property
    def pid(self) -> int | None:
        """Process id, or None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it was started, and does not run any more."""
        return self._process is not None and self._process.ended

    def start(self, deadline: float) -> None:
        """Starts it on free ports and waits until it answers."""
        try:
            for _ in range(_NUM_STARTS):
                if self._launch(_free_port(self._ip), _free_port("0.0.0.0"), deadline):
                    return
            raise BackendUnavailableError(
                f"connect failed: mooncake_master ended at each of {_NUM_STARTS} starts, lastly on {self.address}: "
                f"{last_words(self._log)}",
                retryable=False,
            )
        except BaseException:
            self.stop()
            raise

    def _launch(self, rpc_port: int, metrics_port: int, deadline: float) -> bool:
        settings = {
            "rpc_address": self._ip,
            "rpc_port": rpc_port,
            "metrics_host": "127.0.0.1",
            "undefok": "metrics_host",  # Mooncake before 0.3.13 does not know it
            "metrics_port": metrics_port,
            **_SETTINGS,
        }
        words = [f"--{name}={value}" for name, value in settings.items()]
        # it keeps no data, and needs a second to end after SIGTERM: so it is killed
        self._process = OwnedProcess([str(master_path()), *words], log=self._log, folder=self._folder)
        self.address = with_port(self._ip, rpc_port)
        while not self._process.ended:
            with contextlib.suppress(psutil.NoSuchProcess):
                if rpc_port in listening_ports(self._process.pid):  # another process on the port would also accept
                    return True
            if time.monotonic() + _POLL_S >= deadline:
                raise OperationTimeoutError(
                    f"connect timed out: the mooncake_master at {self.address} does not answer.",
                    hint="Raise master_start_s, or the client's op_timeout_s.",
                )
            time.sleep(_POLL_S)
        self._process.end()
        return False

    def stop(self) -> None:
        """Ends it by its process id. Idempotent."""
        if self._process is not None:
            self._process.end()
        shutil.rmtree(self._folder, ignore_errors=True)


class MasterWatch:
    """Notices that the master of an instance is dead: then this idle connection to it ends. Thread-safe."""

    def __init__(self, instance: str, address: str, deadline: float) -> None:
        self._master = f"the mooncake_master at {address} of instance {instance!r}"
        try:
            left_s = max(_POLL_S, deadline - time.monotonic())
            self._connection = socket.create_connection(host_and_port(address), left_s)
        except ConnectionRefusedError as error:
            raise self._dead() from error
        except OSError as error:
            raise BackendUnavailableError(f"{self._master} cannot be reached from here: {error}.") from error
        self._connection.setblocking(False)

    def check(self) -> None:
        """Does not block. A master that is suspended, or cannot be reached now, does not count as dead."""
        try:
            alive = bool(self._connection.recv(1, socket.MSG_PEEK))
        except ConnectionError:
            alive = False
        except OSError:  # nothing to read, as long as it lives; or `close` was called
            alive = True
        if not alive:
            raise self._dead()

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def _dead(self) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"{self._master} is dead, and all rows are lost.",
            retryable=False,
            hint="Close this client and bootstrap the instance again.",
        )


def _free_port(ip: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.bind((ip, 0))
        port: int = probe.getsockname()[1]
        return port
