"""Requests to storage units and their replies, over ZeroMQ, each with a deadline.

TransferQueue's own clients wait for replies without a limit, retry on a schedule of their own, and reset torch's thread
count around each request. So the engine talks to TransferQueue's sockets itself: the calling thread polls plain
blocking sockets until a deadline. There is no event loop and no extra thread.

A reply does not name its request. So a socket belongs to one exchange at a time, and is closed if that exchange fails:
otherwise the next exchange could read a late reply as its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import zmq as _zmq

from dataplane_core.errors import (
    BackendUnavailableError,
    ClientClosedError,
    OperationTimeoutError,
)
from dataplane_core.hosting import Watch
from dataplane_tq_simple._privates import identity_prefix, new_socket
from dataplane_tq_simple.addresses import with_port

zmq: Any = _zmq  # its type stubs are partial

# Seconds between two checks of a waiting exchange whether the engine was closed.
_POLL_S = 0.1
#: Seconds without a reply after which an exchange starts to watch its peers, and between two questions about them.
PATIENCE_S = 0.2
# Requests in flight from one exchange to one peer. Replies arrive in the order of the requests.
_WINDOW = 4
# Idle sockets kept per peer.
_MAX_IDLE = 8


class Peer(NamedTuple):
    """A storage unit.

    Attributes:
        name: Its name in messages: ``storage unit-0``.
        actor: Its Ray actor name.
        ip: Its address.
        port: Its port.
        life: The number of its life. -1: it has none.
        token: What identifies its life in requests.
    """

    name: str
    actor: str
    ip: str
    port: int
    life: int = -1
    token: str = ""


class Request(NamedTuple):
    """One request of an exchange.

    Attributes:
        frames: Builds the message. Called when it is about to be sent, so that a long exchange does not hold all its
            messages at once.
        on_reply: Receives the frames of the reply. What it raises ends the exchange.
    """

    frames: Callable[[], list[Any]]
    on_reply: Callable[[list[Any]], None]


class Exchange:
    """Sends requests to peers and waits for their replies. Thread-safe.

    Args:
        watch: Makes a `Watch` of the peers that an exchange waits for. Called when no reply came for a while.
    """

    def __init__(self, watch: Callable[[Sequence[Peer]], Watch]) -> None:
        self._make_watch = watch
        self._context = zmq.Context()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: dict[Peer, list[Any]] = {}
        self._num_leased = 0
        self._none_leased = threading.Condition(self._lock)
        self._closed = False
        # Storage units drop requests of peers whose identity does not start with this prefix.
        self._identity = f"{identity_prefix}dataplane_{uuid4().hex}"
        self._num_sockets = 0

    def run(self, what: str, requests: Sequence[tuple[Peer, Sequence[Request]]], deadline: float) -> None:
        """Sends each peer its requests in order, and waits for all replies.

        Args:
            what: The operation, for messages: ``put_rows(512 rows)``.
            requests: The peers, each at most once, with the requests to each.
            deadline: On `time.monotonic`'s clock, in seconds.

        Raises:
            OperationTimeoutError: Not all replies arrived in time. The requests may have been executed or not.
            BackendUnavailableError: A peer is dead, or cannot be reached.
            ClientClosedError: `close` was called before or during the exchange.
            DataPlaneError: Raised by an ``on_reply``.
        """
        if time.monotonic() >= deadline:
            raise OperationTimeoutError(f"{what}: the deadline had passed before it began. Nothing was sent.")
        with ExitStack() as leases:
            lanes = [_Lane(peer, leases.enter_context(self._lease(peer)), work) for peer, work in requests if work]
            try:
                self._pump(what, lanes, deadline)
            except zmq.ZMQError as error:
                raise BackendUnavailableError(f"{what} failed: {error}") from error

    def _pump(self, what: str, lanes: list[_Lane], deadline: float) -> None:
        poller = zmq.Poller()
        for lane in lanes:
            lane.send()
            poller.register(lane.socket, zmq.POLLIN)
        waiting = {lane.socket: lane for lane in lanes}
        began = last_reply = time.monotonic()
        watch: Watch | None = None
        while waiting:
            if self._closed:
                raise _closed_error(what)
            now = time.monotonic()
            ready = poller.poll(max(0.0, min(_POLL_S, deadline - now)) * 1000)
            for key, _ in ready:
                lane = waiting[key]
                lane.receive()
                if lane.done:
                    poller.unregister(lane.socket)
                    del waiting[key]
            if ready:
                last_reply, watch = time.monotonic(), None
            elif now >= deadline:
                names = ", ".join(lane.peer.name for lane in waiting.values())
                raise OperationTimeoutError(
                    f"{what}: no answer within {now - began:.3g} s from the {names}. It may have been executed or not.",
                    hint=watch.describe() if watch else None,
                )
            elif now - last_reply >= PATIENCE_S:
                watch = watch or self._make_watch([lane.peer for lane in waiting.values()])
                watch.check()

    @contextmanager
    def _lease(self, peer: Peer) -> Iterator[Any]:
        """A socket to ``peer`` for one exchange. It is kept for reuse only if this exchange ends without an error."""
        with self._lock:
            if self._closed:
                raise _closed_error(f"a request to the {peer.name}")
            if os.getpid() != self._pid:
                raise ClientClosedError(
                    f"this client was opened by process {self._pid} and is used by its fork {os.getpid()}. Expected "
                    "the process that opened it.",
                    hint="Start such processes by spawn, not by fork, and attach a client of its own in each.",
                )
            idle = self._idle.get(peer)
            socket = idle.pop() if idle else None
            self._num_leased += 1
            self._num_sockets += 1
            serial = self._num_sockets
        try:
            if socket is None:
                socket = self._connect(peer, serial)
            yield socket
        except BaseException:
            if socket is not None:
                socket.close(linger=0)
            raise
        else:
            with self._lock:
                pool = self._idle.setdefault(peer, [])
                keep = not self._closed and len(pool) < _MAX_IDLE
                if keep:
                    pool.append(socket)
            if not keep:
                socket.close(linger=0)
        finally:
            with self._lock:
                self._num_leased -= 1
                self._none_leased.notify_all()

    def _connect(self, peer: Peer, serial: int) -> Any:
        socket = new_socket(self._context, zmq.DEALER, peer.ip, identity=f"{self._identity}_{serial}".encode())
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://{with_port(peer.ip, peer.port)}")
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    def forget(self, peers: Collection[Peer]) -> None:
        """Closes the idle sockets to peers that have ended, or that are reached anew."""
        with self._lock:
            sockets = [socket for peer in peers for socket in self._idle.pop(peer, ())]
        for socket in sockets:
            socket.close(linger=0)

    def close(self) -> None:
        """Ends running exchanges with `ClientClosedError`, and frees the sockets. Called once, not in a fork."""
        with self._lock:
            self._closed = True
            idle = [socket for sockets in self._idle.values() for socket in sockets]
            self._idle.clear()
            self._none_leased.wait_for(lambda: self._num_leased == 0, timeout=20 * _POLL_S)
            all_returned = self._num_leased == 0
        for socket in idle:
            socket.close(linger=0)
        if all_returned:
            self._context.term()


class _Lane:
    """The requests of one exchange to one peer: how many are sent, and how many are answered.

    Attributes:
        peer: The peer.
        socket: The socket to it.
    """

    def __init__(self, peer: Peer, socket: Any, requests: Sequence[Request]) -> None:
        self.peer = peer
        self.socket = socket
        self._requests = requests
        self._num_sent = 0
        self._num_answered = 0

    @property
    def done(self) -> bool:
        return self._num_answered == len(self._requests)

    def send(self) -> None:
        """Sends as many requests as may be in flight."""
        while self._num_sent < len(self._requests) and self._num_sent - self._num_answered < _WINDOW:
            frames = self._requests[self._num_sent].frames()
            self.socket.send_multipart(frames, copy=False)
            self._num_sent += 1

    def receive(self) -> None:
        """Receives one reply that has arrived, and sends the next request."""
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        request = self._requests[self._num_answered]
        self._num_answered += 1
        self.send()  # before the reply is read: the peer works on it meanwhile
        request.on_reply(frames)


def _closed_error(what: str) -> ClientClosedError:
    return ClientClosedError(f"{what}: this client is closed.")
