"""The time of AReaL's remote tensors: its own HTTP backend beside ours. Needs the environment of ``make test-areal``.

``.venv-areal/bin/python benchmarks/areal_tensors.py [MB]`` prints, for 16 tensors of MB megabytes together (1000),
the seconds of storing them, of fetching them in another process than stored them, and of deleting them.
"""

import asyncio
import multiprocessing
import socket
import statistics
import sys
import threading
import time

import torch
from areal.infra.rpc import rtensor
from areal.infra.rpc.guard.data_blueprint import data_bp
from areal.infra.rpc.rtensor import HttpRTensorBackend, TensorShardInfo

from dataplane_compat.areal import RTensorStore

PARTS, REPEATS = 16, 3


def serve(config, port, megabytes, pipe):
    """The worker that stores: over HTTP, it also serves them."""
    if config is None:
        from flask import Flask
        from werkzeug.serving import make_server

        app = Flask("worker")
        app.register_blueprint(data_bp)
        threading.Thread(target=make_server("127.0.0.1", port, app, threaded=True).serve_forever, daemon=True).start()
    backend = HttpRTensorBackend() if config is None else RTensorStore(config, bootstrap=False)
    tensors = [torch.randn(megabytes * 1_000_000 // PARTS // 4) for _ in range(PARTS)]
    while pipe.recv():
        start = time.perf_counter()
        ids = [backend.store(tensor) for tensor in tensors]
        pipe.send((ids, time.perf_counter() - start))


def measure(name, config, megabytes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = HttpRTensorBackend() if config is None else RTensorStore(config, bootstrap=True)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    worker = context.Process(target=serve, args=(config, port, megabytes, theirs), daemon=True)
    worker.start()
    times = []
    for _ in range(REPEATS):
        pipe.send(True)
        ids, stored = pipe.recv()
        shards = [TensorShardInfo(each, f"127.0.0.1:{port}") for each in ids]
        start = time.perf_counter()
        fetched = backend.fetch(shards)
        middle = time.perf_counter()
        asyncio.run(backend.delete(shards[0].node_addr, ids))
        times.append((stored, middle - start, time.perf_counter() - middle))
        assert sum(each.nbytes for each in fetched) == megabytes * 1_000_000 // PARTS // 4 * 4 * PARTS
        del fetched
    pipe.send(False)
    worker.join()
    if config is not None:
        backend.close()
    print(name, *(f"{statistics.median(column):8.3f}" for column in zip(*times, strict=True)), sep="\t")


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    rtensor.set_backend(None)
    print("backend\tstore s\tfetch s\tdelete s")
    measure("HTTP", None, size)
    measure("shm_store", {"backend": "shm_store", "options": {"namespace": "areal-benchmark"}}, size)
    measure("redis_store", {"backend": "redis_store", "options": {"namespace": "areal-benchmark"}}, size)
