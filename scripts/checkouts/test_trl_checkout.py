"""TRL's own tests of AsyncGRPOTrainer, with our two classes in place of their stubs.

``TRL_CHECKOUT`` names a checkout, whose code is tested: not the installed TRL. See `checkouts.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkouts import needs_checkout, run_tests


@pytest.mark.timeout(600)
@needs_checkout("TRL")
def test_trls_own_tests_of_the_trainer_pass_with_our_classes(tmp_path: Path) -> None:
    # the trainer of this commit reads its `args` in this one before it has them
    names = "(TestAsyncGRPOTrainer or TestEpochStop) and not environment_owned"
    arguments = ["-p", "trl_suite", "tests/experimental/test_async_grpo_trainer.py", "-k", names]
    # the rewards of these tests are hashes; with some, all of a group are equal, and its advantages are not numbers
    how = {"paths": [Path(__file__).parent], "PYTHONHASHSEED": "0", "timeout_s": 580}
    run_tests("TRL", tmp_path, *arguments, expected=5, **how)
