"""The base class of the kit's suites.

It skips tests of undeclared capabilities, applies deviations, and refuses a class that overrides the kit.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pytest

from dataplane_testkit._author import AUTHORS_NAMES, MOST_COPIES, AuthorsClass, ConformanceError
from dataplane_testkit._store import NOT_DECLARED, Deployment, Store
from dataplane_testkit.rules import declares, label_of, rule_of

#: What the classes of the kit have, and authors' classes inherit.
_CHAPTER: Final = "__dataplane_chapter__"


class Suite(AuthorsClass):
    """Base of the suites and of `BackendConformance`. The kit's classes give a chapter; an author's class does not."""

    def __init_subclass__(cls, *, chapter: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if chapter is None:
            _check_authors_class(cls)
            return
        setattr(cls, _CHAPTER, chapter)
        suites = [base for base in cls.__bases__ if base is not Suite]
        names = [name for base in suites for name in vars(base) if not name.startswith("__")]
        assert len(names) == len(set(names)), "two suites of the kit define the same name"

    # --- fixtures -----------------------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _conformance_gate(self, request: pytest.FixtureRequest) -> None:
        rule = rule_of(request.function)
        if rule is None:
            return
        cls = self.under_test()
        for need in rule.proves:
            if not declares(cls, need):
                pytest.skip(f"{NOT_DECLARED}{label_of(need)}")
        reason = deviation_of(self.all_deviations(), request.node.name)
        if reason is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=reason))

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest, options: dict[str, Any]) -> Iterator[Store]:
        """The store under test, with helpers for the tests."""
        owner = request.node if self.store_per_test else request.node.getparent(pytest.Class)
        store = Store(Deployment.of(owner, self, options))
        try:
            yield store
        finally:
            store.end_test()


def kit_members(cls: type) -> dict[str, Any]:
    """Everything that the kit's classes define, without what the author's class overrides."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if _CHAPTER in vars(base) or base in (Suite, AuthorsClass):
            members.update({name: value for name, value in vars(base).items() if not name.startswith("__")})
    return members


def deviation_of(deviations: Mapping[str, str], node_name: str) -> str | None:
    plain = node_name.partition("[")[0]
    for key, reason in deviations.items():
        # the brackets of a key are literal; only the text inside them is a pattern
        inside = key.removeprefix(f"{plain}[").removesuffix("]") if key.startswith(f"{plain}[") else None
        if key in (plain, node_name):
            return reason
        if inside is not None and fnmatch.fnmatchcase(node_name.removeprefix(f"{plain}[").removesuffix("]"), inside):
            return reason
    return None


def _check_authors_class(cls: type[Suite]) -> None:
    members = kit_members(cls)
    tests = {name for name in members if name.startswith("test_")}
    overridden = [
        name
        for name, member in members.items()
        if name not in AUTHORS_NAMES and inspect.getattr_static(cls, name, None) is not member
    ]
    if overridden:
        names = ", ".join(overridden)
        raise ConformanceError(
            f"{cls.__name__} overrides {names} of the conformance kit. All parts of the kit must run unchanged.",
            hint=f"If the backend fails this test, write deviations = {{{overridden[0]!r}: 'why'}}. "
            "Give your own test another name.",
        )
    marks = cls.__dict__.get("pytestmark", [])
    for mark in marks if isinstance(marks, list) else [marks]:
        if mark.name == "xfail":
            raise ConformanceError(
                f"{cls.__name__} marks the whole kit xfail.",
                hint="Name each test that fails in deviations, with the reason.",
            )
    for key, reason in cls.deviations.items():
        if key.partition("[")[0] not in tests:
            raise ConformanceError(f"{cls.__name__}.deviations names {key!r}, which is no test of the kit.")
        if not isinstance(reason, str) or not reason.strip():
            raise ConformanceError(f"{cls.__name__}.deviations[{key!r}] gives no reason.")
    for operation, (_, reason) in cls.most_copies.items():
        if operation not in MOST_COPIES:
            raise ConformanceError(
                f"{cls.__name__}.most_copies names {operation!r}. Expected {' or '.join(MOST_COPIES)}."
            )
        if not reason.strip():
            raise ConformanceError(f"{cls.__name__}.most_copies[{operation!r}] gives no reason.")


def unused_deviations(items: Sequence[Any]) -> list[str]:
    """Deviations that match no collected case. Only of classes of which every test was collected."""
    unused = []
    for cls in dict.fromkeys(item.cls for item in items):
        names = [item.name for item in items if item.cls is cls]
        tests = {name for name in kit_members(cls) if name.startswith("test_")}
        if tests <= {name.partition("[")[0] for name in names}:
            used = [key for key in cls.all_deviations() if any(deviation_of({key: "x"}, name) for name in names)]
            unused += [f"{cls.__name__}: {key}" for key in cls.all_deviations() if key not in used]
    return unused
