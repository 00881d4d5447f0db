"""`Session`: what a client is connected to, and the scripts and commands that it runs there."""

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
    """The link and the instance, once the backend is started.

    Attributes:
        base: The prefix of all keys.
        link: The link to the server.
        instance: What the namespace says of itself.
    """

    def __init__(self, namespace: str) -> None:
        self.base = b"dp:{%s}" % namespace.encode()
        self.link: Link | None = None
        self.instance: Instance | None = None

    def connected(self) -> tuple[Link, Instance]:
        """Both.

        Raises:
            BackendUnavailableError: The backend is not started.
        """
        if self.link is None or self.instance is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self.link, self.instance

    def run(self, what: str, deadline: float, script: str, *values: Any) -> Any:
        """Runs a script on a request of these values; its reply."""
        return self.script(what, deadline, script, pack_request(*values))

    def script(self, what: str, deadline: float, script: str, packed: bytes, *rows: memoryview) -> Any:
        """Runs a script; its reply.

        Raises:
            StalePartitionError: The namespace is not the store that this client connected to.
        """
        link, instance = self.connected()
        reply = link.script(what, deadline, SCRIPTS[script], self.base, packed, *rows, instance.asker())
        if reply[0] == b"other_history":
            _refusals.raise_history(what, link.label)
        return reply

    def command(self, what: str, deadline: float, *words: bytes) -> Any:
        """Sends a command; its reply."""
        return self.connected()[0].command(what, deadline, *words)

    def key_of(self, write: bytes) -> bytes:
        """The key of a write's rows."""
        return b"%s:w:%s" % (self.base, write.hex().encode())
