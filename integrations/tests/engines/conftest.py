"""Ranks that have what models of several processes take long to import."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def imported_by_ranks() -> list[str]:
    """Megatron and Redis too; `megatron.core.models.gpt` imports torch._dynamo."""
    return [
        "torch.distributed.fsdp",
        "megatron.core.hyper_comm_grid",
        "megatron.core.models.gpt",
        "dataplane_integrations.trainer.worker",
        "dataplane_redis",
    ]
