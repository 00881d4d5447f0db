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

from dataplane_core.connecting import KNOWN_BACKENDS, find_plugins
from dataplane_core.errors import ConfigError

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
testing = ["dataplane-testkit"]

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

_JOURNALED: Final = '''\
"""The backend `$name`."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from dataplane_core import BlobStore
from dataplane_core.backends import CapacityOptions
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError


class ${cls}Options(CapacityOptions):
    """The options of `$name`, besides ``capacity_bytes`` and ``on_full``."""

    path: Path
    """The folder of the store."""


class $cls(BlobStore):
    """Keeps a file per blob and per record in a folder. Replace the files by your engine.

    What is written survives the end of a process. To survive that of the machine, it must be synced, too.
    """

    Config = ${cls}Options

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of a store that shares nothing with that of ``options``. The kit asks for them."""
        return {**options, "path": f"{options['path']}-{tag}"}

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Makes the folder, or goes on with the one that is there."""
        path = self.config.path
        self._new, self._blobs, self._trims, self._records = (
            path / name for name in ("new", "blobs", "trims", "records")
        )
        if bootstrap:
            try:
                path.mkdir(parents=True, exist_ok=not self.exclusive)  # of several processes, one
            except FileExistsError as error:
                raise AlreadyRunningError(f"there is a store in '{path}'.", retryable=True) from error
            for folder in (self._new, self._blobs, self._trims, self._records):
                folder.mkdir(exist_ok=True)
        elif not self._records.is_dir():
            raise BackendUnavailableError(f"there is no store in '{path}'.", hint="Bootstrap it first.")

    # --- blobs --------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        """Stores a blob. Returns when every process can read it."""
        self._write(data).rename(self._blobs / key)

    def get(self, key: str) -> bytes | None:
        """Reads a blob. None if it does not exist."""
        try:
            return (self._blobs / key).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """Deletes a blob. Ignores a key that does not exist."""
        (self._blobs / key).unlink(missing_ok=True)

    # --- the journal --------------------------------------------------------------------------------------------------

    def append(self, seq: int, record: bytes) -> bool:
        """Writes a record with the next number, unless another process was faster."""
        new, place = self._write(record), self._records / str(seq)
        try:
            os.link(new, place)  # whole, and only if there is no such file
        except FileExistsError:
            return False
        finally:
            new.unlink()
        if seq < self._first():  # there was such a record, and it was trimmed
            place.unlink(missing_ok=True)
            return False
        return True

    def read(self, from_seq: int) -> list[bytes]:
        """The records from a place on."""
        while True:
            first = max(from_seq, self._first())
            records: list[bytes] = []
            with suppress(FileNotFoundError):
                while True:
                    records.append((self._records / str(first + len(records))).read_bytes())
            if self._first() <= first:  # else another process trimmed records meanwhile: perhaps the one not found
                return records

    def trim(self, before_seq: int) -> None:
        """Drops the records below a number."""
        first = self._first()
        if before_seq <= first:
            return
        (self._trims / str(before_seq)).touch()
        for name in os.listdir(self._records):
            if int(name) < before_seq:
                (self._records / name).unlink(missing_ok=True)
        (self._trims / str(first)).unlink(missing_ok=True)

    def _first(self) -> int:
        """The number of the first record: the highest that the journal was trimmed to."""
        return max(map(int, os.listdir(self._trims)), default=0)

    def _write(self, data: bytes) -> Path:
        """Writes a file under a name that nobody reads."""
        path = self._new / uuid4().hex
        path.write_bytes(data)
        return path
'''

_TEST: Final = '''\
"""$cls keeps the contract."""

from dataplane_testkit import BackendConformance

from $module import $cls


class Test$cls(BackendConformance):
    backend = "$name"
    backend_class = $cls
'''

_TEST_OF_JOURNALED: Final = '''\
"""$cls keeps the contract."""

import time

import pytest
from dataplane_testkit import BackendConformance

from $module import $cls


class Test$cls(BackendConformance):
    backend = "$name"
    backend_class = $cls

    @pytest.fixture
    def options(self, tmp_path_factory):
        return {"path": str(tmp_path_factory.getbasetemp() / "store")}

    def restart(self, backend):
        """Ends what the store runs, as a crash does, and starts it again. Files run nothing."""
        backend.__init__(backend.config)
        backend.start(bootstrap=True, deadline=time.monotonic() + 60)
'''

_README: Final = """\
# $distribution

The `$name` backend of dataplane.

    pip install -e '.[testing]'
    pytest                         # the conformance kit: every promise of the contract
    dataplane conformance $name$flag    # the same, with a report

```python
from dataplane_core import connect

with connect({"backend": "$name"$options}) as client:
    client.register_partition("train", fields=["input_ids"], num_samples=None, consumer_tasks=["trainer"])
```

## Next steps

1. Put your engine into `put`, `get` and `delete` of `src/$module/__init__.py`; connect in `start`, disconnect in
   `stop`.
2. To serve several processes, add `append`, `read` and `trim`, which keep a journal; `dataplane new-plugin --journal`
   writes an example. For checks of `dataplane doctor`, add `diagnose`.
3. Run `pytest` after each step.
4. Choose a license, write down what you promise, and publish: `python -m build && twine upload dist/*`.
"""


def run(name: str, *, folder: str | None, journal: bool = False) -> int:
    """Writes the project and prints the next commands. Its arguments are those of the command.

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
        "flag": f" --options '{{path: /tmp/{name}}}'" if journal else "",
        "options": f', "options": {{"path": "/tmp/{name}"}}' if journal else "",
    }
    root = Path(distribution if folder is None else folder)
    files = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"src/{module}/__init__.py": _JOURNALED if journal else _BACKEND,
        f"src/{module}/py.typed": "",
        "tests/test_conformance.py": _TEST_OF_JOURNALED if journal else _TEST,
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
