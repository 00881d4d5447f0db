"""The rollout side: the first write of a step's rows, an actor that generates them, sampling until enough are kept,
and what a run that is started again finds of them.

Rollout actors derive from its classes; the driver reads their receipts.
"""

from dataplane_integrations.rollout.actor import SyncRolloutActor, flatten_message_logs
from dataplane_integrations.rollout.dynamic_sampling import (
    DynamicSampling,
    GroupRule,
    SamplingCounts,
    all_match,
    tag_varies,
)
from dataplane_integrations.rollout.first_write import DataPlaneRolloutMixin, RolloutReceipt, mint_sample_ids
from dataplane_integrations.rollout.found import FoundRollouts, missing_groups

__all__ = [
    "DataPlaneRolloutMixin",
    "DynamicSampling",
    "FoundRollouts",
    "GroupRule",
    "RolloutReceipt",
    "SamplingCounts",
    "SyncRolloutActor",
    "all_match",
    "flatten_message_logs",
    "mint_sample_ids",
    "missing_groups",
    "tag_varies",
]
