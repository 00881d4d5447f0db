"""`StreamingDataset` in the workers of a DataLoader: each sample once, acked when trained on, nothing lost by kills."""

import os
import signal
import time
import uuid
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from dataplane_core import StreamingDataset, connect
from dataplane_core.errors import ClientClosedError, InvalidRequestError
from dataplane_testkit._timing import eventually

NUM = 24
#: torch warns on a machine with one core.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def config():
    return {"backend": "shm_store", "options": {"namespace": f"load-{uuid.uuid4().hex[:8]}"}}


def _fill(client):
    client.register_partition("p", ["x"], NUM, ["t"])
    rows = torch.nested.nested_tensor([torch.full((i % 5 + 1,), i) for i in range(NUM)], layout=torch.jagged)
    client.put_samples([f"s{i}" for i in range(NUM)], "p", {"x": rows})


def sums(meta, columns):
    return columns["x"].values().sum()


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (0, {}),
        (2, {"multiprocessing_context": "fork"}),
        (2, {"multiprocessing_context": "spawn", "persistent_workers": True, "prefetch_factor": 4}),
    ],
    ids=["no workers", "forked", "spawned"],
)
def test_each_sample_is_trained_on_once_and_acked_then(config, workers, options):
    with connect(config) as client:
        _fill(client)
        dataset = StreamingDataset(config, "p", "t", ["x"], 4, lease_s=6.0)
        loader = dataset.loader(client, workers, **options)
        seen = []
        for batch in loader:
            assert sorted(client.list_consumed("p", "t")) == sorted(seen)  # none that a worker read ahead
            assert [row[0].item() for row in batch.columns["x"].unbind()] == [int(n[1:]) for n in batch.meta.sample_ids]
            seen += batch.meta.sample_ids
            if len(seen) == 8:
                time.sleep(6.5)  # longer than the lease: the workers renew those that wait in the loader
        assert sorted(seen, key=lambda name: int(name[1:])) == [f"s{i}" for i in range(NUM)]
        assert client.check_consumption_status("p", ["t"])
        if options.get("persistent_workers"):  # a second epoch
            client.reset_consumption("p", "t")
            assert sum(batch.meta.size for batch in loader) == NUM
            assert client.check_consumption_status("p", ["t"])


def test_a_loader_of_ones_own_gives_metas_to_ack_and_collates_in_the_worker(config):
    with connect(config) as client:
        _fill(client)
        dataset = StreamingDataset(config, "p", "t", ["x"], 4, collate=sums)
        total = 0
        for batch in DataLoader(dataset, batch_size=None, num_workers=2):
            total += batch.columns
            client.ack(batch.meta)
        assert total == sum(i * (i % 5 + 1) for i in range(NUM))
        assert client.check_consumption_status("p", ["t"])


def test_batches_of_a_loop_that_was_left_come_again(config):
    with connect(config) as client:
        _fill(client)
        dataset = StreamingDataset(config, "p", "t", ["x"], 4, lease_s=6.0)
        for number, _ in enumerate(dataset.loader(client, 2)):
            if number == 1:
                break
        assert len(client.list_consumed("p", "t")) == 4
        state = dataset.state_dict()
        resumed = StreamingDataset(config, "p", "t", ["x"], 4)
        resumed.load_state_dict(state)
        with pytest.raises(InvalidRequestError, match="load_state_dict refused"):
            resumed.load_state_dict({**state, "task_name": "other"})
        seen = [name for batch in resumed.loader(client) for name in batch.meta.sample_ids]
        while not client.check_consumption_status("p", ["t"]):  # leases of batches that were read ahead end later
            seen += [name for batch in resumed.loader(client) for name in batch.meta.sample_ids]
        assert len(seen) == len(set(seen)) == NUM - 4


def slow_in_worker_1(folder, meta, columns):
    """Worker 1 waits until the others are trained on, and worker 0 until worker 1 has a batch."""
    worker = get_worker_info().id
    if worker == 1:
        (folder / "claimed").touch()
    eventually((folder / ("trained" if worker == 1 else "claimed")).exists, within_s=60.0)
    return worker


def test_no_batch_waits_in_the_loader_for_another_one(config, tmp_path):
    with connect(config) as client:
        _fill(client)
        dataset = StreamingDataset(config, "p", "t", ["x"], 8, collate=partial(slow_in_worker_1, tmp_path))
        workers = []
        for batch in dataset.loader(client, 2):
            workers.append(batch.columns)
            if len(workers) == 2:
                (tmp_path / "trained").touch()
        assert workers == [0, 0, 1]
        assert client.check_consumption_status("p", ["t"])


def test_a_client_serves_no_worker(config):
    with connect(config) as client:
        _fill(client)
        dataset = StreamingDataset(client, "p", "t", ["x"], 4)
        with pytest.raises(ClientClosedError, match="used in its fork"):
            next(iter(dataset.loader(client, 1, multiprocessing_context="fork")))
        assert sum(batch.meta.size for batch in dataset.loader(client)) == NUM


TRAINER = """
import sys, time
from dataplane_core import StreamingDataset, connect
namespace, path, most = sys.argv[1:]
config = {"backend": "shm_store", "options": {"namespace": namespace}}
client = connect(config, bootstrap=False)
with open(path, "a") as trained:
    for number, batch in enumerate(StreamingDataset(config, "p", "t", ["x"], 1, lease_s=8.0).loader(client, 2), 1):
        print(*batch.meta.sample_ids, file=trained, flush=True)
        if number == int(most):
            time.sleep(600)  # until it is killed
"""


def test_a_trainer_that_is_killed_and_started_again_trains_on_every_sample(config, tmp_path, python):
    with connect(config) as client:
        _fill(client)
        path = tmp_path / "trained"
        command = ["-c", TRAINER, config["options"]["namespace"], path]
        trainer = python.start(*command, 6, start_new_session=True)
        while not path.exists() or len(path.read_text().split()) < 5:
            time.sleep(0.005)
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
        acked = set(client.list_consumed("p", "t"))
        assert acked <= set(path.read_text().split())  # nothing was acked that was not trained on
        while not client.check_consumption_status("p", ["t"]):  # leases of the killed run end first
            python.run(*command, NUM + 1)
        trained = path.read_text().split()
        assert set(trained) == {f"s{i}" for i in range(NUM)}
        assert len(trained) <= NUM + 1  # only the batch that it was killed on came twice
