"""Rows without ids, fields that nobody declared, rows that lack a field, groups, registrations, limits of arguments."""

import errno
import logging
import re
import threading

import pytest
import torch

from dataplane_core import KVBatchMeta, connect, connect_async, stream
from dataplane_core.errors import BackendError, ClaimTimeoutError, LeaseExpiredError, MissingDataError
from dataplane_core.spec import new_id, this_process
from dataplane_noop import NoopBackend

pytestmark = pytest.mark.anyio


@pytest.fixture
def client():
    with connect({"backend": "noop"}) as opened:
        opened.register_partition("p", ["x", "reward"], None, ["t"])
        yield opened


@pytest.mark.parametrize("partition_id", ["", None])
def test_an_empty_meta_may_have_no_partition(client, partition_id):
    meta = KVBatchMeta(partition_id, None, [])
    client.ack(meta)
    client.nack(meta)
    client.renew(meta, 60.0)


def test_a_claim_of_a_field_that_nobody_writes_says_so_once_before_it_waits(client, caplog):
    for sample_id in ("a", "b"):
        client.put_samples([sample_id], "p", {"x": [1], "rewrad": [0.5], "text": ["object"]})
        assert client.claim_meta("p", "t", ["x", "reward"], 1, blocking=False).size == 0
    for fields, size in ((["aa"], 0), (["aa"], 0), (["rewards"], 0), (["rewrad"], 1)):
        assert client.claim_meta("p", "t", fields, 1, blocking=False).size == size
    assert [record.message for record in caplog.records] == [
        f"claim_meta('p', 't'): field {said} If it is right, register it."
        for said in (
            "'reward' is not written, and 'rewrad' is, which is not registered.",
            "'aa' is neither registered nor written. Registered: 'x', 'reward'.",
            "'rewards' is neither registered nor written. Did you mean 'reward'?",
        )
    ]


async def test_strict_fields_refuse_unknown_ones():
    async with await connect_async({"backend": "noop", "strict_fields": True}) as opened:
        await opened.register_partition("p", ["x", "reward"], None, ["t"])
        refused = r"'rewrad' is not registered\. Did you mean 'reward'\? Nothing was written"
        with pytest.raises(ValueError, match=refused):
            await opened.put_samples(["a"], "p", {"x": [1], "rewrad": [0.5]})
        with pytest.raises(ValueError, match="'aa' is neither registered nor written"):
            await opened.claim_meta("p", "t", ["aa"], 1)
        assert await opened.list_sample_ids("p") == []
        await opened.register_partition("p", ["later"], None, [], if_exists="keep")
        await opened.put_samples(["a"], "p", {"later": [1]})
        await opened.register_partition("any", [], None, ["t"])
        await opened.put_samples(["a"], "any", {"whatever": [1]})


def test_ids_are_listed_by_the_fields_that_they_have(client):
    client.put_samples(["a", "b", "c"], "p", {"x": torch.arange(3)}, [{"n": 1}, {"n": 2}, {"n": 2}])
    client.put_samples(["a", "c"], "p", {"reward": torch.zeros(2)})
    with pytest.raises(KeyError, match="'b' lacks 'reward'"):
        client.get_samples(client.list_sample_ids("p"), "p", ["reward"])
    assert client.list_sample_ids("p", fields=["reward"]) == ["a", "c"]
    assert client.list_sample_ids("p", {"n": 2}, fields=["x", "reward"]) == ["c"]
    assert client.list_sample_ids("p", fields=["nothing"]) == []


def test_ids_are_listed_while_samples_are_cleared(client, monkeypatch):
    client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    listed = client.list_samples

    def cleared_after(*args):
        found = listed(*args)
        client.clear_samples(["a"], "p")
        return found

    monkeypatch.setattr(client, "list_samples", cleared_after)
    assert client.list_sample_ids("p", fields=["x"]) == ["b"]


def put_eight(client):
    client.put_samples([f"s{i}" for i in range(8)], "p", {"x": torch.arange(8)})


def claim(client, rank=0, **options):
    return client.claim_meta("p", "t", ["x"], 1, rank, timeout_s=5, **options).sample_ids


