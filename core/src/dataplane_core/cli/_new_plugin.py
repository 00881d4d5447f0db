"""`dataplane new-plugin NAME`: writes a project with a backend that installs and passes the kit without changes."""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Final

import yaml

from dataplane_core.errors import ConfigError
from dataplane_core.plugins import KNOWN_BACKENDS, find_plugins

__all__ = ["run"]

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

_PYPROJECT: Final = """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "$distribution"
version = "0.1.0"
description = "A dataplane backend: $name."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["dataplane-core"]

[project.optional-dependencies]
testing = ["dataplane-core[testing]"]

[project.entry-points."dataplane.backends"]
$name = "$module:$cls"

[tool.hatch.build.targets.wheel]
packages = ["src/$module"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

_BACKEND: Final = '''\
"""The backend `$name`."""

from typing import Any

from dataplane_core import BlobStore


class $cls(BlobStore):
    """Keeps blobs in a dict of this process. Replace the dict by your engine."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._blobs: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        """Stores a blob. Returns when every process can read it."""
        self._blobs[key] = data

    def get(self, key: str) -> bytes | None:
        """Reads a blob. None if it does not exist."""
        return self._blobs.get(key)

    def delete(self, key: str) -> None:
        """Deletes a blob. Ignores a key that does not exist."""
        self._blobs.pop(key, None)
'''

_TEST: Final = '''\
"""$cls keeps the contract."""

from dataplane_core.testing import BackendConformance

from $module import $cls


class Test$cls(BackendConformance):
    backend = "$name"
    backend_class = $cls
'''

_README: Final = """\
# $distribution

The `$name` backend of dataplane.

    pip install -e '.[testing]'
    pytest                         # the conformance kit: every promise of the contract
    dataplane conformance $name    # the same, with a report

```python
from dataplane_core import connect

with connect({"backend": "$name"}) as client:
    client.register_partition("train", fields=["input_ids"], num_samples=None, consumer_tasks=["trainer"])
```

## Next steps

1. Put your engine into `put`, `get` and `delete` of `src/$module/__init__.py`; connect in `start`, disconnect in
   `stop`.
2. To serve several processes, add `append` and `read`, which keep a journal. For checks of `dataplane doctor`, add
   `diagnose`.
3. Run `pytest` after each step.
4. Choose a license, write down what you promise, and publish: `python -m build && twine upload dist/*`.
"""


def run(name: str, *, folder: str | None) -> int:
    """Writes the project and prints the next commands.

    Args:
        name: Entry-point name of the new backend.
        folder: Where to write. Created if it does not exist. None: ``dataplane-NAME`` in the working directory.

    Raises:
        ConfigError: The name is not valid or is taken, or the folder is not empty or cannot be written.
    """
    _check_name(name)
    distribution, module = f"dataplane-{name.replace('_', '-')}", f"dataplane_{name}"
    _check_free(name, distribution, module)
    words = {
        "name": name,
        "distribution": distribution,
        "module": module,
        "cls": "".join(part.capitalize() for part in name.split("_")),
    }
    root = Path(distribution if folder is None else folder)
    files = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"src/{module}/__init__.py": _BACKEND,
        f"src/{module}/py.typed": "",
        "tests/test_conformance.py": _TEST,
    }
    try:
        if root.is_dir() and any(root.iterdir()):
            raise ConfigError(f"new-plugin refused: the folder '{root}' is not empty.", hint="Choose another: --dir.")
        for path, template in files.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(template).substitute(words), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"new-plugin failed: '{root}' cannot be written: {error.strerror or error}.") from error
    print(f"wrote {root}: the backend '{name}', in package {distribution}\n\n  cd {root}")
    print("  pip install -e '.[testing]'\n  pytest")
    return 0


def _check_name(name: str) -> None:
    if not _is_name(name):
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")
        raise ConfigError(
            f"new-plugin refused: '{name}' cannot name a backend. Expected lower-case words of letters and digits, "
            "joined by single underscores, such as acme_store; not a word that Python or YAML reads as something else.",
            hint=f"Did you mean '{near}'?" if _is_name(near) else None,
        )


def _is_name(name: str) -> bool:
    """Whether module, class and config can have the name: YAML reads some words as other values, such as ``on``."""
    keywords = keyword.iskeyword(name) or keyword.iskeyword(name.capitalize())
    return _NAME.fullmatch(name) is not None and not keywords and yaml.safe_load(name) == name


def _check_free(name: str, distribution: str, module: str) -> None:
    owners = {**KNOWN_BACKENDS, **{record.name: record.distribution for record in find_plugins()}}
    reason = None
    if name in owners:
        reason = f"it is a backend of {owners[name]} already"
    elif distribution in owners.values() or any(found.name == distribution for found in metadata.distributions()):
        reason = f"its package would be {distribution}, and there is one of that name"
    elif importlib.util.find_spec(module) is not None:
        reason = f"its module would be {module}, and there is one of that name"
    if reason is not None:
        raise ConfigError(f"new-plugin refused: '{name}' is taken: {reason}.", hint="Choose another name.")
