"""The store under test: one connected client for all tests of a class, and helpers for a single test."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, Literal, NoReturn, TypeVar, cast

import msgpack
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
from dataplane_testkit._asyncio import ThroughAsyncio
from dataplane_testkit._author import AuthorsClass, shown_name
from dataplane_testkit._columns import batch, bits, ids
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._nursery import Nursery
from dataplane_testkit._rows import opened, recorded_handles, rows_at, stores_rows
from dataplane_testkit._timing import PROMPT_S, STARTS_S, Background, eventually
from dataplane_testkit._workers import Worker, attached, prepare
from dataplane_testkit.faults import Faults

_E = TypeVar("_E", bound=BaseException)
_R = TypeVar("_R")

#: Beginning of the skip reason of a test that proves something that the backend does not declare.
NOT_DECLARED: Final = "not declared: "
#: Beginning of the skip reason of a test that cannot run on this machine or with this author's class.
NOT_RUN: Final = "not run: "

#: Capacity of the store of `Deployment.bounded`.
BOUNDED_BYTES: Final = 640 * 1024

#: Claims that know of no lease ask every 10 s.
_SOON_S: Final = 5.0

#: The most different options of one class. With more, the class must set `store_per_test`.
_MOST_STORES: Final = 8


def not_declared(what: str) -> NoReturn:
    """Skips a test that proves something that the backend does not declare."""
    pytest.skip(f"{NOT_DECLARED}{what}")  # the report counts it as not declared, not as passed


def not_run(reason: str) -> NoReturn:
    """Skips a test that cannot be run. The report shows the reason."""
    pytest.skip(f"{NOT_RUN}{reason}")


class Deployment:
    """A connected store, and all clients and processes that use it. It is closed after its test class or test."""

    def __init__(self, case: AuthorsClass, options: dict[str, Any], op_timeout_s: float | None = None) -> None:
        self.case = case
        self.backend_class = case.under_test()
        self.name = shown_name(case)
        self.options = copy.deepcopy(options)
        self._clients: dict[str, DataPlaneClient] = {}
        self._workers: list[Worker] = []
        self._nursery: Nursery | None = None
        self._made: dict[Callable[..., Any], Any] = {}
        self.client = self.connect(self.options, op_timeout_s=op_timeout_s or case.op_timeout_s)

    @classmethod
    def of(cls, owner: Any, case: AuthorsClass, options: dict[str, Any]) -> Deployment:
        """The deployment of a pytest node for these options. Connects a new one if there is none yet."""
        if _KNOWN not in owner.stash:
            owner.stash[_KNOWN] = {}
            owner.addfinalizer(lambda: _close_all(owner.stash[_KNOWN]))
        known: dict[str, Deployment | Exception] = owner.stash[_KNOWN]
        key = repr(sorted(options.items()))
        if key not in known:
            if len(known) >= _MOST_STORES:
                pytest.fail("the fixture 'options' returns different options for each test. Set store_per_test = True.")
            try:
                known[key] = cls(case, options)
            except Exception as error:
                known[key] = error
                raise
        found = known[key]
        if isinstance(found, Exception):
            pytest.fail(f"the store could not be connected: {type(found).__name__}: {found}", pytrace=False)
        found.case = case
        return found

    def connect(self, options: Mapping[str, Any], *, bootstrap: Bootstrap = True, **config: Any) -> DataPlaneClient:
        """A client of the backend under test, with a `Faults` around it. The caller must close it.

        ``config`` are further keys of the config.
        """
        client = connect_backend(
            self.backend_class, self._config(options, middleware=[Faults()], **config), bootstrap=bootstrap
        )
        return cast("DataPlaneClient", ThroughAsyncio(client)) if self.case.through_asyncio else client

    def _config(self, options: Mapping[str, Any], **config: Any) -> DataPlaneConfig:
        case = {"num_ledgers": self.case.num_ledgers, "op_timeout_s": self.case.op_timeout_s}
        return DataPlaneConfig(backend=self.name, options=dict(options), **{**case, **config})

    def separate_options(self, tag: str) -> dict[str, Any]:
        """Options of a store that shares nothing with this one."""
        return self.case.isolated_options(copy.deepcopy(self.options), tag)

    def attach_options(self) -> dict[str, Any]:
        """Options with which further clients attach to this store."""
        return self.case.attach_options(copy.deepcopy(self.options), backend_of(self.client))

    def bounded(self, on_full: str) -> DataPlaneClient:
        """A client of a separate store with a capacity of `BOUNDED_BYTES`, which several tests share."""
        if on_full not in self._clients:
            options = self.separate_options(f"kit{len(self._clients)}")
            self._clients[on_full] = self.connect({**options, "capacity_bytes": BOUNDED_BYTES, "on_full": on_full})
        return self._clients[on_full]

    # --- clients in processes -----------------------------------------------------------------------------------------

    def workers(self, count: int) -> list[Worker]:
        """Clients in separate processes, attached to the store. They are kept for later tests."""
        for worker in [each for each in self._workers if not each.alive]:
            worker.close()
            self._workers.remove(worker)
        started = [self.new_worker() for _ in range(count - len(self._workers))]
        self._workers.extend(started)
        for worker in started:
            worker.wait_ready()
        return self._workers[:count]

    def end_workers(self) -> None:
        """Ends the processes that `workers` has kept."""
        while self._workers:
            self._workers.pop().close()

    def new_worker(
        self, options: Mapping[str, Any] | None = None, bootstrap: Bootstrap = False, **config: Any
    ) -> Worker:
        """A client in a separate process, by default attached to this store. The caller must wait for it and close it.

        The arguments are those of `connect`. A process that may bootstrap waits for `Worker.connect`.
        """
        chosen = self.attach_options() if options is None else options
        full = self._config(chosen, attach_wait_s=STARTS_S, **config)
        connect = partial(attached, self.backend_class, full.model_dump(), bootstrap)
        return self._fork(connect, waits=bootstrap is not False)

    def new_engine_worker(self, options: Mapping[str, Any]) -> Worker:
        """A separate process that opens only the engine of a `RowStoreBackend`. The caller closes it."""
        return self._fork(partial(opened, self.backend_class, options, False))

    def _fork(self, connect: Callable[[], AbstractContextManager[Any]], *, waits: bool = False) -> Worker:
        if self._nursery is None:
            self._nursery = Nursery.of(self.backend_class.__module__, partial(prepare, self.backend_class))
        return Worker(self._nursery, connect, waits=waits)

    # --- the end ------------------------------------------------------------------------------------------------------

    def once(self, make: Callable[[Deployment], _R]) -> _R:
        """Calls ``make(self)`` once, and returns or raises the same result on every call. Several tests check it."""
        if make not in self._made:
            try:
                self._made[make] = make(self)
            except Exception as error:
                self._made[make] = error
        made: Any = self._made[make]
        if isinstance(made, Exception):
            raise made
        found: _R = made
        return found

    def close(self) -> None:
        """Ends the processes, then closes the clients. The client that bootstrapped is closed last."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.client.close)
            if self._nursery is not None:
                stack.callback(self._nursery.release)
            for client in self._clients.values():
                stack.callback(client.close)
            for worker in self._workers:
                stack.callback(worker.close)


