"""Forks of a process with an open client: the list of open clients, and the advice in errors."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

from dataplane_core.backends import Backend
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.spec import Scope


class _Client(Protocol):
    """The part of a client that this module uses: its backend, and the process that opened it."""

    _backend: Backend
    _pid: int


#: The clients that are open in this process. In a fork, also those of the parent process.
open_clients: Final[weakref.WeakSet[_Client]] = weakref.WeakSet()

_CONNECT: Final = "Call connect(config, bootstrap=False) in this process: each opens a client of its own."
_SPAWN: Final = (
    "Start the process with 'spawn' instead (multiprocessing.get_context('spawn'); of a torch DataLoader: "
    "multiprocessing_context='spawn') and call connect(config, bootstrap=False) in it."
)
_IN_ONE_PROCESS: Final = (
    "The store is in the memory of the process that opened it: use it there, or choose a backend of scope host or "
    "cluster."
)


def fork_hint(backend_class: type[Backend]) -> str:
    """What to do in a fork instead of using the client of the parent."""
    if backend_class.scope is Scope.PROCESS:
        return _IN_ONE_PROCESS
    return _CONNECT if backend_class.opens_in_forks else _SPAWN


def _all_open() -> list[_Client]:
    while True:
        try:
            return list(open_clients)
        except RuntimeError:  # another thread opened a client; no lock here, since a fork could inherit it locked
            continue


def refuse_in_fork(backend_class: type[Backend], name: str) -> None:
    """Refuses to open a backend in a fork of a process that has it open, if its engine does not survive a fork.

    Args:
        backend_class: The backend's class.
        name: Its name in errors.

    Raises:
        BackendUnavailableError: Not retryable. The message says what to do.
    """
    if backend_class.opens_in_forks:
        return
    for client in _all_open():
        if type(client._backend) is backend_class and client._pid != os.getpid():
            raise BackendUnavailableError(
                f"connect refused: this process {os.getpid()} is a fork of {client._pid}, which has a client of "
                f"backend '{name}' open, and its engine does not survive a fork.",
                backend=name,
                retryable=False,
                hint=fork_hint(backend_class),
            )
