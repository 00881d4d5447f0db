"""The rollout actor's first write, with ids minted once; and what a run that is started again finds."""

import pickle

import pytest
import torch

from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.schema import DP_TRAIN_FIELDS
from dataplane_integrations.rollout import DataPlaneRolloutMixin, FoundRollouts, mint_sample_ids, missing_groups


@pytest.fixture
def rollout(client):
    actor = DataPlaneRolloutMixin()
    actor.setup_data_plane(client)
    client.register_partition("train", list(DP_TRAIN_FIELDS), None, ["train"])
    return actor


@pytest.mark.parametrize(
    ("uids", "group_size", "message"),
    [(["a", "b", "a"], 2, "uids repeat: 'a'"), (["a", ""], 2, "a uid is empty"), (["a"], 0, "group_size must be at")],
)
def test_ids_that_would_collide_are_refused(uids, group_size, message):
    with pytest.raises(InvalidRequestError, match=message):
        mint_sample_ids(uids, group_size)


def test_everything_goes_out_in_one_put(rollout, client, make_batch):
    batch = make_batch([3, 1])
    batch["text"] = ["a", "b"]
    ids = mint_sample_ids(["p0"], 2)
    receipt = rollout._first_write(
        batch, sample_ids=ids, partition_id="train", tags=[{"reward": 1.0}, {"reward": 0.0}], pad_to_multiple=4
    )
    assert client.metrics.snapshot()["operations"]["put_samples"]["calls"] == 1
    assert receipt.meta.sample_ids == ids
    assert receipt.meta.sequence_lengths == [3, 1]
    assert set(receipt.meta.fields or []) == set(batch)
    assert receipt.carry == {"input_lengths": [3, 1]}
    assert len(pickle.dumps(receipt)) < 2000
    listed = client.list_samples("train")
    assert listed.tags is not None
    assert [tags["reward"] for tags in listed.tags] == [1.0, 0.0]
    assert client.get_samples(ids, "train", ["input_ids"])["input_ids"].layout is torch.jagged


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"sample_ids": ["b_g0"]}, InvalidRequestError, "has 2 rows. Expected 1"),
        ({"carry_fields": ["input_ids"]}, InvalidTypeError, r"'input_ids' has shape \(2, 3\). Expected \(N,\)"),
        ({"carry_fields": ["rewards"]}, InvalidRequestError, "'rewards' is not in the batch"),
    ],
)
def test_a_first_write_that_does_not_fit_writes_nothing(rollout, client, make_batch, options, error, named):
    with pytest.raises(error, match=named):
        rollout._first_write(make_batch([3, 1]), **{"sample_ids": ["b_g0", "b_g1"], "partition_id": "train", **options})
    assert client.list_samples("train").size == 0


# --- what a run that is started again finds ---------------------------------------------------------------------------


def test_a_prompt_is_missing_until_all_its_generations_are_committed(client):
    uids = ["p2", "p0", "p1"]
    assert missing_groups(client, "step-7", uids, 2) == uids
    client.register_partition("step-7", ["x"], None, ["train"], grpo_group_size=2)
    assert missing_groups(client, "step-7", uids, 2) == uids
    client.put_samples(["p1_g0", "p2_g0", "p2_g1", "p9_g0", "p9_g1"], "step-7", {"x": [[1], [2], [3], [4], [5]]})
    assert missing_groups(client, "step-7", uids, 2) == ["p0", "p1"]
    client.clear_samples(["p2_g1"], "step-7")
    assert missing_groups(client, "step-7", uids, 2) == uids
    assert missing_groups(client, "step-7", [], 2) == []
    with pytest.raises(InvalidRequestError, match="uids repeat"):
        missing_groups(client, "step-7", ["p0", "p0"], 2)


def test_the_share_is_that_of_all_starts(tmp_path):
    path = tmp_path / "found.jsonl"
    assert str(FoundRollouts(path)) == "no step was interrupted"
    FoundRollouts(path).add(step=1, wanted=2400, found=2100)
    FoundRollouts(path).add(step=2, wanted=2400, found=2012)
    assert str(FoundRollouts(path)) == (
        "4,112 of 4,800 rollouts of interrupted steps were found committed: 86 % of generation saved"
    )
