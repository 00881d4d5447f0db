"""`dataplane top` in a terminal: its keys, what it follows, and the terminal that it leaves as it was."""

import asyncio
import os
import pty
import re
import select
import termios
import time
from contextlib import contextmanager

import pytest
import torch
from textual.widgets import Input, Static

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.errors import UnknownPartitionError
from dataplane_tools import _store
from dataplane_tools._live import Live, Samples, Watcher, Wish
from dataplane_tools._where import parse_where

WAITS_S = 120.0
#: Rewards of the samples, in the order of their first write.
REWARDS = {"q0_g0": 0.5, "q0_g1": 0.1, "q1_g0": 1.0, "q1_g1": 0.3}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """A watcher asks again at once, however long an answer takes here."""
    monkeypatch.setattr(_store, "PAUSE_S", 0.05)
    monkeypatch.setattr(_store, "SHARE", 1.0)


def fill(client, partition_id="step-1"):
    client.register_partition(partition_id, ["input_ids", "token_mask", "reward", "later"], 8, ["train"])
    columns = {"input_ids": [list(b"2+2=4.")] * 4, "token_mask": [[0, 0, 0, 0, 1, 1]] * 4}
    columns["reward"] = torch.tensor(list(REWARDS.values()))
    client.put_samples(list(REWARDS), partition_id, columns, tags=[{"version": number} for number in range(4)])


def letters(ids):
    return "".join(map(chr, ids))


class Screen:
    """The screen in a terminal of a test."""

    def __init__(self, app, pilot):
        self.app, self.pilot, self.press = app, pilot, pilot.press

    @property
    def table(self):
        return self.app.query_one(Samples)

    def text(self, pane):
        return str(self.app.query_one(pane, Static).render())

    def lines(self):
        """The lines of the table as they are drawn."""
        return [self.table.render_line(y).text.split() for y in range(self.table.size.height)]

    async def until(self, condition, what):
        """Waits until a condition holds."""
        end = time.monotonic() + WAITS_S
        while not condition():
            assert time.monotonic() < end, f"never: {what}. It shows {self.table.ids}, {self.text('#state')}"
            await self.pilot.pause(0.05)

    async def shows(self, *ids):
        await self.until(lambda: self.table.ids == list(ids), f"the samples {ids}")


def live(config, check, partition_id=None, wish=None, size=(140, 40)):
    """Runs a check on the screen."""

    async def run():
        watcher = Watcher(config, partition_id, letters)
        watcher.open()
        app = Live(watcher, wish)
        async with app.run_test(size=size) as pilot:
            await check(Screen(app, pilot))
        assert not watcher.is_alive()

    asyncio.run(run())


def test_stages_samples_and_the_text_of_the_chosen_one_and_that_no_task_loses_any(store, config):
    fill(store)

    async def check(screen):
        await screen.shows(*REWARDS)
        await screen.until(lambda: ["q0_g1", "1", "0.1"] in screen.lines(), "numbers of the rows")
        assert screen.lines()[:2] == [["id", "version", "reward"], ["q0_g0", "0", "0.5"]]
        await screen.until(lambda: "answer: 4." in screen.text("#sample"), "the text")
        text = screen.text("#sample")
        assert text.startswith("q0_g0\n")
        assert "prompt: 2+2=" in text
        assert "lacks: later" in text
        await screen.press("down", "j")
        await screen.until(lambda: screen.text("#sample").startswith("q1_g0\n"), "the third one")
        assert "step-1: 4 of 4" in screen.text("#state")

    live(config, check)
    assert store.claim_meta("step-1", "train", ["reward"], 4).sample_ids == list(REWARDS)


