"""The store under test: one connected client for all tests of a class, and helpers for a single test."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import inspect
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import pytest
import torch
from msgspec.structs import replace
from tensordict import TensorDict

from dataplane_core.backends import Backend, LedgerBackend, RowStoreBackend
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import Bootstrap, connect_backend
from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import commands
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, Claim, ClaimRequest, Scope
from dataplane_testkit._author import AUTHORS_NAMES, MOST_COPIES, AuthorsClass, ConformanceError, shown_name
from dataplane_testkit._columns import batch, bits, ids
from dataplane_testkit._hooks import Hooks, backend_of, rows_at, soon, stores_rows
from dataplane_testkit._timing import PROMPT_S, STARTS_S, Background, eventually
from dataplane_testkit._workers import Worker, attached
from dataplane_testkit.faults import Faults
from dataplane_testkit.rules import declares, rule_of

_E = TypeVar("_E", bound=BaseException)

#: Capacity of the store of `Store.bounded`.
BOUNDED_BYTES: Final = 640 * 1024

#: Claims that know of no lease ask every 10 s.
_SOON_S: Final = 5.0

#: More rows than a run stores.
_MOST_HANDLES: Final = 1 << 24

#: The most different options of one class. With more, the class must set `store_per_test`.
_MOST_STORES: Final = 8


def not_declared(what: str) -> NoReturn:
    """Skips a test that proves something that the backend does not declare. The report counts it as that."""
    pytest.skip(f"not declared: {what}")


def not_run(reason: str) -> NoReturn:
    """Skips a test that cannot run on this machine or with this author's class."""
    pytest.skip(f"not run: {reason}")


_STORES = pytest.StashKey[dict[str, "Store | Exception"]]()


class OwnerChangedError(Exception):
    """Nobody can say how many rows were put, since another owner numbers them now."""


