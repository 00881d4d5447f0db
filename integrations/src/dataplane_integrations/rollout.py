"""The rollout actor's side: ids minted once, and one flat first write of everything that generation made.

Runs in the rollout process. The driver gets back a meta and a small carry, never a token tensor.

Shape legend: ``N`` rows (prompts x group size), ``S`` padded sequence length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from dataplane_core.batch import BatchedDataDict, kv_first_write
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.attach import DataPlaneClientMixin

__all__ = ["DataPlaneRolloutMixin", "RolloutReceipt", "mint_sample_ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReceipt:
    """What the rollout actor returns to the driver.

    Attributes:
        meta: The rows written; every later column goes to these ids.
        carry: Field -> one small value per row, for what the driver computes itself.
    """

    meta: KVBatchMeta
    carry: dict[str, list[Any]] = field(default_factory=dict)


def mint_sample_ids(uids: Sequence[str], group_size: int) -> list[str]:
    """The ids of a step's rows, ``{uid}_g{i}``: a prompt's generations side by side.

    Args:
        uids: One per prompt, unique among the rows of the partition.
        group_size: Generations per prompt.

    Raises:
        InvalidRequestError: A uid is empty or repeats, or the group size is below 1.
    """
    if group_size < 1:
        raise InvalidRequestError(f"mint_sample_ids refused: group_size is {group_size}. Expected 1 or more.")
    if not all(isinstance(uid, str) and uid for uid in uids):
        raise InvalidRequestError("mint_sample_ids refused: a uid is empty. Expected a non-empty string per prompt.")
    if len(set(uids)) != len(uids):
        seen: set[str] = set()
        repeated = [uid for uid in uids if uid in seen or seen.add(uid)]  # type: ignore[func-returns-value]
        raise InvalidRequestError(
            f"mint_sample_ids refused: uids repeat: {preview(repeated)}. Expected one uid per prompt; where a prompt "
            "is drawn twice, number the draws."
        )
    return [f"{uid}_g{i}" for uid in uids for i in range(group_size)]


class DataPlaneRolloutMixin(DataPlaneClientMixin):
    """For a rollout actor; `setup_data_plane` attaches it, as it does the workers."""

    def _first_write(
        self,
        batch: BatchedDataDict,
        *,
        sample_ids: Sequence[str],
        partition_id: str,
        carry_fields: Sequence[str] = ("input_lengths",),
        tags: Sequence[Mapping[str, Any]] | None = None,
        extra_info: Mapping[str, Any] | None = None,
        task_name: str = "train",
        pad_to_multiple: int = 1,
        token_aligned_fields: Collection[str] | None = None,
        required_fields: Collection[str] = (),
    ) -> RolloutReceipt:
        """Writes every column of the batch in one put.

        Args:
            batch: N rows, with ``input_lengths`` (N,).
            sample_ids: N ids, of `mint_sample_ids`.
            partition_id: The step's partition.
            carry_fields: Columns of one small value per row, also handed to the driver.
            tags: N dicts of primitives, readable without fetching.
            extra_info: Batch-wide values for the readers.
            task_name: The task that will train on the rows.
            pad_to_multiple: Readers round their padded length up to a multiple of this many tokens.
            token_aligned_fields: Columns to cut to the rows' lengths; None: as `kv_first_write` finds them.
            required_fields: Columns without which nothing is written, such as ``routed_experts`` for router replay.

        Raises:
            InvalidRequestError: A count of ids other than N, or a carry field or required column that the batch lacks.
            InvalidTypeError: A carry field that is wider than one value per row.
        """
        carry = {name: _small_column(batch, name) for name in carry_fields}
        meta = kv_first_write(
            batch,
            sample_ids=sample_ids,
            dp_client=self._require_dp_client(),
            partition_id=partition_id,
            extra_info=extra_info,
            task_name=task_name,
            pad_to_multiple=pad_to_multiple,
            tags=tags,
            token_aligned_fields=token_aligned_fields,
            required_fields=required_fields,
        )
        return RolloutReceipt(meta=meta, carry=carry)


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
