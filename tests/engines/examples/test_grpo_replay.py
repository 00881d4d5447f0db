"""The GRPO example, recorded, and run again without generation: the same losses, and what differs is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo.train import main
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


def test_a_flipped_byte_is_named_with_the_step_whose_rows_it_changed(
    recorded: Finished, tmp_path: Path, replay: Callable[..., tuple[int, str, str]]
) -> None:
    recording = tmp_path / "recording"
    recording.mkdir()
    for file in (recorded.folder / "recording").iterdir():
        (recording / file.name).write_bytes(file.read_bytes())
    put = next(each for each in Recording(recording).records() if each.ids[:1] == ["s3_p0_g0"])
    assert put.block is not None
    rows = recording / f"{put.segment}.rows"
    data = bytearray(rows.read_bytes())
    data[sum(put.block[:2]) - 1] ^= 1
    rows.write_bytes(data)
    code, out, err = replay(recording, tmp_path)
    assert code == 1
    assert "\nstep 2/4" in out
    assert f"segment {put.segment} in '{recording}' are not as they were written. The run put them after step 2." in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--in-memory", "--record"], "a recording is made, and replayed, by the data plane. Leave out --in-memory."),
        (["--mode", "async", "--replay", "gone"], "--replay is for synchronous runs from their start"),
    ],
)
def test_what_cannot_be_recorded_or_replayed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["--config", str(write_config(tmp_path)), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
