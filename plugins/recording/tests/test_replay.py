"""A recorded run happens again: the same batches and rows, and what differs is named."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import InvalidRequestError, MissingDataError, UnknownPartitionError
from dataplane_recording import DifferenceError

FIELDS = ["tokens", "text", "loss"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "recording"


def recorded(folder, payload="all", **config):
    recorder = {"recorder": {"folder": str(folder), "payload": payload}}
    return connect({"backend": "noop", "middleware": [recorder], **config})


def replayed(folder, bootstrap=True, **options):
    return connect({"backend": "recording", "options": {"folder": str(folder), **options}}, bootstrap=bootstrap)


def register(client, **options):
    """Registers the partition "train". Returns the client."""
    client.register_partition("train", FIELDS, **{"num_samples": None, "consumer_tasks": ["trainer"], **options})
    return client


def test_partitions_that_puts_and_claims_open_happen_again(folder):
    def run(client):
        seen = []
        for step in range(2):  # the second time, the partition is another one
            client.put_samples(["a", "b"], "open", {"x": torch.arange(2) + step})
            meta = client.claim_meta("open", "any", ["x"], 2)
            seen.append((meta.sample_ids, client.get_data(meta)["x"].tolist()))
            client.clear_samples(None, "open")
        return seen

    with recorded(folder, open_partitions=True) as client:
        first = run(client)
    config = {"backend": "recording", "options": {"folder": str(folder)}, "open_partitions": True}
    with connect(config, bootstrap=True) as client:
        assert run(client) == first == [(["a", "b"], [0, 1]), (["a", "b"], [1, 2])]


def roll_out(client, step, count=4):
    """The rows of a step, as rollout processes write them."""
    ids = [f"s{step}_{row}" for row in range(count)]
    tokens = [torch.arange(row + 1, dtype=torch.int64) + step for row in range(count)]
    texts = ["a", {"k": 1}, None, "d"][:count]
    tags = [{"step": step, "row": row} for row in range(count)]
    client.put_samples(ids, "train", {"tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged)}, tags=tags)
    client.put_samples(ids, "train", {"text": texts})


def train(client, steps=2, weight=0.5):
    """The trainer's side. Returns the batches that it saw."""
    seen = []
    for step in range(1, steps + 1):
        for _ in range(2):
            meta = client.claim_meta("train", "trainer", ["tokens"], 2, lease_s=60, timeout_s=30)
            rows = client.get_samples(meta.sample_ids, "train", ["tokens", "text"])
            tokens = [row.tolist() for row in rows["tokens"].unbind()]
            seen.append((meta.sample_ids, meta.tags, tokens, rows["text"].tolist()))
            losses = torch.tensor([weight * sum(row) for row in tokens])
            client.put_samples(meta.sample_ids, "train", {"loss": losses})
            client.ack(meta)
        client.mark_step(step, loss=weight)
    return seen


@pytest.fixture
def of_run(folder):
    """What the trainer of a recorded run saw. Its rollouts came in another order than their steps."""
    with register(recorded(folder)) as client:
        roll_out(client, 2)
        roll_out(client, 1)
        return train(client)


def test_a_replay_without_rollouts_gets_the_same_batches_in_the_same_order(folder, of_run):
    with register(replayed(folder)) as client:
        assert train(client) == of_run
        assert client.check_consumption_status("train", ["trainer"])


def test_a_process_that_did_not_register_the_partition_finds_its_samples(folder, of_run):
    ids, tags, tokens, _ = of_run[2]
    with replayed(folder, bootstrap=False) as worker:  # which attaches, as the workers of a trainer do
        rows = worker.get_samples(ids, "train", ["tokens"])
        assert [row.tolist() for row in rows["tokens"].unbind()] == tokens
        assert worker.list_samples("train", {"step": 1}).tags[:2] == tags
        assert list(worker.describe("train").info.fields) == FIELDS
        with pytest.raises(UnknownPartitionError):
            worker.list_samples("other")


