"""`dataplane conformance NAME`: runs the conformance kit against an installed backend and prints the report."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dataplane_core.config import validate_model, yaml_problem
from dataplane_core.connecting import load_backend
from dataplane_core.errors import ConfigError, printable

_TEST = """\
import json

import pytest

from dataplane_testkit import BackendConformance


class TestConformance(BackendConformance):
    backend = {name!r}

    @pytest.fixture
    def options(self):
        return json.loads({options!r})
"""


#: Of a run on a store whose calls may have no deadline: how long one may take.
_SHIM_TIMES: Final = {"op_timeout_s": 5.0, "allowance_s": 5.0}
#: Seconds between two progress lines if the output is not a terminal.
_EVERY_S: Final = 10.0
#: Seconds between two changes of the progress line on a terminal.
_REFRESH_S: Final = 0.1


class Progress:
    """A pytest plugin that shows progress instead of dots: tests done, time left, and each failure as it happens.

    On a terminal, one line changes. Otherwise it prints a line every few seconds.

    Args:
        config: The session's config, for its terminal reporter.
        clock: Returns the time in seconds.
    """

    def __init__(self, config: pytest.Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._total = self._ran = self._failed = 0
        self._began = self._shown = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Counts the tests."""
        self._total = len(session.items)
        self._began = self._shown = self._clock()
        if self._total:
            self._write(f"{self._total} tests, the quick ones first")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Suppresses pytest's letters. The outcomes are still counted."""
        if isinstance(report, pytest.TestReport) and not hasattr(report, "wasxfail"):
            if report.when == "call" or not report.passed:
                return report.outcome, "", report.outcome.upper()
            return "", "", ""
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Prints a failure immediately, with its rule. After each test, updates the progress."""
        if report.failed:
            self._failed += 1
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
            self._write(f"FAILED {report.nodeid.rpartition('::')[2]}: {crash.strip().partition(chr(10))[0]}")
            for title, text in report.sections:
                if title == "the rule that it breaks":  # from the kit's pytest plugin
                    for line in text.split("\n\n"):
                        self._write(f"    {line}")
        if report.when == "teardown":
            self._ran += 1
            self._tell()

    def _tell(self) -> None:
        now = self._clock()
        if now - self._shown < (_REFRESH_S if self._terminal.isatty else _EVERY_S) or self._ran == self._total:
            return
        self._shown = now
        left_s = (now - self._began) / self._ran * (self._total - self._ran)
        failures = f", {self._failed} failed" if self._failed else ""
        done = f"{self._ran} of {self._total} tests{failures}"
        self._write(f"{done}, about {_in_words(left_s)} left at this pace", passing=True)

    @property
    def _terminal(self) -> pytest.TerminalReporter:
        terminal: pytest.TerminalReporter = self._config.pluginmanager.getplugin("terminalreporter")
        return terminal

    def _write(self, line: str, *, passing: bool = False) -> None:
        """Writes a line. On a terminal, the next line replaces a ``passing`` one."""
        terminal = self._terminal
        if terminal.isatty:
            terminal.rewrite(line, erase=True)
            if not passing:
                terminal.line("")
        else:
            terminal.line(line)
            terminal.flush()


def _in_words(seconds: float) -> str:
    if seconds < 5:
        return "a few seconds"
    rounded = int(5 * -(-seconds // 5))  # rounded up to a multiple of five
    return f"{rounded} s" if rounded < 120 else f"{rounded // 60} min {rounded % 60} s"


class _Watcher:
    """Shows progress, and counts the tests that passed."""

    passed = 0

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(Progress(config))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.outcome == "passed"


def run(chosen: argparse.Namespace) -> int:
    """Runs the kit in this process.

    Returns:
        0 if a test passed and none failed, else 1.

    Raises:
        ConfigError: The options are not a YAML mapping, or the backend refuses them.
        PluginError: The backend cannot be loaded.
    """
    values = _ready(chosen.name, chosen.options)
    for path in (chosen.json_path, chosen.markdown_path):
        _check_report(path)
    watcher = _Watcher()
    with tempfile.TemporaryDirectory(prefix="dataplane-conformance-") as folder:
        file, settings = Path(folder, "test_conformance.py"), Path(folder, "pytest.ini")
        file.write_text(_TEST.format(name=chosen.name, options=json.dumps(values)), encoding="utf-8")
        settings.write_text("[pytest]\n", encoding="utf-8")
        # by the name of its entry point, so that it is loaded where plugins are not loaded by themselves
        words = ["-p", "dataplane_conformance", str(file), "-c", str(settings), "--rootdir", folder]
        words += ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-o", "console_output_style=classic"]
        # of the package itself and this command, which hold no assertion
        told = "Module already imported so cannot be rewritten; dataplane_testkit"
        words += ["-W", f"ignore:{told}:pytest.PytestAssertRewriteWarning"]
        words += ["--disable-warnings"]  # the report lists them
        words += ["-x"] if chosen.first_failure else []
        words += ["-k", chosen.select] if chosen.select is not None else []
        words += ["--dataplane-json", chosen.json_path] if chosen.json_path else []
        words += ["--dataplane-markdown", chosen.markdown_path] if chosen.markdown_path else []
        status = pytest.main(words, plugins=[watcher])
    return 0 if status == pytest.ExitCode.OK and watcher.passed else 1


def run_chaos(chosen: argparse.Namespace) -> int:
    """Runs a random schedule in processes that are killed and stopped, and has its history checked.

    Returns:
        0 if nothing was found, else 1.

    Raises:
        ConfigError: The options are not a YAML mapping, or the backend refuses them.
        PluginError: The backend cannot be loaded.
        DataPlaneError: The store cannot be started.
    """
    name, minutes = chosen.name, 1.0 if chosen.minutes is None else chosen.minutes
    shim = ":" in name
    values = _options_of(chosen.options) if shim else _ready(name, chosen.options)
    if not minutes > 0:
        raise ConfigError(f"--minutes must be above 0, got {minutes:g}.")
    _check_report(chosen.json_path)
    from dataplane_testkit import AuthorsClass, Settings, run_chaos as run_schedule, run_shim

    seed = random.SystemRandom().randrange(1_000_000) if chosen.seed is None else chosen.seed
    words = ["dataplane", "conformance", name, "--chaos", "--minutes", f"{minutes:g}", "--seed", str(seed)]
    words += ["--options", chosen.options] if values else []
    for option, names in (("--faults", chosen.faults), ("--steps", chosen.steps)):
        words += [] if names is None else [option, ",".join(sorted(names)) or "none"]
    print(f"chaos on {name}: {minutes:g} min, seed {seed}", flush=True)
    case = type("Case", (AuthorsClass,), {"backend": name})()
    line = _Line()
    given = {"faults": chosen.faults, "steps": chosen.steps} | (_SHIM_TIMES if shim else {})
    try:
        verdict = (partial(run_shim, name) if shim else partial(run_schedule, case))(
            values,
            Settings(seed=seed, schedule_s=60 * minutes, **given),
            folder=Path(chosen.folder or f"chaos-{name.rpartition(':')[2]}-{seed}"),
            command=shlex.join(words),
            progress=line.show,
        )
    finally:
        line.end()
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


class _Line:
    """The progress line: on a terminal one line that changes, elsewhere nothing."""

    def __init__(self) -> None:
        self._last = 0.0
        self._shown = False

    def show(self, text: str) -> None:
        if sys.stderr.isatty() and time.monotonic() > self._last + 0.2:
            self._last, self._shown = time.monotonic(), True
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _ready(name: str, options: str) -> dict[str, Any]:
    """The options, once it is certain that the backend takes them."""
    values = _options_of(options)
    cls = load_backend(name)
    validate_model(cls.Config, values, f"options of backend '{name}'")
    return values


def _check_report(path: str | None) -> None:
    """Refuses a path that the report cannot be written to, before the run."""
    if path is None:
        return
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"the report cannot be written to '{path}': there is no such folder.")
    if Path(path).is_dir():
        raise ConfigError(f"the report cannot be written to '{path}': it is a folder. Expected a file.")


def _options_of(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--options is not valid YAML: {yaml_problem(error)}.") from None
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"--options must be a mapping such as '{{url: ...}}', got {type(values).__name__}.")
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--options must hold plain values: {error}.") from error
    return values
