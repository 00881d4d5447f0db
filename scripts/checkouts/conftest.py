"""Lets test files of this folder import each other, and the tests that need no checkout."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPAT = HERE.parents[1] / "compat/tests"
sys.path[:0] = map(str, [HERE, COMPAT, COMPAT / "transfer_queue"])
