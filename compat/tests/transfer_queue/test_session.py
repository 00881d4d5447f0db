"""Connections: which config a process uses, other processes, checkpoints, and no TransferQueue."""

import asyncio
import threading

import pytest
import torch
from tensordict import TensorDict

import dataplane_compat.transfer_queue as tq
from dataplane_compat.transfer_queue.client import TransferQueueClient
from dataplane_core.errors import ConfigError
from dataplane_core.spec import hookimpl
from dataplane_testkit._timing import STARTS_S, eventually


@pytest.fixture
def closing(monkeypatch):
    yield monkeypatch
    tq.close()


def test_without_a_config_nothing_starts(closing):
    closing.delenv("DATAPLANE_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="DATAPLANE_CONFIG"):
        tq.init()
    with pytest.raises(ConfigError, match="DATAPLANE_CONFIG"):
        tq.init({"backend": {"storage_backend": "SimpleStorage"}})
    with pytest.raises(AssertionError, match=r"tq\.init"):
        tq.get_client()
    for call in (tq.save_checkpoint, tq.load_checkpoint):
        with pytest.raises(RuntimeError, match="not initialized"):
            call("x")
    assert tq.get_metrics_endpoint() is None


def test_a_checkpoint_brings_back_rows_tags_and_what_was_consumed(closing, tmp_path):
    folder = tmp_path / "checkpoint"
    tq.init({"backend": "noop", "controller": {"polling_mode": False}})
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(folder)
    fields = TensorDict({"x": torch.arange(3)}, batch_size=[3])
    tq.kv_batch_put(["a", "b", "c"], "p", fields, [{"n": n} for n in range(3)])
    numbered = tq.get_client().put(fields, partition_id="q").global_indexes
    assert tq.get_client().get_meta(["x"], 2, "p", task_name="t").size == 2
    tq.save_checkpoint(folder, metadata={"global_steps": 7})
    tq.save_checkpoint(folder, metadata={"global_steps": 8})  # replaces the first
    tq.close()
    with pytest.raises(RuntimeError, match="not initialized"):
        tq.load_checkpoint(folder)

    tq.init({"backend": "noop", "controller": {"polling_mode": True}})
    tq.load_checkpoint(folder)
    client = tq.get_client()
    assert TransferQueueClient("later", client.store)._claims.polling_mode, "the settings are those of the run"
    assert tq.kv_list("p") == {"p": {"a": {"n": 0}, "b": {"n": 1}, "c": {"n": 2}}}
    assert tq.kv_batch_get(["c", "a"], "p")["x"].tolist() == [2, 0]
    assert client.get_meta(["x"], 1, "p", task_name="t").custom_meta == [{"n": 2}]
    new = client.put(fields, partition_id="q").global_indexes
    assert not set(new) & set(numbered)


def test_a_checkpoint_that_is_loaded_in_a_running_job_gives_no_number_twice(closing, tmp_path):
    tq.init({"backend": "noop", "controller": {"polling_mode": True}})
    one = tq.get_client()
    other = TransferQueueClient("other", one.store)

    def put(client):
        fields = TensorDict({"x": torch.arange(2)}, batch_size=[2])
        return client.put(fields, partition_id="p").global_indexes

    put(one)
    tq.save_checkpoint(tmp_path)
    put(other)  # it takes a block of numbers after the save
    tq.load_checkpoint(tmp_path)
    put(other)
    put(one)
    put(TransferQueueClient("third", one.store))
    assert len(one.store.list_sample_ids("p")) == 8


class SlowClaims:
    """Middleware whose claims end when they are told to."""

    def __init__(self):
        self.claiming, self.go_on = threading.Event(), threading.Event()

    @hookimpl(wrapper=True)
    def claim(self, request):
        reply = yield
        if request.partition_id == "p":  # not those of numbers for rows
            self.claiming.set()
            self.go_on.wait(60)
        return reply


def cancelled_while_it_claims(slow):
    """A client with two rows, whose `async_get_meta` of them was cancelled, in a loop that has ended."""
    tq.init({"backend": "noop", "middleware": [slow], "controller": {"polling_mode": True}})
    client = tq.get_client()
    rows = client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="p").global_indexes

    async def main():
        task = asyncio.create_task(client.async_get_meta(["x"], 2, "p", task_name="t"))
        while not slow.claiming.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        threading.Timer(0.2, slow.go_on.set).start()  # the loop ends before

    asyncio.run(main())
    return client, rows


@pytest.mark.parametrize("reset", [False, True])
def test_what_a_cancelled_get_meta_was_given_is_given_to_the_next_once(closing, reset):
    client, rows = cancelled_while_it_claims(SlowClaims())
    if reset:  # drops what is kept for the next
        eventually(lambda: client._kept, within_s=STARTS_S)
        client.reset_consumption("p", "t")
    eventually(lambda: client.get_meta(["x"], 2, "p", task_name="t").global_indexes == rows, within_s=STARTS_S)
    assert client.get_meta(["x"], 2, "p", task_name="t").size == 0
