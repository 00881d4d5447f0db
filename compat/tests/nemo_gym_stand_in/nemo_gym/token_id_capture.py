"""The records of `nemo_gym.token_id_capture`."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


class TokenEntry(BaseModel):
    model_config = ConfigDict(extra="allow")

    schema_version: int = 1
    rollout_id: str
    model_call_id: str
    model: str = ""
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: Any | None = None
    output_items: list[dict] = []
    token_item_index: int | None = None
    created_at: float = 0.0


@dataclass(frozen=True)
class TokenCaptureSnapshot:
    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int
