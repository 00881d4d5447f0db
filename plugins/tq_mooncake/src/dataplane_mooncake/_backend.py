"""`TQMooncakeBackend`: the ledger in a controller on Ray, the rows in Mooncake's segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dataplane_core.backends import Finding, RowStoreBackend
from dataplane_core.spec import Capability
from dataplane_mooncake.config import TQMooncakeConfig
from dataplane_mooncake.machine import check_distributions, check_library, check_machine, check_master, diagnose
from dataplane_tq_simple import QueueBackend

if TYPE_CHECKING:
    from dataplane_mooncake._engine import Engine


class TQMooncakeBackend(QueueBackend["Engine"], RowStoreBackend):
    """All clients of an instance connect to one controller, and to Mooncake's segments on any node of the cluster."""

    Config = TQMooncakeConfig
    # an object costs the master and the transfer engine far more than a row costs a storage unit, so whole reads of
    # large rows may take longer, for reads of a few fields that take a tenth of the time
    row_cost_bytes = 40 << 10
    apart_share = 0.25
    why_not_declared: ClassVar[Mapping[str, str]] = {
        **QueueBackend.why_not_declared,
        Capability.UNITS: "Mooncake's master places the rows, and does not say how many a storage unit holds",
    }

    @classmethod
    def _engine_class(cls) -> type[Engine]:
        from dataplane_mooncake._engine import Engine

        return Engine

    @classmethod
    def diagnose(cls, config: TQMooncakeConfig, *, deadline: float) -> Iterable[Finding]:
        """Checks Mooncake on this node; then the engine's packages and the Ray cluster, as for ``tq_simple``."""
        yield from diagnose(config)
        yield from super().diagnose(config, deadline=deadline)

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Checks this machine, then starts the instance on Ray, or attaches to it."""
        if bootstrap:
            check_machine(self.config)
            check_master(mend=True)
        else:  # the rest when the options of the instance are known
            check_distributions()
            check_library()
        super().start(bootstrap=bootstrap, deadline=deadline)

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        self._connected().put_rows(handles, buffer, offsets, deadline=deadline)

    def get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[memoryview]:
        return self._connected().get_rows(handles, deadline=deadline)

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        self._connected().delete_rows(handles, deadline=deadline)
