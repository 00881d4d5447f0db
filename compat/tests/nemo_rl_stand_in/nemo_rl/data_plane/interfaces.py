"""The names that the adapter takes from NeMo RL's interface."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict


class DataPlaneConfig(TypedDict):
    enabled: bool
    impl: Literal["transfer_queue"]
    storage_capacity: int


@dataclass
class KVBatchMeta:
    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None


#: Every version's methods are abstract, so that an adapter that lacks one cannot be made.
METHODS = (
    *("register_partition", "claim_meta", "get_data", "check_consumption_status", "put_samples", "get_samples"),
    *("clear_samples", "close", "list_sample_ids", "save_checkpoint", "load_checkpoint"),
)


def _method(self, *args, **kwargs): ...


DataPlaneClient = ABCMeta("DataPlaneClient", (), {name: abstractmethod(_method) for name in METHODS})
