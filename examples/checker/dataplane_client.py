"""The client of this project, over any backend."""

import torch

from dataplane_core import KVBatchMeta, connect
from dataplane_testkit import Shim
from dataplane_testkit.chaos import RULES


class Dataplane(Shim):
    """Holds a backend to the whole contract, with every cell as a tensor of bytes.

    Args:
        tasks: As for `Shim`.
        backend: The entry-point name of the backend. The first process starts what it needs, and the others attach.
        options: The backend's options.
    """

    promises = dict.fromkeys([*RULES, "fenced"], "docs/contract.md")

    def __init__(self, tasks, backend, **options):
        self.tasks, self.known = tasks, set()
        self.client = connect({"backend": backend, "options": options}, bootstrap="auto")

    def on(self, partition):
        if partition not in self.known:
            fields = {field for needed in self.tasks.values() for field in needed}
            self.client.register_partition(partition, sorted(fields), None, list(self.tasks), if_exists="keep")
            self.known.add(partition)
        return self.client

    def put(self, partition, rows):
        cells = {field: [tensor(row[field]) for row in rows.values()] for field in next(iter(rows.values()))}
        self.on(partition).put_samples(list(rows), partition, cells)

    def get(self, partition, samples, fields):
        columns = self.on(partition).get_samples(samples, partition, fields)
        cells = {field: [cell.numpy().tobytes() for cell in columns[field].unbind()] for field in fields}
        return {sample: {field: cells[field][place] for field in fields} for place, sample in enumerate(samples)}

    def claim(self, partition, task, fields, limit, lease_s):
        meta = self.on(partition).claim_meta(partition, task, fields, limit, blocking=False, lease_s=lease_s)
        return meta.sample_ids if lease_s is None else dict(zip(meta.sample_ids, meta.lease_tokens, strict=True))

    def ack(self, partition, task, tokens):
        self.on(partition).ack(KVBatchMeta(partition, task, list(tokens), lease_tokens=list(tokens.values())))

    def list(self, partition):
        return self.on(partition).list_samples(partition).sample_ids

    def clear(self, partition, samples):
        self.on(partition).clear_samples(samples, partition)

    def close(self):
        self.client.close()


def tensor(cell):
    return torch.frombuffer(bytearray(cell), dtype=torch.uint8)
