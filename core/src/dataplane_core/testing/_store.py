"""The store under test: one connected client for a whole class of tests, and helpers for a test."""

from __future__ import annotations

import contextlib
import copy
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

import msgpack
import pytest
import torch
from tensordict import TensorDict

from dataplane_core.backends import Backend, BlobStore, LedgerBackend
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig
from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import commands
from dataplane_core.meta import KVBatchMeta
from dataplane_core.plugins import Bootstrap, connect_backend
from dataplane_core.spec import Capability, Scope
from dataplane_core.testing._author import AuthorsClass
from dataplane_core.testing._blobs import recorded_keys
from dataplane_core.testing._columns import batch, bits
from dataplane_core.testing._hooks import Hooks
from dataplane_core.testing._nursery import Nursery
from dataplane_core.testing._timing import PROMPT_S, STARTS_S
from dataplane_core.testing._workers import BackendReference, Worker
from dataplane_core.testing.faults import Faults

__all__ = ["BOUNDED_BYTES", "NOT_DECLARED", "NOT_RUN", "Deployment", "Store", "not_run"]

_E = TypeVar("_E", bound=BaseException)
_R = TypeVar("_R")

#: Opens the reason of a test that is skipped because the backend does not declare what it proves.
NOT_DECLARED: Final = "not declared: "
#: Opens the reason of a test that this machine or this author's class cannot run.
NOT_RUN: Final = "not run: "

#: Room in the store of `Deployment.bounded`.
BOUNDED_BYTES: Final = 640 * 1024

#: Distinct options that one class may have before the kit asks for `store_per_test`.
_MOST_STORES: Final = 8


def not_run(reason: str) -> NoReturn:
    """Ends a test that cannot be run, with the reason that the report shows."""
    pytest.skip(f"{NOT_RUN}{reason}")


