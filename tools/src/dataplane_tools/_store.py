"""The store that a command looks at: attached to, and asked rarely."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from dataplane_core.backends import spread_over
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import load_config, size_bytes
from dataplane_core.connecting import connect_backend, load_backend
from dataplane_core.errors import BackendUnavailableError

#: Of what asks again and again: seconds between two looks, and the most of the time that the store spends on them.
PAUSE_S: Final = 1.0
SHARE: Final = 0.02


def attach(config_path: str, *, announced: bool = False) -> DataPlaneClient:
    """A client of the store of a config: of the running one, or of what an earlier one left, if it outlives its owner.

    It makes no store, and imports torch once it reads rows. ``announced``: with the announcements and the middleware of
    the config.
    """
    quiet: dict[str, Any] = {} if announced else {"middleware": [], "announce_s": None}
    config = load_config(config_path).model_copy(update={"attach_wait_s": 0.0, **quiet})
    named = load_backend(config.backend)
    try:
        return connect_backend(named, config, bootstrap=False, tensors=False)
    except BackendUnavailableError as error:
        checked = named.Config(**config.options)
        cls = named.class_for(checked)
        if config.num_ledgers > 1:
            checked = spread_over(cls, config.num_ledgers).first_of(checked)
        if not cls.outlives_owner(checked):
            raise
        journal = _journal_of(checked)
        if journal is not None and not journal.is_dir():
            raise BackendUnavailableError(
                f"no store was reached, and the durable folder holds none: there is no {journal}. {error.message}",
                retryable=error.retryable,
                hint="Correct the path in the config, or bootstrap a store with connect(config). This command makes "
                "none.",
            ) from error
        return connect_backend(named, config, tensors=False)


def _journal_of(options: Any) -> Path | None:
    """The folder that tells that a store was in a durable folder. None: these options name no such folder."""
    durable = getattr(options, "durable", None)
    if durable is None:
        return None
    # an instance of Ray has a folder of its own in the folder that may be shared
    return Path(getattr(options, "journal", None) or durable, getattr(options, "instance", ""), "journal").absolute()


def pause_s(cost_s: float) -> float:
    """How long to wait after a look that took this long, in seconds."""
    return max(PAUSE_S, cost_s / SHARE)


def capacity_of(client: DataPlaneClient) -> int | None:
    """How many bytes of payload the store may hold, by the config. None: it sets no limit."""
    capacity_bytes = client.config.options.get("capacity_bytes")
    return None if capacity_bytes is None else int(size_bytes(capacity_bytes)) * client.config.num_ledgers