class Store:
    """The store under test, with all clients and processes that use it, as the tests of a class use it."""

    def __init__(self, case: AuthorsClass, options: dict[str, Any], **config: Any) -> None:
        self.case = case
        self.backend_class = case.under_test()
        self.name = shown_name(case)  # in errors
        self.options = copy.deepcopy(options)
        self._bounded: dict[str, DataPlaneClient] = {}
        self._workers: list[Worker] = []
        self.histories: dict[str, Background] = {}  # that several tests look at
        self.client = self.connect(self.options, **config)  # which the tests share
        self.backend: Backend = backend_of(self.client)
        self.hooks = Hooks(self.client)
        self.ends = contextlib.ExitStack()  # what ends with the test that runs
        self._asked: set[str] = set()  # the tokens of claims that wait

    @classmethod
    def of(cls, owner: Any, case: AuthorsClass, options: dict[str, Any]) -> Store:
        """The store of a pytest node for these options. Connects a new one if there is none yet."""
        stores, key = owner.stash.setdefault(_STORES, {}), repr(sorted(options.items()))
        if key not in stores:
            if len(stores) >= _MOST_STORES:
                pytest.fail("the fixture 'options' returns different options for each test. Set store_per_test = True.")
            try:
                stores[key] = cls(case, options)
            except Exception as error:
                stores[key] = error
                raise
            owner.addfinalizer(lambda: stores.pop(key).close())
        store: Store | Exception = stores[key]
        if isinstance(store, Exception):
            pytest.fail(f"the store could not be connected: {type(store).__name__}: {store}", pytrace=False)
        store.case = case
        return store

    def connect(self, options: Mapping[str, Any], *, bootstrap: Bootstrap = True, **config: Any) -> DataPlaneClient:
        """A client of the backend under test, with a `Faults` around it. The caller must close it."""
        full = self._config(options, middleware=[Faults()], **config)
        return connect_backend(self.backend_class, full, bootstrap=bootstrap)

    def _config(self, options: Mapping[str, Any], **config: Any) -> DataPlaneConfig:
        case = {"num_ledgers": self.case.num_ledgers, "op_timeout_s": self.case.op_timeout_s}
        return DataPlaneConfig(backend=self.name, options=dict(options), **{**case, **config})

    def separate_options(self, tag: str) -> dict[str, Any]:
        return self.case.isolated_options(copy.deepcopy(self.options), tag)

    def attach_options(self) -> dict[str, Any]:
        return self.case.attach_options(copy.deepcopy(self.options), backend_of(self.client))

    def bounded(self, on_full: str) -> DataPlaneClient:
        """A client of a separate store with a capacity of `BOUNDED_BYTES`, which several tests share."""
        if on_full not in self._bounded:
            options = self.separate_options(f"kit{len(self._bounded)}")
            self._bounded[on_full] = self.connect({**options, "capacity_bytes": BOUNDED_BYTES, "on_full": on_full})
        return self._bounded[on_full]

    def workers(self, count: int) -> list[Worker]:
        """Clients in separate processes, attached to the store. They are kept for later tests."""
        for worker in [dead for dead in self._workers if not dead.alive]:
            worker.close()
            self._workers.remove(worker)
        started = [self.new_worker() for _ in range(count - len(self._workers))]
        self._workers.extend(started)
        for worker in started:
            worker.wait_ready()
        return self._workers[:count]

    def end_workers(self) -> None:
        while self._workers:
            self._workers.pop().close()

    def new_worker(
        self, options: Mapping[str, Any] | None = None, bootstrap: Bootstrap = False, **config: Any
    ) -> Worker:
        """As `connect`, in a separate process; by default attached to this store. The caller must wait for it.

        A process that may bootstrap waits for `Worker.connect`.
        """
        chosen = self.attach_options() if options is None else options
        full = self._config(chosen, attach_wait_s=STARTS_S, **config)
        connect = partial(attached, self.backend_class, full.model_dump(), bootstrap)
        return Worker(connect, waits=bootstrap is not False)

    def close(self) -> None:
        """Ends the processes, then closes the clients. The client that bootstrapped is closed last."""
        with contextlib.ExitStack() as stack:
            for client in (self.client, *self._bounded.values()):
                stack.callback(client.close)
            for worker in self._workers:
                stack.callback(worker.close)

    def declares(self, capability: Capability) -> bool:
        return capability in self.backend_class.capabilities

    def require(self, capability: Capability | None) -> None:
        """Skips the test as not declared, unless the capability is declared or None."""
        if capability is not None and not self.declares(capability):
            not_declared(capability)

    def rows(self) -> RowStoreBackend:
        """The backend if it is a `RowStoreBackend`. Otherwise skips the test as not declared."""
        if not stores_rows(self.backend):
            not_declared("rows: the backend is no RowStoreBackend")
        return self.backend

    @property
    def scope(self) -> Scope:
        return self.backend_class.scope

    def attached_client(self, **config: Any) -> DataPlaneClient:
        """A further client of the same store, closed when the test ends. For scopes wider than one process."""
        return self.ends.enter_context(self.connect(self.attach_options(), bootstrap=False, **config))

    def same_store_client(self) -> DataPlaneClient:
        """A further client of the same store, if there can be one, else the shared client."""
        return self.client if self.scope is Scope.PROCESS else self.attached_client()

    def another_client(self, **config: Any) -> DataPlaneClient:
        """A further client, closed when the test ends: of the same store, or with the scope process of another."""
        if self.scope is not Scope.PROCESS:
            return self.attached_client(**config)
        return self.ends.enter_context(self.connect(self.separate_options("another"), **config))

    def new_id(self) -> str:
        return f"kit-{uuid.uuid4().hex[:12]}"

    def register(
        self,
        *fields: str,
        tasks: Sequence[str] = ("train",),
        client: DataPlaneClient | None = None,
        partition_id: str = "",
        **about: Any,
    ) -> str:
        """Registers a partition that the test's end clears: by default a new one, with ``x``. Returns its id."""
        owner = client or self.client
        chosen = partition_id or self.new_id()

        def clear() -> None:
            with contextlib.suppress(DataPlaneError):  # the test may have closed or broken the client
                owner.clear_samples(None, chosen)

        self.ends.callback(clear)
        about = {"fields": fields or ("x",), "num_samples": None, **about}
        owner.register_partition(chosen, consumer_tasks=tasks, **about)
        return chosen

    def filled(
        self, samples: int | Sequence[str], *fields: str, tags: Sequence[Mapping[str, Any]] | None = None, **about: Any
    ) -> str:
        """Registers a partition, and puts samples whose ``x`` is 0, 1, ...; a number makes ``s0``, ``s1``, ..."""
        names = ids(samples) if isinstance(samples, int) else samples
        partition = self.register(*fields, **about)
        self.put(partition, names, tags, x=torch.arange(len(names)))
        return partition

    def put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None = None,
        columns: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> KVBatchMeta:
        """Puts columns. They are keyword arguments, or in ``columns`` if a name is not an identifier."""
        columns = {**(columns or {}), **more}
        fields = batch(len(sample_ids), **columns) if columns else None
        return self.client.put_samples(sample_ids, partition_id, fields, tags)

    def get(self, partition_id: str, sample_ids: Sequence[str], *fields: str) -> TensorDict:
        return self.client.get_samples(sample_ids, partition_id, list(fields or ("x",)))

    def claim(
        self, partition_id: str, batch_size: int, *fields: str, task: str = "train", **options: Any
    ) -> KVBatchMeta:
        """Claims what is ready now. Default of the required fields: ``x``."""
        options.setdefault("blocking", False)
        return self.client.claim_meta(partition_id, task, list(fields or ("x",)), batch_size, **options)

    def waiting_claim(
        self,
        partition_id: str,
        batch_size: int,
        *fields: str,
        client: DataPlaneClient | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> Background:
        """A blocking claim of more than is ready, which waits: the store was asked, and gave it nothing."""
        owner, asked = client or self.client, threading.Event()

        def note(request: ClaimRequest, claim: Claim) -> Claim:
            if request.token not in self._asked:  # others that wait may ask again meanwhile
                self._asked.add(request.token)
                asked.set()
            return claim

        with Faults.of(owner).after("claim", note):
            names = list(fields or ("x",))
            waiting = Background(
                lambda: owner.claim_meta(partition_id, "train", names, batch_size, timeout_s=timeout_s, **options)
            )
            eventually(lambda: asked.is_set() or not waiting.running, what="the first question of a claim")
        return waiting

    def has(self, partition_id: str, sample_id: str, field: str = "x") -> bool:
        try:
            self.client.get_samples([sample_id], partition_id, [field])
        except KeyError:
            return False
        return True

    def raw_cell(self, partition_id: str, sample_id: str, field: str, rank: int | None) -> Any:
        """What the engine holds, without hooks and codec: bytes of a tensor of this rank, or an object (None)."""
        raw, wire = self.ask_author("raw_get", partition_id, sample_id, field), self.backend_class.wire
        if rank is None and wire.objects == "native" and not wire.bytes:
            return raw
        if wire.bytes:
            data = bytes(raw)
            assert data[:3] == b"DPF", f"raw_get returned {data[:8]!r}..., expected a framed cell"
            data = data[8 + 8 * data[6] :]  # behind "DPF", version, kind, dtype, rank, 0, and the shape as int64
        else:
            assert isinstance(raw, torch.Tensor), f"raw_get returned a {type(raw).__name__}, expected the cell's tensor"
            data = bits(raw)
        return msgspec.msgpack.decode(data) if rank is None else data

    @property
    def _held_bytes(self) -> Callable[[], int] | None:
        """What says how many bytes the engine holds: the author's class, else the backend."""
        if self.case.supplies("held_bytes"):
            return partial(self.case.held_bytes, self.backend)
        return getattr(self.backend, "held_bytes", None)

    @property
    def can_say_held(self) -> bool:
        return self._held_bytes is not None or stores_rows(self.backend)

    def held(self) -> Callable[[], int]:
        """Returns a function that returns by how many payload bytes the engine has grown since.

        It does not use the ledger's counts. For a `RowStoreBackend` without ``held_bytes``, it counts the bytes of all
        rows that were put since and still exist. It raises `OwnerChangedError` if there is another owner.
        """
        backend, held_bytes = self.backend, self._held_bytes
        if held_bytes is not None:
            before = held_bytes()
            return lambda: held_bytes() - before
        if not stores_rows(backend):
            not_run("the author's class supplies no held_bytes")
        first = self._new_handle(backend)

        def of_rows() -> int:
            handles = range(first, self._new_handle(backend))
            if len(handles) > _MOST_HANDLES:
                raise OwnerChangedError("another owner gives out handles that are far greater")
            return sum(len(row or b"") for row in rows_at(backend, handles).values())

        return of_rows

    def _new_handle(self, backend: RowStoreBackend) -> int:
        """A handle of a row store. An owner gives them out in turn."""
        partition = self.filled(1)
        (ref,) = backend.call_ledger(soon(), commands.Locate(partition, ["s0"], ["x"])).refs
        self.client.clear_samples(None, partition)
        return sum(ref)

    def lose(self, partition_id: str, sample_id: str, field: str) -> None:
        """Deletes the payload of a cell in the engine. The ledger does not notice it."""
        backend = self.backend
        if isinstance(backend, LedgerBackend) and not self.case.supplies("lose_payload"):
            deadline = time.monotonic() + PROMPT_S
            located = backend.call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field]))
            backend.delete_refs(located.refs, deadline)
        else:
            self.ask_author("lose_payload", partition_id, sample_id, field)

    def ask_author(self, name: str, *args: Any) -> Any:
        """Calls an optional method of the author's class. If it is missing, skips the test as not run."""
        if not self.case.supplies(name):
            not_run(f"the author's class supplies no {name}")
        return getattr(self.case, name)(self.backend, *args)

    @contextmanager
    def refusal(self, error_type: type[_E], *words: str) -> Iterator[pytest.ExceptionInfo[_E]]:
        """Asserts that the block raises an error, such as a user would catch, with all that must hold for one."""
        with pytest.raises(error_type) as caught:
            yield caught
        check_error(caught.value, self.name, *words)


