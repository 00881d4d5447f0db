"""Plain connections for calls: what arrives whole is answered in order, and no client can stop the server."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane_tq_simple._line import TOKEN_BYTES, CallServer, Line

ADDRESS = "127.0.0.1"
LONG_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[CallServer]:
    """Answers with the call in capital letters."""
    server = CallServer(ADDRESS, bytes.upper)
    yield server
    server.close()


def replies(line: Line, count: int) -> list[bytes]:
    """The next replies."""
    found: list[bytes] = []
    deadline = time.monotonic() + LONG_S
    while len(found) < count:
        assert time.monotonic() < deadline
        wants_room = [line] if line.unsent else []
        readable, writable, _ = select.select([line], wants_room, [], 1.0)
        if writable:
            line.flush()
        if readable:
            line.fill()
        while (message := line.message()) is not None:
            found.append(message)
    return found


def ended(channel: socket.socket) -> bool:
    """Whether the server closes a connection, and sends nothing before."""
    channel.settimeout(LONG_S)
    try:
        return channel.recv(1) == b""
    except ConnectionResetError:
        return True


def connected(server: CallServer) -> Line:
    return Line.connect(ADDRESS, server.port, server.token)


def test_messages_of_any_size_are_answered_in_order(server: CallServer) -> None:
    line = connected(server)
    sizes = [0, 1, 3, 5_000_000, 2, 300_000]  # some are larger than what a socket takes at once
    for size in sizes:
        line.send(b"x" * size)
    assert replies(line, len(sizes)) == [b"X" * size for size in sizes]
    line.close()


def test_many_clients_at_once_each_get_their_own_replies(server: CallServer) -> None:
    def talk(number: int) -> bool:
        line = connected(server)
        for step in range(50):
            line.send(b"call %d of %d" % (step, number))
            assert replies(line, 1) == [b"CALL %d OF %d" % (step, number)]
        line.close()
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(talk, range(8)))


@pytest.mark.parametrize("garbage", [os.urandom(TOKEN_BYTES), b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_who_does_not_know_the_token_gets_no_answer(server: CallServer, garbage: bytes) -> None:
    with socket.create_connection((ADDRESS, server.port)) as channel:
        channel.sendall(garbage + struct.pack("<Q", 4) + b"call")
        assert ended(channel)


def test_a_message_of_an_impossible_length_ends_its_connection_alone(server: CallServer) -> None:
    other = connected(server)
    with socket.create_connection((ADDRESS, server.port)) as channel:
        channel.sendall(server.token + struct.pack("<Q", 1 << 60))
        assert ended(channel)
    other.send(b"still there")
    assert replies(other, 1) == [b"STILL THERE"]
    other.close()


def test_a_client_that_takes_no_replies_does_not_keep_others_waiting(server: CallServer) -> None:
    slow, other = connected(server), connected(server)
    for _ in range(8):
        slow.send(b"x" * 4_000_000)
    other.send(b"quick")
    deadline = time.monotonic() + LONG_S
    while slow.unsent and time.monotonic() < deadline and not select.select([other], [], [], 0)[0]:
        slow.flush()
    assert replies(other, 1) == [b"QUICK"]
    assert replies(slow, 8) == [b"X" * 4_000_000] * 8
    slow.close()
    other.close()


def test_an_idle_connection_that_ended_is_noticed(server: CallServer) -> None:
    line = connected(server)
    line.send(b"a")
    assert replies(line, 1) == [b"A"]
    assert line.idle
    line.channel.shutdown(socket.SHUT_WR)  # the server closes its side then
    select.select([line], [], [], LONG_S)
    assert not line.idle
    line.close()
