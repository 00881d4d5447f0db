"""The kit finds out every broken backend in `testkit/tests/toys`, and lets right ones of rare sorts pass."""

from __future__ import annotations

from pathlib import Path

import pytest

_RUN = Path(__file__).parents[1] / "toys" / "run.py"
_TIMEOUT_S = 1800


def _passes(python, *words):
    done = python.run(_RUN, *words, check=False, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(_TIMEOUT_S)
def test_every_broken_backend_fails_the_test_that_names_its_rule(python):
    _passes(python)


@pytest.mark.timeout(_TIMEOUT_S)
def test_right_backends_pass_whatever_they_declare_or_carry(python):
    _passes(python, "--right")
