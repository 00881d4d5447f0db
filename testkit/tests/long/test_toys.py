"""The kit lets right backends of all sorts pass."""

from pathlib import Path

import pytest

_RUN = Path(__file__).parents[1] / "toys" / "run.py"
_TIMEOUT_S = 1800


@pytest.mark.timeout(_TIMEOUT_S)
def test_right_backends_that_declare_all_operations_but_one_pass(python):
    done = python.run(_RUN, "--all-but-one", check=False, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
