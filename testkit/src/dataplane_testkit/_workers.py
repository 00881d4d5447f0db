"""Clients in separate processes, attached to the store under test. They run functions that the test sends.

The server of `multiprocessing` forks them. To start Python and import torch takes seconds; to fork a process that has
done so takes milliseconds. That server never had a client, so its forks inherit no connection, lock or thread of one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from dataplane_core.backends import Backend
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import Bootstrap, connect_backend
from dataplane_core.spec import Claim, ClaimRequest
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._timing import STARTS_S
from dataplane_testkit.faults import Faults

_FORKS: Final = multiprocessing.get_context("forkserver")
#: Seconds that a process may take to end after it was asked to.
_END_S: Final = 10.0


class Worker:
    """One process with a client, a context manager, which ``connect`` makes in the process.

    All that is sent is pickled, so functions must be importable by name. With ``waits``, the process waits for
    `Worker.connect` first, so that several can begin at the same time. It ends with this process at the latest.
    """

    def __init__(self, connect: Callable[[], AbstractContextManager[Any]], *, waits: bool = False) -> None:
        _FORKS.set_forkserver_preload(["dataplane_testkit._preloaded"])
        self._connection, theirs = _FORKS.Pipe()
        body = (theirs, dict(os.environ), pickle.dumps(connect), waits)
        self._process = _FORKS.Process(target=_serve, args=body, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def replied(self) -> bool:
        """Whether `result` would return at once: the function has ended, or the process has died."""
        return self._connection.poll(0)

    def wait_ready(self) -> None:
        """Waits until the client is connected. Raises the error if it could not connect."""
        self.result(STARTS_S)

    def connect(self) -> None:
        """Lets a process that waits begin to connect. Call `wait_ready` afterwards."""
        self._connection.send_bytes(b"now")

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._connection.send_bytes(pickle.dumps((function, arguments)))

    def result(self, within_s: float = 60.0) -> Any:
        """Returns the result of the function that was started, or raises its error. Fails if the process died."""
        assert self._connection.poll(within_s), f"the worker process did not reply within {within_s:g} s"
        try:
            succeeded, reply = self._connection.recv()  # from our own child
        except (EOFError, ConnectionResetError) as error:
            self._process.join(_END_S)
            raise AssertionError(f"the worker process died, with status {self._process.exitcode}") from error
        if not succeeded:
            raise reply
        return reply

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Asks the process to end, and kills it if it does not."""
        with contextlib.suppress(OSError):  # it may be gone already
            self._connection.send_bytes(pickle.dumps(None))
        self._process.join(_END_S)
        self.kill()
        self._connection.close()


def attached(cls: type[Backend], config: dict[str, Any], bootstrap: Bootstrap) -> DataPlaneClient:
    """A client of a backend, with a `Faults` around it."""
    full = DataPlaneConfig.model_validate({**config, "middleware": [Faults()]})
    return connect_backend(cls, full, bootstrap=bootstrap)


def _serve(connection: Connection, environment: dict[str, str], connect: bytes, waits: bool) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    try:
        if waits:
            connection.recv_bytes()
        opening = pickle.loads(connect)()  # from our own parent
    except Exception as error:
        _reply(connection, False, error)
        return
    _reply(connection, True, os.getpid())
    with opening as client, contextlib.suppress(EOFError):  # our parent has ended
        while (command := pickle.loads(connection.recv_bytes())) is not None:  # from our own parent
            function, arguments = command
            try:
                _reply(connection, True, function(client, *arguments))
            except Exception as error:
                _reply(connection, False, error)


def _reply(connection: Connection, succeeded: bool, value: Any) -> None:
    try:
        data = pickle.dumps((succeeded, value))
    except Exception as error:
        data = pickle.dumps((False, RuntimeError(f"the reply cannot be pickled: {error}: {value!r}")))
    connection.send_bytes(data)


def call_engine(client: DataPlaneClient, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(backend_of(client), *arguments)


def read_items(client: DataPlaneClient, partition_id: str, sample_ids: list[str], field: str) -> Any:
    return client.get_samples(sample_ids, partition_id, [field])[field].tolist()


def claim_all(client: DataPlaneClient, partition_id: str, batch_size: int, timeout_s: float) -> list[list[str]]:
    """Claims until the partition can give no more. Returns the ids of each claim."""
    claims: list[list[str]] = []
    while (meta := client.claim_meta(partition_id, "train", ["x"], batch_size, timeout_s=timeout_s)).size:
        claims.append(meta.sample_ids)
    return claims


def claim_and_tell(client: DataPlaneClient, partition_id: str, path: Path) -> None:
    """Claims a sample, and makes a file once the store has answered the claim for the first time."""

    def tell(request: ClaimRequest, claim: Claim) -> Claim:
        path.touch()
        return claim

    with Faults.of(client).after("claim", tell):
        client.claim_meta(partition_id, "train", ["x"], 1)
