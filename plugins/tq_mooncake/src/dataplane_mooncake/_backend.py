"""`TQMooncakeBackend`: the ledger inside TransferQueue's controller, the rows in Mooncake's segments."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from dataplane_core.diagnosis import Finding
from dataplane_core.errors import CapacityExceededError, OperationTimeoutError
from dataplane_core.hookspecs import PutReply, PutRequest
from dataplane_mooncake._diagnosis import diagnose
from dataplane_mooncake.config import TQMooncakeConfig
from dataplane_mooncake.machine import check_distributions, check_library, check_master, check_rdma
from dataplane_tq_simple._backend import QueueBackend

if TYPE_CHECKING:
    from dataplane_mooncake._engine import Engine

__all__ = ["TQMooncakeBackend"]

#: Seconds between two tries of a put that found the segments full.
_FULL_POLL_S: Final = 0.05


class TQMooncakeBackend(QueueBackend["Engine"]):
    """Every client of an instance speaks to one controller, and to Mooncake's segments on any node of the cluster."""

    Config = TQMooncakeConfig

    @classmethod
    def _engine_class(cls) -> type[Engine]:
        from dataplane_mooncake._engine import Engine

        return Engine

    @classmethod
    def diagnose(cls, config: TQMooncakeConfig, *, deadline: float) -> Iterable[Finding]:
        """Mooncake on this node; then the engine's packages and the Ray cluster, as for ``tq_simple``."""
        yield from diagnose(config)
        yield from super().diagnose(config, deadline=deadline)

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Checks this machine, then starts the instance on Ray, or attaches to it."""
        check_distributions()
        check_library()  # before TransferQueue is imported, which hides why it does not load
        if bootstrap and self.config.master_address is None:
            check_master()
        if self.config.protocol == "rdma":
            check_rdma(self.config.rdma_devices)
        super().start(bootstrap=bootstrap, deadline=deadline)

    def put_samples(self, request: PutRequest) -> PutReply:
        """Reserves, stores, commits; waits for room where ``on_full`` is ``block``."""
        from dataplane_mooncake._engine import StoreFullError

        while True:
            try:
                return super().put_samples(request)
            except StoreFullError as error:
                if self.config.on_full == "raise":
                    raise CapacityExceededError(error.message, hint=error.hint) from error
                if time.monotonic() + _FULL_POLL_S >= request.deadline:
                    raise OperationTimeoutError(
                        f"put_samples('{request.partition_id}', {len(request.sample_ids)} samples) timed out waiting "
                        f"for room. Nothing was written. {error.message}",
                        hint=error.hint,
                    ) from error
            time.sleep(_FULL_POLL_S)

    def _put_rows(self, handles: Sequence[int], buffer: bytearray, offsets: Any, deadline: float) -> None:
        self._connected().put_rows(handles, buffer, offsets, deadline=deadline)

    def _get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[memoryview]:
        return self._connected().get_rows(handles, deadline=deadline)

    def _delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        self._connected().delete_rows(handles, deadline=deadline)
