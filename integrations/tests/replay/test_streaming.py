"""The streaming consumer: rollouts and training overlap, each row is trained on once, stale rows go."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from dataplane_core import KVBatchMeta
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    BackendUnavailableError,
    ClaimTimeoutError,
    InvalidRequestError,
    LeaseExpiredError,
    OperationTimeoutError,
    Verdict,
)
from dataplane_integrations.replay import StreamingConsumer, _consumer
from dataplane_testkit._timing import Background, eventually

WAIT_S = 60.0
#: Batches that the consumers read ahead.
DEPTH = 0


@pytest.fixture(params=[0, 3], ids="{} ahead".format, autouse=True)
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DEPTH", request.param)


@pytest.fixture
def stream(client: DataPlaneClient) -> DataPlaneClient:
    client.register_partition("replay", ["x"], 12, ["train"])
    return client


def put(client: DataPlaneClient, rows: range, weight_version: int = 0) -> None:
    client.put_samples(
        [f"v{weight_version}_p{row}_g0" for row in rows],
        "replay",
        {"x": torch.tensor(rows).unsqueeze(1)},
        tags=[{"weight_version": weight_version}] * len(rows),
    )


def train_on(consumer: StreamingConsumer) -> list[list[int]]:
    """Trains to the end; the rows of each batch."""
    trained = []
    for batch in consumer:
        with batch:
            trained.append(batch.read()["x"].flatten().tolist())
    return trained


def consumer_of(client: DataPlaneClient, **options: Any) -> StreamingConsumer:
    return StreamingConsumer(
        client, "replay", "train", ["x"], 4, **{"timeout_s": WAIT_S, "lease_s": 60.0, "read_ahead": DEPTH, **options}
    )


def test_batches_are_trained_on_while_rollouts_go_on(stream: DataPlaneClient) -> None:
    trained, in_training = [], threading.Event()

    def roll() -> None:
        put(stream, range(4))
        assert in_training.wait(WAIT_S)  # the further rows are written while the first batch is trained on
        put(stream, range(4, 9))
        put(stream, range(9, 12))

    thread = threading.Thread(target=roll)
    thread.start()
    for batch in consumer_of(stream):
        with batch:
            trained.append(batch.read()["x"].flatten().tolist())
            in_training.set()
            thread.join(WAIT_S)
            batch.check()
    assert trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert stream.list_samples("replay").size == 0


def test_a_step_that_fails_gives_its_rows_back_at_once(stream: DataPlaneClient) -> None:
    put(stream, range(12))
    with pytest.raises(RuntimeError, match="out of memory"), next(iter(consumer_of(stream, lease_s=600.0))):
        raise RuntimeError("out of memory")
    assert train_on(consumer_of(stream)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_lease_outlives_its_time_as_long_as_the_consumer_lives(
    stream: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_consumer, "RENEWED_AFTER", 1 / 40)  # so this machine may stand still for most of a lease
    put(stream, range(12))
    renewed, renew = threading.Semaphore(0), stream.renew

    def counted(meta: KVBatchMeta, *args: Any) -> None:
        renew(meta, *args)
        if "v0_p0_g0" in meta.sample_ids:  # others are read ahead
            renewed.release()

    stream.renew = counted
    batch = next(iter(consumer_of(stream, lease_s=3.0)))
    with batch:
        for _ in range(41):  # in more than the lease
            assert renewed.acquire(timeout=WAIT_S)
        taken = stream.claim_meta("replay", "train", ["x"], 12, blocking=False)
        assert not set(taken.sample_ids) & set(batch.meta.sample_ids)


def test_a_lost_lease_is_said_before_the_optimizer_step_and_nothing_is_cleared(stream: DataPlaneClient) -> None:
    put(stream, range(12))
    batch = next(iter(consumer_of(stream, lease_s=0.3)))
    noticed = threading.Event()
    renew = stream.renew

    def lost(*args: Any) -> None:
        try:
            stream.nack(batch.meta)  # as if it had come too late
            renew(*args)
        finally:
            noticed.set()

    stream.renew = lost
    batch.__enter__()
    assert noticed.wait(WAIT_S)
    batch._thread.join(WAIT_S)
    with pytest.raises(LeaseExpiredError):
        batch.check()
    with pytest.raises(LeaseExpiredError):  # without the check: the ack refuses
        batch.__exit__(None, None, None)
    assert stream.list_samples("replay").size == 12


@pytest.mark.parametrize("error", [OperationTimeoutError("no answer"), RuntimeError("a bug")])
def test_a_lease_that_nobody_renews_any_more_is_said_before_the_optimizer_step(
    stream: DataPlaneClient, error: Exception
) -> None:
    put(stream, range(12))
    failed = threading.Semaphore(0)

    def refuse(*args: Any) -> None:
        failed.release()
        raise error

    stream.renew = refuse
    batch = next(iter(consumer_of(stream, lease_s=0.3)))

    def step() -> None:
        with batch:
            for _ in range(4):  # at a third of a lease each
                assert failed.acquire(timeout=WAIT_S)
            batch.check()

    with pytest.raises(LeaseExpiredError) as info:
        step()
    assert info.value.__cause__ is error
    assert set(info.value.sample_ids) == set(batch.meta.sample_ids)


def test_stale_rows_are_cleared_and_never_trained_on(stream: DataPlaneClient) -> None:
    for version in range(4):
        put(stream, range(3 * version, 3 * version + 3), version)
    trained = []
    consumer = consumer_of(stream, max_staleness=1, weight_version=1)
    for batch in consumer:
        with batch:
            trained.append(batch.read()["x"].flatten().tolist())
        consumer.weight_version += 2
    assert trained == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert consumer.num_stale == 4
    assert stream.list_samples("replay").size == 0


def test_stale_rows_that_another_consumer_trains_on_are_left_to_it(stream: DataPlaneClient) -> None:
    put(stream, range(12))
    held = next(iter(consumer_of(stream)))
    other = consumer_of(stream, max_staleness=0, weight_version=3)
    with held:
        assert other.drop_stale() == 8
        assert held.read()["x"].flatten().tolist() == [0, 1, 2, 3]
    assert stream.list_samples("replay").size == 0


@pytest.mark.parametrize(
    ("versions", "trained", "num_stale"),
    [
        ([0, 1, 1, 1], [[2, 3]], 2),
        ([1, 1, 1, 0], [[0, 1]], 2),
        ([0, 1, 1, 0], [], 4),
        ([1, 1, 2, 1], [[0, 1, 2, 3]], 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("clear", [True, False])
def test_a_group_is_as_old_as_its_oldest_row(
    client: DataPlaneClient, versions: list[int], trained: list[list[int]], num_stale: int, clear: bool
) -> None:
    client.register_partition("replay", ["x"], 4, ["train"], grpo_group_size=2)
    tags = [{"weight_version": version} for version in versions]
    ids = ["p0_g0", "p0_g1", "p1_g0", "p1_g1"]
    client.put_samples(ids, "replay", {"x": torch.arange(4).unsqueeze(1)}, tags=tags)
    consumer = consumer_of(client, max_staleness=0, weight_version=1, clear=clear)
    assert (train_on(consumer), consumer.num_stale) == (trained, num_stale)
    assert client.list_samples("replay").size == (0 if clear else 4)


def test_rows_are_kept_for_further_tasks(client: DataPlaneClient) -> None:
    client.register_partition("replay", ["x"], 4, ["train", "score"])
    put(client, range(4))
    for task in ("train", "score"):
        assert train_on(StreamingConsumer(client, "replay", task, ["x"], 4, clear=False)) == [[0, 1, 2, 3]]
    assert client.check_consumption_status("replay", ["train", "score"])
    assert client.list_samples("replay").size == 4


def test_stale_rows_are_kept_for_further_tasks(client: DataPlaneClient) -> None:
    client.register_partition("replay", ["x"], 8, ["train", "score"])
    for version in range(2):
        put(client, range(4 * version, 4 * version + 4), version)
    consumer = consumer_of(client, max_staleness=0, weight_version=1, clear=False)
    assert train_on(consumer) == [[4, 5, 6, 7]]
    assert consumer.num_stale == 4
    scored = train_on(StreamingConsumer(client, "replay", "score", ["x"], 4, clear=False))
    assert scored == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_that_can_never_be_given_are_named(stream: DataPlaneClient) -> None:
    put(stream, range(11))
    stream.put_samples(["untagged_g0"], "replay", {"x": torch.zeros(1, 1, dtype=torch.int64)})
    with pytest.raises(ClaimTimeoutError, match=r"of the 1 rows held.*'weight_version'.*'untagged_g0'"):
        train_on(consumer_of(stream, max_staleness=1, timeout_s=1.0))


def test_a_group_that_stays_short_ends_the_training_and_is_cleared(client: DataPlaneClient) -> None:
    client.register_partition("replay", ["x"], None, ["train"], grpo_group_size=2)
    ids = [f"p{row // 2}_g{row % 2}" for row in range(7)]
    client.put_samples(ids, "replay", {"x": torch.arange(7).unsqueeze(1)})
    client.finish_partition("replay")
    client.clear_samples(["p2_g1"], "replay")
    assert train_on(consumer_of(client)) == [[0, 1, 2, 3]]
    assert client.list_samples("replay").size == 0


def test_a_consumer_waits_for_a_dead_ones_lease_but_not_without_end(stream: DataPlaneClient) -> None:
    put(stream, range(12))
    dead = stream.claim_meta("replay", "train", ["x"], 4, lease_s=600.0)
    with pytest.raises(ClaimTimeoutError, match=r"none could be claimed within 1 s.* other consumers"):
        train_on(consumer_of(stream, timeout_s=1.0))
    assert stream.list_samples("replay").sample_ids == dead.sample_ids


def test_no_batch_in_time_is_an_error_that_says_so(stream: DataPlaneClient) -> None:
    put(stream, range(3))
    with pytest.raises(ClaimTimeoutError, match="3 of 4 samples were ready"):
        next(iter(consumer_of(stream, timeout_s=0.1)))


def test_without_a_timeout_it_waits_until_nobody_is_left_who_could_put(
    stream: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_consumer, "_LOOK_S", 0.01)
    looks = iter([False, None, True])

    def why(*task: str) -> list[Verdict]:
        is_over = next(looks)
        if is_over is None:
            raise BackendUnavailableError("restarts.")
        return [Verdict(partition_id=task[0], task_name=task[1], state="waits", is_over=is_over)]

    stream.why = why
    put(stream, range(3))
    with pytest.raises(ClaimTimeoutError, match="3 of 4 samples were ready"):
        next(iter(consumer_of(stream, timeout_s=None)))
    assert list(looks) == []


def test_rows_that_come_too_stale_while_it_waits_are_dropped(
    stream: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is full of them takes no others."""
    monkeypatch.setattr(_consumer, "_LOOK_S", 0.01)
    waits = threading.Event()
    stream.why = lambda *task: waits.set() or []
    consumer = consumer_of(stream, timeout_s=None, max_staleness=0, weight_version=1)
    batch = Background(lambda: next(iter(consumer)))
    assert waits.wait(WAIT_S)
    put(stream, range(4))
    eventually(lambda: not stream.list_samples("replay").size, WAIT_S, "the stale rows are dropped")
    put(stream, range(4), 1)
    assert batch.result(WAIT_S).meta.sample_ids == [f"v1_p{row}_g0" for row in range(4)]
    assert consumer.num_stale == 4


def test_without_a_timeout_it_waits_for_what_others_hold(
    stream: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_consumer, "_LOOK_S", 0.01)
    put(stream, range(12))
    held = stream.claim_meta("replay", "train", ["x"], 4, lease_s=600.0)
    looked, describe = threading.Semaphore(0), stream.describe

    def counted(*args: Any, **options: Any) -> Any:
        looked.release()
        return describe(*args, **options)

    stream.describe = counted

    def end() -> None:
        assert looked.acquire(timeout=WAIT_S)
        assert looked.acquire(timeout=WAIT_S)
        stream.nack(held)

    thread = threading.Thread(target=end)
    thread.start()
    assert sorted(train_on(consumer_of(stream, timeout_s=None))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    thread.join()


@pytest.mark.parametrize("options", [{"lease_s": 0.0}, {"max_staleness": -1}])
def test_numbers_that_make_no_sense_are_refused(stream: DataPlaneClient, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="Expected more than 0, and at least 0 or None"):
        consumer_of(stream, **options)