def test_registrations_of_a_name_stand_for_those_of_the_run_in_their_order(folder):
    def steps(client, put):
        seen = []
        for step in range(3):
            register(client, num_samples=2)
            if put:
                roll_out(client, 7 * step, count=2)
            meta = client.claim_meta("train", "trainer", ["tokens"], 2, timeout_s=30)
            rows = client.get_samples(meta.sample_ids, "train", ["tokens"])
            seen.append((meta.sample_ids, [row.tolist() for row in rows["tokens"].unbind()]))
            client.clear_samples(None, "train")
        return seen

    with recorded(folder) as client:
        seen = steps(client, put=True)
    with replayed(folder) as client:
        assert steps(client, put=False) == seen
        with pytest.raises(InvalidRequestError, match="registered it 3 times"):
            register(client, num_samples=2)
    with replayed(folder) as worker:
        for ids, _ in seen:  # of each registration in turn
            assert worker.get_samples(ids, "train", ["text"])["text"].tolist() == ["a", {"k": 1}]


def test_ids_that_are_used_again_are_those_of_the_next_registration_once_all_was_read(folder):
    def step(client, value):
        register(client)
        client.put_samples(["a"], "train", {"loss": torch.tensor([value])})

    with recorded(folder) as driver:
        for value in (1.0, 2.0):
            step(driver, value)
            driver.get_samples(["a"], "train", ["loss"])
    with replayed(folder) as worker:
        assert [worker.get_samples(["a"], "train", ["loss"])["loss"].item() for _ in range(2)] == [1.0, 2.0]


def test_a_cell_that_was_overwritten_is_read_as_the_run_read_it(folder):
    with register(recorded(folder)) as client:
        for value in (1.0, 2.0):
            client.put_samples(["a"], "train", {"loss": torch.tensor([value])})
            client.claim_meta("train", "trainer", ["loss"], 1, timeout_s=30)
            client.get_samples(["a"], "train", ["loss"])
            client.clear_samples(["a"], "train")
    with register(replayed(folder)) as client:
        for value in (1.0, 2.0):
            meta = client.claim_meta("train", "trainer", ["loss"], 1, timeout_s=30)
            assert client.get_samples(meta.sample_ids, "train", ["loss"])["loss"].item() == value
            client.clear_samples(["a"], "train")
        assert client.list_sample_ids("train") == []


def test_ranks_get_the_batches_of_the_run_whoever_asks_first(folder):
    def claim(client, rank):
        return client.claim_meta("train", "trainer", ["tokens"], 1, timeout_s=30, dp_rank=rank, dp_size=2)

    with recorded(folder) as client:
        for step in (0, 1):  # the client's first claims of a registration follow those of another one
            register(client, num_samples=4)
            roll_out(client, step)
            given = [[claim(client, rank).sample_ids for _ in range(2)] for rank in range(2)]
    with replayed(folder) as client:
        for _ in range(2):
            register(client, num_samples=4)
            again = {rank: [claim(client, rank).sample_ids for _ in range(2)] for rank in (1, 0)}
        assert [again[0], again[1]] == given
        with pytest.raises(InvalidRequestError, match=r"rank 2\. The run claimed for ranks 0, 1"):
            client.claim_meta("train", "trainer", ["tokens"], 1, timeout_s=30, dp_rank=2, dp_size=3)
        with pytest.raises(InvalidRequestError, match=r"dp_size is 4. The run's claim had 2"):
            client.claim_meta("train", "trainer", ["tokens"], 1, timeout_s=30, dp_rank=1, dp_size=4, batch_index=0)


