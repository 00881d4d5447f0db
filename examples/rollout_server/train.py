"""GRPO with generation servers: this program trains, and asks servers over HTTP for answers.

    python examples/rollout_server/train.py --config examples/rollout_server/config.yaml

It starts the data plane and the servers, and ends them. It does not read the servers' replies: the answers come through
the data plane, as batches of a stream, while later answers are still generated. Writes ``summary.json`` to ``--out``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import aiohttp
import torch
from grpo import Transformer, group_advantages, reward
from torch import Tensor, nn

from dataplane_core import DataPlaneClient, connect, materialize, stream
from dataplane_core.client import StreamBatch
from dataplane_integrations.weights import open_weights, publish_weights
from rollout_server.settings import FIELDS, TASK, partition_of, read_config

_HERE = Path(__file__).resolve().parent
_RETRY_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=_HERE / "config.yaml")
    parser.add_argument("--out", type=Path, default=Path("out/rollout_server"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = read_config(args.config)
    run = config["run"]
    model = Transformer(run["seed"])
    prompts = (_HERE.parent / "prompts.txt").read_text().split()
    held_out, prompts = prompts[: run["eval_prompts"]], prompts[run["eval_prompts"] :]
    before = evaluate(model, held_out)
    with (
        connect(config["data_plane"].model_copy(update={"role": "trainer"})) as client,
        servers_of(args.config, run["servers"]) as servers,
    ):
        start = time.monotonic()
        rewards = train(client, model, prompts, servers, run)
        wall_s = time.monotonic() - start
        health = servers.health()
    summary = {
        "exact_before": before,
        "exact_after": evaluate(model, held_out),
        "reward_of_step": rewards,
        "answers_per_s": round(len(rewards) * run["prompts_per_step"] * run["answers_per_prompt"] / wall_s, 1),
        "servers": health,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"exact on {len(held_out)} prompts not trained on: {before:.2f} before, {summary['exact_after']:.2f} after")
    for each in health:
        print(f"{each['name']}: {each['requests']} requests")
    return 0


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    client: DataPlaneClient, model: Transformer, prompts: list[str], servers: Servers, run: dict[str, Any]
) -> list[float]:
    """Trains the model in place. Returns the mean reward of each step's answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=run["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / run["warmup_steps"]))
    rng = random.Random(run["seed"])
    open_weights(client)
    rewards = []
    asked = 0
    for step in range(run["steps"]):
        publish_weights(client, step, model.state_dict())
        while asked < min(step + run["ahead"] + 1, run["steps"]):
            num_samples = run["prompts_per_step"] * run["answers_per_prompt"]
            client.register_partition(partition_of(asked), FIELDS, num_samples, [TASK], run["answers_per_prompt"])
            servers.ask(asked, rng.sample(prompts, run["prompts_per_step"]))
            asked += 1
        rewards.append(train_step(client, model, optimizer, step, run))
        schedule.step()
        client.clear_samples(None, partition_of(step))
        client.mark_step(step + 1, reward=rewards[-1])
        print(f"step {step + 1:3d} of {run['steps']}: reward {rewards[-1]:.3f}", flush=True)
    return rewards


def train_step(
    client: DataPlaneClient, model: Transformer, optimizer: torch.optim.Optimizer, step: int, run: dict[str, Any]
) -> float:
    """One update, from the answers of a step, of which each batch is worked on as soon as it is there."""
    total, count = 0.0, 0
    batch_size = run["groups_per_batch"] * run["answers_per_prompt"]
    step_size = run["prompts_per_step"] * run["answers_per_prompt"]
    optimizer.zero_grad()
    with stream(
        client, partition_of(step), TASK, FIELDS, batch_size, lease_s=60.0, timeout_s=run["timeout_s"]
    ) as batches:
        for batch in batches:
            loss = loss_of(model, batch, run) * len(batch.meta) / step_size
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(batch.columns["reward"].sum())
            count += len(batch.meta)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total / count


def loss_of(model: Transformer, batch: StreamBatch, run: dict[str, Any]) -> Tensor:
    """The clipped policy loss of whole groups: a mean over answers, of means over their tokens."""
    columns = materialize(batch.columns)
    lengths_n = torch.tensor(batch.meta.sequence_lengths)
    position_s = torch.arange(columns["input_ids"].shape[1])
    prompt_n1, lengths_n1 = columns["prompt_length"].unsqueeze(1), lengths_n.unsqueeze(1)
    mask_ns = ((position_s >= prompt_n1) & (position_s < lengths_n1)).float()
    logprobs_ns = model.token_logprobs({"input_ids": columns["input_ids"], "input_lengths": lengths_n})
    ratio_ns = (logprobs_ns - columns["logprobs"]).exp()
    clipped_ns = ratio_ns.clamp(1.0 - run["clip_ratio"], 1.0 + run["clip_ratio"])
    advantages_n1 = group_advantages(columns["reward"].float(), run["answers_per_prompt"]).unsqueeze(1)
    policy_ns = -torch.minimum(ratio_ns * advantages_n1, clipped_ns * advantages_n1)
    return ((policy_ns * mask_ns).sum(1) / mask_ns.sum(1)).mean()


def evaluate(model: Transformer, prompts: list[str]) -> float:
    """The share of answers that are exact: one to each prompt, drawn as in training."""
    _, answers = model.answer(prompts, seed=0)
    return list(map(reward, prompts, answers)).count(1.0) / len(prompts)


# --- the servers ------------------------------------------------------------------------------------------------------


class Servers:
    """Generation servers, and an event loop in a thread that sends them prompts.

    Args:
        ports: Of the servers, on this host.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self._urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self._run(_session())

    def ask(self, step: int, prompts: Sequence[str]) -> None:
        """Sends the prompts of a step, all at once, to all servers in turns. Does not wait for the answers."""
        for number, prompt in enumerate(prompts):
            body = {"step": step, "id": f"s{step}p{number}", "prompt": prompt}
            asyncio.run_coroutine_threadsafe(self._ask(body, number), self._loop)

    def health(self) -> list[dict[str, Any]]:
        """What the servers that still run say of themselves."""

        async def ask_all() -> list[dict[str, Any]]:
            found = []
            for url in self._urls:
                with contextlib.suppress(aiohttp.ClientError):
                    async with self._session.get(f"{url}/health") as reply:
                        found.append(await reply.json())
            return found

        found: list[dict[str, Any]] = self._run(ask_all())
        return found

    def close(self) -> None:
        """Drops what was not answered."""
        self._run(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _ask(self, body: dict[str, Any], turn: int) -> None:
        """Asks one server after the other until one has put the answers, or the step is over."""
        while not self._session.closed:
            try:
                async with self._session.post(f"{self._urls[turn % len(self._urls)]}/generate", json=body) as reply:
                    if reply.status in (200, 410):
                        return
            except (aiohttp.ClientError, RuntimeError):  # it was killed, or this program ends
                pass
            turn += 1
            await asyncio.sleep(_RETRY_S)

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


@contextlib.contextmanager
def servers_of(config: Path, count: int) -> Iterator[Servers]:
    """Starts servers, and ends them with the ``with``."""
    command = [sys.executable, str(_HERE / "server.py"), "--config", str(config)]
    processes = [
        subprocess.Popen([*command, "--name", f"server-{number}"], stdout=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    try:
        ports = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a server did not start")
            ports.append(int(line.split()[1]))
            print(f"server {len(ports) - 1} on port {ports[-1]}, process {process.pid}", flush=True)
        servers = Servers(ports)
        try:
            yield servers
        finally:
            servers.close()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30.0)
            assert process.stdout is not None
            process.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
