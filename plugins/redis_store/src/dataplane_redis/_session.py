"""`Session`: a client's connection to its instance, and the scripts and commands that it runs there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from dataplane_core.errors import BackendUnavailableError
from dataplane_redis import _refusals
from dataplane_redis._acknowledged import Acknowledgements, Confirms, Receipt
from dataplane_redis._instance import Instance
from dataplane_redis._link import Link
from dataplane_redis._nodes import Nodes
from dataplane_redis._placing import Placing, base_of
from dataplane_redis._scripts import SCRIPTS
from dataplane_redis._wire import pack_request

__all__ = ["KEPT_S", "Session"]

#: Seconds after the deadline of a request for which the server keeps its id, if it was carried out.
KEPT_S: Final = 60.0


class Session:
    """The link and the instance; both are None until the backend is started.

    Attributes:
        base: The prefix of all keys.
        link: The link to the server.
        instance: The instance in the namespace.
        placing: Where the rows lie.
        nodes: The nodes of the cluster, if rows are spread over them; else None.
        acknowledgements: What this client was told is done. None for a private server, which nobody starts again.
    """

    def __init__(self, namespace: str, acknowledgements: Acknowledgements | None = None) -> None:
        self.base = base_of(namespace)
        self.link: Link | None = None
        self.instance: Instance | None = None
        self.placing = Placing(namespace, 1)
        self.nodes: Nodes | None = None
        self.acknowledgements = acknowledgements

    def connected(self) -> tuple[Link, Instance]:
        """The link and the instance.

        Raises:
            BackendUnavailableError: The backend is not started.
        """
        if self.link is None or self.instance is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self.link, self.instance

    def run(self, what: str, deadline: float, script: str, *values: Any, confirms: Confirms | None = None) -> Any:
        """Packs the values into a request, runs a script on it, and returns the reply; see `script`."""
        return self.script(what, deadline, script, pack_request(*values), confirms=confirms)

    def script(
        self,
        what: str,
        deadline: float,
        script: str,
        packed: bytes,
        *rows: memoryview,
        confirms: Confirms | None = None,
    ) -> Any:
        """Runs a script on a packed request and returns the reply.

        Args:
            what: The operation; messages start with it.
            deadline: On `time.monotonic`'s clock, in seconds.
            script: The name of the script.
            packed: The request.
            rows: Further arguments.
            confirms: What the reply "ok" (or "part") acknowledges. It then waits for replicas, if it should.

        Raises:
            StalePartitionError: The namespace now holds another store than the one that this client connected to; or it
                went back behind what this client was told is done.
        """
        link, _ = self.connected()
        text = SCRIPTS[script]
        if confirms is None:
            reply = link.script(what, deadline, text, self.base, packed, *rows, self.context(None))
        else:
            with self.receipt(confirms) as receipt:
                context = self.context(receipt)
                reply = link.script(what, deadline, text, self.base, packed, *rows, context, rider=receipt)
                self.accept(what, receipt, reply)
        if reply[0] == b"other_history":
            _refusals.raise_other_store(what, link.label)
        return reply

    @contextlib.contextmanager
    def receipt(self, confirms: Confirms) -> Iterator[Receipt | None]:
        """For a call that acknowledges something. None for a private server."""
        if self.acknowledgements is None:
            yield None
        else:
            with self.acknowledgements.receipt(confirms) as receipt:
                yield receipt

    def context(self, receipt: Receipt | None) -> bytes:
        """The last argument of a script."""
        return self.connected()[1].call_context() + (b"" if receipt is None else receipt.mark)

    def accept(self, what: str, receipt: Receipt | None, reply: Any) -> None:
        """Notes what a reply acknowledges. Raises if too few replicas have it."""
        if receipt is not None and self.acknowledgements is not None:
            self.acknowledgements.accept(what, self.connected()[0], receipt, reply)

    def quietly(self) -> contextlib.AbstractContextManager[None]:
        """For calls that are not the user's own: they do not tell what a server lost."""
        return contextlib.nullcontext() if self.acknowledgements is None else self.acknowledgements.quietly()

    def command(self, what: str, deadline: float, *words: bytes) -> Any:
        """Sends a command and returns the reply."""
        return self.connected()[0].command(what, deadline, *words)
