"""This process's connection: which config it uses, and the client.

A config is found in this order: the one given to `init`, the file that the environment variable `CONFIG_VARIABLE`
names, and that of the process of the Ray cluster that started the store.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dataplane_compat.transfer_queue._pool import end_threads
from dataplane_compat.transfer_queue.client import TransferQueueClient
from dataplane_core import DataPlaneConfig, connect
from dataplane_core.config import load_config
from dataplane_core.connecting import Bootstrap
from dataplane_core.errors import ConfigError, OperationTimeoutError

#: Environment variable: the path of a config file.
CONFIG_VARIABLE: Final = "DATAPLANE_CONFIG"
#: The Ray actor that holds the config of the running store, so that other processes of the cluster find it. It has the
#: name of TransferQueue's controller, and its method ``get_config``. Without Ray there is none.
_NAME: Final = "TransferQueueController"
_NAMESPACE: Final = "transfer_queue"
#: Seconds to wait for an answer, where no config says it.
_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Session:
    """An open connection.

    Attributes:
        config: Its config.
        client: Its client.
        pid: The process that opened it.
        published: The actor that tells other processes of the Ray cluster its config, or None.
    """

    config: DataPlaneConfig
    client: TransferQueueClient
    pid: int
    published: Any = None


_lock = threading.RLock()
_session: Session | None = None


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # a thread of the parent may have held it


def current() -> Session | None:
    """The open session of this process. That of a parent before a fork does not count."""
    return _session if _session is not None and _session.pid == os.getpid() else None


def start(conf: Any) -> Session:
    """Opens the session: starts the store, or attaches if it runs. An open session is returned as it is."""
    with _lock:
        return current() or _open(find_config(conf), bootstrap="auto", controller=_key(conf, "controller") or {})


def attached(config: DataPlaneConfig | None = None) -> Session:
    """The open session, or one that attaches to a running store, with the config given or else found."""
    with _lock:
        session = current()
        if session is None:
            if config is None:
                config = _session.config if _session is not None else find_config(None)  # a parent's, before a fork
            session = _open(config, bootstrap=False, controller={})
        return session


def _open(config: DataPlaneConfig, bootstrap: Bootstrap, controller: Mapping[str, Any]) -> Session:
    global _session
    with contextlib.ExitStack() as opened:  # closes the store if what follows raises
        store = opened.enter_context(connect(config, bootstrap))
        settings = controller if store.bootstrapped else None
        client = TransferQueueClient(f"TransferQueueClient_{os.getpid()}", store, settings)
        published = publish(_shown(config, controller), config.op_timeout_s) if store.bootstrapped else None
        _session = Session(config, client, os.getpid(), published)
        opened.pop_all()
    return _session


def end() -> None:
    """Closes the session. The process that started the store ends it."""
    global _session
    with _lock:
        session, _session = current(), None
        if session is not None:
            withdraw(session.published)
            session.client.close()
            end_threads()


def find_config(conf: Any) -> DataPlaneConfig:
    """The config of the store, with partitions that open by themselves.

    Raises:
        ConfigError: There is none.
    """
    given: Any = None
    if isinstance(conf, (DataPlaneConfig, str, os.PathLike)):
        given = conf
    elif isinstance(_key(conf, "backend"), str):  # TransferQueue's own config has a mapping there
        given = {name: value for name, value in _plain(conf).items() if name not in ("controller", "metrics")}
    elif (shown := _key(conf, "dataplane")) is not None:
        given = _plain(shown)
    if given is None:
        given = os.environ.get(CONFIG_VARIABLE) or (look_up() or {}).get("dataplane")
    if given is None:
        raise ConfigError(
            "no config was found.",
            hint=f"Set {CONFIG_VARIABLE}=/path/to/config.yaml in the environment of every process, or pass a config, "
            "such as {'backend': 'shm_store'}, to init().",
        )
    return load_config(given).model_copy(update={"open_partitions": True})


def _shown(config: DataPlaneConfig, controller: Any) -> dict[str, Any]:
    """What other processes learn. Objects in the config, such as samplers, are left out."""
    settings = {name: value for name, value in _plain(controller).items() if isinstance(value, (str, bool, int))}
    return {"dataplane": config.model_dump(), "controller": settings}


def _key(conf: Any, name: str) -> Any:
    if not isinstance(conf, Mapping) and not _is_omegaconf(conf):
        return None
    return conf.get(name)


def _plain(conf: Any) -> dict[str, Any]:
    if _is_omegaconf(conf):
        from omegaconf import OmegaConf

        found: dict[str, Any] = OmegaConf.to_container(conf, resolve=True)
        return found
    return dict(conf)


def _is_omegaconf(conf: Any) -> bool:
    """Whether it is of OmegaConf, which need not be installed."""
    return "omegaconf" in sys.modules and type(conf).__module__.partition(".")[0] == "omegaconf"


# --- the actor that tells other processes of a Ray cluster the config -------------------------------------------------


class _Directory:
    """The actor."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def get_config(self) -> dict[str, Any]:
        """What was published."""
        return self._config


def _ray() -> Any:
    """Ray, if this process uses it."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def publish(config: dict[str, Any], timeout_s: float) -> Any:
    """Starts the actor, and returns it. It lives as long as its handle. Without Ray: None.

    Raises:
        OperationTimeoutError: The actor did not start in time.
    """
    ray = _ray()
    if ray is None:
        return None
    actor = ray.remote(_Directory).options(name=_NAME, namespace=_NAMESPACE, num_cpus=0).remote(config)
    try:
        _ask(actor, timeout_s)
    except BaseException:
        withdraw(actor)  # or the next one could not have its name
        raise
    return actor


def _ask(actor: Any, timeout_s: float) -> Any:
    ray = sys.modules["ray"]
    try:
        return ray.get(actor.get_config.remote(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise OperationTimeoutError(
            f"the Ray actor '{_NAME}', which holds the config of the store, did not answer within {timeout_s:g} s.",
            hint="Ray starts a process for it, which takes long on a busy node. Raise op_timeout_s of the config.",
        ) from error


def look_up() -> dict[str, Any] | None:
    """What was published, or None."""
    ray = _ray()
    if ray is None:
        return None
    try:
        actor = ray.get_actor(_NAME, namespace=_NAMESPACE)
    except ValueError:
        return None
    found = _ask(actor, _WAIT_S)
    return found if isinstance(found, dict) and "dataplane" in found else None


def cluster_address() -> str | None:
    """The address of the Ray cluster that this process uses, or None."""
    ray = _ray()
    return None if ray is None else str(ray.get_runtime_context().gcs_address)


def withdraw(actor: Any) -> None:
    """Ends an actor of `publish`, if there is one."""
    ray = _ray()
    if actor is not None and ray is not None:
        ray.kill(actor)