@pytest.mark.parametrize(("acked", "given"), [(0, [2, 2]), (1, [1, 1, 2])])
def test_rows_that_a_crashed_trainer_did_not_ack_are_given_once(folder, acked, given):
    def claim(client, count):
        return client.claim_meta("train", "trainer", ["tokens"], count, lease_s=60, timeout_s=30)

    def train(client, meta, losses):
        seen = client.get_data(meta, ["text"])["text"].tolist()
        client.put_samples(meta.sample_ids, "train", {"loss": torch.tensor(losses)})
        return seen

    with register(recorded(folder)) as client:
        roll_out(client, 1, count=2)
        crashed = claim(client, 2)
        train(client, crashed, [7.0, 8.0])
        client.ack(crashed.slice(0, acked))
        client.renew(crashed.slice(acked, 2), 0.001)
        client.put_samples(crashed.sample_ids, "train", {"text": ["new", "new"]})
        again = claim(client, 2 - acked)
        train(client, again, [0.5] * again.size)
        client.ack(again)
        roll_out(client, 2, count=2)
        client.ack(claim(client, 2))
        client.finish_partition("train")
    with register(replayed(folder)) as client:
        metas = [claim(client, count) for count in [2, 2 - acked, 2][1 - acked :]]  # before any is acked
        assert [meta.size for meta in metas] == given
        ids = [sample_id for meta in metas for sample_id in meta.sample_ids]
        assert ids == ["s1_0", "s1_1", "s2_0", "s2_1"]
        texts = []
        for meta in metas[:-1]:
            texts += train(client, meta, [7.0 if acked and meta is metas[0] else 0.5] * meta.size)
        assert texts == ["a" if acked else "new", "new"]
        for meta in metas:
            client.ack(meta)
        client.finish_partition("train")
        assert client.is_finished("train", ["trainer"])


@pytest.mark.parametrize("acked", [0, 1])
def test_ranks_that_crashed_lose_what_they_did_not_ack(folder, acked):
    """A batch that all ranks lost is none. Of another one each rank has what it acked, perhaps nothing."""

    def claim(client, rank):
        return client.claim_meta("train", "trainer", ["tokens"], 1, lease_s=60, timeout_s=30, dp_rank=rank, dp_size=2)

    with register(recorded(folder)) as client:
        roll_out(client, 1, count=2)
        crashed = [claim(client, rank) for rank in range(2)]
        for number, meta in enumerate(crashed):
            client.ack(meta) if number < acked else client.renew(meta, 0.001)
        for step, count in enumerate([acked, 2], 2):
            if count:
                roll_out(client, step, count)
            for meta in [claim(client, rank) for rank in range(2)]:
                client.ack(meta)
    with register(replayed(folder)) as client:
        given = [[claim(client, rank).sample_ids for _ in range(2 + acked)] for rank in range(2)]
    of_both = [["s1_0"], ["s1_1"], ["s3_0"]], [[], ["s2_0"], ["s3_1"]]
    assert given == list(of_both if acked else ([["s1_0"], ["s3_0"]], [["s1_1"], ["s3_1"]]))


@pytest.mark.parametrize("payload", ["all", "digests"])
def test_the_first_difference_is_named_with_step_sample_column_and_values(folder, payload):
    with register(recorded(folder, payload)) as client:
        for step in (1, 2):
            client.put_samples([f"s{step}"], "train", {"loss": torch.tensor([0.25 * step])})
            client.mark_step(step)
    with register(replayed(folder)) as client:
        client.put_samples(["s1"], "train", {"loss": torch.tensor([0.25])})
        with pytest.raises(
            DifferenceError, match=r"'loss' of sample 's2' .* after step 1. It is 0.75, and was 0.5"
        ) as e:
            client.put_samples(["s2"], "train", {"loss": torch.tensor([0.75])})
        assert (e.value.step, e.value.sample_id, e.value.field) == (1, "s2", "loss")
        with pytest.raises(DifferenceError, match="float64"):
            client.put_samples(["s2"], "train", {"loss": torch.tensor([0.5], dtype=torch.float64)})


def test_a_difference_may_be_a_warning_and_is_taken(folder, of_run, caplog):
    caplog.set_level(logging.WARNING, "dataplane_recording")
    with register(replayed(folder, on_difference="warn")) as client:
        assert train(client, weight=2.0) == of_run  # another loss on the data of the run
        assert client.get_samples(["s1_3"], "train", ["loss"])["loss"].item() == 2.0 * (1 + 2 + 3 + 4)
    (message,) = [record.message for record in caplog.records]  # of the column, once
    assert "column 'loss' of sample 's2_0' is not what the run put before the end of any step" in message


