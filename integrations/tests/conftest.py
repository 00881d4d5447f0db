"""Process groups for the tests: real ranks over gloo, in processes that are reused from test to test."""

import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import pytest
import torch

from dataplane_core import DataPlaneConfig, connect, kv_first_write
from dataplane_core.batch import BatchedDataDict, write_columns
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.ledger import commands
from dataplane_core.middleware import Metrics
from dataplane_core.schema import DP_TRAIN_FIELDS
from dataplane_testkit import backend_of

sys.path.insert(0, os.path.dirname(__file__))

from layouts import ToyWorker

# modules beside this file, which other processes cannot import: functions of theirs travel by value
_HELPERS = ("bits", "layouts", "tiny_megatron")


def _serve(pipe):
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):  # the test session is over
            return
        fn, args, rank, world, path, timeout_s = cloudpickle.loads(job)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(path, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
            answer = (True, fn(rank, *args))
        except BaseException as error:
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            answer = (False, error)
        try:
            pipe.send_bytes(cloudpickle.dumps(answer))
        except Exception as error:
            pipe.send_bytes(cloudpickle.dumps((False, RuntimeError(f"{answer!r} cannot be sent: {error!r}"))))
        # not before the last rank is done: one may still be connecting to this one
        with suppress(EOFError, ConnectionResetError):
            pipe.recv_bytes()
        with suppress(Exception):
            dist.destroy_process_group()


class Ranks:
    """Runs a function on several ranks that form a process group.

    The ranks are forked from a process that has imported, once, what takes long to import.
    """

    def __init__(self, imported):
        self._context: Any = mp.get_context("forkserver")
        self._context.set_forkserver_preload(imported)
        self._processes: list[tuple[Any, Connection]] = []

    def _ensure(self, count):
        self._processes = [(process, pipe) for process, pipe in self._processes if process.is_alive()]
        while len(self._processes) < count:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._processes.append((process, here))

    def outcomes(self, world, fn, *args, timeout_s=120.0):
        """Per rank what ``fn(rank, *args)`` returned, or the exception that it raised (EOFError: the rank died)."""
        for name in {fn.__module__, *_HELPERS} & sys.modules.keys():
            cloudpickle.register_pickle_by_value(sys.modules[name])
        self._ensure(world)
        with tempfile.TemporaryDirectory() as folder:
            pipes = [pipe for _, pipe in self._processes[:world]]
            for rank, pipe in enumerate(pipes):
                job = (fn, args, rank, world, os.path.join(folder, "store"), timeout_s)
                pipe.send_bytes(cloudpickle.dumps(job))
            answers = {}
            while len(answers) < world:
                ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in answers], timeout=timeout_s + 10)
                if not ready:
                    late = sorted(set(range(world)) - set(answers))
                    self.close()
                    raise AssertionError(f"ranks {late} did not answer; the others: {answers}")
                for pipe in ready:
                    rank = pipes.index(pipe)
                    try:
                        answers[rank] = cloudpickle.loads(pipe.recv_bytes())[1]
                    except (EOFError, ConnectionResetError) as error:
                        self._processes[rank][0].join(10)
                        answers[rank] = error
                    except Exception:  # an answer that cannot be read here; those of the others would be left over
                        self.close()
                        raise
            for pipe in pipes:
                with suppress(OSError):
                    pipe.send_bytes(b"all are done")
        return [answers[rank] for rank in range(world)]

    def __call__(self, world, fn, *args, timeout_s=120.0):
        """Per rank what ``fn(rank, *args)`` returned; raises the first exception."""
        outcomes = self.outcomes(world, fn, *args, timeout_s=timeout_s)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def close(self):
        for process, pipe in self._processes:
            pipe.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []


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
    """``lose(partition_id, sample_id, field)`` deletes a payload behind the ledger's back, as a dead engine does."""

    def delete(partition_id, sample_id, field):
        deadline = time.monotonic() + 60
        located = backend_of(client).call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field]))
        backend_of(client).delete_refs(located.refs, deadline)

    return delete


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
