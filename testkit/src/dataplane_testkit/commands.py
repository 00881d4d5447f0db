"""The commands of this package: `dataplane conformance` and `dataplane new-plugin`.

The first runs the kit on an installed backend, or random calls under kills. The second writes a project whose backend
passes the kit: it lies in the folder `template`, under the name ``acme_store``. What differs in one with a log lies in
`template_log`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from dataplane_core.cli import Command, complete_backends
from dataplane_core.config import validate_model, yaml_problem
from dataplane_core.connecting import load_backend
from dataplane_core.entry_points import KNOWN_BACKENDS, find_plugins
from dataplane_core.errors import ConfigError, printable

if TYPE_CHECKING:
    import pytest

    from dataplane_core.backends import Backend

__all__ = ["conformance", "new_plugin"]

# --- conformance ------------------------------------------------------------------------------------------------------

_TEST: Final = """\
import json

import pytest

from dataplane_testkit import BackendConformance
from dataplane_testkit.commands import class_of

OPTIONS = json.loads({options!r})


class TestConformance(BackendConformance):
    backend = {name!r}
    backend_class = class_of({name!r}, OPTIONS)

    @pytest.fixture
    def options(self):
        return OPTIONS
"""
#: How pytest is called. The warning is of the package itself and this module, which hold no assertion.
_PYTEST: Final = (
    *("-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"),
    # by the name of its entry point, so that it is loaded where plugins are not loaded by themselves
    *("-p", "dataplane_conformance"),
    "-Wignore:Module already imported so cannot be rewritten; dataplane_testkit:pytest.PytestAssertRewriteWarning",
)
#: Of a run on a store whose calls may have no deadline: how long one may take.
_SHIM_TIMES: Final = {"op_timeout_s": 5.0, "allowance_s": 5.0}


def conformance(parser: argparse.ArgumentParser) -> Command:
    """`dataplane conformance`."""
    add = parser.add_argument
    complete_backends(add("name", help="entry-point name of the backend; with --chaos also FILE.py:Class of a shim"))
    add("--options", default="{}", metavar="YAML", help="the backend's options, such as '{url: ...}'")
    add("--json", dest="json_path", metavar="FILE", help="write the report as JSON")
    add("--markdown", dest="markdown_path", metavar="FILE", help="write the report as Markdown")
    add("-k", dest="select", metavar="EXPRESSION", help="only the tests that match, as pytest's -k")
    add("-x", dest="first_failure", action="store_true", help="stop at the first failure")
    what = "instead of the tests, run random calls in processes that are killed and stopped, and check the history"
    add("--chaos", action="store_true", help=what)
    add("--minutes", type=float, metavar="M", help="with --chaos: how long; default: 1")
    add("--seed", type=int, metavar="N", help="with --chaos: the schedules of this seed again")
    add("--kills", type=int, metavar="N", help="with --chaos: end after so many kills, if not by the time")
    faults = "with --chaos: only these of kill, stop, and what can be done to the store; or none"
    add("--faults", type=_names, metavar="A,B", help=faults)
    add("--steps", type=_names, metavar="A,B", help="with --chaos: only these steps, such as put,claim")
    add("-o", dest="folder", metavar="DIR", help="with --chaos: where a fault is written; default: chaos-NAME-SEED")

    def run(chosen: argparse.Namespace) -> int:
        of_tests = (chosen.markdown_path, chosen.select, chosen.first_failure or None)
        of_chaos = (chosen.minutes, chosen.kills, chosen.seed, chosen.faults, chosen.steps, chosen.folder)
        if chosen.chaos and any(value is not None for value in of_tests):
            parser.error("conformance --chaos takes no --markdown, -k and -x")
        if not chosen.chaos and any(value is not None for value in of_chaos):
            parser.error("conformance takes --minutes, --kills, --seed, --faults, --steps and -o only with --chaos")
        if ":" in chosen.name and not chosen.chaos:
            parser.error("conformance runs on a shim only with --chaos")
        options = _options_of(chosen.options)
        for path in filter(None, (chosen.json_path, chosen.markdown_path)):
            if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
                expected = "Expected a file in a folder that there is."
                raise ConfigError(f"the report cannot be written to '{path}'. {expected}")
        return _chaos(chosen, options) if chosen.chaos else _kit(chosen, options)

    return run


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))


def _options_of(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--options is not valid YAML: {yaml_problem(error)}.") from None
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"--options must be a mapping such as '{{url: ...}}', got {type(values).__name__}.")
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--options must hold plain values: {error}.") from error
    return values


def class_of(name: str, options: Mapping[str, Any]) -> type[Backend]:
    """The class of a backend with these options. Raises `ConfigError` if it does not take them."""
    cls = load_backend(name)
    return cls.class_for(validate_model(cls.Config, options, f"options of backend '{name}'"))


class _Progress:
    """A pytest plugin that prints how many tests there are, and each failure as it happens, among pytest's dots."""

    passed = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
        if session.items:
            self._write(f"{len(session.items)} tests, the quick ones first")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
            self._write(f"FAILED {report.nodeid.rpartition('::')[2]}: {crash.strip().partition(chr(10))[0]}")
            for text in (text for title, text in report.sections if title == "the rule that it breaks"):
                self._write("    " + text.replace("\n\n", "\n    "))

    def _write(self, text: str) -> None:
        self._terminal.ensure_newline()
        self._terminal.write_line(text)
        self._terminal.flush()


