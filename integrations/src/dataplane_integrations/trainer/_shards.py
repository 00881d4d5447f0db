"""Which rows each data-parallel rank gets, also after rows of a call were lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from dataplane_core import shard_meta_for_dp
from dataplane_core.errors import InvalidRequestError, LostSamplesError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, PAD_TO_MULTIPLE, padded_length
from dataplane_integrations.trainer.batching import Batching, Stage

#: ``extra_info`` key: ``replace_lost`` has left rows out. Later calls with the meta may not find whole global batches.
_SHORTENED: Final = "replace_lost_left_rows_out"

#: Replaces rows that the store has lost: gets the meta of a call and the lost ids, returns the meta to go on with. It
#: may also get ids that are not lost, see `DataPlanePolicy`.
ReplaceLost: TypeAlias = Callable[[KVBatchMeta, Sequence[str]], KVBatchMeta]


class Shards:
    """Divides the rows of a call among the ranks."""

    def __init__(self, dp_world: int, batching: Batching, replace_lost: ReplaceLost | None) -> None:
        """Takes what all calls have in common."""
        self._dp_world = dp_world
        self._batching = batching
        self._replace_lost = replace_lost

    def stamp_common_length(self, meta: KVBatchMeta) -> None:
        """Writes the sequence length of every rank's forward into ``meta``, once: all calls on its rows use it."""
        if meta.sequence_lengths is None or not meta.size:
            raise InvalidRequestError(
                f"meta of '{meta.partition_id}' refused: {meta.size} rows "
                f"{'without' if meta.sequence_lengths is None else 'with'} sequence_lengths. Expected at least one "
                "row, and a length for each: kv_first_write fills them from input_lengths."
            )
        longest = max(meta.sequence_lengths)
        if (meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN) or 0) >= longest:
            return
        multiples = (
            meta.extra_info.get(PAD_TO_MULTIPLE) or 1,
            self._batching.pad_multiple,
            self._batching.length_round,
        )
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = padded_length(longest, *multiples)

    def shard(
        self, meta: KVBatchMeta, stage: Stage, fields: Sequence[str], gbs: int | None = None
    ) -> list[KVBatchMeta]:
        """One meta per data-parallel rank, with its microbatch plan, the common length, and the fields to read."""
        self.stamp_common_length(meta)
        shards, _ = shard_meta_for_dp(meta, dp_world=self._dp_world, batch_size=gbs, **self._batching.shard_args(stage))
        return [dataclasses.replace(shard, fields=list(fields)) for shard in shards]

    def divided(
        self, meta: KVBatchMeta, stage: Stage, fields: Sequence[str], gbs: int | None, lost: Sequence[str]
    ) -> tuple[KVBatchMeta, list[KVBatchMeta]]:
        """The rows and their shards. If some rows were lost and the others do not divide, more are left out."""
        while True:
            try:
                return meta, self.shard(meta, stage, fields, batch_size(meta, gbs))
            except InvalidRequestError:
                if self._replace_lost is None or _SHORTENED not in meta.extra_info:
                    raise
                size, meta = meta.size, self.replaced(meta, meta.sample_ids[-1:], lost)
                if meta.size == size:  # it leaves none out any more
                    raise

    def replaced(self, meta: KVBatchMeta, gone: Sequence[str], lost: Sequence[str]) -> KVBatchMeta:
        """What ``replace_lost`` makes of the rows without ``gone``; marked if it has left some out."""
        assert self._replace_lost is not None
        size, meta = meta.size, self._replace_lost(meta, gone)
        if not meta.size:
            raise LostSamplesError(
                f"no rows of '{meta.partition_id}' are left of those of the call: "
                f"{preview(lost) or 'some of an earlier call'} were lost, and replace_lost has left out all. Expected "
                "as many as the data-parallel ranks can share.",
                partition_id=meta.partition_id,
                missing_samples=lost,
                hint="Make the call with other rows.",
            )
        if meta.size < size:
            meta.extra_info[_SHORTENED] = True
        return meta


def batch_size(meta: KVBatchMeta, gbs: int | None) -> int | None:
    """Rows of a global batch. If rows were left out: that of the fewest equal batches of at most ``gbs`` rows."""
    if gbs is None or _SHORTENED not in meta.extra_info:
        return gbs
    return meta.size // -(-meta.size // gbs)
