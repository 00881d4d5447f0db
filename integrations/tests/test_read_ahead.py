"""Portions are read ahead of their turn: the same bits, errors at their own portion, and nothing left running."""

import threading

import pytest
from bits import bits

from dataplane_core.errors import InvalidRequestError, InvalidTypeError, MissingDataError
from dataplane_integrations.trainer.groups import InProcessWorkerGroup
from dataplane_integrations.trainer.policy import DataPlanePolicy

WAIT_S = 30.0
DEPTHS = [0, 1, 2, 9]


@pytest.fixture(autouse=True)
def no_reader_is_left():
    yield
    assert [each.name for each in threading.enumerate() if each.name.startswith("read-ahead")] == []


@pytest.fixture
def portions(write_rows):
    """Three portions of two rows."""
    meta = write_rows([3, 5, 2, 2, 7, 1])
    meta.fields = ["input_ids", "generation_logprobs", "sample_mask"]
    return [meta.slice(start, start + 2) for start in (0, 2, 4)]


@pytest.fixture
def make_worker(toy_worker, client):
    def make():
        worker = toy_worker()
        worker.setup_data_plane(client)
        worker.begin_train_step_presharded(1.0)
        return worker

    return make


@pytest.mark.parametrize("depth", DEPTHS)
def test_portions_are_trained_on_as_if_each_were_a_call_up_to_one_that_is_missing(make_worker, portions, client, depth):
    one_by_one, at_once, worker = make_worker(), make_worker(), make_worker()
    for portion in portions:
        one_by_one.train_microbatch_presharded(portion)
    reads, get_samples, train = [], client.get_samples, at_once.train_microbatch

    def counted(*args):
        reads.append(args)
        return get_samples(*args)

    def train_while_no_more_than_the_depth_is_read(data):
        assert len(reads) <= len(at_once.seen) + 1 + depth
        train(data)

    client.get_samples, at_once.train_microbatch = counted, train_while_no_more_than_the_depth_is_read
    at_once.train_microbatches_presharded(portions, read_ahead=depth)
    assert len(reads) == 3
    expected, found = ([bits(batch) for _, batch in worker.seen] for worker in (one_by_one, at_once))
    assert found == expected
    assert len(found) == 3
    assert at_once.finish_train_step_presharded()["all_mb_metrics"] == {"rows": [2, 2, 2]}
    client.clear_samples(portions[1].sample_ids[:1], "train")
    with pytest.raises(MissingDataError, match=portions[1].sample_ids[0]):
        worker.train_microbatches_presharded(portions, read_ahead=depth)  # the third may be read at this moment
    assert len(worker.seen) == 1
    worker.abort_train_step_presharded()


def test_a_portion_is_read_while_the_one_before_it_is_trained_on(make_worker, portions, client):
    worker = make_worker()
    done = threading.Semaphore(0)
    get_samples, train = client.get_samples, worker.train_microbatch

    def counted(*args):
        rows = get_samples(*args)
        done.release()
        return rows

    def train_after_the_next_read(data):
        reads = 2 if not worker.seen else 1  # the first portion's own, and the next one's
        if len(worker.seen) < 2:
            assert all(done.acquire(timeout=WAIT_S) for _ in range(reads))
        train(data)

    client.get_samples = counted
    worker.train_microbatch = train_after_the_next_read
    worker.train_microbatches_presharded(portions, read_ahead=1)
    assert len(worker.seen) == 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_driver_trains_on_several_portions_in_one_call(toy_worker, client, trainable_rows, depth):
    workers = [toy_worker(0), toy_worker(1)]
    with DataPlanePolicy(InProcessWorkerGroup(workers), client, read_ahead=depth) as policy:
        meta = trainable_rows([3, 5, 2, 2, 7, 1, 4, 4])
        policy.begin_train_step(0.25)
        with pytest.raises(InvalidRequestError, match="shard_meta_for_dp"):
            policy.train_microbatches_from_metas([meta.slice(0, 4), meta.slice(4, 5)])
        assert [worker.seen for worker in workers] == [[], []], "a portion that is refused stops all of them"
        policy.train_microbatches_from_metas([meta.slice(0, 4), meta.slice(4, 8)])
        assert policy.finish_train_step()["all_mb_metrics"] == {"rows": [2, 2, 2, 2]}


def test_a_depth_that_makes_no_sense_is_refused(make_worker, client):
    with pytest.raises(InvalidRequestError, match=r"read_ahead must be .*-1"):
        make_worker().train_microbatches_presharded([], read_ahead=-1)
    with pytest.raises(InvalidTypeError, match="DataPlanePolicy: read_ahead must be an int"):
        DataPlanePolicy(InProcessWorkerGroup([make_worker()]), client, read_ahead=1.5)