def test_a_batch_that_is_named_changes_the_next_one_only_if_it_is_that_one(client):
    put_eight(client)
    assert [claim(client) for _ in range(3)] == [["s0"], ["s1"], ["s2"]]
    assert claim(client, batch_index=0) == ["s0"]
    assert claim(client) == ["s3"]
    assert claim(client, batch_index=7) == ["s4"]
    assert claim(client, batch_index=4) == ["s5"]
    assert claim(client) == ["s6"]  # batch 5
    assert claim(client, batch_index=5) == ["s6"]
    assert claim(client) == ["s7"]


def test_a_client_remembers_the_partitions_that_it_used_last(client, monkeypatch):
    put_eight(client)
    monkeypatch.setattr("dataplane_core.client.claims._MOST_COUNTED", 2)
    for step in range(6):
        client.register_partition(f"step-{step}", ["x", "text"], 1, ["t"])
        client.put_samples(["a"], f"step-{step}", {"x": torch.zeros(1), "text": ["b"]})
        assert client.claim_meta(f"step-{step}", "t", ["x"], 1, 0).sample_ids == ["a"]
        assert claim(client) == [f"s{step}"]  # a rank that it goes on counting is not forgotten
    assert len(client._connection.batches) <= 2


# --- groups -----------------------------------------------------------------------------------------------------------

PAIR = ["q0_g0", "q0_g1"]


@pytest.mark.parametrize(
    ("others", "then", "num_left", "said"),
    [
        (["q1_g0"], lambda c: None, 1, "'q1' has 1. Samples in such groups: 1."),
        (["q1_g0", "q2_g0"], lambda c: None, 2, "'q1' has 1, 'q2' has 1. Samples in such groups: 2."),
        (["q1_g0", "q1_g1"], lambda c: c.clear_samples(["q1_g1"], "p"), 1, ""),
        (["q1_g0", "q1_g1"], lambda c: c.reset_consumption("p", "train", ["q1_g0"]), 1, ""),
    ],
    ids=["short", "two short", "one lost", "half given"],
)
def test_a_group_that_stays_short_does_not_keep_a_task_from_its_end(caplog, others, then, num_left, said):
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["x"], None, ["train"], grpo_group_size=2)
        client.put_samples([*PAIR, *others], "p", {"x": [1.0] * (2 + len(others))})
        client.finish_partition("p")
        told = "finish_partition('p'): groups that lack some of their 2 samples are never given: "
        assert caplog.messages == [f"{told}{said}"] * bool(said)
        then(client)
        assert not client.is_finished("p", ["train"])
        assert [batch.meta.sample_ids for batch in stream(client, "p", "train", ["x"], 2)] == [PAIR]
        assert client.is_finished("p", ["train"])
        (verdict,) = client.why("p")
        assert (verdict.state, verdict.backlog) == ("done", num_left)
        assert f"all samples but {num_left}, which are never given" in verdict.text
        assert client.claim_meta("p", "train", ["x"], 2).size == 0


@pytest.mark.parametrize(
    ("tags", "condition", "wrong"),
    [
        ([{"v": 0}, {"v": 1}], (">=", 1), "q0_g0"),
        ([{"v": 1}, {"v": 0}], (">=", 1), "q0_g1"),
        ([{}, {"v": 1}], (">=", 1), "q0_g0"),
        ([{"v": 0}, {"v": 1}], ("any <", 1), None),
        ([{"v": 1}, {}], ("any ==", 1), None),
        ([{"v": 1}, {}], ("any in", [0, 2]), "q0_g1"),
    ],
)
def test_a_filter_holds_for_all_of_a_group_or_any_and_who_does_not_pass_is_named(tags, condition, wrong):
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["x"], None, ["train"], grpo_group_size=2)
        client.put_samples(PAIR, "p", {"x": [1.0, 2.0]}, tags)
        claim = {"timeout_s": 0.0, "tag_filter": {"v": condition}}
        if wrong is None:
            assert client.claim_meta("p", "train", ["x"], 2, **claim).sample_ids == PAIR
            return
        with pytest.raises(ClaimTimeoutError) as caught:
            client.claim_meta("p", "train", ["x"], 2, **claim)
        shortfall = caught.value.shortfall
        assert (shortfall.not_matching, shortfall.newest_tags) == ((wrong,), tags[PAIR.index(wrong)])