def _kit(chosen: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Runs the kit in this process. Returns 0 if a test passed and none failed, else 1."""
    import pytest

    class_of(chosen.name, options)
    progress = _Progress()
    asked = {"-k": chosen.select, "--dataplane-json": chosen.json_path, "--dataplane-markdown": chosen.markdown_path}
    words = [word for option, value in asked.items() if value is not None for word in (option, value)]
    words += ["-x"] if chosen.first_failure else []
    with tempfile.TemporaryDirectory(prefix="dataplane-conformance-") as folder:
        file, settings = Path(folder, "test_conformance.py"), Path(folder, "pytest.ini")
        file.write_text(_TEST.format(name=chosen.name, options=json.dumps(options)), encoding="utf-8")
        settings.write_text("[pytest]\n", encoding="utf-8")
        place = [str(file), "-c", str(settings), "--rootdir", folder]
        status = pytest.main([*_PYTEST, *place, *words], plugins=[progress])
    sys.modules.pop(file.stem, None)  # the next run in this process has another
    return 0 if status == pytest.ExitCode.OK and progress.passed else 1


def _chaos(chosen: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Runs a random schedule, and has its history checked. Returns 0 if nothing was found, else 1."""
    name, shim = chosen.name, ":" in chosen.name
    minutes = (1.0 if chosen.kills is None else 60.0) if chosen.minutes is None else chosen.minutes
    backend_class = None if shim else class_of(name, options)
    if not minutes > 0:
        raise ConfigError(f"--minutes must be above 0, got {minutes:g}.")
    from dataplane_testkit._author import AuthorsClass
    from dataplane_testkit.chaos import Settings, run_chaos, run_shim

    seed = random.SystemRandom().randrange(1_000_000) if chosen.seed is None else chosen.seed
    words = ["dataplane", "conformance", name, "--chaos", "--minutes", f"{minutes:g}", "--seed", str(seed)]
    words += ["--options", chosen.options] if options else []
    words += [] if chosen.kills is None else ["--kills", str(chosen.kills)]
    for option, names in (("--faults", chosen.faults), ("--steps", chosen.steps)):
        words += [] if names is None else [option, ",".join(sorted(names)) or "none"]
    print(f"chaos on {name}: {minutes:g} min, seed {seed}", flush=True)
    case = type("Case", (AuthorsClass,), {"backend": name, "backend_class": backend_class})()
    how = {"faults": chosen.faults, "steps": chosen.steps, "kills": chosen.kills} | (_SHIM_TIMES if shim else {})
    try:
        verdict = (partial(run_shim, name) if shim else partial(run_chaos, case))(
            options,
            Settings(seed=seed, schedule_s=60 * minutes, **how),
            folder=Path(chosen.folder or f"chaos-{name.rpartition(':')[2]}-{seed}"),
            command=shlex.join(words),
            progress=_show,
        )
    finally:
        _show("")
    print(verdict.facts)
    print("\n".join(verdict.table()))
    if chosen.json_path is not None:
        Path(chosen.json_path).write_text(json.dumps(verdict.summary(), indent=2) + "\n", encoding="utf-8")
    print("\n".join(map(printable, verdict.found())), end="\n" if verdict.page else "")
    if verdict.passed:
        print("no promise of the store was broken" if shim else "no rule of the contract was broken")
    if verdict.page is not None:
        print(f"see {verdict.page}")
    return 0 if verdict.passed else 1


def _show(text: str) -> None:
    """On a terminal, writes the one line that changes; elsewhere nothing."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# --- new-plugin -------------------------------------------------------------------------------------------------------

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
#: What a README says of a backend without options -> the same with those of a backend with a log.
_WITH_OPTIONS: Final = {
    "dataplane conformance acme_store": "dataplane conformance acme_store --options '{path: /tmp/acme_store}'",
    '{"backend": "acme_store"}': '{"backend": "acme_store", "options": {"path": "/tmp/acme_store"}}',
}


def new_plugin(parser: argparse.ArgumentParser) -> Command:
    """`dataplane new-plugin`."""
    parser.add_argument("name", help="entry-point name of the new backend, such as acme_store")
    parser.add_argument("--log", action="store_true", help="one that several processes share, with a log")
    parser.add_argument("--dir", dest="folder", help="where to write it; default: dataplane-NAME, here")

    def run(chosen: argparse.Namespace) -> int:
        name, distribution = chosen.name, f"dataplane-{chosen.name.replace('_', '-')}"
        _check_name(name, distribution)
        root = Path(distribution if chosen.folder is None else chosen.folder)
        try:
            if root.is_dir() and any(root.iterdir()):
                what = f"new-plugin refused: the folder '{root}' is not empty."
                raise ConfigError(what, hint="Choose another: --dir.")
            for path, text in files_of(name, log=chosen.log).items():
                file = root / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"new-plugin failed: '{root}' cannot be written: {error.strerror or error}.") from error
        print(f"wrote {root}: the backend '{name}', in package {distribution}\n\n  cd {root}")
        print("  pip install -e '.[testing]'\n  pytest")
        return 0

    return run


def files_of(name: str, *, log: bool = False) -> dict[str, str]:
    """Path -> text of each file of a project."""
    names = {
        "acme_store": name,
        "acme-store": name.replace("_", "-"),
        "AcmeStore": "".join(part.capitalize() for part in name.split("_")),
    }
    files = {}
    for folder in ("template", "template_log") if log else ("template",):
        template = Path(__file__).with_name(folder)
        for file in template.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                text = _replaced(file.read_text(encoding="utf-8"), _WITH_OPTIONS if log else {})
                files[_replaced(str(file.relative_to(template)), names)] = _replaced(text, names)
    return files


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def _check_name(name: str, distribution: str) -> None:
    """Refuses what cannot name a backend, or names another one."""
    if not _is_name(name):
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")
        raise ConfigError(
            f"new-plugin refused: '{name}' cannot name a backend. Expected lower-case words of letters and digits, "
            "joined by single underscores, such as acme_store; not a word that Python or YAML reads as something else.",
            hint=f"Did you mean '{near}'?" if _is_name(near) else None,
        )
    owners = {**KNOWN_BACKENDS, **{record.name: record.distribution for record in find_plugins()}}
    names, module = {*owners.values(), *(other.name for other in metadata.distributions())}, f"dataplane_{name}"
    for taken, reason in (
        (name in owners, f"it is a backend of {owners.get(name)} already"),
        (distribution in names, f"its package would be {distribution}, and there is one of that name"),
        (importlib.util.find_spec(module), f"its module would be {module}, and there is one of that name"),
    ):
        if taken:
            raise ConfigError(f"new-plugin refused: '{name}' is taken: {reason}.", hint="Choose another name.")


def _is_name(name: str) -> bool:
    """Whether module, class and config can have the name: YAML reads some words as other values, such as ``on``."""
    keywords = keyword.iskeyword(name) or keyword.iskeyword(name.capitalize())
    return _NAME.fullmatch(name) is not None and not keywords and yaml.safe_load(name) == name