_KNOWN = pytest.StashKey[dict[str, "Deployment | Exception"]]()


def _close_all(known: dict[str, Deployment | Exception]) -> None:
    with contextlib.ExitStack() as stack:
        for each in known.values():
            if isinstance(each, Deployment):
                stack.callback(each.close)
    known.clear()


class Store:
    """The store under test, as a test of the kit uses it.

    Attributes:
        client: A client of the store, which the tests of a class share.
        backend: The started backend of this client.
        hooks: The backend's hooks, called directly.
        faults: A middleware around the hooks that counts calls and injects faults.
        name: The name of the backend in errors.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.client = deployment.client
        self.backend: Backend = backend_of(deployment.client)
        self.hooks = Hooks(self.backend)
        self.faults = Faults.of(self.client)
        self.name = deployment.name
        self._partitions: list[tuple[DataPlaneClient, str]] = []
        self._clients: list[DataPlaneClient] = []
        self._asked: set[str] = set()  # the tokens of claims that wait

    # --- the backend --------------------------------------------------------------------------------------------------

    @property
    def case(self) -> AuthorsClass:
        """The author's test object."""
        return self.deployment.case

    def declares(self, capability: Capability) -> bool:
        """Whether the backend declares a capability."""
        return capability in self.deployment.backend_class.capabilities

    def require(self, *capabilities: Capability | None) -> None:
        """Skips the test as not declared, unless one of the capabilities is declared or None."""
        if not any(each is None or self.declares(each) for each in capabilities):
            not_declared(" or ".join(map(str, capabilities)))

    def rows(self) -> RowStoreBackend:
        """The backend if it is a `RowStoreBackend`. Otherwise skips the test as not declared."""
        if not stores_rows(self.backend):
            not_declared("rows: the backend is no RowStoreBackend")
        return self.backend

    @property
    def scope(self) -> Scope:
        """The declared scope."""
        return self.deployment.backend_class.scope

    # --- clients ------------------------------------------------------------------------------------------------------

    def keep(self, client: DataPlaneClient) -> DataPlaneClient:
        """Has a client closed when the test ends."""
        self._clients.append(client)
        return client

    def attached_client(self, **config: Any) -> DataPlaneClient:
        """A further client of the same store, closed when the test ends. For scopes wider than one process."""
        return self.keep(self.deployment.connect(self.deployment.attach_options(), bootstrap=False, **config))

    def same_store_client(self) -> DataPlaneClient:
        """A further client of the same store, if there can be one, else the shared client."""
        return self.client if self.scope is Scope.PROCESS else self.attached_client()

    def another_client(self, **config: Any) -> DataPlaneClient:
        """A further client, closed when the test ends: of the same store, or with the scope process of another."""
        if self.scope is not Scope.PROCESS:
            return self.attached_client(**config)
        return self.keep(self.deployment.connect(self.deployment.separate_options("another"), **config))

    # --- partitions and rows ------------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """A new partition id."""
        return f"kit-{uuid.uuid4().hex[:12]}"

    def register(
        self,
        *fields: str,
        num_samples: int | None = None,
        tasks: Sequence[str] = ("train",),
        group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        partition_id: str | None = None,
        client: DataPlaneClient | None = None,
        if_exists: Literal["replace", "keep"] = "replace",
        followers: Sequence[str] = (),
    ) -> str:
        """Registers a partition that the test's end clears: by default a new one, with ``x``, of the shared client.

        It returns the partition's id.
        """
        owner = client or self.client
        chosen = partition_id or self.new_id()
        self._partitions.append((owner, chosen))
        owner.register_partition(
            *(chosen, fields or ("x",), num_samples, tasks, group_size, enums), if_exists=if_exists, followers=followers
        )
        return chosen

    def filled(
        self, samples: int | Sequence[str], *fields: str, tags: Sequence[Mapping[str, Any]] | None = None, **about: Any
    ) -> str:
        """Registers a partition as `register` does, and puts samples whose field ``x`` holds 0, 1, 2, ...

        ``samples`` are their ids; or how many, which are then ``s0``, ``s1``, ... It returns the partition's id.
        """
        names = ids(samples) if isinstance(samples, int) else samples
        partition = self.register(*fields, **about)
        self.put(partition, names, tags, x=torch.arange(len(names)))
        return partition

    def owned_id(self, client: DataPlaneClient) -> str:
        """A new partition id. What the client registers under it is cleared when the test ends."""
        self._partitions.append((client, self.new_id()))
        return self._partitions[-1][1]

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
        """Reads columns. Default: ``x``."""
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
        """A blocking claim that waits: the store was asked, and gave it nothing.

        The fields and options are those of `claim`, the client is one that the kit made, by default the shared one.
        ``batch_size`` must be more than is ready.
        """
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

    def tags_of(self, partition_id: str) -> dict[str, dict[str, Any]]:
        """Id -> tags. Uses a listing if it is declared, otherwise a claim of the task ``train`` that requires ``x``."""
        self.require(Capability.LISTING, Capability.CLAIMS)
        listing = self.declares(Capability.LISTING)
        meta = self.client.list_samples(partition_id) if listing else self.claim(partition_id, 10_000)
        assert meta.tags is not None, "the meta carries no tags"
        return dict(zip(meta.sample_ids, meta.tags, strict=True))

    def has(self, partition_id: str, sample_id: str, field: str = "x") -> bool:
        """Whether a cell is produced."""
        try:
            self.client.get_samples([sample_id], partition_id, [field])
        except KeyError:
            return False
        return True

    # --- without the hooks --------------------------------------------------------------------------------------------

    def raw_cell(self, partition_id: str, sample_id: str, field: str, rank: int | None) -> Any:
        """The bytes of a tensor cell of this rank, or an object item (None), as the engine holds it: without hooks and
        codec.
        """
        raw, wire = self.ask_author("raw_get", partition_id, sample_id, field), self.deployment.backend_class.wire
        if rank is None and wire.objects == "native" and not wire.bytes:
            return raw
        if wire.bytes:
            data = _frame_payload(raw)
        else:
            assert isinstance(raw, torch.Tensor), f"raw_get returned a {type(raw).__name__}, expected the cell's tensor"
            data = bits(raw if wire.zero_length_rows or rank == 0 else raw[1:])
        return msgpack.unpackb(data) if rank is None else data

    @contextmanager
    def held(self) -> Iterator[Callable[[], int]]:
        """Yields a function that returns by how many payload bytes the engine has grown since the block began.

        It does not use the ledger. For a `RowStoreBackend` without the author's ``held_bytes``, it counts the bytes of
        the rows that were put in the block and still exist.
        """
        backend = self.backend
        if stores_rows(backend) and not self.case.supplies("held_bytes"):
            with recorded_handles(backend) as handles:
                yield lambda: sum(len(row or b"") for row in rows_at(backend, handles).values())
            return
        before = self.ask_author("held_bytes")
        yield lambda: self.ask_author("held_bytes") - before

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

    # --- refusals -----------------------------------------------------------------------------------------------------

    @contextmanager
    def refusal(self, error_type: type[_E], *words: str) -> Iterator[pytest.ExceptionInfo[_E]]:
        """Asserts that the block raises an error with all properties of a data-plane error.

        ``error_type`` is what a user would catch. The message must contain ``words``.
        """
        with pytest.raises(error_type) as caught:
            yield caught
        check_error(caught.value, self.name, *words)

    # --- the end ------------------------------------------------------------------------------------------------------

    def end_test(self) -> None:
        """Clears the test's partitions and closes its clients."""
        for owner, partition_id in self._partitions:
            with contextlib.suppress(DataPlaneError):  # the test may have closed or broken the client
                owner.clear_samples(None, partition_id)
        with contextlib.ExitStack() as stack:
            for client in self._clients:
                stack.callback(client.close)


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


def _frame_payload(frame: Any) -> bytes:
    """The payload of a frame. Its header is "DPF", version, kind, dtype, rank, 0, and the shape as int64."""
    data = bytes(frame)
    assert data[:3] == b"DPF", f"raw_get returned {data[:8]!r}..., expected a framed cell"
    return data[8 + 8 * data[6] :]


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
