"""Run on the first of two hosts: moves data to the second and back over each backend, and prints what it found.

Usage: crossing.py RAY_ADDRESS ADDRESS_OF_THE_SECOND_HOST URL_OF_A_REDIS BACKEND...

Prints a line of JSON for each backend.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import NonTensorStack, TensorDict

from dataplane_core import connect
from dataplane_testkit import backend_of

NUM_SAMPLES = 96


def columns(seed: int) -> TensorDict:
    """Columns of several kinds, 1.5 MB: scalars, ragged rows (some of length 0), wide and small dtypes, objects."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 700, (NUM_SAMPLES,), generator=generator)
    lengths[::7] = 0
    tokens = [torch.randint(0, 50_000, (int(length),), generator=generator) for length in lengths]
    noise = torch.randint(-(2**31), 2**31 - 1, (NUM_SAMPLES, 2048), generator=generator, dtype=torch.int32)
    return TensorDict(
        {
            "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
            "lengths": lengths,
            "any_bits": noise.view(torch.float32),
            "half": torch.randn(NUM_SAMPLES, 33, generator=generator).to(torch.bfloat16),
            "mask": torch.rand(NUM_SAMPLES, 5, generator=generator) > 0.5,
            "one": torch.randn(NUM_SAMPLES, 1, generator=generator),
            "text": NonTensorStack(*[f"sample {i} of {seed}" for i in range(NUM_SAMPLES)]),
        },
        batch_size=[NUM_SAMPLES],
    )


def same(got: TensorDict, expected: TensorDict) -> bool:
    """Whether all columns are equal, bit for bit."""

    def equal(name: str) -> bool:
        one, other = got.get(name), expected.get(name)
        if not isinstance(one, torch.Tensor):
            return list(one.tolist()) == list(other.tolist())
        if one.is_nested:
            pairs = zip(one.unbind(), other.unbind(), strict=True)
            return all(torch.equal(left, right) for left, right in pairs)
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

    names = list(expected.keys())  # iterating over a TensorDict gives rows
    return set(got.keys()) == set(names) and all(equal(name) for name in names)


def ids(name: str) -> list[str]:
    """Sample ids."""
    return [f"{name}{i}" for i in range(NUM_SAMPLES)]


@ray.remote(num_cpus=1)
def answer(config: dict[str, Any]) -> dict[str, Any]:
    """On the second host: reads what the first has put, and puts rows of its own."""
    with connect(config, bootstrap=False) as client:
        names = list(columns(1).keys())
        read = same(client.get_samples(ids("here"), "p", names), columns(1))
        client.put_samples(ids("there"), "p", columns(2))
        claimed = client.claim_meta("p", "train", ["tokens"], NUM_SAMPLES, timeout_s=60)
    return {"ip": ray.util.get_node_ip_address(), "read": read, "claimed": claimed.size}


def main(ray_address: str, other_ip: str, redis_url: str, *backends: str) -> None:
    """The program."""
    ray.init(address=ray_address, log_to_driver=False, logging_level="ERROR")
    other = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == other_ip)
    for backend in backends:
        print(json.dumps(cross(backend, other, redis_url)), flush=True)


def cross(backend: str, other: str, redis_url: str) -> dict[str, Any]:
    """Moves data to a node and back."""
    options: dict[str, Any] = {"url": redis_url} if backend == "redis_store" else {"num_storage_units": 2}
    if backend == "tq_mooncake":
        options |= {"segment_size_bytes": 32 << 20, "local_buffer_size_bytes": 4 << 20}
    config = {"backend": backend, "options": options, "op_timeout_s": 90}
    units, paths = [], {}
    with connect(config) as client:
        attach = {**config, "options": options if backend == "redis_store" else backend_of(client).attach_options()}
        client.register_partition("p", list(columns(1).keys()), None, ["train"])
        client.put_samples(ids("here"), "p", columns(1))
        placed = answer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(other, soft=False))
        answered = ray.get(placed.remote(attach), timeout=300)
        read = same(client.get_samples(ids("there"), "p", list(columns(2).keys())), columns(2))
        if backend != "redis_store":
            units = [unit.ip for unit in backend_of(client)._engine._instance.units]
        if backend == "tq_simple":
            paths = {each.address.rpartition(":")[0]: each.path for each in client.list_units()}
    return {"backend": backend, "read": read, "answered": answered, "units": units, "paths": paths}


if __name__ == "__main__":
    main(*sys.argv[1:])
