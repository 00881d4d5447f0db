"""Whole runs of the GRPO example repeat bit for bit, over every backend, also with rollouts ahead of training."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Finished, assert_like, finish, read_metrics, results, start, write_config

pytestmark = pytest.mark.timeout(540)


@pytest.mark.parametrize("backend", ["tq_simple", "redis_store", "tq_mooncake"])
def test_a_run_over_a_backend_equals_the_run_in_memory_bit_for_bit(
    tmp_path: Path, in_memory: Finished, ray_server: str, backend: str
) -> None:
    config = write_config(tmp_path, ray={"address": ray_server})
    code, out, err = finish(start(config, tmp_path / "out", path=backend))
    assert (code, err) == (0, "")
    assert_like(in_memory, Finished(tmp_path / "out", out), backend)


def test_a_run_repeats_bit_for_bit(tmp_path: Path, in_memory: Finished) -> None:
    assert finish(start(write_config(tmp_path), tmp_path / "out"))[0] == 0
    assert results(read_metrics(tmp_path / "out")) == results(read_metrics(in_memory.folder))


def run_ahead(
    folder: Path, config: Path, staleness: int, path: str, *arguments: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records and the evaluation of an asynchronous run."""
    options = ("--mode", "async", "--staleness", str(staleness), *arguments)
    code, _, err = finish(start(config, folder, *options, path=path))
    assert (code, err) == (0, "")
    return read_metrics(folder), json.loads((folder / "summary.json").read_text())["evaluation"]


def ahead(run: list[dict[str, Any]]) -> list[bool]:
    """Per step but the last, whether generating for the next one began before training on this one had ended."""
    return [later["spans"]["generate"][0] < step["spans"]["train"][1] for step, later in itertools.pairwise(run)]


def overlap(run: list[dict[str, Any]]) -> bool:
    """Whether answers of some step were being generated while the workers trained on an earlier one."""
    pairs = [(step["spans"]["train"], later["spans"]["generate"]) for step, later in itertools.combinations(run, 2)]
    return any(generating < ended and began < generated for (began, ended), (generating, generated) in pairs)


@pytest.mark.parametrize("path", ["tq_simple", "tq_mooncake"])
def test_staleness_0_is_the_synchronous_run_bit_for_bit(tmp_path: Path, in_memory: Finished, path: str) -> None:
    records, evaluation = run_ahead(tmp_path / "out", write_config(tmp_path), 0, path)
    assert [record.pop("staleness") for record in records] == [0, 0, 0, 0]
    assert results(records) == results(read_metrics(in_memory.folder))
    assert evaluation == json.loads((in_memory.folder / "summary.json").read_text())["evaluation"]
    assert ahead(records) == [False] * 3
    assert not overlap(records)


@pytest.mark.parametrize(
    ("staleness", "made_with", "others"),
    [(1, [0, 1, 1, 1], ["tq_simple"]), (3, [0, 1, 2, 3], ["tq_simple", "tq_mooncake"])],
)
def test_stale_rollouts_are_made_with_the_weights_of_a_fixed_step_and_repeat_over_backends(
    tmp_path: Path, in_memory: Finished, ray_server: str, staleness: int, made_with: list[int], others: list[str]
) -> None:
    config = write_config(tmp_path, ray={"address": ray_server})
    runs = {path: run_ahead(tmp_path / path, config, staleness, path) for path in ("redis_store", *others)}
    records, evaluation = runs["redis_store"]
    assert [record["staleness"] for record in records] == made_with
    for record in records:
        fresh = record["generation_logprob_error"] < 1e-5
        assert fresh == (record["staleness"] == 0), "the rollout worker had the weights that it should have"
    for other in others:
        assert results(records) == results(runs[other][0]), other
        assert evaluation == runs[other][1], other
    synchronous = results(read_metrics(in_memory.folder))
    assert records[0]["loss"] == synchronous[0]["loss"]
    assert records[2]["loss"] != synchronous[2]["loss"]
    for record in records:
        (generating, generated), (began, ended) = record["spans"]["generate"], record["spans"]["train"]
        assert generating < generated <= began < ended
    assert [ahead(run) for run, _ in runs.values()] == [[True] * 3] * len(runs)
    assert any(overlap(run) for run, _ in runs.values()), "both at the same time, not only in another order"
    assert (tmp_path / "redis_store" / "reward.png").read_bytes().startswith(b"\x89PNG")
