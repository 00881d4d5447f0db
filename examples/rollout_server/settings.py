"""What the trainer and the servers agree on: the config, the names in the data plane, and the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from dataplane_core.config import load_config

__all__ = ["FIELDS", "TASK", "partition_of", "read_config"]

#: What a server writes of each answer: the tokens of prompt and answer, the log-probability of each token of the answer
#: (0 for those of the prompt), the length of the prompt, and the reward.
FIELDS: Final = ["input_ids", "logprobs", "prompt_length", "reward"]
#: The consumer task of the trainer.
TASK: Final = "train"


def read_config(path: Path) -> dict[str, Any]:
    """The config: ``data_plane``, a `DataPlaneConfig`, and ``run``."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["data_plane"] = load_config(path.parent / config["data_plane"])
    return config


def partition_of(step: int) -> str:
    """The partition of a step's answers."""
    return f"answers-{step}"
