"""The GRPO example on a durable store: all its processes are killed, and the same command goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpo.config import RunConfig, load_config
from grpo.errors import UserError
from grpo.model import build_model
from grpo.plane_path import DataPlanePath, PlaneRolloutWorker
from grpo.weights import pack_weights
from grpo_kills import (
    PATIENCE,
    ROWS,
    Config,
    check_generated_once,
    committed,
    durable,
    found_lines,
    wait_for,
    write_killed_config,
)
from grpo_runs import Finished, finish, read_metrics, results, start

from dataplane_core import DataPlaneClient, connect
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.rollout import FoundRollouts
from dataplane_integrations.trainer.groups import InProcessWorkerGroup


def processes_of(run: subprocess.Popen[str], plane: Config) -> list[int]:
    """The driver, its actors, and the ledger's process. Reads what the run prints until it names the actors."""
    assert run.stdout is not None
    line = next((line for line in run.stdout if line.startswith("running over ")), None)
    assert line is not None, run.communicate()
    ledger = json.loads((Path(plane["options"]["durable"]) / "lock").read_bytes())["pid"]
    return [run.pid, ledger, *map(int, re.findall(r"pid (\d+)", line))]


def kill(pids: list[int]) -> None:
    random.shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # some end with the driver
            os.kill(pid, signal.SIGKILL)


class Run:
    """A start of a run, without its training: a path with its rollout worker, in this process."""

    def __init__(self, client: DataPlaneClient, config: RunConfig, found: Path) -> None:
        sizes = config.model
        worker = PlaneRolloutWorker(sizes, max_new_tokens=6, temperature=1.0, seed=config.seed, prompts_per_put=2)
        worker.setup_data_plane(client)
        worker.load_weights(pack_weights(build_model(sizes, seed=1)))
        self.generated: list[int] = []
        generate_portion = worker.generate_portion

        def noted(step: int, prompts: list[str], answers: int, first: int) -> Any:
            self.generated.append(first)
            return generate_portion(step, prompts, answers, first)

        worker.generate_portion = noted  # type: ignore[method-assign]
        self.path = DataPlanePath(config, found=FoundRollouts(found))
        self.path._policy = DataPlanePolicy(InProcessWorkerGroup([SimpleNamespace(setup_data_plane=id)]), client)
        self.path._refuse_other_runs()
        self.path._on_rollout = lambda name, *given, doing: getattr(worker, name)(*given)  # type: ignore[method-assign]

    def answers(self) -> list[str]:
        return self.path.generate(3, ["1=", "22=", "333=", "4444=", "5="]).answers


def rows_of(client: DataPlaneClient) -> dict[str, list[Any]]:
    ids = sorted(client.list_sample_ids("train-3"))
    rows = client.get_samples(ids, "train-3", ["input_ids", "generation_logprobs"])
    return {
        each: [row["input_ids"].tolist(), row["generation_logprobs"].tolist()]
        for each, row in zip(ids, rows, strict=True)
    }


def test_a_step_that_is_begun_again_generates_what_is_missing_and_the_same(tmp_path: Path) -> None:
    file, found = write_killed_config(tmp_path, {"backend": "noop"}), tmp_path / "found.jsonl"
    config = load_config(file, {})
    with connect({"backend": "noop"}) as client:
        first = Run(client, config, found)
        answers, rows = first.answers(), rows_of(client)
        assert first.generated == [0, 2, 4]
        assert len(rows) == 5 * 4
        client.clear_samples([f"s3_p{prompt}_g{answer}" for prompt in (2, 3) for answer in range(4)], "train-3")
        again = Run(client, config, found)
        assert again.answers() == answers
        assert again.generated == [2]
        assert rows_of(client) == rows
        assert str(FoundRollouts(found)).startswith("12 of 20 ")

        again.path.saved(2)
        again.path.restore(tmp_path, 2)
        assert client.list_partitions() == ["train-3"]
        again.path.restore(tmp_path, 3)  # the start before was killed between this save and `saved`
        assert client.list_partitions() == []


@pytest.mark.parametrize("other", [{"seed": 6}, {"grpo.learning_rate": 0.5}, {"model.width": 16}], ids=str)
def test_a_store_that_holds_rows_of_another_run_is_refused_and_keeps_them(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    file, found = write_killed_config(tmp_path, {"backend": "noop"}), tmp_path / "found.jsonl"
    with connect({"backend": "noop"}) as client:
        first = Run(client, load_config(file, {}), found)
        first.answers()
        rows = rows_of(client)
        with pytest.raises(UserError, match=r"holds rows of another run in 'train-3'.* Start it again with"):
            Run(client, load_config(file, other), found)
        assert rows_of(client) == rows
        Run(client, load_config(file, {"grpo.steps": 50, "data_plane.backend": "redis_store"}), found)  # the same run


def test_of_two_runs_that_were_started_on_an_empty_store_one_is_refused(tmp_path: Path) -> None:
    file, found = write_killed_config(tmp_path, {"backend": "noop"}), tmp_path / "found.jsonl"
    with connect({"backend": "noop"}) as client:
        first, second = (Run(client, load_config(file, {"seed": seed}), found) for seed in (5, 6))
        first.answers()
        with pytest.raises(UserError, match="holds rows of another run"):
            second.answers()


@pytest.mark.timeout(1800)  # two starts, and the run that tests share
def test_a_run_whose_processes_are_all_killed_gives_the_losses_of_one_that_was_not(
    tmp_path: Path, in_memory: Finished, ray_server: str, python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).with_name("hang.py"), tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    plane = {**durable(tmp_path), "middleware": [{"metrics": {"on_event": "hang:on_event"}}]}
    out = tmp_path / "out"
    config = write_killed_config(tmp_path, plane, every=2, ray={"address": ray_server, **PATIENCE})
    # the rollout worker, in the second step after the save
    where = {"op": "put_samples", "partition": "train-4", "field": "input_ids", "nth": 3}
    (tmp_path / "hang.json").write_text(json.dumps(where))
    run = start(config, out, path="shm_store", python=python)
    with run:
        try:
            wait_for((tmp_path / "hangs").exists, run)
            kill(processes_of(run, plane))
        finally:
            run.kill()
    assert committed(plane) == {3: ROWS, 4: 24}
    (tmp_path / "hang.json").write_text(json.dumps({**where, "op": "never"}))
    code, said, err = finish(start(config, out, path="shm_store", python=python))
    assert (code, err) == (0, "")
    found = [(line["step"], line["found"], line["wanted"]) for line in found_lines(out)]
    assert found == [(3, ROWS, ROWS), (4, 24, ROWS)]
    assert "56 of 64 rollouts of interrupted steps were found committed: 88 % of generation saved" in said
    check_generated_once(out)
    assert committed(plane) == {}
    assert results(read_metrics(out)) == results(read_metrics(in_memory.folder))
