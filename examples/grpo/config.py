"""The run's configuration: one YAML file, checked before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dataplane_core.config import DataPlaneConfig, validate_model, yaml_problem

from .errors import UserError

__all__ = ["GrpoSection", "ModelConfig", "RunConfig", "load_config"]

_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0)]
_Fraction = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(_Section):
    """The prompts. A relative ``file`` is looked up beside the configuration."""

    file: Path
    eval_prompts: Annotated[int, Field(ge=0)] = 128


class ModelConfig(_Section):
    """Sizes of the transformer."""

    #: Size of the hidden state; a multiple of ``heads``.
    width: _Count = 64
    layers: _Count = 2
    #: Attention heads per layer.
    heads: _Count = 4
    #: The longest sequence, in tokens, prompt and answer together.
    context: _Count = 24

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class GrpoSection(_Section):
    """Rollouts, loss and optimizer."""

    steps: _Count = 150
    prompts_per_step: _Count = 32
    answers_per_prompt: Annotated[int, Field(ge=2)] = 8
    max_new_tokens: _Count = 6
    temperature: _Positive = 1.0
    #: Of AdamW, after a linear rise over the first ``warmup_steps`` steps.
    learning_rate: _Positive = 2e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.95)
    #: Gradients are scaled down to this norm.
    max_grad_norm: _Positive = 1.0
    clip_ratio: _Positive = 0.2
    kl_weight: Annotated[float, Field(ge=0)] = 0.005


class DynamicBatchingSection(_Section):
    """Microbatches by token count: rows times padded length stays within the limit."""

    max_tokens_per_microbatch: _Count = 1024
    sequence_length_round: _Count = 4


class SequencePackingSection(_Section):
    """Microbatches as packed sequences, in place of padded rows; limit and rounding are dynamic batching's."""

    enabled: bool = False
    algorithm: Literal[
        "modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"
    ] = "modified_first_fit_decreasing"


class DynamicSamplingSection(_Section):
    """Training on groups whose rewards differ only; further prompts make up for the others."""

    enabled: bool = False
    #: Rounds of ``prompts_per_step`` prompts after which a step takes the groups that it has.
    max_generations: _Count = 4


class RolloutsSection(_Section):
    """Whether rollouts wait for training, or run ahead of it."""

    mode: Literal["sync", "async"] = "sync"
    #: With ``async``: steps that they run ahead, and so versions by which their weights are behind.
    staleness: Annotated[int, Field(ge=0)] = 1
    #: Prompts that are answered together, and written by one put. None: all of a step.
    prompts_per_put: _Count | None = None


class PortionsSection(_Section):
    """Training on a step's rows in portions, with one optimizer step for all."""

    #: 1: the workers fetch all rows of a step at once.
    per_step: _Count = 1
    #: Portions that the workers read from the store while they train on another.
    read_ahead: Annotated[int, Field(ge=0)] = 0


class SavingSection(_Section):
    """Saves to go on from."""

    #: Steps between two saves; 0: none.
    every: Annotated[int, Field(ge=0)] = 0
    #: Saves that stay; older ones are removed.
    keep: _Count = 2
    #: Whether a run that is started again goes on from its newest save, with the rows that the store still holds.
    resume: bool = False

    @model_validator(mode="after")
    def _check_resume(self) -> SavingSection:
        if self.resume and not self.every:
            raise ValueError("resume needs saves: set every to 1 or more")
        return self


class RaySection(_Section):
    """Where the actors run, and how long the run waits for them."""

    #: A running cluster (``host:port`` or ``auto``); None: a private one, ended with the run.
    address: str | None = None
    #: Logical CPUs of the private cluster. They only count actors; the machine may have fewer.
    num_cpus: _Positive = 8
    cpus_per_actor: _Positive = 0.5
    start_timeout_s: _Positive = 120
    step_timeout_s: _Positive = 60