# --- registrations ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two():
    """Two clients of one store, of the roles driver and rank."""
    options = {"capacity_bytes": "1 MiB", "namespace": f"test-{new_id()}"}
    config = {"backend": "shm_store", "options": options, "announce_s": None}
    with (
        connect({**config, "role": "driver"}) as driver,
        connect({**config, "role": "rank"}, bootstrap=False) as rank,
    ):
        register(driver)
        driver.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        yield driver, rank


def register(client, **more):
    client.register_partition("p", ["x"], 4, ["train"], **more)


def test_the_log_says_what_a_second_registration_drops(two, caplog):
    driver, rank = two
    driver.claim_meta("p", "train", ["x"], 1)
    register(rank)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    told = "register_partition('p') dropped 2 samples, 1 of them not consumed by 'train': "
    assert record.message.startswith(f"{told}{this_process()} (driver) had registered it ")
    register(rank)  # its own, and empty
    register(driver)  # empty
    driver.put_samples(["a"], "p", {"x": torch.arange(1)})
    register(driver)  # its own
    register(rank, if_exists="keep")
    assert len(caplog.records) == 1


def test_errors_name_who_registered_a_partition_again(two):
    driver, rank = two
    held = driver.claim_meta("p", "train", ["x"], 1, lease_s=60.0)
    read = rank.claim_meta("p", "train", ["x"], 1, lease_s=60.0)
    told = r"\(rank\) registered the partition \d+ s ago\.$"
    register(rank)
    for fails, error in ((driver.ack, LeaseExpiredError), (driver.get_data, MissingDataError)):
        with pytest.raises(error) as caught:
            fails(held)
        assert re.search(told, caught.value.hint)
    with pytest.raises(LeaseExpiredError) as caught:
        rank.ack(read)
    assert "registered" not in caught.value.hint, "it knows what it did itself"
    info = rank.describe("p").info
    assert info.registered_by == f"{this_process()} (rank)"
    register(driver, if_exists="keep")
    assert driver.describe("p").info == info


def test_a_client_is_told_of_a_registration_since_it_was_opened(two):
    _, rank = two
    with pytest.raises(MissingDataError) as caught:
        rank.get_samples(["z"], "p", ["x"])
    told = f"It was never written, or cleared. {this_process()} (driver) registered the partition "
    assert re.fullmatch(rf"{re.escape(told)}\d+ s ago\.", caught.value.hint), "it may have held nothing before"
    with pytest.raises(MissingDataError) as caught:
        rank.get_samples(["a"], "p", ["y"])
    assert "registered" not in caught.value.hint, "the sample is there"


# --- limits -----------------------------------------------------------------------------------------------------------

NO_THREAD = RuntimeError("can't start new thread")


def refuse(*_, **__):
    raise NO_THREAD


@pytest.mark.parametrize(
    ("error", "hint"),
    [(NO_THREAD, "ulimit -u"), (OSError(errno.ENOMEM, "no"), "ulimit -v"), (MemoryError(), "ulimit -v")],
    ids=repr,
)
@pytest.mark.parametrize("where", ["start", "list_partitions"])
def test_what_a_backend_lacks_is_named(monkeypatch, error, hint, where):
    def fail():
        raise error

    fails = {"start": lambda self, **_: fail(), "list_partitions": lambda self, request: fail()}
    monkeypatch.setattr(NoopBackend, where, fails[where])
    with pytest.raises(BackendError, match=hint), connect({"backend": "noop"}) as client:
        client.list_partitions()


def test_a_client_without_an_announcing_thread_works_and_closes(monkeypatch):
    def start_ledger(thread, start=threading.Thread.start):
        (start if thread.name == "dataplane-ledger" else refuse)(thread)

    monkeypatch.setattr(threading.Thread, "start", start_ledger)
    with connect({"backend": "noop"}) as client:
        assert client.list_partitions() == []


async def test_an_asyncio_client_that_gets_no_thread_says_so(monkeypatch):
    client = await connect_async({"backend": "noop"})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendError, match="ulimit -u"):
            await client.list_partitions()
    assert await client.list_partitions() == []
    await client.close()
