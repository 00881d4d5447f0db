"""What looks at a running store or at what a run recorded: the commands `dataplane top`, `why`, `read`, `export`,
`metrics` and `audit`.

Operators and researchers run the commands. `export_partition` and `follow_partition` do the same for Python as
`export`. No package imports this one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane_tools._export import Exported, export_partition, follow_partition

__all__ = ["Exported", "export_partition", "follow_partition"]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562): commands that do not need pyarrow and torch start without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}._export"), name)
