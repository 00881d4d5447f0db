"""Runs a TransferQueue with two storage units on a Ray cluster, until its standard input ends.

Run:  python transfer_queue_system.py ADDRESS
"""

import sys

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf

ray.init(address=sys.argv[1], namespace="elsewhere", log_to_driver=False, logging_level="ERROR")
options = {"num_data_storage_units": 2, "total_storage_size": 20_000}  # in rows, half of it in each unit
transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": options}}))
transfer_queue.kv_put("theirs", "their partition", {"x": torch.ones(3)})
print("runs", flush=True)
for _asked in sys.stdin:  # for what it holds, as its own client sees it
    print({name: sorted(found) for name, found in transfer_queue.kv_list().items()}, flush=True)
