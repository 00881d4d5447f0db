"""How much the kit tries, by the profile (``brief``, usual, ``long``), its seed, and how it shortens what failed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def by_profile(brief: _T, usual: _T, long: _T) -> _T:
    """One of three values, as ``DATAPLANE_HYPOTHESIS_PROFILE`` says."""
    return {"brief": brief, "long": long}.get(os.environ.get("DATAPLANE_HYPOTHESIS_PROFILE", ""), usual)


def is_long() -> bool:
    """Whether ``DATAPLANE_HYPOTHESIS_PROFILE=long`` is set."""
    return by_profile(False, False, True)


def new_seed() -> int:
    """The random seed, printed so that a failing test shows it. ``DATAPLANE_CONFORMANCE_SEED`` sets it."""
    seed = int(os.environ.get("DATAPLANE_CONFORMANCE_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"DATAPLANE_CONFORMANCE_SEED={seed}")
    return seed


def fewest(items: list[_T], still: Callable[[list[_T]], list[_T] | None], most: int) -> list[_T]:
    """Leaves out parts of a list, ever smaller ones.

    ``still`` is called at most so often. It gets what is left, and returns what to go on with; None: not with that.
    """
    size = max(1, len(items) // 2)
    while size:
        at = 0
        while at < len(items) and most > 0:
            most -= 1
            fewer = still([*items[:at], *items[at + size :]])
            at, items = (at + size, items) if fewer is None else (at, fewer)
        size //= 2
    return items
