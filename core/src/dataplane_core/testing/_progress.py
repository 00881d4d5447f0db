"""Progress of a run of the kit: tests done, time left, and each failure at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Final

import pytest

from dataplane_core.testing._base import Suite
from dataplane_core.testing._marks import declares, needs_of, rule_of

__all__ = ["Progress", "estimate_s"]

#: Seconds that a test takes on a store of one host, where it is more than most take.
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
#: The estimate begins with what is typical, as if it had been seen for so many seconds.
_TRUST_S: Final = 3.0
#: Seconds between two lines where nobody can watch one line change.
_EVERY_S: Final = 10.0
#: Seconds between two changes of that one line.
_BLINK_S: Final = 0.1


def estimate_s(left_s: float, done_s: float, took_s: float) -> float:
    """How long the rest takes.

    Args:
        left_s: What the tests that are left take typically.
        done_s: What those that ran take typically.
        took_s: What they took here.
    """
    return left_s * (took_s + _TRUST_S) / (done_s + _TRUST_S)


def _in_words(seconds: float) -> str:
    if seconds < 5:
        return "a few seconds"
    rounded = int(5 * -(-seconds // 5))  # up, to a multiple of five
    return f"{rounded} s" if rounded < 120 else f"{rounded // 60} min {rounded % 60} s"


def _typical_s(item: pytest.Item) -> float:
    cls, test = getattr(item, "cls", None), getattr(item, "obj", None)
    if isinstance(cls, type) and issubclass(cls, Suite):
        backend = cls.under_test()
        if not all(declares(backend, need) for need in needs_of(test)):
            return 0.0
    return _TYPICAL_S.get(getattr(item, "originalname", item.name), _MOST_TAKE_S)


class Progress:
    """A pytest plugin in the place of the dots. On a terminal it is one line that changes, else a line now and then.

    Args:
        config: Has the terminal.
        clock: Gives the time in seconds.
    """

    def __init__(self, config: pytest.Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._typical_s: dict[str, float] = {}
        self._total = self._ran = self._failed = 0
        self._done_s = 0.0
        self._began = self._told = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Knows what will run."""
        self._typical_s = {item.nodeid: _typical_s(item) for item in session.items}
        self._total = len(session.items)
        self._began = self._told = self._clock()
        if self._total:
            left_s = estimate_s(sum(self._typical_s.values()), 0.0, 0.0)
            self._write(f"{self._total} tests, in about {_in_words(left_s)}, the quick ones first")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letters: the outcome counts, and is told by `pytest_runtest_logreport`."""
        if isinstance(report, pytest.TestReport) and not hasattr(report, "wasxfail"):
            if report.when == "call" or not report.passed:
                return report.outcome, "", report.outcome.upper()
            return "", "", ""
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure, at once."""
        if report.failed:
            self._failed += 1
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
            self._write(f"FAILED {report.nodeid.rpartition('::')[2]}: {crash.strip().partition(chr(10))[0]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """How far it is."""
        failed = self._failed
        finished = yield
        if self._failed > failed and needs_of(getattr(item, "obj", None)):
            rule = rule_of(getattr(item, "obj", None))
            self._write(f"    the rule: {rule.text}")
            self._write(f"    check first: {rule.check_first}")
        self._ran += 1
        self._done_s += self._typical_s.get(item.nodeid, 0.0)
        now = self._clock()
        if now - self._told >= (_BLINK_S if self._terminal.isatty else _EVERY_S) and self._ran < self._total:
            self._told = now
            left_s = estimate_s(sum(self._typical_s.values()) - self._done_s, self._done_s, now - self._began)
            failures = f", {self._failed} failed" if self._failed else ""
            self._write(f"{self._ran} of {self._total} tests{failures}, about {_in_words(left_s)} left", passing=True)
        return finished

    @property
    def _terminal(self) -> pytest.TerminalReporter:
        terminal: pytest.TerminalReporter = self._config.pluginmanager.getplugin("terminalreporter")
        return terminal

    def _write(self, line: str, *, passing: bool = False) -> None:
        """A line that stays, or one that the next takes the place of."""
        terminal = self._terminal
        if terminal.isatty:
            terminal.rewrite(line, erase=True)
            if not passing:
                terminal.line("")
        else:
            terminal.line(line)
            terminal.flush()
