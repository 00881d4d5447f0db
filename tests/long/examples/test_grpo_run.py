"""Whole runs of the GRPO example repeat bit for bit, over every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_runs import Finished, assert_like, finish, read_metrics, results, start, write_config

pytestmark = pytest.mark.timeout(540)


@pytest.mark.parametrize("backend", ["shm_store", "tq_simple", "redis_store", "tq_mooncake"])
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
