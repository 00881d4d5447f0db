"""`Host`: what a server serves, and `LedgerHost`: a ledger, with the claims and puts of its clients that wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

from dataplane_core.errors import InvalidRequestError
from dataplane_core.hosting.layout import Bytes
from dataplane_core.hosting.messages import ClaimOrWait, Messages, StopWaiting, Together
from dataplane_core.ledger import Command, Reply, commands
from dataplane_core.spec import Claim, new_id


@dataclass(slots=True, eq=False)
class Client:
    """A client, as its host sees it: from the begin of its session to the end, however it ends.

    Attributes:
        number: Its number, never used again by this host.
        key: Identifies it among the sessions of all hosts.
        waits: Tokens of its claims that wait.
        tickets: Those of its puts that wait for room.
        ended: Whether it is gone.
        wake: Tells it that a claim or a put, named by its token or ticket, is to ask again. False if it is gone. It
            never blocks.
    """

    number: int
    key: str = field(default_factory=new_id)
    waits: set[str] = field(default_factory=set)
    tickets: set[str] = field(default_factory=set)
    ended: bool = False
    wake: Callable[[str], bool] = lambda token: False


@dataclass(slots=True)
class Receiving:
    """What a host answers to a request that bytes follow: where they go.

    Attributes:
        into: Gets the bytes, one array after the other. The host keeps this memory until ``finish``, ``lost``, the end
            of the client's session, or ``cancelled``.
        finish: Called when all have come. What it returns is the reply.
        lost: Called if the connection ends before.
        cancelled: Set by the host: no more bytes may be written, and the connection ends.
    """

    into: Sequence[Bytes]
    finish: Callable[[], Any]
    lost: Callable[[], Any]
    cancelled: bool = False


@dataclass(slots=True)
class Sending:
    """A reply that bytes follow.

    Attributes:
        reply: The reply.
        sources: The bytes, one array after the other. The host keeps this memory until ``finish``, or the end of the
            client's session.
        finish: Called when all are sent, or the connection has ended.
    """

    reply: Any
    sources: Sequence[Bytes]
    finish: Callable[[], Any]


class Host:
    """What a server serves. The server's thread calls it, one call after the other.

    Attributes:
        messages: The requests that it knows.
        descriptors: The file descriptors that each client gets that connects over a Unix socket.
    """

    messages: Messages
    descriptors: Sequence[int] = ()
    #: Type of a request -> its handler.
    handlers: ClassVar[Mapping[type[Any], Callable[[Any, Any, Any], Any]]] = {}

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}  # by key
        self._numbers = itertools.count(1)

    def begin_session(self) -> Client:
        """A client connects."""
        client = self._new_client(next(self._numbers))
        self._clients[client.key] = client
        return client

    def client(self, key: str) -> Client | None:
        """The client with that key, or None if its session has ended, or is one of another host."""
        return self._clients.get(key)

    def end_session(self, client: Client) -> None:
        """A client is gone. A subclass gives up what it held."""
        client.ended = True
        del self._clients[client.key]

    def about(self) -> Any:
        """What clients are told when they connect."""
        return None

    def answer(self, request: Any, client: Client) -> Any:
        """Answers a request or a command, by its handler. Must not block: it would delay every client.

        It may return `Receiving` or `Sending` in place of a reply.

        Args:
            request: What came.
            client: From whom.

        Raises:
            DataPlaneError: As the request says. The client raises it.
        """
        if isinstance(request, Together):
            return [self._answer_part(each, client) for each in request.requests]
        handler = self.handlers.get(type(request))
        if handler is None:
            raise InvalidRequestError(f"this host knows no {type(request).__name__}.")
        return handler(self, request, client)

    def _answer_part(self, message: bytes, client: Client) -> bytes:
        """The reply to one of several requests, without its length."""
        request = self.messages.decode_request(message)
        if isinstance(request, Together) or getattr(request, "followed", False):
            raise InvalidRequestError(f"a {type(request).__name__} comes alone.")
        reply = self.answer(request, client)
        if isinstance(reply, Sending):
            reply.finish()
            raise InvalidRequestError(f"a {type(request).__name__} comes alone.")
        return self.messages.encode_reply(reply)[4:]

    def settle(self) -> None:
        """Called before replies are sent, once for all requests that had arrived together. Must not raise."""

    def _new_client(self, number: int) -> Client:
        return Client(number)


class Service(Protocol):
    """A ledger with a clock: `LedgerService`, or one that is recorded."""

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply: ...
    def stop_waiting(self, token: str) -> None: ...


class LedgerHost(Host):
    """A host of a ledger. Clients that wait are woken, and a client that is gone keeps nobody waiting.

    Args:
        service: The ledger.
    """

    messages = Messages()

    def __init__(self, service: Service) -> None:
        Host.__init__(self)
        self._service = service

    def answer(self, request: Any, client: Client) -> Any:
        """As `Host.answer`. What has no handler is a command, which goes to the ledger as it is."""
        if isinstance(request, Command) and type(request) not in self.handlers:
            return self._service.call(request)
        return super().answer(request, client)

    def end_session(self, client: Client) -> None:
        """Gives up what the client waited for: others get the samples, and the room."""
        super().end_session(client)
        for token in client.waits:
            self._service.stop_waiting(token)
        for ticket in client.tickets:
            self._service.call(commands.WaitForRoom(ticket, 0, wait_s=0.0))

    def _claim_or_wait(self, request: ClaimOrWait, client: Client) -> Claim:
        claim = request.claim
        client.waits.discard(claim.token)
        found = self._service.call(claim, partial(client.wake, claim.token))
        if not (found.answered or claim.explain):
            client.waits.add(claim.token)
        return found

    def _stop_waiting(self, request: StopWaiting, client: Client) -> None:
        client.waits.discard(request.token)
        self._service.stop_waiting(request.token)

    def _wait_for_room(self, request: commands.WaitForRoom, client: Client) -> None:
        (client.tickets.add if request.wait_s > 0 else client.tickets.discard)(request.ticket)
        self._service.call(request, partial(client.wake, request.ticket))


LedgerHost.handlers = {
    ClaimOrWait: LedgerHost._claim_or_wait,
    StopWaiting: LedgerHost._stop_waiting,
    commands.WaitForRoom: LedgerHost._wait_for_room,
}
