"""Where the instances of this user run on this host, so that a process attaches by their name alone.

The process that bootstrapped an instance holds a `PrivateFolder` whose name is that of the instance, the address of
its Ray, and whether that asks for a token. If it ends, however it ends, the folder is no longer owned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Final, NamedTuple

import ray

from dataplane_core.errors import BackendUnavailableError, ConfigError, DataPlaneError
from dataplane_core.ownership import PrivateFolder
from dataplane_tq_simple.config import QueueConfig

_logger = logging.getLogger(__name__)
_MARK: Final = "@"  # no instance's name holds it
_SECURED: Final = f"{_MARK}token"  # at the end, if that Ray asks for a token


def cluster_is_known(config: QueueConfig) -> bool:
    """Whether this process uses a Ray, or was told of one."""
    return bool(ray.is_initialized() or config.ray_address or os.environ.get("RAY_ADDRESS"))


def claim_name(name: str, deadline: float) -> PrivateFolder:
    """Held by the one process that may start a Ray for this name. Raises `AlreadyRunningError` if it is another one."""
    folder = PrivateFolder("ray", name)
    folder.claim(deadline)
    return folder


def leave(name: str, address: str, deadline: float) -> PrivateFolder | None:
    """Says where an instance runs, until the folder is released. None: this host has no place to say it."""
    secured = _SECURED if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" else ""  # Ray itself sets it
    folder = PrivateFolder("ray", f"{name}{_MARK}{address}{secured}")
    try:
        folder.claim(deadline)
    except (DataPlaneError, OSError) as error:
        _logger.warning("other processes need ray_address=%r to attach: %s", address, error)
        return None
    return folder


class Owner(NamedTuple):
    """A process of this user that has bootstrapped an instance.

    Attributes:
        folder: What it left.
        address: Of its Ray.
        runs: Whether it runs. If not, it was killed.
    """

    folder: PrivateFolder
    address: str
    runs: bool


def look(name: str) -> list[Owner]:
    """What owners of instances of this name have left on this host. Changes nothing.

    Raises:
        BackendUnavailableError: Other users can access the folder; not retryable.
    """
    home = PrivateFolder("ray", name)
    if not home.path.parent.exists():
        return []
    home.check_home()
    left = [each.name for each in sorted(home.path.parent.glob(f"{name}{_MARK}*"))]
    folders = [PrivateFolder("ray", each) for each in left]
    return [Owner(each, each.path.name.split(_MARK)[1], each.is_owned) for each in folders]


def find(config: QueueConfig, name: str) -> str:
    """The address of the Ray on which an instance of this user runs. Removes what killed owners left.

    Raises:
        BackendUnavailableError: None runs on this host; retryable. Or as `look`.
        ConfigError: Several of this name run, each on a Ray of its own.
    """
    owners = look(name)
    for owner in owners:
        if not owner.runs:
            with contextlib.suppress(DataPlaneError, OSError):
                owner.folder.claim(time.monotonic())
                owner.folder.release()
    found = [owner for owner in owners if owner.runs]
    if not found:
        raise BackendUnavailableError(
            f"cannot attach to instance {config.instance!r}: no process of this user runs one on this host, and no "
            "address of a Ray cluster is configured.",
            hint="Bootstrap it first (bootstrap=True, in a process that stays). If it runs on another host, or is "
            "another user's, set ray_address (host:port) or RAY_ADDRESS, or call ray.init first.",
        )
    if len(found) > 1:
        raise ConfigError(
            f"cannot attach to instance {config.instance!r}: {len(found)} of that name run on this host, on the Rays "
            f"at {', '.join(owner.address for owner in found)}.",
            hint="Set ray_address to one of them, or give each an `instance` of its own.",
        )
    if found[0].folder.path.name.endswith(_SECURED):
        # else Ray, which is given an address, would not use the user's token, though the owner's Ray asks for it
        with contextlib.suppress(ImportError):  # an older Ray uses a token only where RAY_AUTH_MODE says so
            from ray._private.authentication.authentication_token_setup import (
                maybe_enable_token_auth_if_token_available,
            )

            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    return found[0].address
