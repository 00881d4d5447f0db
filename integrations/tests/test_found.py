"""What a run that is started again finds in the store."""

from __future__ import annotations

import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.rollout import FoundRollouts, missing_groups


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
