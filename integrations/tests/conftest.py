"""Process groups for the tests: real ranks over gloo, in processes that are reused from test to test."""

import os
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver

import cloudpickle
import pytest
import torch
from layouts import ToyWorker, join_and_run, leave, lose_payload

from dataplane_core import DataPlaneConfig, connect, kv_first_write
from dataplane_core.batch import BatchedDataDict, write_columns
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.middleware import Metrics
from dataplane_core.schema import DP_TRAIN_FIELDS
from dataplane_testkit._workers import Worker

# modules beside this file, which processes of Ray cannot import: what cloudpickle sends of them travels by value
_HELPERS = ("bits", "layouts", "tiny_megatron")


class Ranks:
    """Runs a function on several ranks that form a process group.

    The ranks are forked from a process that has imported, once, what takes long to import.
    """

    def __init__(self, imported):
        forkserver.set_forkserver_preload(imported)
        forkserver.ensure_running()  # a `Worker` would begin it with other modules
        self._workers: list[Worker] = []

    def outcomes(self, world, fn, *args, timeout_s=120.0):
        """Per rank what ``fn(rank, *args)`` returned, or what it raised (AssertionError: the rank died)."""
        for name in {fn.__module__, *_HELPERS} & sys.modules.keys():
            cloudpickle.register_pickle_by_value(sys.modules[name])
        self._workers = [worker for worker in self._workers if worker.alive]
        while len(self._workers) < world:
            self._workers.append(Worker(nullcontext))
            self._workers[-1].wait_ready()
        workers = self._workers[:world]
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(workers):
                group = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=timeout_s)}
                worker.start(join_and_run, os.path.join(folder, "store"), group, cloudpickle.dumps((fn, args)))
            answers = [self._answer(worker, timeout_s + 10) for worker in workers]
            for worker in workers:  # not before the last one is done: it may still be connecting to another
                if worker.alive:
                    worker.run(leave)
        return answers

    def _answer(self, worker, within_s):
        try:
            return cloudpickle.loads(worker.result(within_s))
        except Exception as error:
            if isinstance(error, AssertionError) and not worker.alive:
                return error
            self.close()  # it hangs, or its answer cannot be read here; those of the others would be left over
            raise

    def __call__(self, world, fn, *args, timeout_s=120.0):
        """Per rank what ``fn(rank, *args)`` returned; raises the first exception."""
        outcomes = self.outcomes(world, fn, *args, timeout_s=timeout_s)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def close(self):
        for worker in self._workers:
            worker.kill()
        self._workers = []


@pytest.fixture(scope="session")
def imported_by_ranks():
    """Modules that ranks have from the start."""
    return ["dataplane_integrations.trainer.fsdp2"]


@pytest.fixture(scope="session")
def ranks(imported_by_ranks):
    """``ranks(world, fn, *args)`` runs ``fn(rank, *args)`` on ``world`` ranks."""
    pool = Ranks(imported_by_ranks)
    yield pool
    pool.close()


# --- a worker, its store and its rows ---------------------------------------------------------------------------------


@pytest.fixture
def toy_worker():
    return ToyWorker


@pytest.fixture
def client():
    """A client of the in-process store, with its metrics in ``client.metrics``."""
    metrics = Metrics()
    with connect(DataPlaneConfig(backend="noop", middleware=[metrics])) as opened:
        opened.metrics = metrics
        yield opened


@pytest.fixture
def worker(client):
    """A worker that is attached to the store."""
    made = ToyWorker()
    made.setup_data_plane(client)
    return made


@pytest.fixture
def lose(client):
    """``lose(partition_id, sample_id, field)``: see `lose_payload`."""
    return partial(lose_payload, client)


@pytest.fixture
def no_clears(client, monkeypatch):
    """``with no_clears():`` the store is away for whoever clears rows."""

    def refuse(*_):
        raise BackendUnavailableError("the store is away")

    @contextmanager
    def away():
        with monkeypatch.context() as patch:
            patch.setattr(client, "clear_samples", refuse)
            yield

    return away


def rollout_batch(lengths, first=1):
    """Row i holds the token ``first + i`` as often as its length says."""
    width = max(lengths)
    inside = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    tokens = torch.arange(first, first + len(lengths)).unsqueeze(1)
    return BatchedDataDict(
        {
            "input_ids": torch.where(inside, tokens, 0),
            "input_lengths": torch.tensor(lengths),
            "generation_logprobs": -0.5 * inside,
            "token_mask": inside.float(),
            "sample_mask": torch.ones(len(lengths)),
        }
    )


@pytest.fixture
def make_batch():
    return rollout_batch


@pytest.fixture
def write_rows(client):
    """``write_rows(lengths)`` opens a partition and makes the first write of a rollout."""

    def write(lengths, partition_id="train", **options):
        client.register_partition(partition_id, list(DP_TRAIN_FIELDS), None, ["train"])
        ids = [f"p{i // 2}_g{i % 2}" for i in range(len(lengths))]
        batch = rollout_batch(lengths)
        return kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id=partition_id, **options)

    return write


@pytest.fixture
def trainable_rows(client, write_rows):
    """As ``write_rows``, with the columns that training reads besides those of a rollout; all are 0."""

    def write(lengths):
        zeros = torch.zeros(len(lengths), max(lengths))
        columns = dict.fromkeys(("advantages", "prev_logprobs", "reference_policy_logprobs"), zeros)
        return write_columns(client, write_rows(lengths), columns, token_aligned_fields=columns)

    return write


# --- Ray --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local_ray(ray_address, request):
    """Ray, with this process connected to the one that all files share. Its actors get the file's classes by value."""
    import ray

    sent = [sys.modules[name] for name in {request.module.__name__, *_HELPERS} & sys.modules.keys()]
    for module in sent:
        ray.cloudpickle.register_pickle_by_value(module)
    yield ray
    for module in sent:
        ray.cloudpickle.unregister_pickle_by_value(module)
