"""Clients in separate processes, attached to the store under test. They run functions that the test sends."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dataplane_core._compiler_marks import load_compiler
from dataplane_core.backends import Backend
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import Bootstrap, connect_backend
from dataplane_core.spec import Claim, ClaimRequest
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._nursery import END_S, START_S, Nursery, answer
from dataplane_testkit.faults import Faults


def prepare(backend_class: type[Backend]) -> None:
    """Imports what a client of the class needs. The import of the class itself comes with the argument."""
    load_compiler()


class Worker:
    """One process with an attached client. It is forked from a process that never had a client.

    Everything that is sent is pickled, so functions must be importable by name. The process ends after `close`, or when
    this process ends. ``connect`` makes the client, a context manager, in the process. With ``waits``, the process
    waits for `Worker.connect` before, so that several can begin at the same time.
    """

    def __init__(
        self, nursery: Nursery, connect: Callable[[], AbstractContextManager[Any]], *, waits: bool = False
    ) -> None:
        self._nursery = nursery
        self._pid, self._connection = nursery.fork(functools.partial(_serve, connect=connect, waits=waits))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._nursery.exit_status(self._pid) is None

    @property
    def pid(self) -> int:
        """Its process id. It stays taken until `close`, also if the process has died."""
        return self._pid

    @property
    def replied(self) -> bool:
        """Whether `result` would return at once: the function has ended, or the process has died."""
        return self._connection.poll(0)

    def wait_ready(self) -> None:
        """Waits until the client is connected. Raises the error if it could not connect."""
        self.result(START_S)

    def connect(self) -> None:
        """Lets a process that waits begin to connect. Call `wait_ready` afterwards."""
        self._connection.send_bytes(b"now")

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts ``function(client, *arguments)`` in the process."""
        self._connection.send_bytes(pickle.dumps((function, arguments)))

    def result(self, within_s: float = 60.0) -> Any:
        """Returns the result of the function that was started, or raises its error.

        Raises:
            AssertionError: It did not end in time, or the process died.
        """
        return answer(self._connection, within_s, "the worker process")

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function in the process: `start` and `result`."""
        self.start(function, *arguments)
        return self.result()

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self._nursery.kill(self._pid)

    def close(self) -> None:
        """Asks the process to end, and kills it if it does not."""
        with contextlib.suppress(OSError):  # it may be gone already
            self._connection.send_bytes(pickle.dumps(None))
        give_up = time.monotonic() + END_S
        while self.alive and time.monotonic() < give_up:
            time.sleep(0.005)
        self.kill()
        self._connection.close()


def attached(cls: type[Backend], config: dict[str, Any], bootstrap: Bootstrap) -> DataPlaneClient:
    """A client of a backend, with a `Faults` around it."""
    full = DataPlaneConfig.model_validate({**config, "middleware": [Faults()]})
    return connect_backend(cls, full, bootstrap=bootstrap)


def _serve(connection: Connection, connect: Callable[[], AbstractContextManager[Any]], waits: bool) -> None:
    try:
        if waits:
            connection.recv_bytes()
        opening = connect()
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


# --- functions that run in a worker -----------------------------------------------------------------------------------


def call_engine(client: DataPlaneClient, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of `_rows` with the backend behind the client."""
    return function(backend_of(client), *arguments)


def read_items(client: DataPlaneClient, partition_id: str, sample_ids: list[str], field: str) -> Any:
    """Reads a tensor column as nested lists."""
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
