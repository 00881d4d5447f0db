"""Marks of a test of the kit: what it proves, its chapter of the contract, its rule, its time limit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar

from dataplane_core.backends import Backend
from dataplane_core.spec import OPERATIONS, Capability, Scope

__all__ = [
    "CHAPTER",
    "PROVES",
    "Proof",
    "Rule",
    "chapter_of",
    "declares",
    "label_of",
    "lasts",
    "limit_of",
    "needs_of",
    "proves",
    "rule_of",
    "undeclared_operations",
]

#: What a test proves: the core of the contract, a capability, or a scope wider than one process.
Proof: TypeAlias = Capability | Scope | Literal["core"]

_Test = TypeVar("_Test", bound=Callable[..., Any])

CHAPTER: Final = "__dataplane_chapter__"
PROVES: Final = "__dataplane_proves__"
_LIMIT_S: Final = "__dataplane_limit_s__"


def proves(*what: Proof) -> Callable[[_Test], _Test]:
    """Marks a test of the kit with what it proves.

    Args:
        what: The row of the report that the test counts for; further ones must be declared too, or it is not run.
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
    """Seconds that a test of the kit may take, where that is more than others may."""
    limit_s: float | None = getattr(test, _LIMIT_S, None)
    return limit_s


def needs_of(test: Any) -> tuple[Proof, ...]:
    """What a test of the kit proves and needs; empty for a test that is not the kit's."""
    found: tuple[Proof, ...] = getattr(test, PROVES, ())
    return found


def chapter_of(test: Any) -> str | None:
    """The chapter of the contract that a test of the kit belongs to; None for a test that is not the kit's."""
    chapter: str | None = getattr(test, CHAPTER, None)
    return chapter


@dataclass(frozen=True, slots=True)
class Rule:
    """What a test of the kit says of itself.

    Attributes:
        text: The sentence that it tests, and where it stands: the contract (docs/contract.md), or a docstring of the
            hook specs or of `BlobStore`.
        source: What the sentence stands in, as the text names it: ``Contract``, ``Hook spec`` or ``Blob store``.
        quotes: The sentences alone, with single quotes in them.
        check_first: Where a backend that fails is most likely wrong.
    """

    text: str
    source: str
    quotes: tuple[str, ...]
    check_first: str


def rule_of(test: Any) -> Rule:
    """The rule that a test of the kit tests, from its docstring."""
    text, _, advice = " ".join((inspect.getdoc(test) or "").split()).partition("Check first: ")
    source, _, quoted = text.strip().partition(": ")
    # quotes are joined by "and" or "...", which the kit adds
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
    """How reports call it."""
    return f"scope {need}" if isinstance(need, Scope) else str(need)


def undeclared_operations(cls: type[Backend]) -> list[Capability]:
    """Operations that the backend must refuse."""
    return sorted(OPERATIONS - cls.capabilities)
