"""`Session`: a client's connection to its instance, and the scripts and commands that it runs there."""

from __future__ import annotations

from typing import Any

from dataplane_core.errors import BackendUnavailableError
from dataplane_redis import _refusals
from dataplane_redis._instance import Instance
from dataplane_redis._link import Link
from dataplane_redis._scripts import SCRIPTS
from dataplane_redis._wire import pack_request

__all__ = ["Session"]


class Session:
    """The link and the instance; both are None until the backend is started.

    Attributes:
        base: The prefix of all keys.
        link: The link to the server.
        instance: The instance in the namespace.
    """

    def __init__(self, namespace: str) -> None:
        self.base = b"dp:{%s}" % namespace.encode()
        self.link: Link | None = None
        self.instance: Instance | None = None

    def connected(self) -> tuple[Link, Instance]:
        """The link and the instance.

        Raises:
            BackendUnavailableError: The backend is not started.
        """
        if self.link is None or self.instance is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self.link, self.instance

    def run(self, what: str, deadline: float, script: str, *values: Any) -> Any:
        """Packs the values into a request, runs a script on it, and returns the reply."""
        return self.script(what, deadline, script, pack_request(*values))

    def script(self, what: str, deadline: float, script: str, packed: bytes, *rows: memoryview) -> Any:
        """Runs a script on a packed request and returns the reply.

        Raises:
            StalePartitionError: The namespace now holds another store than the one that this client connected to.
        """
        link, instance = self.connected()
        reply = link.script(what, deadline, SCRIPTS[script], self.base, packed, *rows, instance.call_context())
        if reply[0] == b"other_history":
            _refusals.raise_other_store(what, link.label)
        return reply

    def command(self, what: str, deadline: float, *words: bytes) -> Any:
        """Sends a command and returns the reply."""
        return self.connected()[0].command(what, deadline, *words)

    def key_of(self, write: bytes) -> bytes:
        """The key of the hash that holds the rows of a write."""
        return b"%s:w:%s" % (self.base, write.hex().encode())
