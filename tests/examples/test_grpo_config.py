"""The configuration of the GRPO example: what is read, and what is refused before anything starts."""

from pathlib import Path

import pytest
import torch
import yaml
from grpo import config as grpo_config
from grpo.config import RunConfig, load_config
from grpo.data_path import summarize_training
from grpo.train import main
from grpo_runs import write_config

SHIPPED = Path(grpo_config.__file__).parent / "config.yaml"


def test_the_shipped_configuration_spells_out_every_key_with_its_default():
    shipped = load_config(SHIPPED, {})
    assert shipped == RunConfig(data=shipped.data)
    assert shipped.data.file == SHIPPED.parent / "prompts.jsonl"
    assert shipped.data_plane.backend == "shm_store"
    text = yaml.safe_load(SHIPPED.read_text())
    for name, field in RunConfig.model_fields.items():
        assert name in text
        if name != "data_plane" and isinstance(text[name], dict):
            assert set(text[name]) == set(field.annotation.model_fields)


IN_MEMORY = ["--in-memory"]
#: The sections of the configuration, or its text; arguments; and what the refusal names.
REFUSED = [
    ({"grop": {"steps": 3}}, [], "unknown key 'grop'; did you mean 'grpo'?"),
    ({"grpo": {"stepz": 3}}, [], "unknown key 'grpo.stepz'; did you mean 'steps'?"),
    ({"data_plane": {"bakend": "x", "backend": "y"}}, [], "unknown key 'data_plane.bakend'; did you mean 'back"),
    ({"ray": {"zzz": 1}}, [], "unknown key 'ray.zzz'; known keys: address, num_cpus"),
    ({"grpo": {"steps": "many"}}, [], "key 'grpo.steps': Input should be a valid integer"),
    ({}, ["--steps", "0"], "key 'grpo.steps': Input should be greater than or equal to 1"),
    ({"model": {"width": 10, "heads": 4}}, [], "key 'model': width 10 is not a multiple of heads 4"),
    ({"num_workers": 3}, [], "config.yaml is refused: prompts_per_step x answers_per_prompt = 8 x 4 rows"),
    ({"grpo": {"max_new_tokens": 24}}, [], "leaves no room for a prompt"),
    ({"sequence_packing": {"algorithm": "best_fit"}}, [], "'sequence_packing.algorithm': Input should be"),
    ({"tensor_parallel": 3}, [], "tensor_parallel 3 must divide num_workers 2 and model.heads 2"),
    ({"tensor_parallel": 4, "num_workers": 4}, [], "tensor_parallel 4 must divide num_workers 4 and model.heads 2"),
    (
        {"dynamic_sampling": {"enabled": True}, "grpo": {"answers_per_prompt": 5}},
        [],
        "answers_per_prompt 5 must be a multiple of the 2 data-parallel ranks",
    ),
    ("seed: 1", [], "key 'data' is missing"),
    ("- a", [], "expected a mapping of sections, got list"),
    ("a: [", [], "cannot be read"),
    ({"ray": {"num_cpus": 1}}, IN_MEMORY, "the run's actors ask for 1.5, ray.num_cpus is 1"),
    ({}, [*IN_MEMORY, "--data", "gone.jsonl"], "gone.jsonl does not exist"),
    ({}, [*IN_MEMORY, "--mode", "async"], "Leave out --in-memory or --mode async"),
    ({}, [*IN_MEMORY, "--dynamic-sampling"], "dynamic sampling filters rows in the data plane"),
    ({}, [*IN_MEMORY, "--record"], "a recording is made, and replayed, by the data plane"),
    ({"portions": {"per_step": 2}}, IN_MEMORY, "portions are read from the data plane"),
    ({}, ["--staleness", "2"], "--staleness: rollouts run ahead with --mode async only"),
    ({}, ["--mode", "async", "--staleness", "-1"], "key 'rollouts.staleness'"),
    ({}, ["--mode", "async", "--dynamic-sampling"], "dynamic_sampling finds out while it generates"),
    ({}, ["--mode", "async", "--replay", "gone"], "--replay is for synchronous runs from their start"),
]


@pytest.mark.parametrize(("given", "arguments", "named"), REFUSED, ids=[named for *_, named in REFUSED])
def test_what_does_not_fit_is_named_and_refused_before_anything_starts(tmp_path, capsys, given, arguments, named):
    path = tmp_path / "config.yaml"
    if isinstance(given, str):
        path.write_text(given)
    else:
        write_config(tmp_path, **given)
    assert main(["--config", str(path), "--out", str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert named in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_results_of_all_ranks_become_one_number_each():
    ranks = [
        {
            "global_loss": torch.tensor([0.5, 0.25], dtype=torch.float64),
            "grad_norm": torch.tensor([1.0, 2.0], dtype=torch.float64),
            "global_tokens": 90,
            "all_mb_metrics": {"kl": parts},
        }
        for parts in ([0.1, 0.2, 0.3], [0.4])
    ]
    assert summarize_training(ranks) == {"loss": 0.375, "grad_norm": 1.5, "tokens": 90.0, "kl": 0.5}
