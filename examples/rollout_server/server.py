"""A generation server on asyncio. It answers prompts over HTTP, and puts each answer into the data plane.

    python examples/rollout_server/server.py --config examples/rollout_server/config.yaml --name server-0

``POST /generate`` with ``{"step": 3, "id": "p7", "prompt": "2749="}`` generates a group of answers,
puts them, and then replies with them. So an answer that somebody has seen is in the data plane. Many requests are
generated together. All calls of the data plane are made on the event loop, by `AsyncDataPlaneClient`: while one waits
for the store, the server goes on to answer others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from aiohttp import web
from grpo import Transformer, reward
from torch import Tensor

from dataplane_core import AsyncDataPlaneClient, connect, connect_async
from dataplane_core.errors import DataPlaneError, UnknownPartitionError
from dataplane_integrations.rollout import mint_sample_ids
from dataplane_integrations.weights import WeightReader
from rollout_server.settings import partition_of, read_config

#: Requests that are generated together.
_MOST_AT_ONCE = 64


class Generator:
    """Generates for many requests at once, with the newest weights, in a thread beside the event loop.

    Args:
        seed: Of the model's first weights, and of what is drawn.
        answers: Answers to each prompt.
    """

    def __init__(self, seed: int, answers: int) -> None:
        self.version = -1
        self._model = Transformer(seed)
        self._answers = answers
        self._random = random.Random(seed)
        self._requests: asyncio.Queue[tuple[str, asyncio.Future[Any]]] = asyncio.Queue()
        self._weights: tuple[int, dict[str, Tensor]] | None = None

    def replace_weights(self, version: int, weights: dict[str, Tensor]) -> None:
        """The next batch is generated with these weights. Any thread may call it."""
        self._weights = version, weights

    async def answer(self, prompt: str) -> tuple[dict[str, list[Any]], list[str], int]:
        """The columns of the answers to a prompt, a row per answer; the answers; the version of the weights."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._requests.put((prompt, done))
        result: tuple[dict[str, list[Any]], list[str], int] = await done
        return result

    async def run(self) -> None:
        """Generates until it is cancelled."""
        while True:
            batch = [await self._requests.get()]
            while not self._requests.empty() and len(batch) < _MOST_AT_ONCE:
                batch.append(self._requests.get_nowait())
            try:
                groups = await asyncio.to_thread(self._generate, [prompt for prompt, _ in batch])
            except Exception as error:
                groups = [error] * len(batch)
            for (_, done), group in zip(batch, groups, strict=True):
                if done.cancelled():
                    continue
                if isinstance(group, Exception):
                    done.set_exception(group)
                else:
                    done.set_result((*group, self.version))

    def _generate(self, prompts: list[str]) -> list[Any]:
        if self._weights is not None:
            (self.version, weights), self._weights = self._weights, None
            self._model.load_state_dict(weights)
        repeated = [prompt for prompt in prompts for _ in range(self._answers)]
        rows, answers = self._model.answer(repeated, self._random.getrandbits(60))
        lengths = rows["input_lengths"].tolist()
        groups = []
        for first, prompt in zip(range(0, len(repeated), self._answers), prompts, strict=True):
            group = range(first, first + self._answers)
            columns = {
                "input_ids": [rows["input_ids"][row, : lengths[row]].tolist() for row in group],
                "logprobs": [rows["generation_logprobs"][row, : lengths[row]].tolist() for row in group],
                "prompt_length": [len(prompt)] * self._answers,
                "reward": [reward(prompt, answers[row]) for row in group],
            }
            groups.append((columns, [answers[row] for row in group]))
        return groups


class Server:
    """The HTTP handlers."""

    plane: AsyncDataPlaneClient

    def __init__(self, name: str, generator: Generator) -> None:
        self._name = name
        self._generator = generator
        self._num_requests = 0

    async def generate(self, request: web.Request) -> web.Response:
        """``POST /generate``: a group of answers, once it is in the data plane."""
        body = await request.json()
        columns, answers, version = await self._generator.answer(body["prompt"])
        ids = mint_sample_ids([body["id"]], len(columns["reward"]))
        told = {"weight_version": version, "server": self._name}
        tags = [{**told, "input_lengths": len(row)} for row in columns["input_ids"]]
        try:
            await self.plane.put_samples(ids, partition_of(body["step"]), columns, tags=tags)
        except UnknownPartitionError:  # the step is over: another server was asked the same, and was faster
            return web.json_response({"error": "the step is over"}, status=410)
        self._num_requests += 1
        return web.json_response({"answers": answers, "weight_version": version})

    async def health(self, request: web.Request) -> web.Response:
        """``GET /health``."""
        return web.json_response(
            {"name": self._name, "weight_version": self._generator.version, "requests": self._num_requests}
        )


def follow_weights(config: Any, name: str, generator: Generator, ended: threading.Event) -> None:
    """Gives the generator each newest version, until the run is over. Runs in a thread."""
    with contextlib.suppress(DataPlaneError), connect(config, bootstrap=False) as client:
        reader = WeightReader(client, name)
        while not ended.is_set():
            weights = reader.wait(timeout_s=600.0)
            assert reader.version is not None
            generator.replace_weights(reader.version, weights)


def application(config: dict[str, Any], name: str) -> web.Application:
    """The server as an aiohttp application."""
    run = config["run"]
    generator = Generator(run["seed"], run["answers_per_prompt"])
    plane_config = config["data_plane"].model_copy(update={"role": name})
    server = Server(name, generator)
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    app.router.add_get("/health", server.health)

    async def life(app: web.Application) -> AsyncIterator[None]:
        ended = threading.Event()
        threading.Thread(target=follow_weights, args=(plane_config, name, generator, ended), daemon=True).start()
        async with await connect_async(plane_config, bootstrap=False) as server.plane:
            task = asyncio.create_task(generator.run())
            yield
            ended.set()
            task.cancel()

    app.cleanup_ctx.append(life)
    return app


def main() -> None:
    """Serves on a free port of this host, whose number is printed, until SIGTERM."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)

    async def serve() -> None:
        runner = web.AppRunner(application(read_config(args.config), args.name))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(f"port {runner.addresses[0][1]}", flush=True)
        ended = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, ended.set)
        await ended.wait()
        await runner.cleanup()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
