"""What all suites of the kit share: what a test proves, gates by capability, deviations, no quiet overrides."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import pytest

from dataplane_core.backends import Backend
from dataplane_core.errors import DataPlaneError
from dataplane_core.plugins import load_backend
from dataplane_core.spec import OPERATIONS, Capability, Scope
from dataplane_core.testing._store import NOT_DECLARED, Deployment, Store

__all__ = [
    "MOST_COPIES",
    "ConformanceError",
    "Proof",
    "Rule",
    "Suite",
    "lasts",
    "limit_of",
    "needs_of",
    "proves",
    "rule_of",
]

#: What a test proves: the core of the contract, a capability, or a scope wider than one process.
Proof: TypeAlias = Capability | Scope | Literal["core"]

_Test = TypeVar("_Test", bound=Callable[..., Any])

_CHAPTER: Final = "__dataplane_chapter__"
_PROVES: Final = "__dataplane_proves__"
_LIMIT_S: Final = "__dataplane_limit_s__"

#: How often a client may hold the payload at once, where the author says nothing else. One copy is due; the others are
#: for the engine's format and its messages.
MOST_COPIES: Final[Mapping[str, float]] = {"put_samples": 4.0, "get_samples": 2.5}

#: What an author's class may define; every other name of the kit is the kit's.
_AUTHORS_NAMES: Final = frozenset(
    {
        "absent_options",
        "attach_options",
        "backend",
        "backend_class",
        "conflicting_options",
        "deviations",
        "held_bytes",
        "isolated_options",
        "lose_payload",
        "most_copies",
        "op_timeout_s",
        "options",
        "raw_get",
        "restart",
        "store_per_test",
    }
)


class ConformanceError(DataPlaneError, TypeError):
    """A subclass of `BackendConformance` is not what the kit can run: a quiet override, an unknown deviation."""


def proves(*what: Proof) -> Callable[[_Test], _Test]:
    """Marks a test of the kit with what it proves.

    Args:
        what: The row of the report that the test counts for; further ones must be declared too, or it is not run.
    """

    def mark(test: _Test) -> _Test:
        setattr(test, _PROVES, what)
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
    found: tuple[Proof, ...] = getattr(test, _PROVES, ())
    return found


def chapter_of(test: Any) -> str | None:
    """The chapter of the contract that a test of the kit belongs to; None for a test that is not the kit's."""
    chapter: str | None = getattr(test, _CHAPTER, None)
    return chapter


@dataclass(frozen=True, slots=True)
class Rule:
    """What a test of the kit says of itself.

    Attributes:
        text: The sentence that it tests, and where it stands: the contract (docs/contract.md), or a docstring of the
            hook specs or of `BlobStore`.
        check_first: Where a backend that fails is most likely wrong.
    """

    text: str
    check_first: str


def rule_of(test: Any) -> Rule:
    """The rule that a test of the kit tests, from its docstring."""
    text, _, advice = " ".join((inspect.getdoc(test) or "").split()).partition("Check first: ")
    return Rule(text.strip(), advice)


