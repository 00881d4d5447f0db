"""The kit finds out every broken backend in `testkit/tests/toys`, and lets right ones of rare sorts pass."""

from pathlib import Path

import pytest
from tiers import in_long

_RUN = Path(__file__).parents[1] / "toys" / "run.py"
_TIMEOUT_S = 1800


@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("words", [[], ["--right"], *in_long(["--all-but-one"])], ids=str)
def test_every_broken_backend_fails_by_its_rule_and_right_ones_pass_whatever_they_declare(python, words):
    done = python.run(_RUN, *words, check=False, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
