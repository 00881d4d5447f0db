"""What looks at a running store or at what a run recorded: the commands `dataplane inspect`, `top`, `browse`, `read`,
`why`, `audit`, `export`, `import`, `metrics`, `flow` and `units`.

Operators and researchers run the commands. `export_partition` and `import_folder` are two of them for Python. No
package imports this one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane_tools._export import Exported, export_partition
    from dataplane_tools._import import Imported, import_folder

__all__ = ["Exported", "Imported", "export_partition", "import_folder"]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562): commands that do not need pyarrow and torch start without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "_import" if name in ("Imported", "import_folder") else "_export"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
