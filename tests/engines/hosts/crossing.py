"""Run on the first of two hosts: moves data to the second and back over each backend, and checks it bit for bit.

Usage: crossing.py RAY_ADDRESS ADDRESS_OF_THE_SECOND_HOST URL_OF_A_REDIS BACKEND...

Prints a line of JSON for each backend: where things were.
"""

import json
import sys

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane_core import connect
from dataplane_testkit import backend_of
from dataplane_testkit._columns import as_objects, check_column, ids, items_of, random_cells

ROWS = 96
FIELDS = ["tokens", "wide", "half", "mask", "text"]


def columns(seed):
    """Rows of several kinds, 1.5 MB: ragged ones, some of length 0, wide and small dtypes, objects."""
    lengths = [0 if row % 7 == 0 else 7 * row for row in range(ROWS)]
    return {
        "tokens": [random_cells(torch.int64, [length], seed) for length in lengths],
        "wide": list(random_cells(torch.float32, [ROWS, 2048], seed)),
        "half": list(random_cells(torch.bfloat16, [ROWS, 33], seed)),
        "mask": list(random_cells(torch.bool, [ROWS, 5], seed)),
        "text": as_objects(*[f"sample {row} of {seed}" for row in range(ROWS)]),
    }


def check(client, prefix, seed):
    """Reads the samples that the other host has put."""
    got, expected = client.get_samples(ids(ROWS, prefix), "p", FIELDS), columns(seed)
    assert items_of(got.get("text")) == items_of(expected.pop("text"))
    for name, rows in expected.items():
        check_column(got.get(name), rows)


@ray.remote(num_cpus=1)
def answer(config):
    """On the second host: reads what the first has put, and puts rows of its own."""
    with connect(config, bootstrap=False) as client:
        check(client, "here", 1)
        client.put_samples(ids(ROWS, "there"), "p", columns(2))
        claimed = client.claim_meta("p", "train", ["tokens"], ROWS, timeout_s=60)
    return {"ip": ray.util.get_node_ip_address(), "claimed": claimed.size}


def cross(backend, other, redis_url):
    """Moves data to a node and back."""
    options = {"url": redis_url} if backend == "redis_store" else {}
    if backend == "tq_mooncake":
        options |= {"num_storage_units": 2, "segment_size_bytes": 32 << 20, "local_buffer_size_bytes": 4 << 20}
    config = {"backend": backend, "options": options, "op_timeout_s": 90}
    units, paths = [], {}
    with connect(config) as client:
        attach = {**config, "options": options if backend == "redis_store" else backend_of(client).attach_options()}
        client.register_partition("p", FIELDS, None, ["train"])
        client.put_samples(ids(ROWS, "here"), "p", columns(1))
        placed = answer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(other, soft=False))
        answered = ray.get(placed.remote(attach), timeout=300)
        check(client, "there", 2)
        if backend == "tq_mooncake":
            units = [segment.listening[0][0] for segment in backend_of(client)._instance.segments]
        if backend == "tq_simple":
            paths = {each.address.rpartition(":")[0]: each.path for each in client.list_units()}
            units = list(paths)
    return {"backend": backend, "answered": answered, "units": units, "paths": paths}


def main(ray_address, other_ip, redis_url, *backends):
    """The program."""
    ray.init(address=ray_address, log_to_driver=False, logging_level="ERROR")
    other = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == other_ip)
    for backend in backends:
        print(json.dumps(cross(backend, other, redis_url)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
