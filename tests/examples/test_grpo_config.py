"""The configuration of the GRPO example: what is read, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from grpo import config as grpo_config
from grpo.cluster import ray_session, required_cpus
from grpo.config import RunConfig, load_config
from grpo.data_path import summarize_training
from grpo.errors import UserError

from dataplane_core.errors import ConfigError

SHIPPED = Path(grpo_config.__file__).parent / "config.yaml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_the_shipped_configuration_spells_out_the_defaults() -> None:
    shipped = load_config(SHIPPED, {})
    assert shipped == RunConfig(data=shipped.data)
    assert shipped.data.file == SHIPPED.parent / "prompts.jsonl"
    assert shipped.data_plane.backend == "shm_store"


def test_every_key_of_the_configuration_is_in_the_shipped_file() -> None:
    shipped = yaml.safe_load(SHIPPED.read_text())
    for name, field in RunConfig.model_fields.items():
        assert name in shipped
        if name != "data_plane" and isinstance(shipped[name], dict):
            assert set(shipped[name]) == set(field.annotation.model_fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {file: p}\ngrop: {steps: 3}", "unknown key 'grop'; did you mean 'grpo'?"),
        ("data: {file: p}\ngrpo: {step: 3}", "unknown key 'grpo.step'; did you mean 'steps'?"),
        ("data: {file: p}\ndata_plane: {bakend: x, backend: y}", "unknown key 'data_plane.bakend'; did you mean 'back"),
        ("data: {file: p}\nray: {zzz: 1}", "unknown key 'ray.zzz'; known keys: address, num_cpus"),
        ("data: {file: p}\ngrpo: {steps: 0}", "key 'grpo.steps': Input should be greater than or equal to 1"),
        ("data: {file: p}\ngrpo: {steps: many}", "key 'grpo.steps': Input should be a valid integer"),
        ("data: {file: p}\nmodel: {width: 10, heads: 4}", "key 'model': width 10 is not a multiple of heads 4"),
        ("data: {file: p}\nnum_workers: 3", "run.yaml is refused: prompts_per_step x answers_per_prompt = 32 x 8 rows"),
        ("data: {file: p}\ngrpo: {max_new_tokens: 24}", "leaves no room for a prompt"),
        ("seed: 1", "key 'data' is missing"),
        ("- a", "expected a mapping of sections, got list"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((UserError, ConfigError)) as caught:
        load_config(write(tmp_path, text), {})
    assert message in str(caught.value)
    assert "run.yaml" in str(caught.value)


def test_too_few_cpus_are_refused_before_ray_starts() -> None:
    config = load_config(SHIPPED, {"ray.num_cpus": 1})
    with (
        pytest.raises(UserError, match=r"ask for 1\.5, ray\.num_cpus is 1\."),
        ray_session(config.ray, required_cpus(config)),
    ):
        pass


def test_results_of_all_ranks_become_one_number_each() -> None:
    ranks = [
        {
            "global_loss": torch.tensor([0.5, 0.25], dtype=torch.float64),
            "grad_norm": torch.tensor([1.0, 2.0], dtype=torch.float64),
            "global_tokens": 90,
            "all_mb_metrics": {"kl": parts},
        }
        for parts in ([0.1, 0.2, 0.3], [0.4])
    ]
    assert summarize_training(ranks) == {
        "loss": 0.375,
        "grad_norm": 1.5,
        "tokens": 90.0,
        "kl": 0.5,
    }
