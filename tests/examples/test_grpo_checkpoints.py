"""The saves of a run of the GRPO example: what comes back, and a save that is not what it should be."""

import json
import shutil

import pytest
import torch
from grpo.checkpoint import Checkpoints
from grpo.config import load_config
from grpo.errors import RunFailedError, UserError
from grpo_runs import write_config

from dataplane_integrations.errors import WorkerTimeoutError


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path), {})


def write(checkpoints, step, write_state=None):
    def one_file(folder):
        (folder / "rank_0.pt").write_bytes(b"state")

    records = [{"step": number, "reward": 0.5} for number in range(1, step + 1)]
    return checkpoints.write(records, {"sampled": 0.5}, torch.arange(3.0).numpy(), write_state or one_file)


def test_the_newest_saves_stay_and_come_back_and_a_new_run_or_a_damaged_save_is_refused(tmp_path, config):
    checkpoints = Checkpoints(tmp_path, config)
    checkpoints.refuse_to_mix()
    with pytest.raises(UserError, match=r"--resume: .*checkpoints holds no save\. Give the --out"):
        checkpoints.newest()
    places = [write(checkpoints, step) for step in (2, 4, 6)]
    assert sorted(path.name for path in places[2].parent.iterdir()) == ["step_000004", "step_000006"]
    save = checkpoints.newest()
    assert (save.folder, save.step, len(save.records), save.evaluation) == (places[2], 6, 6, {"sampled": 0.5})
    assert save.reference_weights().tolist() == [0.0, 1.0, 2.0]
    assert (save.folder / "rank_0.pt").read_bytes() == b"state"
    with pytest.raises(UserError, match=r"saves of an earlier run, the newest is step_000006\. Go on with it"):
        checkpoints.refuse_to_mix()
    (places[2] / "rank_0.pt").write_bytes(b"statE")
    with pytest.raises(UserError, match=r"step_000006 is damaged: rank_0\.pt is not what was written\. Remove that"):
        checkpoints.newest()
    shutil.rmtree(places[2])
    assert checkpoints.newest().step == 4


def test_a_save_that_breaks_off_leaves_the_last_one_in_force(tmp_path, config):
    checkpoints = Checkpoints(tmp_path, config)
    first = write(checkpoints, 2)

    def fails(folder):
        (folder / "rank_0.pt").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def waits(folder):
        raise WorkerTimeoutError("policy worker 1 did not answer")  # an OSError too

    with pytest.raises(RunFailedError, match=r"cannot be saved to .*step_000004: .*No space left.*Earlier saves are"):
        write(checkpoints, 4, fails)
    with pytest.raises(WorkerTimeoutError):
        write(checkpoints, 4, waits)
    assert checkpoints.newest().folder == first
    assert write(checkpoints, 4).exists()  # over what the broken one left
    assert [path.name for path in first.parent.glob(".*")] == []


def test_a_save_of_another_format_or_configuration_is_refused(tmp_path, config):
    place = write(Checkpoints(tmp_path, config), 2)
    other = {"seed": 6, "grpo.clip_ratio": 0.3, "grpo.steps": 50, "ray.step_timeout_s": 9, "saving.every": 3}
    with pytest.raises(UserError) as caught:
        Checkpoints(tmp_path, load_config(tmp_path / "config.yaml", other)).newest()
    assert str(caught.value).splitlines()[1:] == [
        "  grpo.clip_ratio: saved with 0.2, now 0.3",
        "  seed: saved with 5, now 6",
    ]
    (tmp_path / "prompts.jsonl").write_text("another file")
    with pytest.raises(UserError, match="prompts sha256: saved with"):
        Checkpoints(tmp_path, config).newest()
    manifest = json.loads((place / "save.json").read_text())
    (place / "save.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(UserError, match="has format 99, this program reads 1"):
        Checkpoints(tmp_path, config).newest()
