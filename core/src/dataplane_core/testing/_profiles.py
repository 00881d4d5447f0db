"""How many examples Hypothesis tries: few and always the same, or, under the profile ``long``, many and random; and the
seed of what is random in both."""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, Phase, settings

__all__ = ["is_long", "kit_settings", "new_seed"]


def is_long() -> bool:
    """Whether ``DATAPLANE_HYPOTHESIS_PROFILE=long`` is set."""
    return os.environ.get("DATAPLANE_HYPOTHESIS_PROFILE") == "long"


def new_seed() -> int:
    """A seed, printed so that a failing test shows it; ``DATAPLANE_CONFORMANCE_SEED`` sets it."""
    seed = int(os.environ.get("DATAPLANE_CONFORMANCE_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"DATAPLANE_CONFORMANCE_SEED={seed}")
    return seed


def kit_settings(max_examples: int, *, stateful_step_count: int = 50, shrink: bool = True) -> settings:
    """Settings of the kit's own, whatever profile the author's suite loads.

    Args:
        max_examples: Examples of the short profile; the long one tries 25 times as many.
        stateful_step_count: Steps of one history of a state machine.
        shrink: Look for a simpler example of a failure.
    """
    long = is_long()
    phases = [Phase.explicit, Phase.generate, Phase.target]
    return settings(
        max_examples=max_examples * (25 if long else 1),
        stateful_step_count=stateful_step_count,
        derandomize=not long,
        database=None,
        deadline=None,
        print_blob=long,
        suppress_health_check=list(HealthCheck),
        phases=[*phases, Phase.shrink] if shrink else phases,
    )
