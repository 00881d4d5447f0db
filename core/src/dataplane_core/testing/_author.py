"""What a storage author's test class declares and supplies."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import pytest

from dataplane_core.backends import Backend
from dataplane_core.errors import DataPlaneError
from dataplane_core.plugins import load_backend

__all__ = ["AUTHORS_NAMES", "MOST_COPIES", "AuthorsClass", "ConformanceError"]

#: How often a client may hold the payload at once, where the author says nothing else. One copy is due; the others are
#: for the engine's format and its messages.
MOST_COPIES: Final[Mapping[str, float]] = {"put_samples": 4.0, "get_samples": 2.5}

#: What an author's class may define; every other name of the kit is the kit's.
AUTHORS_NAMES: Final = frozenset(
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


class AuthorsClass:
    """What an author's class says of its backend, and what it may supply.

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
            The cell as the engine holds it: framed bytes where the wire is bytes, else the encoded tensor or item.
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

    # --- what the kit asks of it --------------------------------------------------------------------------------------

    @classmethod
    def all_deviations(cls) -> dict[str, str]:
        """The backend's deviations and this class's."""
        return {**cls.under_test().deviations, **cls.deviations}

    @classmethod
    def supplies(cls, name: str) -> bool:
        """Whether the author's class has its own of a method that may be left out."""
        return getattr(cls, name) is not getattr(AuthorsClass, name)

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
