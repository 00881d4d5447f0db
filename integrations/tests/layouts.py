"""Workers of real ranks without a model, and what their calls raised. Tests send them there by value."""

from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from dataplane_core import DataPlaneConfig, connect
from dataplane_core.middleware import Metrics
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin


class TokenWorker(FSDP2DataPlaneMixin):
    """Without a model: its logprobs are the tokens below 0, and it keeps the tokens of its portions."""

    def get_logprobs(self, data, micro_batch_size=None):
        return {"logprobs": -data["input_ids"].float()}

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        self.seen: list[Any] = []

    def train_microbatch(self, data):
        self.seen.append(data["input_ids"].tolist())

    def finish_train_step(self):
        return {}

    def abort_train_step(self): ...


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
    worker = TokenWorker()
    worker.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    worker.setup_data_plane(client)
    return worker, metrics, meta
