"""Shows the progress of a run of the kit: tests done, time left, and each failure as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Final

import pytest

from dataplane_testkit._base import Suite
from dataplane_testkit._marks import declares, needs_of, rule_of

#: Test -> the seconds that it typically takes on a store of one host, if it takes longer than most tests.
_TYPICAL_S: Final[Mapping[str, float]] = {
    "test_random_histories_agree_with_the_ledger": 12.0,
    "test_the_store_serves_others_after_every_kill": 12.0,
    "test_blobs_are_seen_by_every_client": 3.0,
    "test_any_batch_comes_back": 2.5,
    "test_reads_that_overlap_clears_are_whole_or_keyerrors": 2.0,
    "test_puts_that_overlap_clears_are_whole_or_nothing": 1.5,
    "test_puts_that_overlap_a_registration_are_whole_or_nothing": 1.5,
    "test_renew_extends_the_lease": 1.5,
    "test_the_payload_is_copied_no_more_than_it_may_be": 1.5,
    "test_claims_see_whole_rows_with_their_tags": 1.0,
    "test_acked_samples_never_go_back": 1.0,
    "test_reads_of_large_rows_that_overlap_partial_clears_are_whole_or_keyerrors": 1.0,
    "test_reads_see_all_old_or_all_new_cells": 1.0,
}
_MOST_TAKE_S: Final = 0.04
#: How much the estimate trusts the typical times: as much as so many seconds of measured tests.
_TRUST_S: Final = 3.0
#: Seconds between two progress lines if the output is not a terminal.
_EVERY_S: Final = 10.0
#: Seconds between two changes of the progress line on a terminal.
_REFRESH_S: Final = 0.1


def estimate_s(left_s: float, done_s: float, took_s: float) -> float:
    """Estimates how many seconds the tests that are left take.

    Args:
        left_s: The typical time of the tests that are left.
        done_s: The typical time of the tests that ran.
        took_s: The measured time of the tests that ran.
    """
    return left_s * (took_s + _TRUST_S) / (done_s + _TRUST_S)


def _in_words(seconds: float) -> str:
    if seconds < 5:
        return "a few seconds"
    rounded = int(5 * -(-seconds // 5))  # rounded up to a multiple of five
    return f"{rounded} s" if rounded < 120 else f"{rounded // 60} min {rounded % 60} s"


def _typical_s(item: pytest.Item) -> float:
    cls, test = getattr(item, "cls", None), getattr(item, "obj", None)
    if isinstance(cls, type) and issubclass(cls, Suite):
        backend = cls.under_test()
        if not all(declares(backend, need) for need in needs_of(test)):
            return 0.0
    return _TYPICAL_S.get(getattr(item, "originalname", item.name), _MOST_TAKE_S)


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
        self._typical_s: dict[str, float] = {}
        self._total = self._ran = self._failed = 0
        self._done_s = 0.0
        self._began = self._shown = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Counts the tests and estimates their time."""
        self._typical_s = {item.nodeid: _typical_s(item) for item in session.items}
        self._total = len(session.items)
        self._began = self._shown = self._clock()
        if self._total:
            left_s = estimate_s(sum(self._typical_s.values()), 0.0, 0.0)
            self._write(f"{self._total} tests, in about {_in_words(left_s)}, the quick ones first")

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
        if self._failed > failed and needs_of(getattr(item, "obj", None)):
            rule = rule_of(getattr(item, "obj", None))
            self._write(f"    the rule: {rule.text}")
            self._write(f"    check first: {rule.check_first}")
        self._ran += 1
        self._done_s += self._typical_s.get(item.nodeid, 0.0)
        now = self._clock()
        if now - self._shown >= (_REFRESH_S if self._terminal.isatty else _EVERY_S) and self._ran < self._total:
            self._shown = now
            left_s = estimate_s(sum(self._typical_s.values()) - self._done_s, self._done_s, now - self._began)
            failures = f", {self._failed} failed" if self._failed else ""
            self._write(f"{self._ran} of {self._total} tests{failures}, about {_in_words(left_s)} left", passing=True)
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