class Deployment:
    """A connected store with all that was opened on it; closed with the test class (or test) that owns it."""

    def __init__(self, case: AuthorsClass, backend_class: type[Backend], name: str, options: dict[str, Any]) -> None:
        self.case = case
        self.backend_class = backend_class
        self.name = name
        self.options = copy.deepcopy(options)
        self.faults = Faults()
        self._clients: dict[str, DataPlaneClient] = {}
        self._workers: list[Worker] = []
        self._nursery: Nursery | None = None
        self._made: dict[Callable[..., Any], Any] = {}
        self.client = self.connect(self.options, middleware=[self.faults])

    @classmethod
    def of(
        cls, owner: Any, case: AuthorsClass, backend_class: type[Backend], name: str, options: dict[str, Any]
    ) -> Deployment:
        """The deployment of these options that belongs to a pytest node; connected where there is none."""
        known: dict[str, Deployment | Exception] | None = owner.stash.get(_KNOWN, None)
        if known is None:
            known = owner.stash[_KNOWN] = {}
            owner.addfinalizer(lambda: _close_all(known))
        key = repr(sorted(options.items()))
        found = known.get(key)
        if isinstance(found, Exception):
            pytest.fail(f"the store could not be connected: {type(found).__name__}: {found}", pytrace=False)
        if found is None:
            if len(known) >= _MOST_STORES:
                pytest.fail("the fixture 'options' gives other options to every test; set store_per_test = True.")
            try:
                found = cls(case, backend_class, name, options)
            except Exception as error:
                known[key] = error
                raise
            known[key] = found
        found.case = case
        return found

    def connect(
        self,
        options: Mapping[str, Any],
        *,
        bootstrap: Bootstrap = True,
        op_timeout_s: float | None = None,
        attach_wait_s: float = 10.0,
        allow_pickle: bool = False,
        middleware: Sequence[Any] = (),
    ) -> DataPlaneClient:
        """A client of the backend under test. The caller must close it."""
        config = DataPlaneConfig(
            backend=self.name,
            options=dict(options),
            middleware=list(middleware),
            op_timeout_s=self.case.op_timeout_s if op_timeout_s is None else op_timeout_s,
            attach_wait_s=attach_wait_s,
            allow_pickle=allow_pickle,
        )
        return connect_backend(self.backend_class, config, bootstrap=bootstrap)

    def isolated(self, tag: str, **options: Any) -> DataPlaneClient:
        """A client of a store of its own, with further options; one per tag and options, closed at the end."""
        key = f"{tag} {sorted(options.items())}"
        if key not in self._clients:
            made = self.case.isolated_options(copy.deepcopy(self.options), f"kit{len(self._clients)}")
            self._clients[key] = self.connect({**made, **options})
        return self._clients[key]

    def bounded(self, on_full: str) -> DataPlaneClient:
        """A client of a store of its own with room for `BOUNDED_BYTES`."""
        return self.isolated("bounded", capacity_bytes=BOUNDED_BYTES, on_full=on_full)

    def attach_options(self) -> dict[str, Any]:
        """Options of further clients of this store."""
        return self.case.attach_options(copy.deepcopy(self.options), self.client._backend)

    def closed_client(self) -> DataPlaneClient:
        """A client that was closed; one for all tests that only need to be refused."""
        if "closed" not in self._clients:
            attach = self.backend_class.scope is not Scope.PROCESS
            options = copy.deepcopy(self.options)
            self._clients["closed"] = self.connect(self.attach_options() if attach else options, bootstrap=not attach)
            self._clients["closed"].close()
        return self._clients["closed"]

    def workers(self, count: int) -> list[Worker]:
        """Clients in processes of their own, attached to the store; kept for the next test that asks."""
        for worker in [each for each in self._workers if not each.alive]:
            worker.close()
            self._workers.remove(worker)
        started = [self.new_worker() for _ in range(count - len(self._workers))]
        self._workers.extend(started)
        for worker in started:
            worker.wait_ready()
        return self._workers[:count]

    def end_workers(self) -> None:
        """Ends the processes that `workers` kept."""
        while self._workers:
            self._workers.pop().close()

    def new_worker(self, options: Mapping[str, Any] | None = None, bootstrap: Bootstrap = False) -> Worker:
        """A client in a process of its own, which attaches unless told else; whoever asks waits for it and ends it.

        Args:
            options: Of another store than this one.
            bootstrap: As for `connect`.
        """
        chosen = self.attach_options() if options is None else dict(options)
        reference = BackendReference.of(self.backend_class, self.name, by_name=self.case.backend_class is None)
        if self._nursery is None:
            self._nursery = Nursery(reference.prepare)
        config = DataPlaneConfig(
            backend=self.name, options=chosen, op_timeout_s=self.case.op_timeout_s, attach_wait_s=STARTS_S
        )
        return Worker(self._nursery, reference, config, bootstrap)

    def once(self, make: Callable[[Deployment], _R]) -> _R:
        """What the first call of ``make(self)`` returned or raised. Several tests check the same result."""
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
        """Ends the processes, then closes the clients, the bootstrapping one last."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.client.close)
            if self._nursery is not None:
                stack.callback(self._nursery.close)
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
    """What a test of the kit uses.

    Attributes:
        client: A client of the store; shared by the tests of a class.
        backend: The started backend behind it.
        hooks: The backend's hooks, called directly.
        faults: The middleware around them: counts calls, and fails them on demand.
        name: What errors call the backend.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.client = deployment.client
        self.backend: Backend = deployment.client._backend
        self.hooks = Hooks(self.backend)
        self.faults = deployment.faults
        self.name = deployment.name
        self._partitions: list[tuple[DataPlaneClient, str]] = []
        self._clients: list[DataPlaneClient] = []

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def case(self) -> AuthorsClass:
        """The author's test object."""
        return self.deployment.case

    def declares(self, capability: Capability) -> bool:
        """Whether the backend declares it."""
        return capability in self.deployment.backend_class.capabilities

    def require(self, *capabilities: Capability | None) -> None:
        """Ends the test as not declared, unless one of them is declared, or None among them."""
        if not any(each is None or self.declares(each) for each in capabilities):
            pytest.skip(f"{NOT_DECLARED}{' or '.join(map(str, capabilities))}")

    def blobs(self) -> BlobStore:
        """The backend, where it is a `BlobStore`; ends the test as not declared where it is none."""
        if not isinstance(self.backend, BlobStore):
            pytest.skip(f"{NOT_DECLARED}blobs: it is no BlobStore")
        return self.backend

    @property
    def scope(self) -> Scope:
        """The declared scope."""
        return self.deployment.backend_class.scope

    # --- clients ------------------------------------------------------------------------------------------------------

    def another_client(self, **config: Any) -> DataPlaneClient:
        """A further client, closed when the test ends: attached to the same store where the scope allows, else with a
        store of its own."""
        if self.scope is Scope.PROCESS:
            options = self.case.isolated_options(copy.deepcopy(self.deployment.options), "another")
            client = self.deployment.connect(options, **config)
            return self.keep(client)
        return self.attached_client(**config)

    def attached_client(self, **config: Any) -> DataPlaneClient:
        """A further client of the same store, closed when the test ends; for scopes wider than the process."""
        return self.keep(self.deployment.connect(self.deployment.attach_options(), bootstrap=False, **config))

    def keep(self, client: DataPlaneClient) -> DataPlaneClient:
        """Closes a client when the test ends."""
        self._clients.append(client)
        return client

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
    ) -> str:
        """Registers a partition that is cleared when the test ends.

        Args:
            fields: Default: ``x``.
            num_samples: As the client's.
            tasks: The consumer tasks.
            group_size: As the client's ``grpo_group_size``.
            enums: As the client's.
            partition_id: Default: a new one.
            client: Default: the shared one.

        Returns:
            The partition's id.
        """
        owner = client or self.client
        chosen = partition_id or self.new_id()
        owner.register_partition(chosen, fields or ("x",), num_samples, tasks, group_size, enums)
        self._partitions.append((owner, chosen))
        return chosen

    def put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None = None,
        columns: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> KVBatchMeta:
        """Puts columns given by name, or as a dict if a name is not an identifier."""
        columns = {**(columns or {}), **more}
        fields = batch(len(sample_ids), **columns) if columns else None
        return self.client.put_samples(sample_ids, partition_id, fields, tags)

    def get(self, partition_id: str, sample_ids: Sequence[str], *fields: str) -> TensorDict:
        """Reads columns; default: ``x``."""
        return self.client.get_samples(sample_ids, partition_id, list(fields or ("x",)))

    def claim(
        self, partition_id: str, batch_size: int, *fields: str, task: str = "train", **options: Any
    ) -> KVBatchMeta:
        """Claims what is ready now; default of the required fields: ``x``."""
        options.setdefault("blocking", False)
        return self.client.claim_meta(partition_id, task, list(fields or ("x",)), batch_size, **options)

    def tags_of(self, partition_id: str) -> dict[str, dict[str, Any]]:
        """Id -> tags, of the samples that hold a cell ``x``; by listing, else by a claim of the task ``train``."""
        self.require(Capability.LISTING, Capability.CLAIMS)
        if self.declares(Capability.LISTING):
            meta = self.client.list_samples(partition_id)
        else:
            meta = self.claim(partition_id, 10_000)
        assert meta.tags is not None, "the meta carries no tags"
        return dict(zip(meta.sample_ids, meta.tags, strict=True))

    def has(self, partition_id: str, sample_id: str, field: str = "x") -> bool:
        """Whether a cell is produced."""
        try:
            self.client.get_samples([sample_id], partition_id, [field])
        except KeyError:
            return False
        return True

    # --- past the hooks -----------------------------------------------------------------------------------------------

    def raw_payload(self, partition_id: str, sample_id: str, field: str, rank: int) -> bytes:
        """The bytes of a tensor cell of that rank as the engine holds it, read past hooks and codec."""
        raw, wire = self.ask_author("raw_get", partition_id, sample_id, field), self.deployment.backend_class.wire
        if wire.bytes:
            return _frame_payload(raw)
        assert isinstance(raw, torch.Tensor), f"raw_get returned a {type(raw).__name__}, expected the cell's tensor"
        return bits(raw if wire.zero_length_rows or not rank else raw[1:])

    def raw_item(self, partition_id: str, sample_id: str, field: str) -> Any:
        """An object item as the engine holds it, read past hooks and codec."""
        raw, wire = self.ask_author("raw_get", partition_id, sample_id, field), self.deployment.backend_class.wire
        if wire.bytes:
            return msgpack.unpackb(_frame_payload(raw))
        if wire.objects == "native":
            return raw
        return msgpack.unpackb(bits(raw if wire.zero_length_rows else raw[1:]))

    @contextmanager
    def held(self) -> Iterator[Callable[[], int]]:
        """Yields how many payload bytes the engine holds more than when the block began, counted past the ledger.

        Of a `BlobStore` for which the author counts nothing, the blobs that were put in the block and are there.
        """
        backend = self.backend
        if isinstance(backend, BlobStore) and not self.case.supplies("held_bytes"):
            with recorded_keys(backend) as keys:
                yield lambda: sum(len(data) for data in map(backend.get, keys) if data is not None)
            return
        before = self.ask_author("held_bytes")
        yield lambda: self.ask_author("held_bytes") - before

    def lose(self, partition_id: str, sample_id: str, field: str) -> None:
        """Deletes the payload of a cell in the engine, past the ledger."""
        backend = self.backend
        if isinstance(backend, LedgerBackend) and not self.case.supplies("lose_payload"):
            deadline = time.monotonic() + PROMPT_S
            located = backend._ledger(deadline, commands.Locate(partition_id, [sample_id], [field]))
            backend._delete(located.refs, deadline)
        else:
            self.ask_author("lose_payload", partition_id, sample_id, field)

    def ask_author(self, name: str, *args: Any) -> Any:
        """Calls a method that an author may supply; ends the test as not run where this one does not."""
        if not self.case.supplies(name):
            not_run(f"the author's class supplies no {name}")
        return getattr(self.case, name)(self.backend, *args)

    # --- refusals -----------------------------------------------------------------------------------------------------

    @contextmanager
    def refusal(
        self, error_type: type[_E], *words: str, client: DataPlaneClient | None = None
    ) -> Iterator[pytest.ExceptionInfo[_E]]:
        """Asserts that the block raises as every error of the data plane must.

        Args:
            error_type: The builtin (or data-plane error) that a user would catch.
            words: What the message must contain.
            client: The client that raises.
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


def _frame_payload(frame: Any) -> bytes:
    """What follows the header of a framed cell: "DPF", version, kind, dtype, rank, 0, and the shape as int64."""
    data = bytes(frame)
    assert data[:3] == b"DPF", f"raw_get returned {data[:8]!r}..., expected a framed cell"
    return data[8 + 8 * data[6] :]


def check_error(error: BaseException, backend: str, *words: str) -> None:
    """Asserts what holds for every error that a client raises."""
    kind = type(error).__name__
    assert isinstance(error, DataPlaneError), f"{kind} does not derive from DataPlaneError: {error}"
    assert error.backend == backend, f"{kind}.backend is {error.backend!r}, expected {backend!r}"
    assert isinstance(error.retryable, bool)
    assert error.hint is None or isinstance(error.hint, str)
    text = str(error)
    assert text, f"{kind} has no message"
    for word in words:
        assert word in text, f"the message of {kind} does not say {word!r}: {text}"
