"""The GRPO example, recorded, and run again without generation: the same losses, and what differs is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Finished, finish, read_metrics, results, start, write_config

from dataplane_core.middleware import Recording

#: A recorded run, which tests share, and one that replays it.
pytestmark = pytest.mark.timeout(540)


@pytest.fixture
def replay(ray_server: str, python: Any) -> Callable[..., tuple[int, str, str]]:
    """Replays a recording to its end."""

    def replay(recording: Path, folder: Path, **sections: dict[str, Any]) -> tuple[int, str, str]:
        config = write_config(folder, ray={"address": ray_server}, **sections)
        return finish(start(config, folder / "out", "--replay", str(recording), path="recording", python=python))

    return replay


def test_a_replay_gives_the_losses_of_the_run_bit_for_bit(
    recorded: Finished, tmp_path: Path, replay: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = replay(recorded.folder / "recording", tmp_path)
    assert (code, err) == (0, "")
    assert "running over recording: " in out
    metrics, records = read_metrics(recorded.folder), Recording(recorded.folder / "recording").records()
    assert results(read_metrics(tmp_path / "out")) == results(metrics)
    assert [each.values["loss"] for each in records if each.op == "step"] == [each["loss"] for each in metrics]


def test_another_learning_rate_is_named_where_it_first_makes_a_difference(
    recorded: Finished, tmp_path: Path, replay: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = replay(recorded.folder / "recording", tmp_path, grpo={"learning_rate": 1e-3})
    assert code == 1
    assert "\nstep 1/4" in out  # its update comes after its loss
    assert "\nstep 2/4" not in out
    assert "column 'prev_logprobs' of sample 's2_p" in err
    assert "is not what the run put after step 1. Its element " in err
