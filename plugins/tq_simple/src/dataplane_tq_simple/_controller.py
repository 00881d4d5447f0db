"""The actor of the controller.

If it keeps a journal, Ray starts it again where it died. It then has its ledger and its book of storage units from the
journal, another port and another token, which clients ask for over Ray.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import ray

from dataplane_tq_simple import _privates
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._keeper import Keeper, UnitMaker
from dataplane_tq_simple._sampler import CALL_PARTITION

__all__ = ["Controller"]

#: The notes of the journal: what attaching clients are told, and what a keeper of units needs.
_DESCRIPTION_NOTE = "description"
_KEEPER_NOTE = "keeper"


class Controller(_privates.ControllerClass):  # type: ignore[misc]  # has no types
    """TransferQueue's controller as an importable class.

    A worker process that imports it imports dataplane_core first, which keeps torch's compiler from loading.
    """

    _keeper: Keeper | None = None
    _keeps: bytes | None = None  # the class and the options of the instance, packed

    def __init__(self, *args: Any, keeps_journal: bool = False, **kwargs: Any) -> None:
        # not super(): Ray makes other classes of this one, which super() refuses
        _privates.ControllerClass.__init__(self, *args, **kwargs)
        if keeps_journal and _was_started_before():
            self._come_back()
        self._line = self.sampler.open_line(_privates.node_ip(self))

    def _come_back(self) -> None:
        self.sampler.open_again()
        _privates.get_metadata(self, data_fields=[], partition_id=CALL_PARTITION, mode="insert", batch_size=1)
        description = self.sampler.noted(_DESCRIPTION_NOTE)
        if description is not None:
            told = pickle.loads(description)
            name, actor, _, _, *rest = told["controller"]
            told["controller"] = (name, actor, _privates.node_ip(self), _privates.request_port(self), *rest)
            _privates.set_config(self, told)
        self._keeps = self.sampler.noted(_KEEPER_NOTE)
        if self._keeps is not None:
            instance, config = pickle.loads(self._keeps)
            self._keeper = Keeper(instance, config, self.sampler)
            self._keeper.come_back()

    def line(self) -> tuple[int, bytes, str, int]:
        """Where this process answers calls: the port, and the token that clients must know; then TransferQueue's
        address and port.
        """
        return self._line.port, self._line.token, _privates.node_ip(self), _privates.request_port(self)

    def store_config(self, conf: Any) -> None:
        """As TransferQueue's. A controller that is started again has it too."""
        self.sampler.note(_DESCRIPTION_NOTE, pickle.dumps(conf))
        if self._keeps is not None:
            self.sampler.note(_KEEPER_NOTE, self._keeps)
        _privates.store_config(self, conf)

    def keep_units(self, instance: UnitMaker, config: Any, units: list[tuple[str, str, Started]]) -> None:
        """Starts to watch the storage units of the instance: names, actors, and what they said."""
        self._keeps = pickle.dumps((instance, config))
        self._keeper = Keeper(instance, config, self.sampler)
        self._keeper.begin(units)


def _was_started_before() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own code, on something that it uses itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
