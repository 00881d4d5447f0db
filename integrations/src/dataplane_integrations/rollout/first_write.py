"""The rollout actor's side: it makes the sample ids once, and writes all columns of a generation in one put.

The driver gets a meta and a few small values per row, never a token tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from dataplane_core.arguments import Count, checked_as
from dataplane_core.batch import BatchedDataDict, kv_first_write
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.attach import DataPlaneClientMixin


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReceipt:
    """What the rollout actor returns to the driver.

    Attributes:
        meta: The written rows. Later columns are written to the same ids.
        carry: Column -> a value per row, for the driver's own computations.
    """

    meta: KVBatchMeta
    carry: dict[str, Any] = field(default_factory=dict)


def mint_sample_ids(uids: Sequence[str], group_size: int) -> list[str]:
    """The ids of a step's rows, ``{uid}_g{i}``. The generations of a prompt are adjacent.

    Args:
        uids: One per prompt, unique among the rows of the partition.
        group_size: Generations per prompt.

    Raises:
        InvalidRequestError: A uid is empty or repeats, or the group size is below 1.
        InvalidTypeError: The group size is no int.
    """
    checked_as("mint_sample_ids: group_size", Count, group_size)
    if not all(isinstance(uid, str) and uid for uid in uids):
        raise InvalidRequestError("mint_sample_ids refused: a uid is empty. Expected a non-empty string per prompt.")
    if len(set(uids)) != len(uids):
        repeated = [uid for uid, count in Counter(uids).items() if count > 1]
        raise InvalidRequestError(
            f"mint_sample_ids refused: uids repeat: {preview(repeated)}. Expected one uid per prompt; where a prompt "
            "is drawn twice, number the draws."
        )
    return [f"{uid}_g{i}" for uid in uids for i in range(group_size)]


class DataPlaneRolloutMixin(DataPlaneClientMixin):
    """For a rollout actor, which `setup_data_plane` attaches to the data plane."""

    def _first_write(
        self, batch: BatchedDataDict, *, carry_fields: Sequence[str] = ("input_lengths",), **options: Any
    ) -> RolloutReceipt:
        """Writes every column of the batch in one put, as `dataplane_core.kv_first_write` does, with its errors.

        Args:
            batch: Rows, with ``input_lengths``.
            carry_fields: Columns of one small value per row, which are also returned to the driver.
            options: As for `kv_first_write`, without ``dp_client``: ``sample_ids``, those of `mint_sample_ids`;
                ``partition_id``, that of the step; and others, such as ``tags`` or ``required_fields``.

        Raises:
            InvalidRequestError: The batch lacks a carry field.
            InvalidTypeError: A carry field has more than one value per row.
        """
        carry = {name: _small_column(batch, name) for name in carry_fields}
        return RolloutReceipt(meta=kv_first_write(batch, dp_client=self._require_dp_client(), **options), carry=carry)


def _small_column(batch: BatchedDataDict, name: str) -> list[Any]:
    if name not in batch:
        raise InvalidRequestError(
            f"first write refused: carry field '{name}' is not in the batch. Found: {', '.join(map(repr, batch))}."
        )
    column = batch[name]
    if isinstance(column, Tensor):
        if column.dim() != 1:
            raise InvalidTypeError(
                f"first write refused: carry field '{name}' has shape {tuple(column.shape)}. Expected (N,), one small "
                "value per row; wider columns stay in the data plane."
            )
        values: list[Any] = column.tolist()
        return values
    return column.tolist() if isinstance(column, np.ndarray) else list(column)
