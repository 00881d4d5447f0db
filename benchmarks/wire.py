"""What connections of this host's loopback carry, beside what the backends make of them.

Run:  OMP_NUM_THREADS=1 python benchmarks/wire.py [--rounds 7] [--batches A B] [--backends redis_store tq_simple ...]

A put sends the bytes of a batch to a peer process, which receives them into memory that it keeps and answers with one
byte. A get asks for them, and receives them into memory that is kept here. With several connections, each carries its
share, by a thread on each side. Nothing is encoded, checked or kept apart: this is the least that a backend over a
socket takes. "Redis alone" is what the server of redis_store takes for as many bytes in one value per row, from a
client that only writes its protocol and receives into memory that it keeps. Rounds are interleaved, so a busy machine
slows all alike; medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import redis
from batches import MAX_TOKENS, NUM_SAMPLES, Step, batch, client_steps, describe, medians_ms, size_bytes

from dataplane_core import connect

#: What is asked of the peer: whether to send, and how many bytes.
_ASKED = struct.Struct("<?q")
#: Name -> config. Redis is reached over TCP or over a Unix socket, the others over TCP.
CONFIGS: dict[str, dict[str, Any]] = {
    "redis_store": {"backend": "redis_store", "options": {"server": "private"}},
    "tq_simple": {"backend": "tq_simple", "options": {"share_memory": False}},
    "tq_mooncake": {"backend": "tq_mooncake"},
}


def receive(channel: socket.socket, memory: memoryview) -> None:
    """Fills memory from a socket."""
    while memory:
        count = channel.recv_into(memory)
        if not count:
            raise EOFError
        memory = memory[count:]


def answer(channel: socket.socket, size_bytes: int) -> None:
    """The peer's half of a connection, until it ends."""
    memory = memoryview(bytearray(size_bytes))
    asked = memoryview(bytearray(_ASKED.size))
    with contextlib.suppress(EOFError, ConnectionResetError), channel:
        while True:
            receive(channel, asked)
            sends, count = _ASKED.unpack(asked)
            if sends:
                channel.sendall(memory[:count])
            else:
                receive(channel, memory[:count])
                channel.sendall(b".")


def serve(path: str, size_bytes: int, ports: multiprocessing.SimpleQueue[int]) -> None:
    """The peer: answers over TCP and over a Unix socket."""
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(path)
    unix.listen()
    tcp = socket.create_server(("127.0.0.1", 0))

    def accept(listener: socket.socket) -> None:
        while True:
            channel, _ = listener.accept()
            if listener is tcp:
                channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=answer, args=(channel, size_bytes), daemon=True).start()

    threading.Thread(target=accept, args=(unix,), daemon=True).start()
    ports.put(tcp.getsockname()[1])
    accept(tcp)


