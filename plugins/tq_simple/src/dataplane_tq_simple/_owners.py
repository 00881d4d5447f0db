"""Where the instances of this user run on this host, so that a process attaches by their name alone.

The process that bootstrapped an instance holds a `PrivateFolder` whose name is that of the instance, the address of
its Ray, and whether that asks for a token. If it ends, however it ends, the folder is no longer owned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Final

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


def running(name: str) -> dict[str, PrivateFolder]:
    """The owners of instances of this name that run on this host: the address of the Ray of each -> what it left.
    Removes what killed owners left. Refuses a folder that other users can access."""
    home, owners = PrivateFolder("ray", name), {}
    if not home.path.parent.exists():
        return {}
    home.check_home()
    for path in sorted(home.path.parent.glob(f"{name}{_MARK}*")):
        folder = PrivateFolder("ray", path.name)
        if folder.is_owned:
            owners[path.name.split(_MARK)[1]] = folder
            continue
        with contextlib.suppress(DataPlaneError, OSError):
            folder.claim(time.monotonic())
            folder.release()
    return owners


def find(config: QueueConfig, name: str) -> str:
    """The address of the Ray on which the one instance of this user and name runs on this host."""
    owners = running(name)
    if not owners:
        raise BackendUnavailableError(
            f"cannot attach to instance {config.instance!r}: no process of this user runs one on this host, and no "
            "address of a Ray cluster is configured.",
            hint="Bootstrap it first (bootstrap=True, in a process that stays). If it runs on another host, or is "
            "another user's, set ray_address (host:port) or RAY_ADDRESS, or call ray.init first.",
        )
    if len(owners) > 1:
        raise ConfigError(
            f"cannot attach to instance {config.instance!r}: {len(owners)} of that name run on this host, on the Rays "
            f"at {', '.join(owners)}.",
            hint="Set ray_address to one of them, or give each an `instance` of its own.",
        )
    ((address, folder),) = owners.items()
    if folder.path.name.endswith(_SECURED):
        # else Ray, which is given an address, would not use the user's token, though the owner's Ray asks for it
        with contextlib.suppress(ImportError):  # an older Ray uses a token only where RAY_AUTH_MODE says so
            from ray._private.authentication.authentication_token_setup import (
                maybe_enable_token_auth_if_token_available,
            )

            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    return address
