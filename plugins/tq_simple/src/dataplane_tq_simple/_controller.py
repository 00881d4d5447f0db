"""The actor of the controller.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transfer_queue.controller import TransferQueueController

if TYPE_CHECKING:
    from dataplane_tq_simple._book import Started
    from dataplane_tq_simple._cluster import Instance

__all__ = ["Controller"]

_BaseController: Any = TransferQueueController.__ray_metadata__.modified_class


class Controller(_BaseController):  # type: ignore[misc]  # has no types
    """TransferQueue's controller as an importable class.

    A worker process that imports it imports dataplane_core first, which keeps torch's compiler from loading.
    """

    _keeper: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _BaseController.__init__(self, *args, **kwargs)  # Ray makes other classes of this one, which super() refuses
        self._line = self.sampler.open_line(self._node_ip)

    def line(self) -> tuple[int, bytes]:
        """Where this process answers calls: the port, and the token that clients must know."""
        return self._line.port, self._line.token

    def keep_units(self, instance: type[Instance], config: Any, units: list[tuple[str, str, Started]]) -> None:
        """Starts to watch the storage units of the instance: names, actors, and what they said."""
        from dataplane_tq_simple._keeper import Keeper

        self._keeper = Keeper(instance, config, self.sampler)
        self._keeper.begin(units)
