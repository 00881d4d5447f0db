"""A process of a run on a durable store: ``durable_roles.py ROLE CONFIG FILE``.

It writes into the file what it was promised, and goes on until it is killed.
"""

import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from itertools import count

import torch

from dataplane_core import connect
from dataplane_core.errors import DataPlaneError

PARTITION = "train"
#: Samples that a check leaves to the next round, at most: with more, each round would take longer than the one before.
MOST = 500


def content(sample_id):
    """What the row of a sample holds: its length and its numbers follow from its id."""
    draw = random.Random(sample_id)
    return torch.full((draw.choice([1, 50, 3000]),), draw.randrange(1 << 30))


def own(client, note):
    client.register_partition(PARTITION, ["x"], None, ["trainer"], if_exists="keep")
    note("ready")
    return lambda: time.sleep(0.05)


def write(client, note):
    numbers = count()

    def put():
        ids = [f"{os.getpid()}-{time.time_ns()}-{next(numbers)}" for _ in range(random.randint(1, 8))]
        client.put_samples(ids, PARTITION, {"x": [content(each) for each in ids]})
        note("put", *ids)

    return put


def consume(client, note):
    def take():
        meta = client.claim_meta(PARTITION, "trainer", ["x"], 8, blocking=False, lease_s=60.0)
        if not meta.sample_ids:
            return
        rows = client.get_samples(meta.sample_ids, PARTITION, ["x"])["x"]
        note("got", *meta.sample_ids)
        for each, row in zip(meta.sample_ids, rows, strict=True):
            if not torch.equal(row, content(each)):
                note("wrong", each)
        note("acking", *meta.sample_ids)
        client.ack(meta)
        note("acked", *meta.sample_ids)
        if random.random() < 0.5:
            note("clearing", *meta.sample_ids)
            client.clear_samples(meta.sample_ids, PARTITION)

    return take


def notes_in(folder):
    """Word -> how often each sample was noted with it."""
    found = defaultdict(Counter)
    for path in folder.glob("*.notes"):
        for line in path.read_text().splitlines():
            word, *ids = line.split()
            found[word].update(ids)
    return found


def check(config, notes):
    put, acked, acking, clearing = (notes[word] for word in ("put", "acked", "acking", "clearing"))
    assert not notes["wrong"]
    assert max(acked.values(), default=1) == 1, "an acked sample was given again"
    with connect(config) as client:
        there = client.list_samples(PARTITION).sample_ids
        lost = put.keys() - set(there) - clearing.keys()
        assert not lost, f"committed samples are gone: {sorted(lost)[:5]}"
        rows = client.get_samples(there, PARTITION, ["x"])["x"] if there else []
        for each, row in zip(there, rows, strict=True):
            assert torch.equal(row, content(each)), each
        claimed = client.claim_meta(PARTITION, "trainer", ["x"], len(there) + 1, blocking=False, lease_s=600.0)
        again = set(claimed.sample_ids)
        assert not again & acked.keys(), "an acked sample is given again"
        assert put.keys() & set(there) <= again | acking.keys(), "a sample that was not acked is not given again"
        if len(again) > MOST:
            client.ack(claimed)
            acked.update(again)
        elif again:
            client.nack(claimed)
        done = sorted(set(there) & acked.keys())  # else they would fill the store
        client.clear_samples(done, PARTITION)
        clearing.update(done)


def act(role, config, path):
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(*words):
        os.write(file, (" ".join(words) + "\n").encode())  # one write: whole, also if the process is killed

    client = connect(config, bootstrap=role == "own")
    step = {"own": own, "write": write, "consume": consume}[role](client, note)
    while True:
        try:
            step()
        except DataPlaneError:  # the ledger's process was killed a moment before this one
            time.sleep(0.05)


if __name__ == "__main__":
    act(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
