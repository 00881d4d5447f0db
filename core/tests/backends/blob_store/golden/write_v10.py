"""Writes ``v10.json``: a journal with every op and a snapshot, as version 10 of the records has them.

Run it only with the core that made version 10: the file shows that later ones still read it. The other files were
written so, each by the core that made its version.
"""

import base64
import json
import os
import socket
import sys
from pathlib import Path

import torch
from tensordict import NonTensorStack

sys.path.insert(0, str(Path(__file__).parents[1]))

from blob_stores import Clock, journaled, open_client

from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec
from dataplane_testkit import backend_of

_INT64 = FieldSpec.of_cells(torch.int64, ())


class Untrimmed(journaled()):
    """Keeps what a trim would drop, so that a replay of all can be compared with the snapshot."""

    def trim(self, before_seq):
        pass


def fill(client):
    clock = Clock(client)
    client.register_partition("p", ["x"], 100, ["t", "u"], 2, {"word": ["a", "b"]}, followers=["u"])
    client.register_partition("q", ["y"], None, ["t"])
    ids = ["k_g0", "k_g1", "m_g0", "m_g1"]
    tags = [{"n": i, "f": 0.5, "s": "ü", "b": True, "none": None} for i in range(4)]
    client.put_samples(ids, "p", {"x": torch.arange(4), "word": NonTensorStack("a", "b", "a", "b")}, tags=tags)
    client.put_samples(["k_g0"], "p", {"z": torch.ones(1, 3)})
    client.put_samples(["k_g0"], "p", {"z": torch.zeros(1, 3)})  # what it replaces is collected
    client.put_samples(["k_g0", "k_g1"], "p", tags=[{"late": 1}] * 2)
    client.ack(client.claim_meta("p", "t", ["x"], 2, lease_s=10.0))
    client.nack(client.claim_meta("p", "t", ["x"], 2, lease_s=10.0))
    client.renew(client.claim_meta("p", "t", ["x"], 2, lease_s=10.0), 5.0)
    clock.now += 7.0
    client.claim_meta("p", "t", ["x"], 2, lease_s=10.0, tag_filter={"n": (">=", 2)})
    client.claim_meta("p", "u", ["z"], 2, blocking=False)
    client.put_samples(["gone"], "q", {"y": torch.zeros(1)})
    client.clear_samples(["gone"], "q")
    client.clear_samples(None, "q")
    deadline = clock.now + 1e9
    begin = ["p", ["v_g0"], {}, [], None, None]
    backend_of(client).call_ledger(deadline, commands.WaitForRoom("b0" * 16, 8, wait_s=20.0))
    backend_of(client).call_ledger(deadline, commands.BeginPut(*begin, write_id=17, ticket="b0" * 16, ttl_s=30.0))
    backend_of(client).call_ledger(deadline, commands.BeginPut(*begin, write_id=1 << 127, ticket=None, ttl_s=30.0))
    backend_of(client).call_ledger(deadline, commands.AbortPut(17))
    client.register_partition("p", ["late"], None, ["v"], grpo_group_size=2, if_exists="keep")
    client.reset_consumption("p", "v")
    client.register_partition("ranks", ["x"], None, ["t"])
    client.put_samples(["a", "b", "c"], "ranks", {"x": torch.arange(3)})
    client.claim_meta("ranks", "t", ["x"], 1, 0, sampler="balanced", dp_size=2, lease_s=10.0)
    client.clear_samples(["c"], "ranks")
    client.register_partition("anew", ["x"], None, ["t"])
    for _ in range(3):  # three batches with the sample, each time written anew
        client.put_samples(["a"], "anew", {"x": torch.arange(1)})
        client.claim_meta("anew", "t", ["x"], 1, 0)
        client.clear_samples(["a"], "anew")
    client.put_samples(["a"], "anew", {"x": torch.arange(1)})
    client.register_partition("shared", ["x", "y"], None, ["t"])
    write = commands.Write(["y"], [100, 200], [0, 1, 0])  # two samples share a row
    shared = ["shared", ["a", "b", "c"], {"x": _INT64, "y": _INT64}, [commands.Write(["x"], [8, 8, 8]), write]]
    put = commands.BeginPut(*shared, write_id=1 << 100, ttl_s=30.0)
    backend_of(client).call_ledger(deadline, commands.CommitPut(backend_of(client).call_ledger(deadline, put)))
    done = commands.PutTags("p", ["k_g0"], [{"n": 0}], request_id="d0" * 16, left_s=60.0)
    backend_of(client).call_ledger(deadline, done)


def main():
    os.getpid, socket.gethostname = (lambda: 4711), (lambda: "host-a")  # who claims
    with open_client(Untrimmed) as client:
        fill(client)
        backend_of(client)._shortener._tail_bytes = 1
        client.put_samples(["k_g0"], "p", tags=[{"late": 2}])
        backend_of(client)._shortener._tail_bytes = 1 << 30
        client.put_samples(["k_g1"], "p", tags=[{"late": 3}])
        blobs = {key: base64.b64encode(data).decode() for key, data in backend_of(client).blobs.items()}
        records = [base64.b64encode(Untrimmed.journal[seq]).decode() for seq in sorted(Untrimmed.journal)]
    text = json.dumps({"records": records, "blobs": blobs}, indent=1)
    Path(__file__).with_name("v10.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
