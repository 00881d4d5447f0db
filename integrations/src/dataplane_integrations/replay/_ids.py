"""Versioned ids and tags: a sample's weight version, prompt and collector."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import WEIGHT_VERSION_TAG
from dataplane_core.spec import TagValue

#: Tags of every row that a collector writes, beside `WEIGHT_VERSION_TAG`: the number of its prompt, the name of the
#: collector, and the number of the collector's start.
PROMPT_TAG: Final = "prompt"
COLLECTOR_TAG: Final = "collector"
INCARNATION_TAG: Final = "incarnation"
#: The version of the weights with which a row's generation ended. `ReplayBuffer.commit` adds it to a meta without it.
END_WEIGHT_VERSION_TAG: Final = "end_weight_version"

_SAMPLE_ID: Final = re.compile(r"(v(\d+)_p(\d+)(?:r(\d+))?)_g(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room for one group, reserved by one collector.

    Attributes:
        group: ``v{weight_version}_p{prompt}``. A prompt that is generated again has ``r{attempt}`` after its number, so
            that no id is used twice.
        prompt: Number of the prompt, from 0, in the order in which prompts are drawn.
        attempt: How often this prompt was started before.
        weight_version: The version of the weights to generate with.
        sample_ids: The ids to write, one per answer.
        collector: Name of the collector.
        incarnation: Number of the collector's start.
        order: Number of the reservation, from 0.
        target_step: The weight version that is to be trained on it; None if the staleness rule does not say.
    """

    group: str
    prompt: int
    attempt: int
    weight_version: int
    sample_ids: tuple[str, ...]
    collector: str
    incarnation: int
    order: int
    target_step: int | None = None

    @property
    def tags(self) -> dict[str, TagValue]:
        """The tags that each of its rows must have."""
        return {
            WEIGHT_VERSION_TAG: self.weight_version,
            PROMPT_TAG: self.prompt,
            COLLECTOR_TAG: self.collector,
            INCARNATION_TAG: self.incarnation,
        }


def group_name(weight_version: int, prompt: int, attempt: int) -> str:
    """The name of a group: ``v3_p17``, or ``v3_p17r1`` if the prompt was started once before."""
    return f"v{weight_version}_p{prompt}" + (f"r{attempt}" if attempt else "")


def parse_sample_id(sample_id: str) -> dict[str, Any]:
    """The parts of a versioned id: ``group``, ``weight_version``, ``prompt``, ``attempt`` and ``index`` in the group.

    Raises:
        InvalidRequestError: Not a versioned id.
    """
    found = _SAMPLE_ID.fullmatch(sample_id)
    if found is None:
        raise InvalidRequestError(
            f"'{sample_id}' is not a versioned sample id. Expected v{{weight_version}}_p{{prompt}}_g{{i}}, such as "
            "'v3_p17_g0'."
        )
    group, version, prompt, attempt, index = found.groups()
    return {
        "group": group,
        "weight_version": int(version),
        "prompt": int(prompt),
        "attempt": int(attempt or 0),
        "index": int(index),
    }
