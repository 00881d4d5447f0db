"""NeMo RL's interface, a worker of it in a Ray actor, and its packed tensors, over the adapter.

See docs/trainers.md and `checkouts.py`.
"""

import json
import os

from checkouts import COMPAT_TESTS, needs_checkout, run_program
from test_nemo_rl import OF_0_8_0, OF_ALL_VERSIONS

pytestmark = needs_checkout("NEMO_RL")

SIGNATURES = """
import json
from nemo_rl.data_plane.interfaces import DataPlaneClient
from test_nemo_rl import signature_of
print(json.dumps({name: signature_of(getattr(DataPlaneClient, name)) for name in DataPlaneClient.__abstractmethods__}))
"""


def test_nemo_rls_interface_is_one_that_our_tests_know():
    printed = run_program("NEMO_RL", "-c", SIGNATURES, paths=[os.environ["NEMO_RL_CHECKOUT"], COMPAT_TESTS])
    theirs = json.loads(printed.splitlines()[-1])
    assert theirs == {name: said for name, said in (OF_ALL_VERSIONS | OF_0_8_0).items() if name in theirs}
    assert set(theirs) >= set(OF_ALL_VERSIONS)


ON_RAY = """
import typing
import ray, torch
from pydantic import BaseModel
from tensordict import TensorDict
from dataplane_compat.nemo_rl import activate

activate()
from nemo_rl.data_plane import DataPlaneConfig, KVBatchMeta, build_data_plane_client
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin

class MasterConfig(BaseModel, extra="allow"):
    data_plane: typing.Optional[DataPlaneConfig] = None

@ray.remote(num_cpus=0)
class Worker(TQWorkerMixin):
    def read(self, meta):
        return type(self._dp_client).__name__, self._dp_client.get_data(meta)["x"].tolist()

@ray.remote(num_cpus=0)
def read_with(client, meta):
    return client.get_data(meta)["x"].tolist()

config = {"backend": "shm_store", "options": {"namespace": "nemo-on-ray"}}
cfg = MasterConfig(data_plane={"enabled": True, "impl": "dataplane", "dataplane": config}).data_plane
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
client = build_data_plane_client(cfg, bootstrap=True)
client.register_partition("train", ["x"], 2, ["train"])
client.put_samples(["a", "b"], "train", TensorDict({"x": torch.arange(2)}, batch_size=[2]))
meta = client.claim_meta("train", "train", ["x"], 2)
worker = Worker.remote()
ray.get(worker.setup_data_plane.remote(cfg=cfg))
assert ray.get(worker.read.remote(meta)) == ("NemoRLDataPlaneClient", [0, 1])
assert ray.get(read_with.remote(client, meta)) == [0, 1]
ray.shutdown()
client.close()
"""


def test_a_worker_of_nemo_rl_on_ray_attaches_through_its_config():
    run_program("NEMO_RL", "-c", ON_RAY)


PACKED = """
import numpy as np, torch
from dataplane_compat.nemo_rl import activate, client_class

activate()
from nemo_rl.data.multimodal_utils import PackedTensor
from nemo_rl.data_plane.column_io import kv_first_write, read_columns
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

config = {"backend": "shm_store", "options": {"namespace": "nemo-packed"}, "allow_pickle": True}
client = client_class()({"enabled": True, "impl": "dataplane", "dataplane": config}, bootstrap=True)
one, two = (PackedTensor(torch.randn(n, 3), 0).enable_deduplication() for n in (2, 1))
shared = [one, one, PackedTensor.empty_rows_like(one, 1), PackedTensor.merge_segments([one, two])]
for sent in PackedTensor([torch.randn(4, 3), None, torch.randn(2, 3), None], 0), PackedTensor.concat(shared):
    rows = np.empty(len(sent), dtype=object)
    rows[:] = [sent.slice([row]) for row in range(len(sent))]
    batch = {"input_ids": torch.ones(4, 3), "input_lengths": torch.tensor([3, 2, 1, 3]), "sample_mask": torch.ones(4)}
    batch = BatchedDataDict(batch | {"pixel_values": rows})
    meta = kv_first_write(batch, sample_ids=list("abcd"), dp_client=client, partition_id="train")
    got = PackedTensor.concat(list(read_columns(client, meta, ["pixel_values"])["pixel_values"]))
    for expected, tensor in zip(vars(sent).pop("tensors"), vars(got).pop("tensors"), strict=True):
        assert expected is tensor is None or torch.equal(expected, tensor)
    assert vars(got) == vars(sent)
    client.clear_samples(None, "train")
client.close()
"""


def test_rows_of_packed_tensors_come_back_with_those_of_text_only():
    run_program("NEMO_RL", "-c", PACKED)
