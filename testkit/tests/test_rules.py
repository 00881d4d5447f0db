"""Each test of the kit has a rule, which quotes a sentence word for word, and says what to check first."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from dataplane_core.backends import row_store
from dataplane_core.spec import Capability, operations, replies, requests
from dataplane_testkit import BackendConformance
from dataplane_testkit.rules import RULES, sentences_of

_CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"


def _plain(text: str) -> str:
    """Without Markdown and line breaks."""
    return " ".join(re.sub(r"[`*]", "", text).replace('"', "'").split())


_SOURCES = {
    "Contract": _plain(_CONTRACT.read_text(encoding="utf-8")),
    "Hook spec": _plain("".join(map(inspect.getsource, (operations, requests, replies)))),
    "Row store": _plain(inspect.getsource(row_store)),
}


def test_each_test_of_the_kit_has_a_rule_and_each_rule_a_test() -> None:
    assert RULES.keys() == {name for name in dir(BackendConformance) if name.startswith("test_")}
    assert {rule.proves[0] for rule in RULES.values()} >= {*Capability}, "a capability that no test proves"


def test_rules_quote_what_their_source_says() -> None:
    said = [
        f"{name}: {quote}"
        for name, rule in RULES.items()
        for quote in rule.quotes
        if not _plain(quote) or _plain(quote).rstrip(".") not in _SOURCES[rule.source]
    ]
    assert not said, "what no source says:\n" + "\n".join(said)


@pytest.mark.parametrize("chapter", ["machine", "chaos"])
def test_each_rule_of_the_machine_and_of_chaos_is_a_sentence_of_the_contract(chapter: str) -> None:
    quotes = [_plain(sentence).rstrip(".") for sentence, _ in sentences_of(chapter).values()]
    assert len(quotes) >= 20
    assert [quote for quote in quotes if quote not in _SOURCES["Contract"]] == []


def test_rules_say_what_to_check_first() -> None:
    hints = {name: rule.check_first for name, rule in RULES.items()}
    hints |= {name: hint for name, (_, hint) in sentences_of("machine").items()}
    assert not [name for name, hint in hints.items() if len(hint) <= 20]
