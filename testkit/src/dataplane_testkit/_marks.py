"""What the kit records of each of its tests: what it proves, its chapter, its rule and its time limit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar

from dataplane_core.backends import Backend
from dataplane_core.spec import Capability, Scope

#: What a test proves: the core of the contract, a capability, or a scope wider than one process.
Proof: TypeAlias = Capability | Scope | Literal["core"]

_Test = TypeVar("_Test", bound=Callable[..., Any])

CHAPTER: Final = "__dataplane_chapter__"
PROVES: Final = "__dataplane_proves__"
_LIMIT_S: Final = "__dataplane_limit_s__"


def proves(*what: Proof) -> Callable[[_Test], _Test]:
    """Marks a test of the kit with what it proves.

    Args:
        what: First the row of the report in which the test counts. If any entry is not declared, the test is skipped.
    """

    def mark(test: _Test) -> _Test:
        setattr(test, PROVES, what)
        return test

    return mark


def lasts(limit_s: float) -> Callable[[_Test], _Test]:
    """Marks a test of the kit that may take longer than others, with its limit in seconds."""

    def mark(test: _Test) -> _Test:
        setattr(test, _LIMIT_S, limit_s)
        return test

    return mark


def limit_of(test: Any) -> float | None:
    """The time limit of a test of the kit in seconds, if it has one of its own; otherwise None."""
    limit_s: float | None = getattr(test, _LIMIT_S, None)
    return limit_s


def needs_of(test: Any) -> tuple[Proof, ...]:
    """What a test of the kit proves and needs. Empty for a test of the author."""
    found: tuple[Proof, ...] = getattr(test, PROVES, ())
    return found


def chapter_of(test: Any) -> str | None:
    """The chapter of a test of the kit. None for a test of the author."""
    chapter: str | None = getattr(test, CHAPTER, None)
    return chapter


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule that a test of the kit tests.

    Attributes:
        text: The source, and the quoted sentence that the test proves. The source is the contract
            (docs/contract.md), or a docstring of the hook specs or of `BlobStore`.
        source: The name of the source in the text: ``Contract``, ``Hook spec`` or ``Blob store``.
        quotes: The quoted sentences, in which double quotes have become single quotes.
        check_first: What to check first in a backend that fails the test.
    """

    text: str
    source: str
    quotes: tuple[str, ...]
    check_first: str


def rule_of(test: Any) -> Rule:
    """The rule that a test of the kit tests, from its docstring."""
    text, _, advice = " ".join((inspect.getdoc(test) or "").split()).partition("Check first: ")
    source, _, quoted = text.strip().partition(": ")
    # the kit joins several quotes by "and" or "..."
    quotes = re.split(r"' and '|' \.\.\. '", quoted.replace('"', "'").rstrip(".").strip("'"))
    return Rule(text.strip(), source, tuple(quotes), advice)


def declares(cls: type[Backend], need: Proof) -> bool:
    """Whether a backend class declares what a test proves."""
    if isinstance(need, Capability):
        return need in cls.capabilities
    if isinstance(need, Scope):
        reach = list(Scope)
        return reach.index(cls.scope) >= reach.index(need)
    return True


def label_of(need: Proof) -> str:
    """The name of a proof in reports."""
    return f"scope {need}" if isinstance(need, Scope) else str(need)
