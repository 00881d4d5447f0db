"""A worker of verl with methods that its decorator bridges to the store."""

import os

import torch
from tensordict import NonTensorData, TensorDict
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register


class Scorer(Worker):
    """Two data-parallel ranks of `tensor_parallel` processes each."""

    def __init__(self, tensor_parallel=1):
        super().__init__()
        dp_rank, tp_rank = divmod(self.rank, tensor_parallel)
        self._register_dispatch_collect_info("actor", dp_rank=dp_rank, is_collect=tp_rank == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data):
        """A value per token, and one per batch."""
        scale = data["temperature"]
        rows = [row.float() * scale for row in data["input_ids"].unbind()]
        log_probs = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict({"log_probs": log_probs, "metrics": NonTensorData({"rank": self.rank})}, batch_size=len(rows))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    async def compute_async(self, data):
        """The same from a coroutine."""
        return TensorDict({"lengths": data["input_ids"].offsets().diff()}, batch_size=len(data))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen_by_process(self):
        """Which module a worker's process uses, and which config."""
        import transfer_queue

        return transfer_queue.kv_list.__module__, os.environ["DATAPLANE_CONFIG"]