@contextmanager
def no_polls(*clients: DataPlaneClient, but_for_leases: bool = False) -> Iterator[list[str]]:
    """Claims that wait ask again only when they are woken, or when their time is over. Lists the tokens of all that
    asked. With ``but_for_leases``, they also ask when the store says that they should ask before long.
    """
    asked: list[str] = []

    def note(request: ClaimRequest, claim: Claim) -> Claim:
        asked.append(request.token)
        soon = but_for_leases and 0 < claim.ask_again_s < _SOON_S
        return claim if soon else replace(claim, ask_again_s=600.0)

    with contextlib.ExitStack() as stack:
        for faults in {Faults.of(client) for client in clients}:
            stack.enter_context(faults.after("claim", note))
        yield asked


def check_error(error: BaseException, backend: str, *words: str) -> None:
    """Asserts what must hold for every error that a client raises."""
    kind = type(error).__name__
    assert isinstance(error, DataPlaneError), f"{kind} does not derive from DataPlaneError: {error}"
    assert error.backend == backend, f"{kind}.backend is {error.backend!r}, expected {backend!r}"
    assert isinstance(error.retryable, bool)
    assert error.hint is None or isinstance(error.hint, str)
    text = str(error)
    for word in (backend, *words):
        assert word in text, f"the message of {kind} does not contain {word!r}: {text}"
    assert not text.startswith(("'", '"')), f"the message of {kind} is a repr: {text}"
    assert len(text) < 2000, f"the message of {kind} is too long to read"
    copied = pickle.loads(pickle.dumps(error))  # by this process
    assert (type(copied), str(copied), vars(copied)) == (type(error), text, vars(error)), f"pickling changes {kind}"
    assert (copied.__cause__ is None) == (error.__cause__ is None), f"pickling {kind} loses its cause"


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

    @pytest.fixture(autouse=True)
    def _conformance_gate(self, request: pytest.FixtureRequest) -> None:
        rule = rule_of(request.function)
        if rule is None:
            return
        cls = self.under_test()
        for need in rule.proves:
            if not declares(cls, need):
                not_declared(need)
        reason = deviation_of(self.all_deviations(), request.node.name)
        if reason is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=reason))

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest, options: dict[str, Any]) -> Iterator[Store]:
        owner = request.node if self.store_per_test else request.node.getparent(pytest.Class)
        store = Store.of(owner, self, options)
        with store.ends:
            yield store