def test_what_the_run_did_not_put_is_taken_uncompared(folder, of_run):
    with register(replayed(folder)) as client:
        client.put_samples(["s1_0", "new"], "train", {"entropy": torch.tensor([0.5, 0.25])}, tags=[{"k": 1}, {}])
        assert client.get_samples(["new", "s1_0"], "train", ["entropy"])["entropy"].tolist() == [0.25, 0.5]
        assert client.list_samples("train", {"k": 1}).tags == [{"k": 1}]


def test_shared_and_long_cells_are_compared_too(folder):
    shared = torch.ones(1, 40_000).expand(3, -1)
    with register(recorded(folder)) as client:
        client.put_samples(["a", "b", "c"], "train", {"tokens": shared, "text": [[1, 2], [], [3]]})
    with register(replayed(folder)) as client:
        client.put_samples(["c", "a"], "train", {"tokens": shared[:2], "text": [[3], [1, 2]]})
        changed = torch.ones(40_000)
        changed[7] = 3.0
        with pytest.raises(DifferenceError, match=r"Its element 7 is 3.0, and was 1.0\."):
            client.put_samples(["b"], "train", {"tokens": changed[None]})
        assert torch.equal(client.get_samples(["b"], "train", ["tokens"])["tokens"], torch.ones(1, 40_000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"grpo_group_size": 2, "if_exists": "keep"},
            r"grpo_group_size is 2\. The run had None, in registration 1 of it, before the end of",
        ),
        ({"num_samples": 8}, r"num_samples is 8\. The run had None"),
        ({"consumer_tasks": ["trainer", "judge"]}, r"consumer_tasks has 'judge'\. The run had 'trainer'"),
    ],
)
def test_another_registration_is_refused_and_says_what_was_recorded(folder, of_run, options, message):
    with replayed(folder) as client, pytest.raises(InvalidRequestError, match=message):
        register(client, **options)


def test_what_the_run_did_not_do_is_refused_and_says_what_it_did(folder, of_run):
    with replayed(folder) as client:
        with pytest.raises(InvalidRequestError, match="the run had no such partition"):
            client.register_partition("other", FIELDS, None, [])
        register(client)
        with pytest.raises(InvalidRequestError, match=r"batch_size is 3. The run's claim had 2, before the end of any"):
            client.claim_meta("train", "trainer", ["tokens"], 3, timeout_s=30)
        with pytest.raises(
            MissingDataError, match=r"did not put field 'values' of sample 's2_0'. It put 'tokens', 'text'"
        ):
            client.claim_meta("train", "trainer", ["values"], 2, timeout_s=30)
        with pytest.raises(MissingDataError, match=r"did not put field 'values' of sample 's1_0'.* after step 1\."):
            client.get_samples(["s1_0"], "train", ["values"])
        with pytest.raises(MissingDataError, match="'gone' is not in the partition"):
            client.get_samples(["gone"], "train", ["tokens"])
        train(client)
        with pytest.raises(MissingDataError, match=r"claimed 4 batches for this task .* the last one after step 1"):
            client.claim_meta("train", "trainer", ["tokens"], 2, timeout_s=30)


@pytest.mark.parametrize("payload", ["digests", 0.01])
def test_rows_that_were_not_recorded_are_missed_when_they_are_read(folder, payload):
    with register(recorded(folder, payload)) as client:
        client.mark_step(4)
        roll_out(client, 1)
    said = rf"payload '?{payload}'?.* The run put them after step 4\."
    with register(replayed(folder)) as client, pytest.raises(MissingDataError, match=said):
        client.get_samples(["s1_0"], "train", ["tokens"])


def test_a_replay_may_begin_after_a_step(folder, of_run):
    with register(replayed(folder, after_step=1)) as client:
        assert train(client, steps=1) == of_run[2:]
    with pytest.raises(InvalidRequestError, match=r"after_step 7 is refused: the run marked 1, 2\."):
        replayed(folder, after_step=7)