class Suite:
    """Base of the suites, and of `BackendConformance`. A suite of the kit names its chapter, an author's does not.

    Attributes:
        backend: Entry-point name of the backend; or the name that reports give to ``backend_class``.
        backend_class: The backend's class.
        deviations: Test -> why this backend departs from what it says, beside the backend's own ``deviations``. The
            test becomes a strict expected failure: it must fail. A key may name some cases of a parametrized test, as
            in ``test_x[float8*]``.
        op_timeout_s: Deadline of one operation in seconds, for the kit's clients.
        most_copies: Operation (``put_samples``, ``get_samples``) -> how often its client may hold the payload at once,
            the copy that is due included, and why. Default: `MOST_COPIES`.
        store_per_test: Connect afresh for every test. By default one store serves all tests of the class that have
            equal ``options``.
    """

    backend: ClassVar[str] = ""
    backend_class: ClassVar[type[Backend] | None] = None
    deviations: ClassVar[Mapping[str, str]] = {}
    op_timeout_s: ClassVar[float] = 90.0
    most_copies: ClassVar[Mapping[str, tuple[float, str]]] = {}
    store_per_test: ClassVar[bool] = False

    def __init_subclass__(cls, *, chapter: str | None = None, proof: Proof = "core", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if chapter is None:
            _check_authors_class(cls)
            return
        setattr(cls, _CHAPTER, chapter)
        owners = [
            name for base in cls.__bases__ if base is not Suite for name in vars(base) if not name.startswith("__")
        ]
        assert len(owners) == len(set(owners)), "two suites of the kit define the same name"
        for name, member in list(vars(cls).items()):
            if name.startswith("test_"):
                setattr(member, _CHAPTER, chapter)
                if not hasattr(member, _PROVES):
                    setattr(member, _PROVES, (proof,))

    # --- what an author may supply ------------------------------------------------------------------------------------

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """The backend's options. Override it as a fixture of any scope, which may use other fixtures."""
        return {}

    def isolated_options(self, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of a store that shares nothing with the one of ``options``, for tests that need one of their own.

        The default asks the backend class, where it has a classmethod of this name, else returns ``options``: right
        where every bootstrapping client owns a store.
        """
        own = getattr(self.under_test(), "isolated_options", None)
        made: dict[str, Any] = dict(options) if own is None else own(dict(options), tag)
        return made

    def attach_options(self, options: dict[str, Any], backend: Backend) -> dict[str, Any]:
        """Options with which another process attaches to the store that ``backend`` bootstrapped with ``options``.

        The default asks the backend, where it has a method ``attach_options()``, else returns ``options``.
        """
        own = getattr(backend, "attach_options", None)
        made: dict[str, Any] = dict(options) if own is None else own()
        return made

    def absent_options(self, options: dict[str, Any]) -> dict[str, Any] | None:
        """Options under which there is nothing to attach to. Default: those of an isolated store, if they differ."""
        isolated = self.isolated_options(options, "absent")
        return isolated if isolated != options else None

    def conflicting_options(self, options: dict[str, Any]) -> dict[str, Any] | None:
        """Options that name the running store of ``options`` but would shape it otherwise; None: there are none."""
        return None

    # Without one of these, the tests that need it are not run, and the report says so.

    def raw_get(self, backend: Backend, partition_id: str, sample_id: str, field: str) -> Any:
        """A second way to read one cell, past the backend's own hooks and core's codec; for the chapter "matrix".

        Args:
            backend: The started backend of the kit's client.
            partition_id: A registered partition.
            sample_id: A sample that was put.
            field: A field of it.

        Returns:
            The cell as the engine holds it: framed bytes where the wire is bytes, else the lowered tensor or item.
        """
        raise NotImplementedError

    def held_bytes(self, backend: Backend) -> int:
        """Payload bytes that the engine holds now, counted past the backend's own books; for the chapter "room".

        What the engine itself says of what it keeps: the sizes of its keys, files or segments. Its own overhead may be
        in it. The tests compare it before and after. Of a `BlobStore` the kit finds it out by itself.

        Args:
            backend: The started backend of the kit's client.
        """
        raise NotImplementedError

    def lose_payload(self, backend: Backend, partition_id: str, sample_id: str, field: str) -> None:
        """Deletes the payload of one cell in the engine, and leaves the books as they are; for the chapter "get".

        What was put in one call with the cell, of the same sample, may go with it. Of a `LedgerBackend` the kit can do
        it by itself.

        Args:
            backend: The started backend of the kit's client.
            partition_id: A registered partition.
            sample_id: A sample that was put.
            field: A field of it.
        """
        raise NotImplementedError

    def restart(self, backend: Backend) -> None:
        """Kills the store's processes (kill -9) and starts them again; for backends that declare ``durable``.

        Args:
            backend: The started backend of the kit's client, which goes on after it.
        """
        raise NotImplementedError

    # --- fixtures -----------------------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _conformance_gate(self, request: pytest.FixtureRequest) -> None:
        if chapter_of(request.function) is None:
            return
        cls = self.under_test()
        for need in needs_of(request.function):
            if not declares(cls, need):
                pytest.skip(f"{NOT_DECLARED}{label_of(need)}")
        reason = deviation_of(self.all_deviations(), request.node.name)
        if reason is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=reason))

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest, options: dict[str, Any]) -> Iterator[Store]:
        """The store under test, as the tests of the kit use it."""
        owner = request.node if self.store_per_test else request.node.getparent(pytest.Class)
        cls = self.under_test()
        deployment = Deployment.of(owner, self, cls, self.backend or cls.__name__, options)
        store = Store(deployment)
        try:
            yield store
        finally:
            store.end_test()

    # --- how it is done -----------------------------------------------------------------------------------------------

    @classmethod
    def all_deviations(cls) -> dict[str, str]:
        """The backend's deviations and this class's."""
        return {**cls.under_test().deviations, **cls.deviations}

    @classmethod
    def supplies(cls, name: str) -> bool:
        """Whether the author's class has its own of a method that may be left out."""
        return getattr(cls, name) is not getattr(Suite, name)

    @classmethod
    def copies_allowed(cls, operation: str) -> tuple[float, str]:
        """How often an operation's client may hold the payload at once, and why where that is the author's number."""
        return cls.most_copies.get(operation, (MOST_COPIES[operation], ""))

    @classmethod
    def under_test(cls) -> type[Backend]:
        """The backend's class."""
        if cls.backend_class is not None:
            return cls.backend_class
        if cls.backend:
            return _load_backend(cls.backend)
        raise ConformanceError(
            f"{cls.__name__} names no backend.",
            hint="Set backend_class = MyBackend, or backend = 'its entry-point name'.",
        )


@functools.cache  # asked for several times per test, and reads the metadata of everything installed
def _load_backend(name: str) -> type[Backend]:
    return load_backend(name)


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


def kit_members(cls: type) -> dict[str, Any]:
    """Everything that the kit's classes define, as the kit alone would resolve it."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if _CHAPTER in vars(base) or base is Suite:
            members.update({name: value for name, value in vars(base).items() if not name.startswith("__")})
    return members


def deviation_of(deviations: Mapping[str, str], node_name: str) -> str | None:
    plain = node_name.partition("[")[0]
    for key, reason in deviations.items():
        # brackets are literal in a test's name, and a pattern only inside them
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
        if name not in _AUTHORS_NAMES and inspect.getattr_static(cls, name, None) is not member
    ]
    if overridden:
        names = ", ".join(overridden)
        raise ConformanceError(
            f"{cls.__name__} overrides {names} of the conformance kit. The kit's own must run unchanged.",
            hint=f"Write deviations = {{{overridden[0]!r}: 'why'}} and give your own test another name.",
        )
    marks = cls.__dict__.get("pytestmark", [])
    for mark in marks if isinstance(marks, list) else [marks]:
        if mark.name == "xfail":
            raise ConformanceError(
                f"{cls.__name__} marks the whole kit xfail.", hint="Write each departure down in deviations."
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
