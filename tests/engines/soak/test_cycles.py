"""Hundreds of cycles of put, claim, ack and clear leave memory, keys, descriptors and threads as they were."""

import gc
import threading
import time
import uuid

import psutil
import pytest
import torch
from tiers import in_long

from dataplane_core import connect
from dataplane_testkit import backend_of

CYCLES = 400
#: What memory may grow. Cycles that left their payload behind would add 6.4 MB.
ALLOWED_BYTES = 4_000_000
IDS = [f"s{number}" for number in range(8)]


def cycle(client, count):
    """Cycles with 16 kB each."""
    for _ in range(count):
        client.put_samples(IDS, "p", {"x": torch.zeros(8, 500)}, tags=[{"n": 1}] * 8)
        meta = client.claim_meta("p", "t", ["x"], 8, lease_s=60.0)
        assert client.get_samples(meta.sample_ids, "p", ["x"])["x"].shape == (8, 500)
        client.ack(meta)
        client.clear_samples(meta.sample_ids, "p")


def seen(client, store):
    """What must not grow."""
    gc.collect()
    here, backend = psutil.Process(), backend_of(client)
    found = {"threads": threading.active_count(), "descriptors": here.num_fds()}
    found["bytes here"] = here.memory_info().rss
    for number, each in enumerate(store):
        found[f"bytes of {each.name()} {number}"] = each.memory_info().rss
        found[f"descriptors of {each.name()} {number}"] = each.num_fds()
    described = client.describe("p")
    found |= {"samples": described.num_samples, "held bytes": described.held_bytes}
    if hasattr(backend, "statistics"):
        found["extents"] = backend.statistics(time.monotonic() + 60.0).num_extents
    if client.backend_name == "redis_store":
        keys = backend._connected().command("look", time.monotonic() + 60.0, b"", b"KEYS", b"*")
        found["keys"] = len(keys)
    return found


@pytest.mark.parametrize("name", ["noop", "shm_store", "redis_store", *in_long("tq_simple", "tq_mooncake")])
def test_cycles_leave_nothing_behind(name, request, monkeypatch):
    options = {"server": "private"} if name == "redis_store" else {}
    if name in ("shm_store", "redis_store"):
        options["namespace"] = f"cycles-{uuid.uuid4().hex[:12]}"
    if name.startswith("tq_"):
        options |= {"instance": f"cycles-{name[3:]}", "ray_address": request.getfixturevalue("ray_address")}
    if name == "tq_mooncake":
        monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "169.254.7.7")  # as the processes of the shared Ray
        options |= {"segment_size_bytes": 16 << 20, "local_buffer_size_bytes": 4 << 20, "master_start_s": 85}
    before = set(psutil.Process().children(recursive=True))
    config = {"backend": name, "options": options, "announce_s": None, "op_timeout_s": 90.0}
    with connect(config) as client:
        store = [each for each in psutil.Process().children(recursive=True) if each not in before]
        store = [each for each in store if name in ("shm_store", "redis_store") and each.name() != "sh"]
        client.register_partition("p", ["x"], None, ["t"])
        cycle(client, CYCLES // 4)
        first = seen(client, store)
        cycle(client, CYCLES)
        last = seen(client, store)
        for what, value in first.items():
            allowed = ALLOWED_BYTES if what.startswith("bytes") else 2 if "descriptors" in what else 0
            assert last[what] <= value + allowed, f"{what}: {value} after {CYCLES // 4} cycles, then {last[what]}"
