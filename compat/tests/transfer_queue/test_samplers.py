"""Samplers choose rows, and what they chose is the same in all processes of a rank."""

import pytest
import torch
from tensordict import TensorDict

from dataplane_compat.transfer_queue._claims import Claims
from dataplane_compat.transfer_queue.client import TransferQueueClient
from dataplane_compat.transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
)
from dataplane_core.errors import BackendUnavailableError, ConfigError


class LastFirst(BaseSampler):
    """A sampler of a user: the newest rows, which stay."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        return ready_indexes[::-1][:batch_size], []


def client(session, sampler):
    """Another process that uses the same store, as far as its sampler is concerned."""
    made = TransferQueueClient("other", session.get_client().store)
    made._claims = Claims(made.store, {"sampler": sampler, "polling_mode": True})
    return made


def fill(session, count, lengths=None):
    data = TensorDict({"x": torch.arange(count)}, batch_size=[count])
    rows = session.get_client().put(data, partition_id="p")
    if lengths:
        rows.update_custom_meta([{"total_lengths": length} for length in lengths])
        session.get_client().set_custom_meta(rows)
    return rows.global_indexes


def ask(one, size, **config):
    task = config.get("task_name", "t")
    return one.get_meta(["x"], size, "p", task_name=task, sampling_config=config or None).global_indexes


def of_rank(one, rank, batch, task="t"):
    """A rank's batch of two rows."""
    return ask(one, 2, dp_rank=rank, batch_index=batch, task_name=task, partition_id="p")


def test_rows_come_in_the_order_of_writing_and_in_groups_also_those_with_keys(tq):
    keys = [f"{number}" for number in (5, 3, 9, 1, 7, 0)]
    tq.kv_batch_put(keys, "p", TensorDict({"x": torch.arange(6)}, batch_size=[6]))
    written = tq.get_client().kv_retrieve_meta(keys, "p").global_indexes
    newest = client(tq, LastFirst())  # whose rows stay
    assert ask(newest, 2, task_name="u") == ask(newest, 2, task_name="u") == written[:-3:-1]
    assert ask(newest, 7, task_name="u") == []
    assert not newest.check_consumption_status("u", "p")
    groups = client(tq, GRPOGroupNSampler(2))
    with pytest.raises(ValueError, match="multiple"):
        ask(groups, 3)
    assert ask(groups, 4) == written[:4]
    assert ask(groups, 4) == []
    tq.kv_clear(keys[:1], "p")  # a group that is not whole any more
    tq.get_client().reset_consumption("p", "t")
    assert ask(client(tq, SeqlenBalancedSampler(1)), 2, dp_rank=0, batch_index=0) == written[1:3]


class OwnRanks(RankAwareSampler):
    """Chooses itself, where the ledger would for its base class."""


@pytest.mark.parametrize("sampler", [RankAwareSampler, OwnRanks])
def test_processes_of_a_rank_get_the_same_rows(tq, sampler):
    rows = fill(tq, 8)
    first, second = client(tq, sampler()), client(tq, sampler())

    assert of_rank(first, 0, 0) == of_rank(second, 0, 0) == rows[:2]
    assert of_rank(second, 1, 0) == of_rank(first, 1, 0) == rows[2:4]
    assert of_rank(first, 0, 1) == rows[4:6]
    assert of_rank(second, 0, 1) == rows[4:6]
    assert of_rank(second, 1, 1) == rows[6:]
    assert of_rank(first, 0, 2) == []
    assert first.check_consumption_status("t", "p")
    second.clear_partition("p")
    again = fill(tq, 2)
    assert of_rank(first, 0, 0) == of_rank(second, 0, 0) == again


@pytest.mark.parametrize(
    ("lengths", "dp_size", "tokens"), [([1, 9, 8, 2], 2, [10, 10]), ([10, 7, 5, 3], 2, [12, 13]), ([5] * 3, 3, [5] * 3)]
)
def test_ranks_get_about_as_many_tokens(tq, lengths, dp_size, tokens):
    rows = fill(tq, len(lengths), lengths)
    arguments = {"dp_size": dp_size, "n_samples_per_prompt": 1}
    ranks = [client(tq, SeqlenBalancedSampler(**arguments)) for _ in range(dp_size)]
    size = len(lengths) // dp_size
    got = [
        ask(one, size, dp_rank=rank, batch_index=0, task_name="t", partition_id="p") for rank, one in enumerate(ranks)
    ]
    assert sorted(row for part in got for row in part) == rows
    assert sorted(sum(lengths[rows.index(row)] for row in part) for part in got) == tokens
    assert ranks[0].check_consumption_status("t", "p")


@pytest.mark.parametrize("refilled", [False, True])
def test_a_choice_that_could_not_be_written_is_none(tq, monkeypatch, refilled):
    rows = fill(tq, 4)
    ranks = [client(tq, SeqlenBalancedSampler(1, 2)) for _ in range(2)]
    store = tq.get_client().store
    put = store.put_samples

    def refuse_plans(sample_ids, partition_id, *columns, **options):
        if partition_id == "~tq:plans":
            raise BackendUnavailableError("the store is away")
        return put(sample_ids, partition_id, *columns, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_samples", refuse_plans)
        with pytest.raises(BackendUnavailableError):
            of_rank(ranks[0], 0, 0)
    if refilled:
        tq.get_client().clear_partition("p")
        rows = fill(tq, 4)
    assert sorted(of_rank(ranks[0], 0, 0) + of_rank(ranks[1], 1, 0)) == rows
    assert ranks[0].check_consumption_status("t", "p")


def test_rows_of_a_process_that_was_killed_after_its_plan_are_in_no_other_batch(tq, monkeypatch):
    rows = fill(tq, 6)
    killed, other = client(tq, GRPOGroupNSampler(1)), client(tq, GRPOGroupNSampler(1))
    store = tq.get_client().store

    class Killed(BaseException):
        pass

    leased = []

    def die(meta):
        leased.append(meta)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store, "ack", die)
        patch.setattr(store, "nack", leased.append)
        with pytest.raises(Killed):
            of_rank(killed, 0, 0)
    for meta in leased:  # as if its leases had ended
        store.nack(meta)
    assert of_rank(other, 0, 1) == rows[2:4]
    assert of_rank(other, 0, 0) == rows[:2]
    assert of_rank(other, 0, 2) == rows[4:]
    assert other.check_consumption_status("t", "p")


def test_a_reset_of_one_task_leaves_the_batches_of_the_others(tq):
    rows = fill(tq, 4)
    first, second = client(tq, GRPOGroupNSampler(1)), client(tq, GRPOGroupNSampler(1))

    assert of_rank(first, 0, 0) == of_rank(first, 0, 0, "u") == rows[:2]
    first.reset_consumption("p", "u")
    assert of_rank(second, 0, 0) == rows[:2]
    assert of_rank(second, 0, 1, "u") == rows[:2]
    first.reset_consumption("p")
    assert of_rank(second, 0, 1) == of_rank(second, 0, 2, "u") == rows[:2]


def test_other_processes_learn_the_sampler(tq):
    client(tq, GRPOGroupNSampler(2))
    fill(tq, 3)
    attached = TransferQueueClient("attached", tq.get_client().store)
    assert len(ask(attached, 2)) == 2
    assert ask(attached, 2) == []
    client(tq, LastFirst())
    with pytest.raises(ConfigError, match="LastFirst"):
        ask(TransferQueueClient("attached", tq.get_client().store), 1)
    client(tq, "SequentialSampler")
