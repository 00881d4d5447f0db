"""The actor of the controller.

A thread in its process serves the ledger and the book of storage units (`ControllerHost`), beside TransferQueue's own
threads, whose queues and sockets would cost each call more than the ledger does.

If it keeps a journal, Ray starts it again where it died. It then has its ledger and its book of storage units from the
journal, another port and another token, which clients ask for over Ray.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

import pickle
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import ray

from dataplane_core.errors import BackendError, DataPlaneError
from dataplane_core.hosting import Server, listen_on, new_token
from dataplane_tq_simple import _privates
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._host import ControllerHost
from dataplane_tq_simple._keeper import Keeper, UnitMaker

#: The notes of the journal: what attaching clients are told, and what a keeper of units needs.
_DESCRIPTION_NOTE = "description"
_KEEPER_NOTE = "keeper"


class Controller(_privates.ControllerClass):  # type: ignore[misc]  # has no types
    """TransferQueue's controller as an importable class.

    A worker process that imports it imports dataplane_core first, which keeps torch's compiler from loading.

    Args:
        service_factory: Picklable. Called without arguments in the controller's process, it returns the ledger; see
            `ControllerHost`. In a controller that was started again, it is called with ``must_exist=True``.
        keeps_journal: Whether the ledger is recorded.
    """

    _keeper: Keeper | None = None
    _keeps: bytes | None = None  # the class and the options of the instance, packed
    _host: ControllerHost

    def __init__(self, *, service_factory: Callable[..., object], keeps_journal: bool) -> None:
        # not super(): Ray makes other classes of this one, which super() refuses
        _privates.ControllerClass.__init__(self)
        self._service_factory = service_factory
        if keeps_journal and _was_started_before():
            self._serve(must_exist=True)
            self._come_back()

    def open(self) -> None:
        """Makes the ledger, and begins to answer. Raises what the factory raises, or a `BackendError` for it."""
        self._serve()

    def _serve(self, **how: Any) -> None:
        try:
            self._host = ControllerHost(self._service_factory(**how))
        except DataPlaneError:
            raise
        except Exception as error:
            lines = "".join(traceback.format_exception(error)).rstrip()
            raise BackendError(f"the controller cannot make its ledger: {lines}") from None
        listener, self._token = listen_on(_privates.node_ip(self)), new_token()
        self._port: int = listener.getsockname()[1]
        server = Server(self._host, listener, self._token)
        threading.Thread(target=server.run, name="dataplane-ledger", daemon=True).start()

    def _come_back(self) -> None:
        description = self._host.noted(_DESCRIPTION_NOTE)
        if description is not None:
            told = pickle.loads(description)
            name, actor, _, _, *rest = told["controller"]
            told["controller"] = (name, actor, _privates.node_ip(self), _privates.request_port(self), *rest)
            _privates.set_config(self, told)
        self._keeps = self._host.noted(_KEEPER_NOTE)
        if self._keeps is not None:
            instance, config = pickle.loads(self._keeps)
            self._keeper = Keeper(instance, config, self._host)
            self._keeper.come_back()

    def line(self) -> tuple[int, bytes, str, int]:
        """Where this process answers calls: the port, and the token that clients must know; then TransferQueue's
        address and port.
        """
        return self._port, self._token, _privates.node_ip(self), _privates.request_port(self)

    def store_config(self, conf: Any) -> None:
        """As TransferQueue's. A controller that is started again has it too."""
        self._host.note(_DESCRIPTION_NOTE, pickle.dumps(conf))
        if self._keeps is not None:
            self._host.note(_KEEPER_NOTE, self._keeps)
        _privates.store_config(self, conf)

    def keep_units(self, instance: UnitMaker, config: Any, units: list[tuple[str, str, Started]]) -> None:
        """Starts to watch the storage units of the instance: names, actors, and what they said."""
        self._keeps = pickle.dumps((instance, config))
        self._keeper = Keeper(instance, config, self._host)
        self._keeper.begin(units)


def _was_started_before() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own code, on something that it uses itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
