"""The actor of the controller.

A thread in its process serves the ledger and the book of storage units (`ControllerHost`).

If it keeps a journal, Ray starts it again where it died. It then has its ledger and its book of storage units from the
journal, another port and another token, which clients ask for over Ray.

Importing this module imports Ray.
"""

from __future__ import annotations

import functools
import pickle
import threading
from pathlib import Path
from typing import Any, TypeAlias

from dataplane_core.hosting import Server, listen_on, new_token
from dataplane_core.spec import new_id
from dataplane_tq_simple._actors import own_address, was_started_before
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._host import ControllerHost, make_ledger
from dataplane_tq_simple._keeper import Keeper

#: Where a controller answers calls: address, port, and the token that clients must know.
Line: TypeAlias = tuple[str, int, bytes]

#: The notes of the journal: what attaching clients are told, and what a keeper of units needs.
_DESCRIPTION_NOTE = "description"
_KEEPER_NOTE = "keeper"
#: What the places of units are marked with.
_IDENTITY_NOTE = "identity"


class Controller:
    """See above.

    Args:
        journal, capacity_bytes, sync, durable: See `make_ledger`.
    """

    _keeps: bytes | None = None  # the class and the options of the instance, packed
    _description: Any = None  # what attaching clients are told
    _host: ControllerHost

    def __init__(self, *, journal: Path | None, capacity_bytes: int | None, sync: bool, durable: bool = False) -> None:
        self._make_ledger = functools.partial(make_ledger, journal, capacity_bytes, sync, durable=durable)
        self._durable = durable
        if journal is not None and was_started_before():
            self.open(must_exist=True)
            self._come_back()

    def open(self, *, must_exist: bool = False) -> Line:
        """Makes the ledger, and begins to answer. Returns `line`. Raises as `make_ledger`."""
        self._host = ControllerHost(self._make_ledger(must_exist=must_exist))
        if not must_exist:  # a controller that dies before it is told of its units must not look for those of before
            for name in (_DESCRIPTION_NOTE, _KEEPER_NOTE):
                if self._host.noted(name) is not None:
                    self._host.note(name, None)
        ip, token = own_address(), new_token()
        listener = listen_on(ip)
        self._line: Line = ip, listener.getsockname()[1], token
        server = Server(self._host, listener, token=token)
        threading.Thread(target=server.run, name="dataplane-ledger", daemon=True).start()
        return self._line

    def _come_back(self) -> None:
        description = self._host.noted(_DESCRIPTION_NOTE)
        if description is not None:
            self._description = pickle.loads(description)
        self._keeps = self._host.noted(_KEEPER_NOTE)
        if self._keeps is not None:
            self._make_keeper().come_back()

    def identity(self) -> str:
        """Identifies this instance, also in the processes that go on with it."""
        found = self._host.noted(_IDENTITY_NOTE)
        if found is None:
            found = new_id().encode()
            self._host.note(_IDENTITY_NOTE, found)
        return found.decode()

    def line(self) -> Line:
        """Where this process answers calls."""
        return self._line

    def store_config(self, conf: Any) -> None:
        """Keeps what attaching clients are told. A controller that is started again has it too."""
        self._host.note(_DESCRIPTION_NOTE, pickle.dumps(conf))
        self._description = conf

    def get_config(self) -> Any:
        """What `store_config` was given, or None."""
        return self._description

    def keep_units(self, instance: Any, config: Any, units: list[tuple[str, str, Started]]) -> None:
        """Starts to watch the storage units of an instance of this class: names, actors, and what they said."""
        self._keeps = pickle.dumps((instance, config))
        self._make_keeper().begin(units)
        self._host.note(_KEEPER_NOTE, self._keeps)

    def _make_keeper(self) -> Keeper:
        assert self._keeps is not None
        instance, config = pickle.loads(self._keeps)
        identity = self.identity() if self._durable else None
        create = functools.partial(instance.create_unit, config, identity=identity, added=True)
        kept = functools.partial(instance.places, config) if self._durable else None
        return Keeper(self._host, instance.unit_prefix(config), create, kept, wait_s=config.node_wait_s)
