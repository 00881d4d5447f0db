"""Every test of the kit quotes the sentence that it proves, word for word, and says what to check first."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from dataplane_core.backends import blob_store
from dataplane_core.spec import hooks, replies, requests
from dataplane_testkit import BackendConformance
from dataplane_testkit._marks import chapter_of, needs_of, rule_of

_CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"
_TESTS = [name for name in dir(BackendConformance) if name.startswith("test_")]


def _plain(text: str) -> str:
    """Without Markdown and line breaks."""
    return " ".join(re.sub(r"[`*]", "", text).replace('"', "'").split())


_SOURCES = {
    "Contract": _plain(_CONTRACT.read_text(encoding="utf-8")),
    "Hook spec": _plain("".join(map(inspect.getsource, (hooks, requests, replies)))),
    "Blob store": _plain(inspect.getsource(blob_store)),
}


@pytest.mark.parametrize("name", _TESTS)
def test_docstrings_quote_the_contract(name):
    doc = " ".join((inspect.getdoc(getattr(BackendConformance, name)) or "").split())
    rule = rule_of(getattr(BackendConformance, name))
    assert len(rule.check_first) > 20, f"{name} does not say what to check first"
    assert rule.source in _SOURCES, f"{name} begins with {rule.source!r}"
    assert re.match(r'[A-Za-z ]+: ".*"\.? Check first: ', doc), f"{name} does not quote"
    for quote in rule.quotes:
        text = _plain(quote).rstrip(".")
        assert text, f"{name} quotes nothing"
        assert text in _SOURCES[rule.source], f"{name} quotes what the {rule.source} does not say: {quote!r}"


def test_every_test_has_a_chapter_and_says_what_it_proves():
    for name in _TESTS:
        test = getattr(BackendConformance, name)
        assert chapter_of(test), name
        assert needs_of(test), name
