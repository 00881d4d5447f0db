"""Writes docs/rules.md: every rule that the conformance kit tests, with its tests.

python scripts/rules_page.py

The rules are the sentences that the docstrings of the kit's tests quote.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from dataplane_core.testing import BackendConformance, rule_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rules.md"

HEAD = """# Rules and their tests

Written by `python scripts/rules_page.py`; not by hand. Each rule is a sentence of the [contract](contract.md), or of
the docstring that it names. The tests are methods of `dataplane_core.testing.BackendConformance`; the folder
`core/src/dataplane_core/testing/suites/` holds them, one file per chapter. Run one of them on your backend with
`pytest -k NAME`.
"""
#: What a docstring of the kit calls a source -> the heading of its rules here.
_OTHER_SOURCES = {"Hook spec": "The hook specs (`dataplane_core.spec`)", "Blob store": "`BlobStore`"}


def page() -> str:
    """The whole page."""
    sections = _sections()
    order = [*sections, *_OTHER_SOURCES.values()]
    rules: dict[str, dict[str, list[str]]] = {heading: defaultdict(list) for heading in order}
    places: dict[str, int] = {}
    for name in sorted(name for name in dir(BackendConformance) if name.startswith("test_")):
        rule = rule_of(getattr(BackendConformance, name))
        for quote in rule.quotes:
            heading = _OTHER_SOURCES.get(rule.source) or next(
                each for each, text in sections.items() if quote.rstrip(".") in text
            )
            places[quote] = sections[heading].index(quote.rstrip(".")) if heading in sections else 0
            rules[heading][quote].append(name)
    parts = [HEAD]
    for heading, found in rules.items():
        if found:
            parts.append(f"\n## {heading}\n")
            for quote in sorted(found, key=lambda each: (places[each], each)):
                parts.append(f"\n{quote}\n\n" + "".join(f"- `{name}`\n" for name in found[quote]))
    return "".join(parts)


def _sections() -> dict[str, str]:
    """Heading of the contract -> its text, in one line."""
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    parts = re.split(r"^##+ (.+)$", "## The contract\n" + text.partition("\n")[2], flags=re.M)[1:]
    return {heading: _plain(body) for heading, body in zip(parts[::2], parts[1::2], strict=True)}


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[`*]", "", text).replace('"', "'").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
