"""The pytest plugin of the conformance kit: it adds the kit's marker and reports what a run proved.

Pytest loads this plugin wherever dataplane-testkit is installed, so it imports neither the kit nor torch. It does
nothing until a test class derives from `dataplane_testkit.BackendConformance`.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dataplane_testkit

if TYPE_CHECKING:
    from dataplane_testkit import Report
    from dataplane_testkit.rules import Rule

_MODULES = [f"dataplane_testkit.{module.name}" for module in pkgutil.iter_modules(dataplane_testkit.__path__)]
pytest.register_assert_rewrite(*(name for name in _MODULES if name not in sys.modules))

_PROPERTY = "dataplane"
#: Time limit of a test of the kit in seconds, if no other limit is set.
_TIMEOUT_S = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dataplane", "dataplane conformance")
    group.addoption("--dataplane-json", metavar="FILE", help="write the conformance reports as a JSON list")
    group.addoption("--dataplane-markdown", metavar="FILE", help="write the conformance reports as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "dataplane(proves, chapter): a test of the data-plane conformance kit; added by the kit itself"
    )
    config.pluginmanager.register(_Recorder(config), "dataplane-conformance-recorder")


def _rule_of(item: pytest.Item) -> Rule | None:
    """The rule that a test of the kit tests. None for all other tests."""
    # while nothing has imported the kit, no test is one of its own
    if "dataplane_testkit._store" not in sys.modules or not isinstance(item, pytest.Function) or item.cls is None:
        return None
    from dataplane_testkit._store import Suite
    from dataplane_testkit.rules import rule_of

    return rule_of(item.obj) if issubclass(item.cls, Suite) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the kit's tests before ``-m`` selects tests, and attaches the record for the report."""
    mine = [item for item in items if _rule_of(item)]
    if not mine:
        return
    from dataplane_testkit._store import unused_deviations
    from dataplane_testkit.report import record_of

    timeout = config.pluginmanager.hasplugin("timeout")
    limited = timeout and (config.getoption("timeout") or config.getini("timeout"))
    for item in mine:
        record = record_of(item)
        item.user_properties.append((_PROPERTY, record))
        item.add_marker(pytest.mark.dataplane(proves=record["proves"], chapter=record["chapter"]))
        if timeout and not limited and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
    if unused := unused_deviations(mine):
        raise pytest.UsageError(f"conformance kit: deviations that name no case of their test: {', '.join(unused)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Refuses xfail marks, and skip marks on single tests of the kit. They would hide a deviation."""
    if _rule_of(item):
        names = {mark.name for mark in item.own_markers} | {mark.name for mark in item.iter_markers("xfail")}
        if quiet := sorted(names & {"skip", "skipif", "xfail"}):
            pytest.fail(
                f"{item.name} is a test of the conformance kit and carries the mark '{quiet[0]}'. Declare it in "
                "deviations instead, with the reason.",
                pytrace=False,
            )
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the rule to the output of a failed test. Failures of fixtures get no rule, because nothing was tested."""
    outcome = yield
    if outcome.failed and outcome.when == "call" and (rule := _rule_of(item)):
        outcome.sections.append(("the rule that it breaks", f"{rule.text}\n\nCheck first: {rule.check_first}"))
    return outcome


class _Recorder:
    """Records the results, also those of other processes (pytest-xdist), and writes the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        #: Class -> test -> its record.
        self._classes: dict[str, dict[str, dict[str, Any]]] = {}

    def reports(self) -> list[Report]:
        """One per class of tests, in the order in which they ran."""
        if not self._classes:
            return []
        from dataplane_testkit import Report

        return [Report.of(list(tests.values())) for tests in self._classes.values()]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._keep(item, "not run", "not selected")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Counts the tests that were not selected, as a process of pytest-xdist tells at its end."""
        for nodeid, record in getattr(node, "workeroutput", {}).get(_PROPERTY, {}).items():
            self._classes.setdefault(record["class"], {}).setdefault(nodeid, record)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, reason = _outcome_of(report)
        if outcome is not None:
            self._keep(report, outcome, reason, report.duration)

    def _keep(self, of: pytest.Item | pytest.TestReport, outcome: str, reason: str, duration_s: float = 0.0) -> None:
        for record in [value for name, value in of.user_properties if name == _PROPERTY and isinstance(value, dict)]:
            tests = self._classes.setdefault(record["class"], {})
            before = tests.get(of.nodeid, {"outcome": "", "duration_s": 0.0})
            if before["outcome"] != "fail":
                duration_s += before["duration_s"]
                tests[of.nodeid] = {**record, "outcome": outcome, "reason": reason, "duration_s": duration_s}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in self.reports():
            if report.started:
                terminalreporter.section(f"conformance of {report.backend}")
                terminalreporter.write_line(report.to_text())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Writes the files. A process of pytest-xdist leaves that to the one that started it."""
        config = self._config
        if hasattr(config, "workeroutput"):
            records = [pair for tests in self._classes.values() for pair in tests.items()]
            config.workeroutput[_PROPERTY] = {name: of for name, of in records if of["reason"] == "not selected"}
            return
        if path := config.getoption("--dataplane-json"):
            text = json.dumps([report.to_dict() for report in self.reports()], indent=2)
            Path(path).write_text(f"{text}\n", encoding="utf-8")
        if path := config.getoption("--dataplane-markdown"):
            Path(path).write_text("\n".join(report.to_markdown() for report in self.reports()), encoding="utf-8")


def _outcome_of(report: pytest.TestReport) -> tuple[str | None, str]:
    """Outcome and reason after one phase of a test. The outcome is None if the phase does not decide it."""
    if report.failed:
        # pytest-xdist puts a line of its own before the text of a report
        text = report.longrepr if isinstance(report.longrepr, str) else report.longreprtext
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", text)
        return "fail", (f"{report.when}: " if report.when != "call" else "") + crash.strip().partition("\n")[0]
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return "deviation", report.wasxfail.removeprefix("reason: ")
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason.startswith("not declared: "):
            return "not declared", reason.removeprefix("not declared: ")
        return "not run", reason.removeprefix("not run: ")
    return ("pass", "") if report.when == "call" else (None, "")
