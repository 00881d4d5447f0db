"""Field names and ``extra_info`` keys that trainers share, each with its meaning.

Shape legend: ``N`` samples, ``S`` padded sequence length. The data plane treats these names like any others: other
fields are allowed too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

_Length = TypeVar("_Length", int, NDArray[np.int64])

#: What a policy training step reads. ``input_ids`` (N, S) int64; ``input_lengths`` (N,) int64;
#: ``generation_logprobs``, ``prev_logprobs``, ``reference_policy_logprobs``, ``advantages`` (N, S) float32;
#: ``token_mask`` (N, S) and ``sample_mask`` (N,).
DP_TRAIN_FIELDS: Final[tuple[str, ...]] = (
    "input_ids",
    "input_lengths",
    "generation_logprobs",
    "prev_logprobs",
    "reference_policy_logprobs",
    "advantages",
    "token_mask",
    "sample_mask",
)

#: What a logprob forward reads.
LP_SEED_FIELDS: Final[tuple[str, ...]] = ("input_ids", "input_lengths", "token_mask", "sample_mask")

#: The token ids of a sample, (N, S) int64, and how many of them are not padding, (N,) int64.
INPUT_IDS_FIELD: Final = "input_ids"
INPUT_LENGTHS_FIELD: Final = "input_lengths"

#: Which places of a padded batch hold tokens, (N, S): not 0 for a token, 0 for padding, on either side of the tokens.
ATTENTION_MASK_FIELD: Final = "attention_mask"

#: ``extra_info`` key: the sequence length in tokens that every data-parallel rank pads its forward to.
GLOBAL_FORWARD_PAD_SEQLEN: Final = "global_forward_pad_seqlen"

#: ``extra_info`` key: readers round their padded length up to a multiple of this many tokens.
PAD_TO_MULTIPLE: Final = "pad_to_multiple"

#: ``extra_info`` keys, and attributes of a `BatchedDataDict`, that hold a shard's microbatch plan, as `Shard` in
#: `dataplane_core.sharding.plan` describes it.
MICRO_BATCH_INDICES: Final = "micro_batch_indices"
MICRO_BATCH_LENGTHS: Final = "micro_batch_lengths"
ELEM_COUNTS_PER_GB: Final = "elem_counts_per_gb"
PLAN_KEYS: Final = (MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS, ELEM_COUNTS_PER_GB)

#: Tag from which a claim fills ``KVBatchMeta.sequence_lengths``.
INPUT_LENGTHS_TAG: Final = "input_lengths"
#: Tag for the version of the weights that generated a sample: a number.
WEIGHT_VERSION_TAG: Final = "weight_version"
#: Tags that seal, in a partition of rollouts: how many rows the rollout of the row has, how many rollouts its group.
ROLLOUT_ROWS_TAG: Final = "rollout_rows"
GROUP_ROLLOUTS_TAG: Final = "group_rollouts"

#: Mixture-of-experts router replay: ``routed_experts`` (N, S, layers, k) signed integers, the experts that generation
#: chose per token; -1 where it recorded none, such as for the last token, which generation does not run the model on.
ROUTED_EXPERTS_FIELD: Final = "routed_experts"

#: The fields above that have one element per token on dim 1, padding included.
PER_TOKEN_FIELDS: Final[frozenset[str]] = frozenset(
    {
        "input_ids",
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
        "advantages",
        "token_mask",
        "routed_experts",
    }
)

#: What vision-language models read beside the tokens: per sample the patches of its images or frames of its videos, the
#: (time, height, width) of each, and their sizes. Rows have as many elements as the sample has patches or images, so no
#: reader pads them to a token length, and no microbatch cuts them.
MULTIMODAL_FIELDS: Final[frozenset[str]] = frozenset(
    {
        "pixel_values",
        "pixel_values_videos",
        "image_grid_thw",
        "video_grid_thw",
        "image_sizes",
        "second_per_grid_ts",
    }
)

#: Message logs (`batch.split_message_logs`): per sample the tokens, role and content of each turn, as lists of
#: equal length, and (N,) int64 the tokens of the assistant's first turn.
TURN_LENGTHS_FIELD: Final = "turn_lengths"
TURN_ROLES_FIELD: Final = "turn_roles"
TURN_CONTENTS_FIELD: Final = "turn_contents"
RESPONSE_TOKEN_LENGTHS_FIELD: Final = "response_token_lengths"

#: What `read_columns` puts the turns under if it is asked for them, never stored; and what it makes them of.
MESSAGE_LOG: Final = "message_log"
MESSAGE_LOG_FIELDS: Final = (INPUT_IDS_FIELD, TURN_LENGTHS_FIELD, TURN_ROLES_FIELD, TURN_CONTENTS_FIELD)


def fields_with_optional_routed_experts(fields: Sequence[str], *, enabled: bool) -> list[str]:
    """The fields to read, with the routed experts where router replay is on.

    Args:
        fields: Field names.
        enabled: Whether router replay is on. A read of the result then raises if the column was not written.

    Returns:
        A new list; ``routed_experts`` is appended once if ``enabled``.
    """
    names = list(fields)
    if enabled and ROUTED_EXPERTS_FIELD not in names:
        names.append(ROUTED_EXPERTS_FIELD)
    return names


def padded_length(length: _Length, *multiples: int) -> _Length:
    """The smallest length that is at least ``length`` and a multiple of each of ``multiples``.

    All code that pads ranks to one length uses it.

    Args:
        length: In tokens, 0 or more. For an array of lengths, the result is an array.
        multiples: 1 or more each.
    """
    multiple = math.lcm(*multiples)
    return -(-length // multiple) * multiple
