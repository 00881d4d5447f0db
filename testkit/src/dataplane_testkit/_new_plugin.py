"""`dataplane new-plugin NAME`: writes a project with a backend that installs and passes the kit without changes.

The project lies in the folder `template`, under the name ``acme_store``. What differs in one with a log lies in
`template_log`.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib import metadata
from pathlib import Path
from typing import Final

import yaml

from dataplane_core.entry_points import KNOWN_BACKENDS, find_plugins
from dataplane_core.errors import ConfigError

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_HERE: Final = Path(__file__).parent
#: What a README says of a backend without options -> the same with those of a backend with a log.
_WITH_OPTIONS: Final = {
    "dataplane conformance acme_store": "dataplane conformance acme_store --options '{path: /tmp/acme_store}'",
    '{"backend": "acme_store"}': '{"backend": "acme_store", "options": {"path": "/tmp/acme_store"}}',
}


def run(name: str, *, folder: str | None, log: bool = False) -> int:
    """Writes the project and prints the next commands. Its arguments are those of the command."""
    _check_name(name)
    distribution, module = f"dataplane-{name.replace('_', '-')}", f"dataplane_{name}"
    _check_free(name, distribution, module)
    root = Path(distribution if folder is None else folder)
    try:
        if root.is_dir() and any(root.iterdir()):
            raise ConfigError(f"new-plugin refused: the folder '{root}' is not empty.", hint="Choose another: --dir.")
        for path, text in files_of(name, log=log).items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"new-plugin failed: '{root}' cannot be written: {error.strerror or error}.") from error
    print(f"wrote {root}: the backend '{name}', in package {distribution}\n\n  cd {root}")
    print("  pip install -e '.[testing]'\n  pytest")
    return 0


def files_of(name: str, *, log: bool = False) -> dict[str, str]:
    names = {
        "acme_store": name,
        "acme-store": name.replace("_", "-"),
        "AcmeStore": "".join(part.capitalize() for part in name.split("_")),
    }
    files = {}
    for template in (_HERE / "template", *([_HERE / "template_log"] if log else [])):
        for file in template.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                path = str(file.relative_to(template))
                text = file.read_text(encoding="utf-8")
                files[_replaced(path, names)] = _replaced(_replaced(text, _WITH_OPTIONS if log else {}), names)
    return files


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


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
