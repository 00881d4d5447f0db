"""The plugin for verl: with the environment variable ``DATAPLANE_CONFIG``, its ``transfer_queue`` is ours.

verl imports the entry points of the group ``verl.plugins`` when it is imported, in every process, before it imports
``transfer_queue``. If TransferQueue is installed, its public functions and classes are replaced in its package; its
other modules stay as they are, for the backends that store data in it. If it is not installed, this package takes its
name. The config is read by `init`: verl would hide an error that a plugin raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from dataplane_integrations.transfer_queue._session import CONFIG_VARIABLE

__all__ = ["install"]

#: Modules of TransferQueue that others import from, and that have a counterpart here.
_MODULES = ("client", "dataloader", "interface", "metadata", "sampler")


def install() -> None:
    """Puts our functions and classes in the place of TransferQueue's, in this process."""
    ours = importlib.import_module("dataplane_integrations.transfer_queue")
    if "transfer_queue" in sys.modules or importlib.util.find_spec("transfer_queue") is not None:
        theirs = importlib.import_module("transfer_queue")
        for name in ours.__all__:
            setattr(theirs, name, getattr(ours, name))
        return
    sys.modules["transfer_queue"] = ours
    for name in _MODULES:
        sys.modules[f"transfer_queue.{name}"] = importlib.import_module(f"{ours.__name__}.{name}")


if os.environ.get(CONFIG_VARIABLE):
    install()
