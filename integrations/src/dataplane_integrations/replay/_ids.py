"""Versioned ids and tags: what a sample's name says about where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from dataplane_core.errors import InvalidRequestError
from dataplane_core.spec import TagValue

__all__ = [
    "COLLECTOR_TAG",
    "INCARNATION_TAG",
    "PROMPT_TAG",
    "WEIGHT_VERSION_TAG",
    "Reservation",
    "parse_sample_id",
]

#: Tags of every row that a collector has written: the version of the weights that made it, the number of its prompt,
#: and which start of which collector wrote it.
WEIGHT_VERSION_TAG: Final = "weight_version"
PROMPT_TAG: Final = "prompt"
COLLECTOR_TAG: Final = "collector"
INCARNATION_TAG: Final = "incarnation"

_SAMPLE_ID: Final = re.compile(r"(v(\d+)_p(\d+)(?:r(\d+))?)_g(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room for one group, given to one collector.

    Attributes:
        group: ``v{weight_version}_p{prompt}``; a prompt that is generated again has ``r{attempt}`` behind its number,
            so that no id is ever used twice.
        prompt: Number of the prompt, from 0, in the order of the dataset's draws.
        attempt: How often this prompt had been begun before.
        weight_version: The weights to answer with.
        sample_ids: The ids to write, one per answer.
        collector: Name of the collector.
        incarnation: Which start of that collector.
        order: Number of the reservation, from 0.
    """

    group: str
    prompt: int
    attempt: int
    weight_version: int
    sample_ids: tuple[str, ...]
    collector: str
    incarnation: int
    order: int

    @property
    def tags(self) -> dict[str, TagValue]:
        """The tags that each of its rows must be written with."""
        return {
            WEIGHT_VERSION_TAG: self.weight_version,
            PROMPT_TAG: self.prompt,
            COLLECTOR_TAG: self.collector,
            INCARNATION_TAG: self.incarnation,
        }


def group_name(weight_version: int, prompt: int, attempt: int) -> str:
    """The group of a prompt's answers: ``v3_p17``, or ``v3_p17r1`` where it was begun once before."""
    return f"v{weight_version}_p{prompt}" + (f"r{attempt}" if attempt else "")


def parse_sample_id(sample_id: str) -> dict[str, Any]:
    """What a versioned id says: ``group``, ``weight_version``, ``prompt``, ``attempt`` and ``index`` in the group.

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