@pytest.mark.parametrize("crashes", [False, True])
def test_a_replay_after_a_step_begins_with_what_the_run_registered_then(folder, crashes):
    """Each step registers the partition anew. One that crashed is made again by another process."""

    def step(client, number, marks=True):
        register(client)
        client.put_samples([f"s{number}"], "train", {"loss": torch.tensor([0.5])})
        meta = client.claim_meta("train", "trainer", ["loss"], 1, lease_s=60, timeout_s=30)
        if marks:
            client.ack(meta)
            client.mark_step(number)
        return meta.sample_ids

    with recorded(folder) as client:
        step(client, 1)
        if crashes:
            step(client, 7, marks=False)
        else:
            step(client, 2)
    if crashes:
        with recorded(folder) as client:
            step(client, 2)
    with replayed(folder) as client:
        step(client, 1)
        with pytest.raises(MissingDataError, match="registered it again after step 1"):
            client.claim_meta("train", "trainer", ["loss"], 1)
    with replayed(folder, after_step=1) as client:
        assert step(client, 2) == ["s2"]


def test_of_the_steps_before_a_replay_only_what_was_left_is_there(folder):
    def step(client, number):
        register(client, if_exists="replace")
        client.put_samples([f"s{number}"], "train", {"loss": torch.tensor([0.5])})
        client.clear_samples(None, "train")
        client.register_partition("kept", ["loss"], None, [], if_exists="keep")
        client.put_samples([f"k{number}"], "kept", {"loss": torch.tensor([float(number)])})
        client.put_samples(["all"], "kept", {"loss": torch.tensor([float(number)])})
        if number > 1:
            client.clear_samples([f"k{number - 1}"], "kept")
        client.mark_step(number)

    with recorded(folder) as client:
        for number in (1, 2, 3):
            step(client, number)
    with replayed(folder, after_step=2) as client:
        client.register_partition("kept", ["loss"], None, [], if_exists="keep")
        assert client.list_sample_ids("kept") == ["all", "k2"]
        step(client, 3)
        assert client.list_sample_ids("kept") == ["all", "k3"]


def test_a_list_has_what_other_processes_of_the_run_put_and_what_this_one_has_put_so_far(folder):
    recorder = {"recorder": {"folder": str(folder), "payload": "all"}}
    config = {"backend": "shm_store", "options": {"namespace": f"listed-{os.getpid()}"}, "middleware": [recorder]}
    with connect(config) as driver, connect(config, bootstrap=False) as rollout:
        register(driver)
        roll_out(rollout, 1, count=2)
        driver.put_samples(["s1_1", "own"], "train", {"loss": torch.tensor([0.5, 0.25])}, tags=[{"seen": 1}, {}])
    with register(replayed(folder)) as client:
        assert client.list_samples("train").tags == [{"step": 1, "row": 0}, {"step": 1, "row": 1}]
        client.put_samples(["s1_1", "own"], "train", {"loss": torch.tensor([0.5, 0.25])}, tags=[{"seen": 1}, {}])
        assert client.list_samples("train").sample_ids == ["s1_0", "s1_1", "own"]
        assert client.list_samples("train", {"seen": 1}).tags == [{"step": 1, "row": 1, "seen": 1}]


def test_a_partition_whose_registration_was_not_recorded_is_refused(folder):
    with connect({"backend": "shm_store"}) as driver:
        register(driver)
        recorder = {"recorder": {"folder": str(folder), "payload": "all"}}
        config = {**driver.config.model_dump(), "middleware": [recorder]}
        with connect(config, bootstrap=False) as client:
            roll_out(client, 1)
    with replayed(folder) as client, pytest.raises(MissingDataError, match="no registration of it"):
        register(client)


def test_a_finished_partition_ends(folder):
    with register(recorded(folder)) as client:
        roll_out(client, 1)
        client.finish_partition("train")
        batches = [client.claim_meta("train", "trainer", ["tokens"], 3, lease_s=60, timeout_s=30) for _ in range(2)]
    with register(replayed(folder)) as client:
        client.finish_partition("train")
        again = [client.claim_meta("train", "trainer", ["tokens"], 3, lease_s=60, timeout_s=30) for _ in range(3)]
        assert [meta.sample_ids for meta in again] == [*(meta.sample_ids for meta in batches), []]
        assert not client.is_finished("train", ["trainer"])
        for meta in again[:2]:
            client.ack(meta)
        assert client.is_finished("train", ["trainer"])
