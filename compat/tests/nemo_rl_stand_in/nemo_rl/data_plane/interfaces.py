"""The names that the adapter takes from NeMo RL's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class DataPlaneClient(ABC):
    """Every version's methods are abstract, so that an adapter that lacks one cannot be made."""

    @abstractmethod
    def register_partition(self, *args, **kwargs): ...

    @abstractmethod
    def claim_meta(self, *args, **kwargs): ...

    @abstractmethod
    def get_data(self, *args, **kwargs): ...

    @abstractmethod
    def check_consumption_status(self, *args, **kwargs): ...

    @abstractmethod
    def put_samples(self, *args, **kwargs): ...

    @abstractmethod
    def get_samples(self, *args, **kwargs): ...

    @abstractmethod
    def clear_samples(self, *args, **kwargs): ...

    @abstractmethod
    def close(self, *args, **kwargs): ...

    @abstractmethod
    def list_sample_ids(self, *args, **kwargs): ...

    @abstractmethod
    def save_checkpoint(self, *args, **kwargs): ...

    @abstractmethod
    def load_checkpoint(self, *args, **kwargs): ...
