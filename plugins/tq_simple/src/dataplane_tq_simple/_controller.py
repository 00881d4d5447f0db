"""The actor of the controller.

A thread in its process serves the ledger and the book of storage units (`ControllerHost`).

If it keeps a journal, Ray starts it again where it died. It then has its ledger and its book of storage units from the
journal, another port and another token, which clients ask for over Ray.

Importing this module imports Ray.
"""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane_core.hosting import Server, listen_on, new_token
from dataplane_core.spec import new_id
from dataplane_tq_simple._host import ControllerHost, make_ledger
from dataplane_tq_simple._keeper import Keeper
from dataplane_tq_simple._messages import Line, Started
from dataplane_tq_simple._ray import NAMESPACE, own_address, remote, was_started_before
from dataplane_tq_simple._storage_unit import StorageUnit, UnitOptions

#: The notes of the journal: what attaching clients are told, and what the folders of units are marked with.
_DESCRIPTION_NOTE = "description"
_IDENTITY_NOTE = "identity"


class Controller:
    """See above.

    Args:
        journal, capacity_bytes, sync, durable: See `make_ledger`.
        units: The options of the units that it keeps, one on each node. None: it keeps none.
    """

    _description: Any = None  # what attaching clients are told
    _host: ControllerHost

    def __init__(
        self,
        *,
        journal: Path | None,
        capacity_bytes: int | None,
        sync: bool,
        durable: bool = False,
        units: UnitOptions | None = None,
    ) -> None:
        self._make_ledger = functools.partial(make_ledger, journal, capacity_bytes, sync, durable=durable)
        self._units = units
        if journal is not None and was_started_before():
            self._open(must_exist=True)
            description = self._host.noted(_DESCRIPTION_NOTE)
            if description is not None:
                self._description = msgspec.msgpack.decode(description)
            if units is not None:
                self._keeper(units).come_back()

    def start(self, within_s: float) -> tuple[Line, list[Started]]:
        """Makes the ledger and begins to answer. Then starts a storage unit on each node, and keeps one there from now
        on, if it keeps any. Returns `line`, and what the units say. Raises as `make_ledger` and `Keeper.begin`."""
        deadline = time.monotonic() + within_s
        self._open(must_exist=False)
        return self._line, [] if self._units is None else self._keeper(self._units).begin(deadline)

    def _open(self, *, must_exist: bool) -> None:
        self._host = ControllerHost(*self._make_ledger(must_exist=must_exist), has_units=self._units is not None)
        if not must_exist:  # a controller that dies before it is told of its clients must not look for those of before
            self._host.book.begin()
            if self._host.noted(_DESCRIPTION_NOTE) is not None:
                self._host.note(_DESCRIPTION_NOTE, None)
        ip, token = own_address(), new_token()
        listener = listen_on(ip)
        self._line: Line = ip, listener.getsockname()[1], token
        server = Server(self._host, listener, token=token)
        threading.Thread(target=server.run, name="dataplane-ledger", daemon=True).start()

    def line(self) -> Line:
        """Where this process answers calls."""
        return self._line

    def store_config(self, conf: Any) -> None:
        """Keeps what attaching clients are told. A controller that is started again has it too."""
        self._host.note(_DESCRIPTION_NOTE, msgspec.msgpack.encode(conf))
        self._description = conf

    def get_config(self) -> Any:
        """What `store_config` was given, or None."""
        return self._description

    def _keeper(self, options: UnitOptions) -> Keeper:
        own = ray.get_runtime_context()
        name, instance = own.get_actor_name(), self._identity()
        follows = (name, own.get_actor_id()) if options.detached else None

        def create(actor: str, node: str) -> Any:
            unit = remote(StorageUnit).options(
                name=actor,
                namespace=NAMESPACE,
                num_cpus=options.num_cpus,
                memory=1,  # as little as can be: Ray is not to take a node with rows for idle
                lifetime="detached" if options.detached else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            return unit.remote(options, instance, follows)

        return Keeper(self._host, f"{name}/", create, options.node_wait_s)

    def _identity(self) -> str:
        """Identifies this instance, also in the processes that go on with it."""
        found = self._host.noted(_IDENTITY_NOTE)
        if found is None:
            found = new_id().encode()
            self._host.note(_IDENTITY_NOTE, found)
        return found.decode()
