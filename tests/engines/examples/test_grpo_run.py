"""The GRPO example as a program: whole runs, shortened; recorded, and run again without generation."""

import pytest
from grpo_runs import assert_like, run, write_config

from dataplane_observe import Recording

#: Up to two whole runs, of which the first is the one that tests share.
pytestmark = pytest.mark.timeout(540)


def test_a_run_trains_reports_and_evaluates(in_memory):
    records = in_memory.metrics
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record["path"] == "in-memory"
        assert 0.0 <= record["reward"] <= 1.0
        assert record["answers"] == 32
        assert 32 <= record["tokens"] <= 32 * 6
        assert record["bytes_put"] > 0
        assert record["bytes_get"] > 0
        assert record["grad_norm"] > 0
        assert record["generation_logprob_error"] < 1e-5  # the rollout worker had the newest weights
        assert set(record["seconds"]) == {"weights", "generate", "advantages", "prev", "reference", "train"}
    assert records[0]["kl"] == 0.0  # the policy still is the reference
    assert records[-1]["kl"] > 0.0
    assert len({record["advantages_sha256"] for record in records}) == 4
    assert (in_memory.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert set(in_memory.evaluation) == {"before", "after"}
    out = in_memory.printed
    assert out.count("\nstep ") == 4
    assert "before GRPO" in out
    assert "after GRPO" in out


def test_a_recorded_run_over_shm_store_equals_the_run_in_memory_bit_for_bit(in_memory, recorded):
    assert_like(in_memory, recorded, "shm_store")


def test_a_replay_gives_the_losses_of_the_run_bit_for_bit(recorded, tmp_path, ray_server, python):
    folder = recorded.folder / "recording"
    config = write_config(tmp_path, ray={"address": ray_server})
    replay = run(config, tmp_path / "out", "--replay", str(folder), path="recording", python=python)
    assert "running over recording: " in replay.printed
    assert replay.results == recorded.results
    losses = [each.values["loss"] for each in Recording(folder).records() if each.op == "step"]
    assert losses == [each["loss"] for each in recorded.metrics]
