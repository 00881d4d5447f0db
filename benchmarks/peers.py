"""What the stores are compared with: programs that move the same bytes, and do less with them.

Each peer is a context manager. It gives the function that makes the steps (put, get and clear) of a batch.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from tensordict import TensorDict

from benchmarks import bench

StepsOf: TypeAlias = Callable[[TensorDict], bench.Steps]
#: What is asked of the process at the other end of a connection: whether to send, and how many bytes.
_ORDER = struct.Struct("<?q")


@contextmanager
def transfer_queue() -> Iterator[StepsOf]:
    """TransferQueue's own calls, over one storage unit: no checks, and no confirmed commit."""
    with ExitStack() as stack:
        bench.start_ray(stack)
        import transfer_queue as tq
        from omegaconf import OmegaConf

        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        stack.callback(tq.close)

        def steps(columns: TensorDict) -> bench.Steps:
            rows = {"keys": [f"s{number}" for number in range(len(columns))], "partition_id": "raw"}
            return (
                lambda: tq.kv_batch_put(**rows, fields=columns),
                lambda: tq.kv_batch_get(**rows, select_fields=list(columns.keys())),
                lambda: tq.kv_clear(**rows),
            )

        yield steps


@contextmanager
def ray_objects() -> Iterator[StepsOf]:
    """Ray's put and get of the packed bytes as one array. Its get is a view."""
    with ExitStack() as stack:
        ray = bench.start_ray(stack)

        def steps(columns: TensorDict) -> bench.Steps:
            packed, kept = np.ones(bench.size_bytes(columns), dtype=np.uint8), list[Any]()
            return lambda: kept.append(ray.put(packed)), lambda: ray.get(kept[-1]), kept.clear

        yield steps


@contextmanager
def copy() -> Iterator[StepsOf]:
    """One copy of the bytes into memory that is kept, each way."""

    def steps(columns: TensorDict) -> bench.Steps:
        source, target = (np.full(bench.size_bytes(columns), value, dtype=np.uint8) for value in (1, 2))
        return partial(np.copyto, target, source), partial(np.copyto, target, source), lambda: None

    yield steps


def _receive(channel: socket.socket, memory: memoryview) -> None:
    """Fills memory from a socket."""
    while memory:
        count = channel.recv_into(memory)
        if not count:
            raise EOFError
        memory = memory[count:]


def _answer(channel: socket.socket) -> None:
    """The other half of a connection, until it ends."""
    memory, order = memoryview(bytearray(80_000_000)), memoryview(bytearray(_ORDER.size))
    with suppress(EOFError, ConnectionResetError), channel:
        while True:
            _receive(channel, order)
            sends, count = _ORDER.unpack(order)
            if sends:
                channel.sendall(memory[:count])
            else:
                _receive(channel, memory[:count])
                channel.sendall(b".")


def _listen(path: str, pipe: Any) -> None:
    """The process at the other end. It answers over a Unix socket at the path, or without one over TCP."""
    listener = socket.socket(socket.AF_UNIX) if path else socket.create_server(("127.0.0.1", 0))
    if path:
        listener.bind(path)
        listener.listen()
    pipe.send(listener.getsockname())
    while True:
        channel, _ = listener.accept()
        if not path:
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(channel,), daemon=True).start()


@contextmanager
def wire(family: socket.AddressFamily, count: int) -> Iterator[StepsOf]:
    """The bytes over connections of the loopback, into memory that is kept: the least that a socket takes.

    Each connection carries its share, by a thread on each side. A put ends with an answer of one byte.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        path = f"{folder}/peer" if family == socket.AF_UNIX else ""
        process = context.Process(target=_listen, args=(path, there), daemon=True)
        process.start()
        stack.callback(process.kill)
        pool = stack.enter_context(ThreadPoolExecutor(count))
        address = here.recv()
        channels = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for channel in channels:
            channel.connect(address)
            if family == socket.AF_INET:
                channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def move(channel: socket.socket, memory: memoryview, sends: bool) -> None:
            channel.sendall(_ORDER.pack(sends, len(memory)))
            if sends:
                _receive(channel, memory)
            else:
                channel.sendall(memory)
                _receive(channel, memoryview(bytearray(1)))

        def steps(columns: TensorDict) -> bench.Steps:
            memory = memoryview(bytearray(bench.size_bytes(columns)))
            share = -(-len(memory) // count)
            shares = [memory[number * share : (number + 1) * share] for number in range(count)]

            def run(sends: bool) -> None:
                list(pool.map(move, channels, shares, [sends] * count))

            return partial(run, False), partial(run, True), lambda: None

        yield steps


PEERS: dict[str, Callable[[], Any]] = {
    "TransferQueue": transfer_queue,
    "Ray": ray_objects,
    "TCP": partial(wire, socket.AF_INET, 1),
    "TCP x 4": partial(wire, socket.AF_INET, 4),
    "Unix": partial(wire, socket.AF_UNIX, 1),
    "Unix x 4": partial(wire, socket.AF_UNIX, 4),
    "copy": copy,
}
