"""Workers without a model, and what calls raised: ranks get them by value, and import `join_and_run` and `leave`."""

import os
import time
import traceback
from contextlib import suppress

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dataplane_core import DataPlaneConfig, connect
from dataplane_core.batch import BatchedDataDict
from dataplane_core.ledger import commands
from dataplane_core.middleware import Metrics
from dataplane_integrations import DataPlaneWorkerMixin
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin
from dataplane_testkit import backend_of


class ToyWorker(DataPlaneWorkerMixin):
    """Its "logprobs" are known numbers, and it keeps the batches that it was given."""

    def __init__(self, dp_rank=0, tp_rank=0):
        self.coords = {"data_parallel": dp_rank, "tensor_parallel": tp_rank}
        self.seen, self.fail_in = [], None

    def _local_coords(self):
        return self.coords

    def _note(self, what, data):
        if self.fail_in == what:
            raise RuntimeError(f"worker {self.coords} broke in {what}")
        self.seen.append((what, data))

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        self._note("train", data)
        return {
            "global_loss": torch.tensor([float(loss_fn)]),
            "grad_norm": torch.tensor([2.0]),
            "all_mb_metrics": {"rows": [data.size], "rank": [self.coords["data_parallel"]]},
            "arguments": (eval_mode, gbs, mbs),
        }

    def get_logprobs(self, data, micro_batch_size=None):
        self._note("get_logprobs", data)
        return {"logprobs": -data["input_ids"].float()}

    def get_reference_policy_logprobs(self, data, micro_batch_size=None):
        self._note("get_reference_policy_logprobs", data)
        return BatchedDataDict({"reference_logprobs": -2 * data["input_ids"].float()})

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        self.open = []
        self.loss_fn = loss_fn

    def train_microbatch(self, data):
        self._note("train_microbatch", data)
        assert self.open is not None
        self.open.append(data.size)

    def finish_train_step(self):
        rows, self.open = self.open, None
        return {
            "global_loss": torch.tensor([self.loss_fn]),
            "grad_norm": torch.tensor([0.0]),
            "all_mb_metrics": {"rows": rows},
        }

    def abort_train_step(self):
        self.open = None


class MeshWorker(FSDP2DataPlaneMixin, ToyWorker):
    """The same on a rank of a mesh."""


def told(call):
    """What a call raised: its class, that of its cause, and both their texts. Empty if it raised nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, type(error.__cause__).__name__, f"{error}\n{error.__cause__}"
    return "", "", ""


def calls(metrics, operation):
    """How often a client made it."""
    return metrics.snapshot()["operations"].get(operation, {"calls": 0})["calls"]


def lose_payload(client, partition_id, sample_id, field):
    """Deletes a payload behind the ledger's back, as a dead engine does."""
    deadline = time.monotonic() + 60
    located = backend_of(client).call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field]))
    backend_of(client).delete_refs(located.refs, deadline)


def worker_of_rank(shape, columns, lengths):
    """A worker whose process has a store of its own with the same rows as the others': what counts is who asks it."""
    metrics = Metrics()
    client = connect(DataPlaneConfig(backend="noop", middleware=[metrics]))
    client.register_partition("train", list(columns), None, [])
    meta = client.put_samples([f"p{row}_g0" for row in range(len(lengths))], "train", columns)
    meta.sequence_lengths = lengths
    worker = MeshWorker()
    worker.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    worker.setup_data_plane(client)
    return worker, metrics, meta


# --- a rank, in the process of a `Worker` -----------------------------------------------------------------------------


def join_and_run(_, store, group, job):
    """Joins a process group, and calls the function of a job. Returns what it returned, or its error."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, group["world_size"]), **group)
        fn, args = cloudpickle.loads(job)
        answer = fn(group["rank"], *args)
    except BaseException as error:
        error.add_note(f"on rank {group['rank']}:\n{traceback.format_exc()}")
        answer = error
    try:
        return cloudpickle.dumps(answer)
    except Exception as error:
        return cloudpickle.dumps(RuntimeError(f"{answer!r} cannot be sent: {error!r}"))


def leave(_):
    """Leaves the process group."""
    with suppress(Exception):
        dist.destroy_process_group()
