"""`dataplane conformance NAME`: runs the conformance kit against an installed backend and prints the report."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dataplane_core.backends import Backend
from dataplane_core.config import validate_model, yaml_problem
from dataplane_core.connecting import load_backend
from dataplane_core.errors import ConfigError, printable

_TEST = """\
import json

import pytest

from dataplane_testkit import BackendConformance
from dataplane_testkit._conformance_command import class_of

OPTIONS = json.loads({options!r})


class TestConformance(BackendConformance):
    backend = {name!r}
    backend_class = class_of({name!r}, OPTIONS)

    @pytest.fixture
    def options(self):
        return OPTIONS
"""


#: Of a run on a store whose calls may have no deadline: how long one may take.
_SHIM_TIMES: Final = {"op_timeout_s": 5.0, "allowance_s": 5.0}


class Progress:
    """A pytest plugin that prints how many tests there are, and each failure as it happens, among pytest's dots.

    Attributes:
        passed: How many tests have passed.
    """

    def __init__(self) -> None:
        self.passed = 0

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keeps the session's config, for its terminal reporter."""
        self._config = config

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Counts the tests."""
        if session.items:
            self._write(f"{len(session.items)} tests, the quick ones first")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Prints a failure immediately, with its rule."""
        self.passed += report.when == "call" and report.passed
        if report.failed:
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
            self._write(f"FAILED {report.nodeid.rpartition('::')[2]}: {crash.strip().partition(chr(10))[0]}")
            for text in (text for title, text in report.sections if title == "the rule that it breaks"):
                self._write("    " + text.replace("\n\n", "\n    "))

    def _write(self, text: str) -> None:
        terminal: pytest.TerminalReporter = self._config.pluginmanager.getplugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(text)
        terminal.flush()


def run(chosen: argparse.Namespace) -> int:
    """Runs the kit in this process. Returns 0 if a test passed and none failed, else 1."""
    values = _options_of(chosen.options)
    class_of(chosen.name, values)
    for path in (chosen.json_path, chosen.markdown_path):
        _check_report(path)
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="dataplane-conformance-") as folder:
        file, settings = Path(folder, "test_conformance.py"), Path(folder, "pytest.ini")
        file.write_text(_TEST.format(name=chosen.name, options=json.dumps(values)), encoding="utf-8")
        settings.write_text("[pytest]\n", encoding="utf-8")
        # by the name of its entry point, so that it is loaded where plugins are not loaded by themselves
        words = ["-p", "dataplane_conformance", str(file), "-c", str(settings), "--rootdir", folder]
        words += ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
        # of the package itself and this command, which hold no assertion
        told = "Module already imported so cannot be rewritten; dataplane_testkit"
        words += ["-W", f"ignore:{told}:pytest.PytestAssertRewriteWarning"]
        words += ["-x"] if chosen.first_failure else []
        asked = {
            "-k": chosen.select,
            "--dataplane-json": chosen.json_path,
            "--dataplane-markdown": chosen.markdown_path,
        }
        words += [word for option, value in asked.items() if value is not None for word in (option, value)]
        status = pytest.main(words, plugins=[progress])
    sys.modules.pop(file.stem, None)  # the next run in this process has another
    return 0 if status == pytest.ExitCode.OK and progress.passed else 1


def run_chaos(chosen: argparse.Namespace) -> int:
    """Runs a random schedule in processes that are killed and stopped, and has its history checked.

    Returns 0 if nothing was found, else 1.
    """
    name, minutes = chosen.name, 1.0 if chosen.minutes is None else chosen.minutes
    shim = ":" in name
    values = _options_of(chosen.options)
    backend_class = None if shim else class_of(name, values)
    if not minutes > 0:
        raise ConfigError(f"--minutes must be above 0, got {minutes:g}.")
    _check_report(chosen.json_path)
    from dataplane_testkit._author import AuthorsClass
    from dataplane_testkit.chaos import Settings, run_chaos as run_schedule, run_shim

    seed = random.SystemRandom().randrange(1_000_000) if chosen.seed is None else chosen.seed
    words = ["dataplane", "conformance", name, "--chaos", "--minutes", f"{minutes:g}", "--seed", str(seed)]
    words += ["--options", chosen.options] if values else []
    for option, names in (("--faults", chosen.faults), ("--steps", chosen.steps)):
        words += [] if names is None else [option, ",".join(sorted(names)) or "none"]
    print(f"chaos on {name}: {minutes:g} min, seed {seed}", flush=True)
    case = type("Case", (AuthorsClass,), {"backend": name, "backend_class": backend_class})()
    run_it = partial(run_shim, name) if shim else partial(run_schedule, case)
    given = {"faults": chosen.faults, "steps": chosen.steps} | (_SHIM_TIMES if shim else {})
    try:
        verdict = run_it(
            values,
            Settings(seed=seed, schedule_s=60 * minutes, **given),
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


def class_of(name: str, options: Mapping[str, Any]) -> type[Backend]:
    """The class of a backend with these options. Raises `ConfigError` if it does not take them."""
    cls = load_backend(name)
    return cls.class_for(validate_model(cls.Config, options, f"options of backend '{name}'"))


def _check_report(path: str | None) -> None:
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise ConfigError(f"the report cannot be written to '{path}'. Expected a file in a folder that there is.")


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
