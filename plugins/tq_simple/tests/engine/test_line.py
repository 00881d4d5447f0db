"""Plain connections for calls: what arrives whole is answered in order, and no client can stop the server."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataplane_tq_simple import _line
from dataplane_tq_simple._line import HALF_BYTES, CallServer, Line
from dataplane_tq_simple._sampler import LedgerSampler

ADDRESS = "127.0.0.1"
LONG_S = 60.0
IPV6 = Path("/proc/net/if_inet6").exists()


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


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def connected(server: CallServer) -> Line:
    return Line.connect(ADDRESS, server.port, server.token)


def test_messages_of_any_size_are_answered_in_order(server: CallServer) -> None:
    line = connected(server)
    sizes = [0, 1, 3, 5_000_000, 2, 300_000]  # some are larger than what a socket takes at once
    for size in sizes:
        line.send(b"x" * size)
    assert replies(line, len(sizes)) == [b"X" * size for size in sizes]
    line.close()


@pytest.mark.skipif(not IPV6, reason="this machine has no IPv6")
def test_a_server_at_an_ipv6_address_is_reached() -> None:
    server = CallServer("::1", bytes.upper)
    line = Line.connect("::1", server.port, server.token)
    line.send(b"six")
    assert replies(line, 1) == [b"SIX"]
    line.close()
    server.close()


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


@pytest.mark.parametrize(
    "garbage",
    [os.urandom(HALF_BYTES), b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b""],
    ids=["random", "http", "none"],
)
def test_bytes_of_who_does_not_know_the_token_are_never_unpickled(tmp_path: Path, garbage: bytes) -> None:
    server = CallServer(ADDRESS, LedgerSampler(dict)._answer)
    try:
        bombs = [Bomb(str(tmp_path / name)) for name in ("stranger", "friend")]
        stranger, friend = [pickle.dumps(bomb) for bomb in bombs]
        with socket.create_connection((ADDRESS, server.port)) as channel:
            channel.sendall(garbage + struct.pack("<Q", len(stranger)) + stranger)
            assert ended(channel)
        line = connected(server)
        line.send(friend)  # which shows that the same bytes do run where they are unpickled
        assert replies(line, 1)
        line.close()
    finally:
        server.close()
    assert [each.name for each in tmp_path.iterdir()] == ["friend"]


def test_replies_of_who_does_not_know_the_token_are_not_read() -> None:
    with socket.create_server((ADDRESS, 0)) as listener:
        line = Line.connect(ADDRESS, listener.getsockname()[1], os.urandom(2 * HALF_BYTES))
        line.send(b"call")
        channel, _ = listener.accept()
        with channel:
            channel.sendall(os.urandom(HALF_BYTES) + struct.pack("<Q", 5) + b"reply")
            with pytest.raises(ConnectionAbortedError, match="token"):
                replies(line, 1)
    line.close()


def test_who_never_proves_to_know_the_token_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_line, "_GREETING_S", 0.0)
    server = CallServer(ADDRESS, bytes.upper)
    try:
        with socket.create_connection((ADDRESS, server.port)) as channel:
            assert ended(channel)
    finally:
        server.close()


def test_a_server_without_file_descriptors_serves_on_and_accepts_later(server: CallServer) -> None:
    friend = connected(server)
    friend.send(b"a")
    assert replies(friend, 1) == [b"A"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = socket.socket()
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        late.connect((ADDRESS, server.port))
        late.sendall(server.token[:HALF_BYTES] + struct.pack("<Q", 4) + b"late")
        for _ in range(20):
            friend.send(b"b")
            assert replies(friend, 1) == [b"B"]
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    late.settimeout(LONG_S)
    with late, late.makefile("rb") as stream:
        answer = stream.read(HALF_BYTES + 8 + 4)
    assert answer == server.token[HALF_BYTES:] + struct.pack("<Q", 4) + b"LATE"
    friend.close()


def test_a_message_of_an_impossible_length_ends_its_connection_alone(server: CallServer) -> None:
    other = connected(server)
    with socket.create_connection((ADDRESS, server.port)) as channel:
        channel.sendall(server.token[:HALF_BYTES] + struct.pack("<Q", 1 << 60))
        assert channel.recv(HALF_BYTES, socket.MSG_WAITALL) == server.token[HALF_BYTES:]
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
