"""Rows that follow from the ids of their samples, in instances whose processes are killed."""

import torch

from dataplane_testkit._timing import eventually as _eventually

STARTS_S = 150.0


def put(client, ids, value=0):
    rows = torch.tensor([[int(each.rpartition("-")[2]) + value] * 50 for each in ids])
    client.put_samples(ids, "p", {"x": rows})


def right(client, ids, value=0):
    found = client.get_samples(ids, "p", ["x"])["x"]
    return found[:, 0].tolist() == [int(each.rpartition("-")[2]) + value for each in ids]


def eventually(holds, what):
    return _eventually(holds, STARTS_S, what)