class Wire:
    """Some connections to the peer."""

    def __init__(self, family: socket.AddressFamily, address: str | tuple[str, int], count: int) -> None:
        self._channels = []
        for _ in range(count):
            channel = socket.socket(family)
            channel.connect(address)
            if family == socket.AF_INET:
                channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._channels.append(channel)
        self._pool = ThreadPoolExecutor(count)

    def steps(self, memory: memoryview) -> tuple[Step, Step, Step]:
        """Put and get of as many bytes as the memory has, and a clear, which does nothing."""
        share = -(-len(memory) // len(self._channels))
        work = [(each, memory[i * share : (i + 1) * share]) for i, each in enumerate(self._channels)]

        def run(sends: bool) -> None:
            list(self._pool.map(lambda each: self._move(*each, sends=sends), work))

        return lambda: run(False), lambda: run(True), lambda: None

    @staticmethod
    def _move(channel: socket.socket, memory: memoryview, *, sends: bool) -> None:
        channel.sendall(_ASKED.pack(sends, len(memory)))
        if sends:
            receive(channel, memory)
        else:
            channel.sendall(memory)
            receive(channel, memoryview(bytearray(1)))

    def close(self) -> None:
        """Ends the connections."""
        self._pool.shutdown()
        for channel in self._channels:
            channel.close()


def redis_steps(connection: Any, memory: memoryview) -> tuple[Step, Step, Step]:
    """As many bytes in a hash with one value per row. Eight rows are one command. Two reads are under way: Redis makes
    one reply while the other is received."""
    channel, pack = connection._sock, connection.pack_command
    step = -(-len(memory) // NUM_SAMPLES)
    values = [memory[start : start + step] for start in range(0, len(memory), step)]
    groups = [range(first, min(first + 8, len(values))) for first in range(0, len(values), 8)]
    asked = [b"".join(pack("HMGET", "wire", *each)) for each in groups]
    sizes = [
        len(b"*%d\r\n" % len(each)) + sum(len(b"$%d\r\n\r\n" % len(values[i])) + len(values[i]) for i in each)
        for each in groups
    ]
    received = memoryview(bytearray(max(sizes)))

    def put() -> None:
        for each in groups:
            parts: list[bytes | memoryview] = [b"*%d\r\n$4\r\nHSET\r\n$4\r\nwire\r\n" % (2 + 2 * len(each))]
            for i in each:
                parts += (b"$%d\r\n%d\r\n$%d\r\n" % (len(str(i)), i, len(values[i])), values[i], b"\r\n")
            channel.sendall(b"".join(parts))
        for _ in groups:
            connection.read_response()

    def get() -> None:
        channel.sendall(asked[0])
        for number, size in enumerate(sizes):
            channel.sendall(b"".join(asked[number + 1 : number + 2]))
            receive(channel, received[:size])

    def clear() -> None:
        connection.send_command("UNLINK", "wire")
        connection.read_response()

    return put, get, clear


def copy_steps(memory: memoryview) -> tuple[Step, Step, Step]:
    """One copy of the bytes into memory that is kept, each way."""
    source, target = np.frombuffer(memory, dtype=np.uint8), np.ones(len(memory), dtype=np.uint8)
    return lambda: np.copyto(target, source), lambda: np.copyto(target, source), lambda: None


@contextlib.contextmanager
def peer(size_bytes: int) -> Iterator[tuple[tuple[str, int], str]]:
    """A peer process: where it answers over TCP, and over a Unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/peer"
        spawning = multiprocessing.get_context("spawn")
        ports = spawning.SimpleQueue()
        process = spawning.Process(target=serve, args=(path, size_bytes, ports), daemon=True)
        process.start()
        try:
            yield ("127.0.0.1", ports.get()), path
        finally:
            process.kill()
            process.join()


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", nargs="+", choices=sorted(MAX_TOKENS), default=sorted(MAX_TOKENS))
    parser.add_argument("--backends", nargs="*", choices=sorted(CONFIGS), default=sorted(CONFIGS))
    parser.add_argument("--url", help="of a server that runs, for redis_store; else it starts a private one")
    options = parser.parse_args()
    if options.url:
        CONFIGS["redis_store"]["options"] = {"url": options.url}
    batches = {name: batch(name) for name in options.batches}
    most_bytes = max(map(size_bytes, batches.values()))
    with contextlib.ExitStack() as stack:
        tcp, path = stack.enter_context(peer(most_bytes))
        wires = {}
        for count in (1, 4):
            wires[f"TCP, {count}"] = Wire(socket.AF_INET, tcp, count)
            wires[f"Unix, {count}"] = Wire(socket.AF_UNIX, path, count)
        for wire in wires.values():
            stack.callback(wire.close)
        clients = {name: stack.enter_context(connect(CONFIGS[name])) for name in options.backends}
        alone = None
        if "redis_store" in clients:
            from dataplane_redis._server import private_url

            alone = redis.Redis.from_url(options.url or private_url("default")).connection_pool.get_connection()
            stack.callback(alone.disconnect)
        for name, columns in batches.items():
            memory = memoryview(bytearray(os.urandom(1 << 20) * -(-size_bytes(columns) >> 20)))[: size_bytes(columns)]
            contestants = {each: wire.steps(memory) for each, wire in wires.items()}
            if alone is not None:
                contestants["Redis alone"] = redis_steps(alone, memory)
            contestants |= {each: client_steps(client, columns) for each, client in clients.items()}
            medians = medians_ms({"copy": copy_steps(memory), **contestants}, options.rounds)
            least = medians["TCP, 1"]
            print(f"\n{describe(name, columns)}\n{'':16}{'put ms':>12}{'get ms':>12}{'put / TCP':>12}{'get / TCP':>12}")
            for each, (put_ms, get_ms) in medians.items():
                cells = [f"{put_ms:.1f}", f"{get_ms:.1f}", f"{put_ms / least[0]:.1f}", f"{get_ms / least[1]:.1f}"]
                print(f"{each:16}" + "".join(f"{cell:>12}" for cell in cells))
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
