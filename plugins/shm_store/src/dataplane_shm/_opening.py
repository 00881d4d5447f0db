"""Connects to a store that runs on this host."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dataplane_core.backends import ExtentClient
from dataplane_core.errors import BackendUnavailableError, DataPlaneError, OperationTimeoutError
from dataplane_core.hosting import ExtentHost, Session, UnixAddress, decode_about
from dataplane_core.ownership import PrivateFolder
from dataplane_shm._messages import About


def _failure(path: Path, what: str, error: Exception) -> DataPlaneError:
    if isinstance(error, TimeoutError):
        return OperationTimeoutError(f"{what} timed out: the ledger's process of {path} does not answer.")
    if what == "connect":
        return BackendUnavailableError(
            f"{what} failed: no store runs at {path}: {error}.",
            hint="Start its owner, connect(config, bootstrap=True), as the same user on this host and with the "
            "same namespace.",
        )
    return BackendUnavailableError(
        f"{what} failed: the ledger's process of {path} has ended, and its data with it, unless it has a durable "
        "folder.",
        retryable=False,
        hint="It ends with the client that bootstrapped the store. Close this client, start a new owner with "
        "connect(config, bootstrap=True). Without `durable`, then register the partitions and produce their samples "
        "again.",
    )


def open_session(folder: PrivateFolder, deadline: float) -> tuple[Session, About]:
    """Connects to a store: the session, and what the store says about itself."""
    address = UnixAddress(folder.socket)
    session = Session(address, ExtentHost.messages, deadline, partial(_failure, folder.socket))
    if not session.descriptors:
        raise BackendUnavailableError(f"connect failed: what listens at {folder.socket} is no store.", retryable=False)
    return session, decode_about(session.welcome, About)


def open_store(folder: PrivateFolder, deadline: float, *, views: bool) -> tuple[ExtentClient, About]:
    """As `open_session`, and maps the memory."""
    session, about = open_session(folder, deadline)
    try:
        return ExtentClient(session, views=views), about
    except BaseException:
        session.finish()
        raise
