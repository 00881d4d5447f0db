"""A generation server on asyncio. It answers prompts over HTTP, and puts each answer into the data plane.

    python examples/rollout_server/server.py --config examples/rollout_server/config.yaml --name server-0

``POST /generate`` with ``{"step": 3, "id": "p7", "prompt": "2749=", "answer": "3850"}`` generates a group of answers,
puts them, and then replies with them. So an answer that somebody has seen is in the data plane. Many requests are
generated together. All calls of the data plane are made on the event loop, by `AsyncDataPlaneClient`: while one waits
for the store, the server goes on to answer others.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import signal
import statistics
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from aiohttp import web
from grpo.generate import generate
from grpo.task import Problem, decode, encode, reward
from torch import Tensor

from dataplane_core import AsyncDataPlaneClient, connect, connect_async
from dataplane_core.errors import DataPlaneError, UnknownPartitionError
from dataplane_integrations.rollout import mint_sample_ids
from dataplane_integrations.weights import WeightReader
from rollout_server.settings import model_of, partition_of, read_config

#: Requests that are generated together.
_MOST_AT_ONCE = 64
_BEAT_S = 0.005


class Generator:
    """Generates for many requests at once, with the newest weights, in a thread beside the event loop.

    Args:
        seed: Of the model's first weights, and of what is drawn.
        answers: Answers to each prompt.
        max_new_tokens: The most tokens of an answer.
    """

    def __init__(self, seed: int, answers: int, max_new_tokens: int) -> None:
        self.version = -1
        self._model = model_of(seed).eval()
        self._answers = answers
        self._max_new_tokens = max_new_tokens
        self._random = torch.Generator().manual_seed(seed)
        self._requests: asyncio.Queue[tuple[Problem, asyncio.Future[Any]]] = asyncio.Queue()
        self._weights: tuple[int, dict[str, Tensor]] | None = None

    def replace_weights(self, version: int, weights: dict[str, Tensor]) -> None:
        """The next batch is generated with these weights. Any thread may call it."""
        self._weights = version, weights

    async def answer(self, problem: Problem) -> tuple[dict[str, list[Any]], int]:
        """The columns of the answers to a prompt, a row per answer, and the version of the weights that gave them."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._requests.put((problem, done))
        result: tuple[dict[str, list[Any]], int] = await done
        return result

    async def run(self) -> None:
        """Generates until it is cancelled."""
        while True:
            batch = [await self._requests.get()]
            while not self._requests.empty() and len(batch) < _MOST_AT_ONCE:
                batch.append(self._requests.get_nowait())
            try:
                groups = await asyncio.to_thread(self._generate, [problem for problem, _ in batch])
            except Exception as error:
                groups = [error] * len(batch)
            for (_, done), group in zip(batch, groups, strict=True):
                if done.cancelled():
                    continue
                if isinstance(group, Exception):
                    done.set_exception(group)
                else:
                    done.set_result((group, self.version))

    def _generate(self, problems: list[Problem]) -> list[Any]:
        if self._weights is not None:
            (self.version, weights), self._weights = self._weights, None
            self._model.load_state_dict(weights)
        prompts = [encode(problem.prompt) for problem in problems for _ in range(self._answers)]
        found = generate(
            self._model, prompts, max_new_tokens=self._max_new_tokens, temperature=1.0, generator=self._random
        )
        groups = []
        for index, problem in enumerate(problems):
            rows = range(index * self._answers, (index + 1) * self._answers)
            lengths = [int(found.input_lengths[row]) for row in rows]
            ids = [found.input_ids[row, :length].tolist() for row, length in zip(rows, lengths, strict=True)]
            prompt = len(prompts[rows[0]])
            groups.append(
                {
                    "input_ids": ids,
                    "logprobs": [found.logprobs[row, :end].tolist() for row, end in zip(rows, lengths, strict=True)],
                    "prompt_length": [prompt] * self._answers,
                    "reward": [reward(problem, decode(each[prompt:])) for each in ids],
                }
            )
        return groups


class Server:
    """The HTTP handlers."""

    plane: AsyncDataPlaneClient

    def __init__(self, name: str, generator: Generator) -> None:
        self._name = name
        self._generator = generator
        self._num_requests = 0
        self._late_s = collections.deque([0.0, 0.0], maxlen=10_000)

    async def generate(self, request: web.Request) -> web.Response:
        """``POST /generate``: a group of answers, once it is in the data plane."""
        body = await request.json()
        problem = Problem(body["prompt"], body["answer"])
        columns, version = await self._generator.answer(problem)
        ids = mint_sample_ids([body["id"]], len(columns["reward"]))
        told = {"weight_version": version, "server": self._name}
        tags = [{**told, "input_lengths": len(row)} for row in columns["input_ids"]]
        try:
            await self.plane.put_samples(ids, partition_of(body["step"]), columns, tags=tags)
        except UnknownPartitionError:  # the step is over: another server was asked the same, and was faster
            return web.json_response({"error": "the step is over"}, status=410)
        self._num_requests += 1
        answers = [decode(row[columns["prompt_length"][0] :]) for row in columns["input_ids"]]
        return web.json_response({"answers": answers, "weight_version": version})

    async def health(self, request: web.Request) -> web.Response:
        """``GET /health``."""
        return web.json_response(
            {
                "name": self._name,
                "weight_version": self._generator.version,
                "requests": self._num_requests,
                "late_ms_p99": round(1e3 * statistics.quantiles(self._late_s, n=100)[98], 1),
            }
        )

    async def beat(self) -> None:
        """Measures how late the event loop is with what is due."""
        loop = asyncio.get_running_loop()
        while True:
            start = loop.time()
            await asyncio.sleep(_BEAT_S)
            self._late_s.append(loop.time() - start - _BEAT_S)


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
    generator = Generator(run["seed"], run["answers_per_prompt"], run["max_new_tokens"])
    plane_config = config["data_plane"].model_copy(update={"role": name})
    server = Server(name, generator)
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    app.router.add_get("/health", server.health)

    async def life(app: web.Application) -> AsyncIterator[None]:
        ended = threading.Event()
        threading.Thread(target=follow_weights, args=(plane_config, name, generator, ended), daemon=True).start()
        async with await connect_async(plane_config, bootstrap=False) as server.plane:
            tasks = [asyncio.create_task(generator.run()), asyncio.create_task(server.beat())]
            yield
            ended.set()
            for task in tasks:
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