def test_sorting_filters_and_a_group_alone(store, config):
    fill(store)

    async def enter(screen, condition):
        await screen.press("slash")
        screen.app.query_one(Input).value = condition
        await screen.press("enter")

    async def check(screen):
        await screen.shows("q1_g0")
        await enter(screen, "reward < 0.4 and version >= 1")
        await screen.shows("q0_g1", "q1_g1")
        assert "step-1: 2 of 4   where reward < 0.4 and version >= 1" in screen.text("#state")
        await enter(screen, "reward <")
        await screen.until(lambda: "refused" in screen.text("#state"), "what is wrong")
        await screen.press("escape")
        assert "refused" not in screen.text("#state")
        assert screen.table.has_focus
        assert screen.table.ids == ["q0_g1", "q1_g1"]
        await enter(screen, "colour == 1")
        await screen.until(lambda: "has no tag or field 'colour'" in screen.text("#state"), "what is unknown")
        await enter(screen, "")
        await screen.shows(*REWARDS)
        assert "colour" not in screen.text("#state")
        await screen.press("home", "s", "s")  # version, reward
        await screen.shows("q0_g1", "q1_g1", "q0_g0", "q1_g0")
        assert screen.lines()[0] == ["id", "version", "reward", "▴"]
        assert screen.table.chosen == "q0_g1"  # the first of the new order
        await screen.press("r")
        await screen.shows("q1_g0", "q0_g0", "q1_g1", "q0_g1")
        await screen.press("s", "r")
        await screen.shows(*REWARDS)
        await screen.pilot.click(Samples, offset=(7, 0))  # the first letter of version
        await screen.until(lambda: "▴" in screen.lines()[0], "an order")
        await screen.pilot.click(Samples, offset=(9, 0))
        await screen.shows(*reversed(REWARDS))
        await screen.press("home", "g")
        await screen.shows("q1_g1", "q1_g0")
        await screen.press("g")
        await screen.shows(*reversed(REWARDS))

    live(config, check, wish=Wish(where=parse_where("reward == 1")))


def test_new_rows_new_columns_and_rows_that_are_cleared(store, config):
    fill(store)

    async def check(screen):
        await screen.shows(*REWARDS)
        await screen.press("down")
        store.put_samples(["new"], "step-1", {"reward": torch.zeros(1)})
        await screen.shows(*REWARDS, "new")
        assert screen.table.chosen == "q0_g1"  # it stays
        store.put_samples(["q0_g0", "new"], "step-1", {"later": torch.tensor([7, 8])})
        await screen.until(lambda: ["q0_g0", "0", "0.5", "7"] in screen.lines(), "a new column")
        store.clear_samples(["q0_g0"], "step-1")
        await screen.shows("q0_g1", "q1_g0", "q1_g1", "new")
        assert screen.table.chosen == "q0_g1"
        await screen.press("end")
        store.put_samples(["newer"], "step-1", {"reward": torch.zeros(1)})
        await screen.until(lambda: screen.table.chosen == "newer", "the last row, which end follows")
        store.clear_samples(["q0_g1", "q1_g0", "q1_g1", "new", "newer"], "step-1")
        await screen.shows()
        await screen.until(lambda: not screen.text("#sample"), "no text")

    live(config, check)


def test_an_empty_partition_and_the_next_one(store, config):
    store.register_partition("step-0", ["x"], None, [])

    async def check(screen):
        await screen.until(lambda: "step-0: 0 of 0" in screen.text("#state"), "an empty partition")
        for key in ("down", "end", "home", "pagedown", "g", "s", "r"):
            await screen.press(key)
        fill(store)
        await screen.until(lambda: len(screen.app._seen.partition_ids) == 2, "two partitions")
        await screen.press("p")
        await screen.until(lambda: len(screen.table.ids) == 4, "the samples of the next one")
        store.clear_samples(None, "step-1")
        await screen.until(lambda: "step-0: 0 of 0" in screen.text("#state"), "the one that is left")
        store.clear_samples(None, "step-0")
        await screen.until(lambda: screen.text("#state") == "empty", "none")

    live(config, check)


def test_a_store_that_ends_and_the_next_one(nowhere):
    stores = [connect(nowhere)]
    fill(stores[0])

    async def check(screen):
        await screen.shows(*REWARDS)
        stores.pop().close()
        await screen.until(lambda: "waiting for the store: " in screen.text("#drawn"), "that it waits")
        stores.append(connect(nowhere))
        fill(stores[0], "step-2")
        await screen.until(lambda: "step-2: 4 of 4" in screen.text("#state"), "the next store")
        await screen.shows(*REWARDS)

    try:
        live(nowhere, check)
    finally:
        stores.pop().close()


