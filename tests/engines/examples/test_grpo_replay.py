"""The GRPO example, recorded, and run again without generation: the same losses, and what differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Finished, finish, run, start, write_config

from dataplane_core.middleware import Recording

#: A recorded run, which tests share, and one that replays it.
pytestmark = pytest.mark.timeout(540)


def test_a_replay_gives_the_losses_of_the_run_bit_for_bit(
    recorded: Finished, tmp_path: Path, ray_server: str, python: Any
) -> None:
    folder = recorded.folder / "recording"
    config = write_config(tmp_path, ray={"address": ray_server})
    replay = run(config, tmp_path / "out", "--replay", str(folder), path="recording", python=python)
    assert "running over recording: " in replay.printed
    assert replay.results == recorded.results
    losses = [each.values["loss"] for each in Recording(folder).records() if each.op == "step"]
    assert losses == [each["loss"] for each in recorded.metrics]


def test_another_learning_rate_is_named_where_it_first_makes_a_difference(
    recorded: Finished, tmp_path: Path, ray_server: str, python: Any
) -> None:
    config = write_config(tmp_path, ray={"address": ray_server}, grpo={"learning_rate": 1e-3})
    options = ("--replay", str(recorded.folder / "recording"))
    code, out, err = finish(start(config, tmp_path / "out", *options, path="recording", python=python))
    assert code == 1
    assert "\nstep 1/4" in out  # its update comes after its loss
    assert "\nstep 2/4" not in out
    assert "column 'prev_logprobs' of sample 's2_p" in err
    assert "is not what the run put after step 1. Its element " in err
