"""How NeMo RL's factory comes to build the adapter, in the driver and in its workers.

`activate` replaces NeMo RL's factory in this process. Processes that build a client are given the ``data_plane``
section, or a client, by the driver; both activate where they are unpickled. So no process is reached that needs no
client, and Ray needs no hook.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import BaseModel, WrapValidator

from dataplane_compat.nemo_rl.adapter import NemoRLAdapter, client_class

__all__ = ["Section", "activate", "attach"]

_IMPL: Final = "dataplane"
_FACTORY: Final = "build_data_plane_client"
_SCHEMA: Final = "__get_pydantic_core_schema__"


class Section(dict[str, Any]):
    """NeMo RL's ``data_plane`` section with ``impl: dataplane``. A process that unpickles it is activated.

    After `activate`, NeMo RL's ``MasterConfig`` makes it. Code that makes its config otherwise calls ``Section(cfg)``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_section, (dict(self),)


def activate() -> None:
    """Makes NeMo RL build the adapter where its config says ``impl: dataplane``. Imports NeMo RL. May be called again.

    Call it in the driver before ``MasterConfig`` is made.
    """
    factory = importlib.import_module("nemo_rl.data_plane.factory")
    interfaces = importlib.import_module("nemo_rl.data_plane.interfaces")
    original = getattr(factory, _FACTORY)
    if hasattr(original, "dataplane_section"):
        return
    replaced = _factory_over(original)
    _accept_section(interfaces.DataPlaneConfig)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "nemo_rl":
            continue
        for value in list(vars(module).values()):  # models that were made before, with the schema of then
            if isinstance(value, type) and issubclass(value, BaseModel) and "data_plane" in value.model_fields:
                value.model_rebuild(force=True)
        if vars(module).get(_FACTORY) is original:
            setattr(module, _FACTORY, replaced)


def attach(section: Mapping[str, Any]) -> NemoRLAdapter:
    """A client that attaches to the store of a section. Unpickling a client calls it."""
    return client_class()(section, bootstrap=False)


def _unpickle_section(values: dict[str, Any]) -> Section:
    activate()
    return Section(values)


def _factory_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo RL's factory, with one more ``impl``."""

    @functools.wraps(original)
    def build_data_plane_client(cfg: Any, *, bootstrap: bool = True) -> Any:
        if cfg is None or not cfg["enabled"] or cfg["impl"] != _IMPL:
            return original(cfg, bootstrap=bootstrap)
        client: Any = client_class()(cfg, bootstrap=bootstrap)
        observability = cfg.get("observability") or {}
        if observability.get("enabled", False):
            theirs = importlib.import_module("nemo_rl.data_plane.observability")
            on_event = observability.get("callback") or theirs.log_event
            client = theirs.MetricsDataPlaneClient(client, on_event=on_event)
        return client

    build_data_plane_client.dataplane_section = Section  # type: ignore[attr-defined] # a mark on a function
    return build_data_plane_client


def _accept_section(config_type: Any) -> None:
    """Makes pydantic take ``impl: dataplane``, which the type's Literal excludes, and keep the key ``dataplane``."""

    def validate(value: Any, theirs: Any) -> Any:
        if isinstance(value, Mapping) and value.get("impl") == _IMPL:
            return Section(value)
        return theirs(value)

    setattr(config_type, _SCHEMA, WrapValidator(validate).__get_pydantic_core_schema__)
