"""Workers without a model, in this process or on real ranks, and what calls raised. Tests send it there by value."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from dataplane_core import DataPlaneConfig, connect
from dataplane_core.batch import BatchedDataDict
from dataplane_core.middleware import Metrics
from dataplane_integrations import DataPlaneWorkerMixin
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin


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
