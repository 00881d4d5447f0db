"""The rules that the kit tests, read from `rules.md` beside this file, and what the kit records of each of its tests.

`rules.md` is the one table of rules: under each chapter the sentences that are proved, and under these the tests that
prove them, each with what it needs and what to check first. The site shows it as a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dataplane_core.backends import Backend
from dataplane_core.spec import Scope

PAGE: Final = Path(__file__).with_name("rules.md")


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule that a test of the kit tests."""

    chapter: str
    source: str  #: ``Contract``, ``Hook spec`` or ``Row store``: where the sentences are from
    quotes: tuple[str, ...]  #: the sentences that the test proves
    #: ``core``, capabilities, ``scope host``: first the row of the report in which it counts; skipped unless all are
    #: declared
    proves: tuple[str, ...]
    check_first: str  #: what to check first in a backend that fails the test

    @property
    def text(self) -> str:
        """The source, and the sentences in quotes."""
        return f"{self.source}: " + " and ".join(f'"{quote}"' for quote in self.quotes)


def _rules(page: str) -> Iterator[tuple[str, Rule]]:
    for part in page.split("\n## ")[1:]:
        chapter, *blocks = part.split("\n\n")
        source, quotes = "", tuple[str, ...]()
        for block in blocks:
            if block[0] not in ">-" or block.startswith("- *"):
                continue
            if block.startswith("> "):
                quoted = block.removeprefix("> ").removeprefix("- ").split("\n> - ")
                said = [" ".join(quote.replace("\n> ", " ").split()) for quote in quoted]
                named = re.match(r"\*(.+?)\*: ", said[0])
                source = named[1] if named else "Contract"
                quotes = tuple(quote.removeprefix(f"*{source}*: ") for quote in said)
                continue
            for item in block.strip().removeprefix("- ").split("\n- "):
                line = re.fullmatch(r"`(\w+)`(?: \((.+?)\))?: (.+)", " ".join(item.split()))
                assert line, f"{PAGE.name} has no rule in: {item}"
                yield line[1], Rule(chapter, source, quotes, tuple((line[2] or "core").split(", ")), line[3])


_TEXT: Final = PAGE.read_text(encoding="utf-8")
#: Test -> its rule.
RULES: Final = dict(_rules(_TEXT))


def sentences_of(chapter: str) -> dict[str, tuple[str, str]]:
    """What the kit's machine, or a chaos run, may find broken -> the sentence, and what to check first."""
    _, _, part = _TEXT.partition(f"\n## {chapter}\n")
    sentences = {}
    for item in part.partition("\n## ")[0].split("\n- *")[1:]:
        name, _, text = " ".join(item.split()).partition("*: ")
        sentence, _, hint = text.partition(" - Check first: ")
        sentences[name] = sentence, hint
    return sentences


def rule_of(test: Any) -> Rule | None:
    """The rule that a test of the kit tests. None for a test of the author."""
    return RULES.get(test.__name__) if test.__module__.startswith("dataplane_testkit.") else None


def declares(cls: type[Backend], need: str) -> bool:
    """Whether a backend class declares what a test proves."""
    reach = list(Scope)
    scopes = [f"scope {scope}" for scope in reach[: reach.index(cls.scope) + 1]]
    return need in ("core", *cls.capabilities, *scopes)
