"""How many examples Hypothesis tries (few fixed ones; with the profile ``long`` many random ones), and the seed."""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, Phase, settings


def is_long() -> bool:
    """Whether ``DATAPLANE_HYPOTHESIS_PROFILE=long`` is set."""
    return os.environ.get("DATAPLANE_HYPOTHESIS_PROFILE") == "long"


def new_seed() -> int:
    """The random seed, printed so that a failing test shows it. ``DATAPLANE_CONFORMANCE_SEED`` sets it."""
    seed = int(os.environ.get("DATAPLANE_CONFORMANCE_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"DATAPLANE_CONFORMANCE_SEED={seed}")
    return seed


def kit_settings(max_examples: int, *, stateful_step_count: int = 50, shrink: bool = True) -> settings:
    """The kit's Hypothesis settings. They do not depend on the profile that the author's tests load.

    Args:
        max_examples: How many examples to try. The profile ``long`` tries 25 times as many.
        stateful_step_count: The most steps in one run of a state machine.
        shrink: Whether to look for a simpler example of a failure.
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