def kit_members(cls: type) -> dict[str, Any]:
    """Everything that the kit's classes define, without what the author's class overrides."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if _CHAPTER in vars(base) or base in (Suite, AuthorsClass):
            members.update({name: value for name, value in vars(base).items() if not name.startswith("__")})
    return members


def deviation_of(deviations: Mapping[str, str], node_name: str) -> str | None:
    for key, reason in deviations.items():
        # the brackets of a key are literal; only the text inside them is a pattern
        if key == node_name.partition("[")[0] or fnmatch.fnmatchcase(node_name, key.replace("[", "[[]")):
            return reason
    return None


def _check_authors_class(cls: type[Suite]) -> None:
    """Refuses a class that overrides the kit, or declares something wrong."""
    members, deviations, most_copies = kit_members(cls), cls.deviations, cls.most_copies
    marks = cls.__dict__.get("pytestmark", [])
    overridden = [
        name
        for name, member in members.items()
        if name not in AUTHORS_NAMES and inspect.getattr_static(cls, name, None) is not member
    ]
    unknown = [key for key in deviations if not key.startswith("test_") or key.partition("[")[0] not in members]
    silent = [f"deviations[{key!r}]" for key, why in deviations.items() if not isinstance(why, str) or not why.strip()]
    silent += [f"most_copies[{operation!r}]" for operation, (_, why) in most_copies.items() if not why.strip()]
    for wrong, what, hint in (
        (
            overridden,
            f"overrides {', '.join(overridden)} of the conformance kit. All parts of the kit must run unchanged.",
            f"If the backend fails a test, write deviations = {{{[*overridden, ''][0]!r}: 'why'}}. Give your own test "
            "another name.",
        ),
        (
            [mark for mark in (marks if isinstance(marks, list) else [marks]) if mark.name == "xfail"],
            "marks the whole kit xfail.",
            "Name each test that fails in deviations, with the reason.",
        ),
        (unknown, f"has deviations that are no tests of the kit: {', '.join(unknown)}.", None),
        (silent, f"gives no reason for {', '.join(silent)}.", None),
        (most_copies.keys() - MOST_COPIES.keys(), f"has other most_copies than of {' and '.join(MOST_COPIES)}.", None),
    ):
        if wrong:
            raise ConformanceError(f"{cls.__name__} {what}", hint=hint)


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
