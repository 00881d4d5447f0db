"""The kit's machine names the sentence of the contract that a store breaks, and the least calls that show it."""

import re
from pathlib import Path

from dataplane_testkit.suites.machine import RULES, Failure, shrunk

_CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"


def _plain(text):
    """Without Markdown and line breaks."""
    return " ".join(re.sub(r"[`*]", "", text).replace('"', "'").split())


def test_each_rule_is_a_sentence_of_the_contract():
    contract = _plain(_CONTRACT.read_text(encoding="utf-8"))
    assert [rule for rule, text in RULES.items() if _plain(text).rstrip(".") not in contract] == []


def test_of_a_failure_the_calls_that_matter_are_left():
    def again(steps):
        failed = {3, 17} <= set(steps)
        return Failure(steps[: steps.index(17) + 1], AssertionError("both")) if failed else None

    assert shrunk(again(list(range(40))), again).steps == [3, 17]
