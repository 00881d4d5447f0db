"""Shows the progress of a run of the kit: tests done, time left, and each failure as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Final

import pytest

from dataplane_testkit.rules import rule_of

#: Seconds between two progress lines if the output is not a terminal.
_EVERY_S: Final = 10.0
#: Seconds between two changes of the progress line on a terminal.
_REFRESH_S: Final = 0.1


def _in_words(seconds: float) -> str:
    if seconds < 5:
        return "a few seconds"
    rounded = int(5 * -(-seconds // 5))  # rounded up to a multiple of five
    return f"{rounded} s" if rounded < 120 else f"{rounded // 60} min {rounded % 60} s"


class Progress:
    """A pytest plugin that shows progress instead of dots.

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
        """Prints a failure immediately."""
        if report.failed:
            self._failed += 1
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
            self._write(f"FAILED {report.nodeid.rpartition('::')[2]}: {crash.strip().partition(chr(10))[0]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """After each test, prints the rule of a failed test and updates the progress."""
        failed = self._failed
        finished = yield
        if self._failed > failed and (rule := rule_of(getattr(item, "obj", None))):
            self._write(f"    the rule: {rule.text}")
            self._write(f"    check first: {rule.check_first}")
        self._ran += 1
        now = self._clock()
        if now - self._shown >= (_REFRESH_S if self._terminal.isatty else _EVERY_S) and self._ran < self._total:
            self._shown = now
            left_s = (now - self._began) / self._ran * (self._total - self._ran)
            failures = f", {self._failed} failed" if self._failed else ""
            self._write(
                f"{self._ran} of {self._total} tests{failures}, about {_in_words(left_s)} left at this pace",
                passing=True,
            )
        return finished

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
