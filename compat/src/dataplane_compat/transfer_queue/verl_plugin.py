"""The plugin for verl: with the environment variable ``DATAPLANE_CONFIG``, its ``transfer_queue`` is ours.

verl imports the entry points of the group ``verl.plugins`` when it is imported, in every process. If TransferQueue is
installed, its public functions and classes are replaced in its package; its other modules stay as they are, for the
backends that store data in it. If it is not installed, this package takes its name. Some modules of verl have been
imported by then, so their names are replaced too.

The config is read by `init`, not here: verl would hide an error that a plugin raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

from dataplane_compat.transfer_queue._session import CONFIG_VARIABLE

#: Modules of TransferQueue that others import from, and that have a counterpart here.
_MODULES = ("client", "dataloader", "interface", "metadata", "sampler")
#: The module of verl that has stand-ins where TransferQueue is not installed, and their names.
_BRIDGE, _STAND_INS = "verl.utils.transferqueue_utils", ("BatchMeta", "KVBatchMeta")


def install() -> None:
    """Puts our functions and classes in the place of TransferQueue's, in this process."""
    ours = importlib.import_module("dataplane_compat.transfer_queue")
    if "transfer_queue" in sys.modules or importlib.util.find_spec("transfer_queue") is not None:
        theirs = importlib.import_module("transfer_queue")
        replaced = {name: getattr(theirs, name) for name in ours.__all__}
        for name in ours.__all__:
            setattr(theirs, name, getattr(ours, name))
    else:
        sys.modules["transfer_queue"] = ours
        for name in _MODULES:
            sys.modules[f"transfer_queue.{name}"] = importlib.import_module(f"{ours.__name__}.{name}")
        bridge = sys.modules.get(_BRIDGE)
        replaced = {} if bridge is None else {name: getattr(bridge, name) for name in _STAND_INS}
        if bridge is not None:
            vars(bridge)["tq"] = ours
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "verl"]:
        _replace(module, replaced, ours)


def _replace(module: ModuleType, replaced: dict[str, object], ours: ModuleType) -> None:
    names = vars(module)
    for name, theirs in replaced.items():
        if names.get(name) is theirs:
            names[name] = getattr(ours, name)


if os.environ.get(CONFIG_VARIABLE):
    install()
