"""TransferQueue's own client with SimpleStorage, on a Ray that runs."""

from contextlib import nullcontext, suppress
from functools import partial

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from dataplane_testkit import Disturbance, Shim

CONTROLLER, UNIT = ("TransferQueueController", "transfer_queue"), ("TransferQueueStorageUnit#0",)


class TransferQueue(Shim):
    promises = dict.fromkeys(
        ("committed", "bits", "written", "latest", "cleared"), "insert, update, retrieve and remove by key (README)"
    ) | {"given once": "each sample is consumed exactly once (SequentialSampler, the default)"}

    def __init__(self, tasks, ray_address="auto"):
        ray.init(address=ray_address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        self.owner = CONTROLLER[0] not in [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        tq.init({"controller": {"polling_mode": True}})

    def put(self, partition, rows):
        columns = {}
        for name in next(iter(rows.values())):
            cells = [torch.frombuffer(bytearray(row[name]), dtype=torch.uint8) for row in rows.values()]
            columns[name] = torch.nested.as_nested_tensor(cells, layout=torch.jagged)
        tq.kv_batch_put(list(rows), partition, TensorDict(columns, batch_size=[len(rows)]))

    def get(self, partition, samples, fields):
        found = {}
        for sample in samples:  # one by one: a read of several leaves out those that are not there
            with suppress(ValueError):  # the key, or one of the fields, is not there
                row = tq.kv_batch_get([sample], partition, list(fields))
                found[sample] = {name: cells.unbind()[0].numpy().tobytes() for name, cells in row.items()}
        return found

    def claim(self, partition, task, fields, limit, lease_s):
        client, given = tq.get_client(), []
        while len(given) < limit and (meta := client.get_meta(list(fields), 1, partition, "fetch", task)).size:
            given += client.kv_retrieve_keys(meta.global_indexes, partition)
        return given

    def list(self, partition):
        return list(tq.kv_list(partition).get(partition, {}))

    def clear(self, partition, samples):
        tq.kv_clear(list(samples), partition)

    def disturbances(self):
        actors = {who[0]: ray.get_actor(*who) for who in (CONTROLLER, UNIT)}
        kill = {f"kill {name}": partial(ray.kill, actor) for name, actor in actors.items()}
        return {name: Disturbance(lambda act=act: nullcontext(act()), lasts=False) for name, act in kill.items()}

    def close(self):
        if self.owner:  # in another process it would end the queue for all
            tq.close()
