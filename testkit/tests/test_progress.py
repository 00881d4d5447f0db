"""What a run of the kit tells while it goes on."""

from __future__ import annotations

import contextlib
import os
import pty
from pathlib import Path

import pytest

from dataplane_testkit import _progress as progress

pytest_plugins = ["pytester"]

_CONFTEST = """
import itertools
from dataplane_testkit._progress import Progress

def pytest_configure(config):
    ticks = itertools.count(step=20)
    config.pluginmanager.register(Progress(config, clock=lambda: next(ticks)))
"""

_BODY = """
from broken import ReordersRows
from dataplane_testkit import BackendConformance

class TestMine(BackendConformance):
    backend_class = ReordersRows
"""


def test_failures_are_told_at_once_with_their_rule_and_how_long_the_rest_takes(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.syspath_prepend(Path(__file__).parent / "toys")
    pytester.makeconftest(_CONFTEST)
    pytester.makepyfile(_BODY)
    options = ["-q", "-p", "no:cacheprovider", "-W", "error", "--strict-markers", "-o", "console_output_style=classic"]
    result = pytester.runpytest_inprocess(*options, "-k", "order_asked_for or get_all_fields or lost_payload")
    result.stdout.fnmatch_lines(
        [
            "3 tests, the quick ones first",
            "FAILED test_get_keeps_the_order_asked_for: *",
            '    the rule: Contract: "Exactly one row per id given, in that order, repeats included."',
            "    check first: bring the engine's rows into the order of request.sample_ids.",
            "1 of 3 tests, 1 failed, about 40 s left at this pace",
            "2 of 3 tests, * left at this pace",
            "*= FAILURES =*",
            "FAILED *::test_get_keeps_the_order_asked_for*",
        ]
    )
    assert "F" not in {line.strip() for line in result.outlines}, "letters beside the lines"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "a few seconds"), (11, "15 s"), (119, "2 min 0 s"), (100, "100 s"), (131, "2 min 15 s")],
)
def test_durations_in_words(seconds, words):
    assert progress._in_words(seconds) == words


def test_on_a_terminal_one_line_changes(tmp_path, python):
    ours, theirs = pty.openpty()
    command = ["-m", "dataplane_core", "conformance", "noop", "-k", "smoke_torchs", "-x"]
    environment = {**os.environ, "TERM": "xterm"}
    with python.start(*command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        try:
            with contextlib.suppress(OSError):  # how a terminal ends
                while data := os.read(ours, 65536):
                    said += data
        finally:
            process.kill()
            os.close(ours)
    assert b"warning" not in said
    lines = said.decode().split("\r")
    assert any("tests, the quick ones first" in line for line in lines)
    assert any(" left" in line and not line.endswith("\n") for line in lines), said.decode()[-2000:]
