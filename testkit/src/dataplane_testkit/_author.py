"""What a storage author's test class declares and supplies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pytest

from dataplane_core.backends import Backend
from dataplane_core.connecting import load_backend
from dataplane_core.errors import DataPlaneError

#: Operation -> the default for how many copies of the payload a client may hold at once. One copy is always needed. The
#: others are for the engine's format and its messages.
MOST_COPIES: Final[Mapping[str, float]] = {"put_samples": 4.0, "get_samples": 2.5}


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Something that a chaos run does to the store itself: its servers, their clocks or its network.

    Attributes:
        act: Returns a context manager that disturbs the store on entry and mends it on exit.
        lasts: Whether the run waits a while in between, at most three times the lease.
        loses_data: Whether the store may lose data by it, and come back empty or in an older state.
    """

    act: Callable[[], AbstractContextManager[Any]]
    lasts: bool = True
    loses_data: bool = False


class ConformanceError(DataPlaneError, TypeError):
    """The kit cannot run a subclass of `BackendConformance`: it overrides the kit, or declares something wrong."""


class AuthorsClass:
    """What an author's class declares about its backend, and what it may implement.

    Attributes:
        backend: Entry-point name of the backend. If ``backend_class`` is set: its name in reports.
        backend_class: The backend's class.
        deviations: Test -> why this backend fails it. The backend class's own ``deviations`` count too. The test
            becomes a strict expected failure: it must fail. A key such as ``test_x[float8*]`` names some cases of a
            parametrized test.
        op_timeout_s: Deadline of one operation in seconds, for the kit's clients.
        most_copies: Operation (``put_samples``, ``get_samples``) -> how many copies of the payload the client may hold
            at once, and the reason. Default: `MOST_COPIES`.
        num_ledgers: Over how many stores the partitions are spread, see `DataPlaneConfig`. The tests then prove that
            the backend's stores can be told apart by ``isolated_options``.
        store_per_test: Whether every test connects a new store. By default, all tests of the class with equal
            ``options`` use one store.
    """

    backend: ClassVar[str] = ""
    backend_class: ClassVar[type[Backend] | None] = None
    deviations: ClassVar[Mapping[str, str]] = {}
    op_timeout_s: ClassVar[float] = 90.0
    most_copies: ClassVar[Mapping[str, tuple[float, str]]] = {}
    num_ledgers: ClassVar[int] = 1
    store_per_test: ClassVar[bool] = False

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """The backend's options. Override this fixture. Yours may have any scope and use other fixtures."""
        return {}

    def isolated_options(self, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of a separate store that shares nothing with the store of ``options``.

        The default calls the backend class's classmethod ``isolated_options`` if it has one. Otherwise it returns
        ``options``, which is right if every client that bootstraps gets a new store.
        """
        own = getattr(self.under_test(), "isolated_options", None)
        made: dict[str, Any] = dict(options) if own is None else own(dict(options), tag)
        return made

    def attach_options(self, options: dict[str, Any], backend: Backend) -> dict[str, Any]:
        """Options with which another process attaches to the store that ``backend`` bootstrapped with ``options``.

        The default calls the backend's method ``attach_options()`` if it has one. Otherwise it returns ``options``.
        """
        own = getattr(backend, "attach_options", None)
        made: dict[str, Any] = dict(options) if own is None else own()
        return made

    def absent_options(self, options: dict[str, Any]) -> dict[str, Any] | None:
        """Options of a store that is not running. Default: those of an isolated store; None if they are the same."""
        isolated = self.isolated_options(options, "absent")
        return isolated if isolated != options else None

    def conflicting_options(self, options: dict[str, Any]) -> dict[str, Any] | None:
        """Options that name the running store of ``options`` but differ from them. None if there are none."""
        return None

    # The next methods are optional. If one is not implemented, the tests that need it are not run. The report says so.
    # ``backend`` is the started backend of the kit's client.

    def raw_get(self, backend: Backend, partition_id: str, sample_id: str, field: str) -> Any:
        """Reads one cell, which was put, without the backend's hooks and core's codec; for the chapter "columns".

        Returns:
            The cell as the engine holds it: a frame if the wire format is bytes, otherwise the encoded tensor or item.
        """
        raise NotImplementedError

    def held_bytes(self, backend: Backend) -> int:
        """How many payload bytes the engine holds now; for the chapter "capacity".

        Use the sizes that the engine reports for its keys, files or segments, not a count of the backend. They may
        include overhead, because the tests only compare values. The kit does this itself for a
        `RowStoreBackend`. A backend with a method ``held_bytes()`` needs none either.
        """
        raise NotImplementedError

    def lose_payload(self, backend: Backend, partition_id: str, sample_id: str, field: str) -> None:
        """Deletes the payload of one cell in the engine, but not the backend's metadata; for the chapter "rows".

        It may also delete other cells of the sample that were put in the same call. The kit does this itself for a
        `LedgerBackend`.
        """
        raise NotImplementedError

    def restart(self, backend: Backend) -> None:
        """Kills the store's processes with kill -9 and starts them again; for backends that declare ``durable``.

        The tests use ``backend`` after the restart too.
        """
        raise NotImplementedError

    def disturbances(self, backend: Backend) -> Mapping[str, Disturbance]:
        """What a chaos run can do to the store besides killing and stopping clients; see `run_chaos`.

        The default has one disturbance if the class implements `restart`, otherwise none.

        Returns:
            A short name for the history, such as ``the server is stopped``, and the disturbance.
        """
        if not self.supplies("restart"):
            return {}

        @contextmanager
        def restarted() -> Iterator[None]:
            self.restart(backend)
            yield

        return {"the store is killed and restarted": Disturbance(restarted, lasts=False)}

    @classmethod
    def all_deviations(cls) -> dict[str, str]:
        """The deviations of the backend class and of this class."""
        return {**cls.under_test().deviations, **cls.deviations}

    @classmethod
    def supplies(cls, name: str) -> bool:
        """Whether the author's class implements an optional method."""
        return getattr(cls, name) is not getattr(AuthorsClass, name)

    @classmethod
    def copies_allowed(cls, operation: str) -> tuple[float, str]:
        """How many copies of the payload a client may hold at once in an operation, and the author's reason if any."""
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


def shown_name(case: AuthorsClass | type[AuthorsClass]) -> str:
    """The name of the backend in errors and reports."""
    return case.backend or case.under_test().__name__


#: The names that an author's class may define: all public ones above but the class methods.
AUTHORS_NAMES: Final = {
    name for name, value in vars(AuthorsClass).items() if name[0] != "_" and not isinstance(value, classmethod)
}


#: Called several times per test, and slow: it reads the metadata of all installed packages.
_load_backend = functools.cache(load_backend)