def test_only_the_rows_on_the_screen_are_read(store, config):
    ids = [f"s{row}" for row in range(10_000)]
    store.register_partition("step-1", ["x"], None, [])
    store.put_samples(ids, "step-1", {"x": torch.arange(10_000), "input_ids": torch.zeros(10_000, 8)})

    async def check(screen):
        await screen.until(lambda: screen.lines()[1] == ["s0", "0"], "the first row")
        await screen.press("end")
        await screen.until(lambda: ["s9999", "9999"] in screen.lines(), "the last row")
        assert len(screen.app._seen.values) <= screen.table.size.height
        await screen.press("home", "pagedown")
        await screen.until(lambda: screen.text("#sample").startswith(f"{screen.table.chosen}\n"), "its text")
        assert 0 < screen.table.cursor < screen.table.size.height
        # the table moves by the row that comes into view, at the bottom and at the top
        await screen.press("pagedown", "home", "pagedown", "down")
        assert screen.lines()[-1][0] == screen.table.chosen
        await screen.press(*["up"] * (screen.table.size.height - 1))
        assert screen.lines()[1][0] == screen.table.chosen

    live(config, check)


def test_top_shows_the_stages_alone_at_first(store, config):
    fill(store)

    async def check(screen):
        await screen.until(lambda: not screen.app.query_one("#right").display, "no samples")
        assert screen.table.ids == []
        await screen.press("t")
        await screen.shows(*REWARDS)

    live(config, check, wish=Wish(samples=False))


def test_samples_in_a_pipe_are_refused(config, capsys):
    assert main(["top", config, "--sort", "reward"]) == 1
    assert "live in a terminal only. In a pipe, use dataplane read." in capsys.readouterr().err


def test_an_unknown_partition_is_refused_at_once(store, config):
    with pytest.raises(UnknownPartitionError):
        Watcher(config, "step-9").open()


@contextmanager
def terminal(python, *words, width=140):
    """A command in a terminal of its own, and what reads until a text is shown."""
    outside, inside = pty.openpty()
    termios.tcsetwinsize(inside, (40, width))
    before = termios.tcgetattr(inside)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), inside)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm-256color"
    process = python.start("-m", "dataplane_core", *words, env=environment, **streams)
    shown = ""

    def read_until(text):
        nonlocal shown
        end = time.monotonic() + WAITS_S
        while text is None or text not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown):
            if select.select([outside], [], [], 0.2)[0]:
                shown += os.read(outside, 65536).decode(errors="replace")
            elif process.poll() is not None:
                break
            assert time.monotonic() < end, f"never: {text}. It shows {shown[-2000:]}"
        return shown

    try:
        yield outside, read_until, process, lambda: termios.tcgetattr(inside) == before
    finally:
        process.kill()
        process.wait()
        os.close(outside)
        os.close(inside)


@pytest.mark.parametrize(
    ("words", "text", "width"), [(["top", "--sort", "reward"], "q1_g1", 140), (["top"], "written", 80)]
)
def test_a_command_in_a_terminal_quits_and_leaves_it_as_it_was(store, config, python, words, text, width):
    fill(store)
    with terminal(python, words[0], config, *words[1:], width=width) as (outside, read_until, process, is_restored):
        assert text in read_until(text)
        assert not is_restored()
        os.write(outside, b"q")
        assert "\x1b[?1049l" in read_until(None)  # to its end: it cannot end while it writes what nobody reads
        assert process.wait() == 0
        assert is_restored()


def test_a_condition_that_cannot_be_read_is_refused(store, config, python):
    with terminal(python, "top", config, "--where", "reward <") as (_, read_until, process, _):
        assert '--where "reward <" refused' in read_until(None)
        assert process.wait() == 1


def test_a_store_that_has_not_started_is_waited_for(nowhere, python):
    with terminal(python, "top", nowhere) as (outside, read_until, process, _):
        read_until("waiting for the store: ")
        with connect(nowhere) as store:
            fill(store)
            read_until("written")
        os.write(outside, b"q")
        assert process.wait() == 0