class RunConfig(_Section):
    """Everything that decides a run. Two runs of equal configuration give equal bits."""

    seed: Annotated[int, Field(ge=0)] = 0
    #: Policy workers in all: data-parallel ranks times ``tensor_parallel``.
    num_workers: _Count = 2
    tensor_parallel: _Count = 1
    #: Engine of the policy workers; ``megatron`` needs ``megatron-core``.
    workers: Literal["fsdp2", "megatron"] = "fsdp2"
    data: DataSection
    model: ModelConfig = ModelConfig()
    grpo: GrpoSection = GrpoSection()
    dynamic_batching: DynamicBatchingSection = DynamicBatchingSection()
    sequence_packing: SequencePackingSection = SequencePackingSection()
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    portions: PortionsSection = PortionsSection()
    rollouts: RolloutsSection = RolloutsSection()
    saving: SavingSection = SavingSection()
    ray: RaySection = RaySection()
    #: What `dataplane_core.connect` gets; ``--in-memory`` leaves it aside.
    data_plane: DataPlaneConfig = DataPlaneConfig(backend="shm_store")

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks: groups of workers with rows of their own."""
        return self.num_workers // self.tensor_parallel

    @model_validator(mode="after")
    def _check_sizes(self) -> RunConfig:
        if self.num_workers % self.tensor_parallel or self.model.heads % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} must divide num_workers {self.num_workers} and model.heads "
                f"{self.model.heads}"
            )
        if self.workers == "megatron" and importlib.util.find_spec("megatron") is None:
            raise ValueError(
                "workers megatron needs megatron-core, which is not installed: install dataplane-integrations[megatron]"
            )
        if (self.grpo.prompts_per_step * self.grpo.answers_per_prompt) % self.data_parallel:
            raise ValueError(
                f"prompts_per_step x answers_per_prompt = {self.grpo.prompts_per_step} x "
                f"{self.grpo.answers_per_prompt} rows cannot be shared equally by num_workers = {self.num_workers}"
            )
        if self.dynamic_sampling.enabled and self.grpo.answers_per_prompt % self.data_parallel:
            raise ValueError(
                f"with dynamic_sampling a step may have any number of groups, so grpo.answers_per_prompt "
                f"{self.grpo.answers_per_prompt} must be a multiple of the {self.data_parallel} data-parallel ranks"
            )
        if self.dynamic_sampling.enabled and self.rollouts.mode == "async":
            raise ValueError(
                "rollouts.mode async fixes beforehand which prompts a step trains on, dynamic_sampling finds out while "
                "it generates: enable one of them"
            )
        if self.grpo.max_new_tokens >= self.model.context:
            raise ValueError(
                f"grpo.max_new_tokens {self.grpo.max_new_tokens} leaves no room for a prompt in model.context "
                f"{self.model.context}"
            )
        if self.dynamic_batching.max_tokens_per_microbatch < self.model.context:
            raise ValueError(
                f"dynamic_batching.max_tokens_per_microbatch {self.dynamic_batching.max_tokens_per_microbatch} is "
                f"less than one sequence of model.context {self.model.context} tokens"
            )
        return self


def load_config(path: Path, overrides: dict[str, Any]) -> RunConfig:
    """Reads the YAML file.

    Args:
        path: The file.
        overrides: Values that win over the file's, by dotted key: ``{"grpo.steps": 10}``. None values are left out.

    Raises:
        UserError: The file cannot be read.
        ConfigError: A key or value is wrong; the message names the key and its nearest.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"configuration {path} does not exist. Give a YAML file with --config FILE.") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"configuration {path} cannot be read: {yaml_problem(error)}.") from None
    except OSError as error:
        raise UserError(f"configuration {path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"configuration {path}: expected a mapping of sections, got {type(raw).__name__}.")
    for dotted, value in overrides.items():
        if value is not None:
            _set(raw, dotted.split("."), value, path)
    config = validate_model(RunConfig, raw, f"configuration {path}")
    file = config.data.file if config.data.file.is_absolute() else path.resolve().parent / config.data.file
    return config.model_copy(update={"data": config.data.model_copy(update={"file": file})})


def _set(raw: dict[str, Any], keys: list[str], value: Any, path: Path) -> None:
    for key in keys[:-1]:
        raw = raw.setdefault(key, {})
        if not isinstance(raw, dict):
            raise UserError(f"configuration {path}: '{key}' must be a section, got {raw!r}.")
    raw[keys[-1]] = value
