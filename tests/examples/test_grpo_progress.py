"""What the GRPO example prints while it runs: for people on a terminal, plain in a pipe."""

import io
import re

import pytest
from grpo import progress
from grpo.progress import ProgressBar, StepLines, format_left

RECORD = {
    "reward": 0.53125,
    "loss": -0.0012,
    "kl": 0.0154,
    "tokens": 920,
    "bytes_put": 70_700,
    "bytes_get": 134_800,
    "seconds": {"weights": 0.25, "generate": 0.5, "train": 1.5},
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass between two looks at the clock: 2."""
    now = iter(range(0, 10_000, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def show(stream, steps=(1, 12, 200)):
    lines = StepLines(200, stream)
    for step in steps:
        lines.show({**RECORD, "step": step, "tokens": 900 + step * 40})
    return stream.getvalue().splitlines()


def without_colors(text):
    return re.sub(r"\x1b\[\d*m", "", text)


def test_a_pipe_gets_plain_lines_with_all_phases(clock):
    assert show(io.StringIO(), [12]) == [
        "step  12/200  reward 0.531  loss -0.0012  kl 0.0154  tokens 1380  put 70.7 KB  get 134.8 KB  2.25 s "
        "(weights 0.25, generate 0.50, train 1.50)"
    ]


def test_a_terminal_gets_colored_columns_and_the_time_left(clock):
    colored = show(Terminal())
    assert all("\x1b[32mreward 0.531\x1b[0m" in line for line in colored)
    lines = [without_colors(line) for line in colored]
    assert all(len(line) < 120 for line in lines)
    for word in ("reward", "loss", "kl", "tokens", "put", "get"):
        assert len({line.index(word) for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1
    assert [line.rpartition(" s  ")[2].lstrip() for line in lines] == ["7 min left", "6 min left", "0 s left"]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colors_can_be_refused(clock, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    (line,) = show(Terminal(), [1])
    assert "\x1b" not in line
    assert line.endswith("7 min left")


def test_the_bar_says_the_time_left_on_a_terminal_only(clock):
    for stream, said in ((Terminal(), "5/20  loss 1  2 s  6 s left"), (io.StringIO(), "")):
        bar = ProgressBar("warm start", 20, stream)
        bar.update(5, "loss 1")
        assert without_colors(stream.getvalue()).endswith(said)
        assert ("left" in stream.getvalue()) == bool(said)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s left"), (99, "99 s left"), (150, "2 min left"), (36_000, "10 h 00 min left")]
)
def test_the_time_left_is_short(seconds, said):
    assert format_left(seconds) == said
