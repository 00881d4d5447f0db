"""`dataplane top` in a terminal: a running store, live.

The screen (`Live`, with its table of `Samples`) asks nothing of the store: it says which rows are on it, and which
is chosen, to a thread of its own (`Watcher`), which hands over what it saw. Ids and tags are read for all rows, numbers
for the rows on the screen, and the other columns for the chosen row. Nothing is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any, ClassVar, Final

from rich.cells import set_cell_size
from rich.console import RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    BackendUnavailableError,
    DataPlaneError,
    InvalidRequestError,
    UnknownPartitionError,
    printable,
)
from dataplane_tools._read import lines_of
from dataplane_tools._report import Looks, Screen, newest
from dataplane_tools._rows import Found, Rows
from dataplane_tools._sample import Decode, Sample, group_of_id
from dataplane_tools._store import PAUSE_S, attach, pause_s
from dataplane_tools._tokenizer import Tokenizer
from dataplane_tools._where import Where, parse_where

#: The most cells of a column.
_WIDEST: Final = 28


def run(chosen: argparse.Namespace, shows_samples: bool) -> int:
    """Shows the store of a config until it is left."""
    where = None if chosen.where is None else parse_where(chosen.where)
    decode = None if chosen.tokenizer is None else Tokenizer(chosen.tokenizer).decode
    watcher = Watcher(chosen.config, chosen.partition, decode)
    try:
        watcher.open()
    except BackendUnavailableError as error:  # the screen waits for the store, if that may help
        if not error.retryable:
            raise
    wish = Wish(samples=shows_samples, where=where, sort=chosen.sort, descending=chosen.descending)

    async def shown() -> None:
        app = Live(watcher, wish)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, app.exit)
        await app.run_async()

    asyncio.run(shown())
    return 0


# --- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wish:
    """What the reader wants to see: whether samples at all, which, the ids on the screen, and the chosen one."""

    samples: bool = True
    partition_id: str | None = None
    where: Where | None = None
    sort: str | None = None
    descending: bool = False
    group: str | None = None
    ids: tuple[str, ...] = ()
    chosen: str | None = None

    @property
    def rows(self) -> tuple[object, ...]:
        """What says which rows, and in which order."""
        return self.samples, self.partition_id, self.where, self.sort, self.descending, self.group


@dataclass(eq=False)
class Seen(Message):
    """What a watcher saw last, for a wish."""

    wish: Wish = field(default_factory=Wish)
    stages: RenderableType = ""
    partition_ids: Sequence[str] = ()
    partition_id: str | None = None  # that of the samples
    found: Found = field(default_factory=lambda: Found({}, 0, 0))
    fields: Sequence[str] = ()  # those of one number
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of these, by id, of rows on the screen
    sample: Sample | None = None  # the chosen one
    error: str = ""  # what is refused, or why nothing is seen


class Watcher(Thread):
    """Asks a store for what is wished, and again each second; rarely enough to take 2 % of its time.

    When the store ends, the next one of its config is looked for. ``tell`` gets what was seen, in this thread.
    """

    def __init__(self, config_path: str, partition_id: str | None = None, decode: Decode | None = None) -> None:
        super().__init__(name="dataplane-top", daemon=True)
        self.wish = Wish()
        self.tell: Callable[[Seen], object] = lambda _: None
        self._config_path = config_path
        self._partition_id = partition_id
        self._decode = decode
        self._looks: Looks | None = None
        self._report: dict[str, Any] = {}
        self._rows: Rows | None = None
        self._found = Found({}, 0, 0)
        self._refused = ""
        self._wake, self._ends = Event(), Event()
        self._open = ExitStack()

    def open(self) -> None:
        """Attaches to the store, if it has the partition."""
        client = attach(self._config_path)
        self._open.callback(client.close)
        try:
            if self._partition_id is not None:
                client.describe(self._partition_id)
        except DataPlaneError:
            self._close()
            raise
        self._looks = Looks(client, self._partition_id)

    def ask_for(self, wish: Wish) -> None:
        """Sets what is wished. A new wish is asked for at once."""
        if wish != self.wish:
            self.wish = wish
            self._wake.set()

    def end(self) -> None:
        self._ends.set()
        self._wake.set()
        self.join(PAUSE_S)

    def run(self) -> None:
        before, due, seen = Wish(), 0.0, Seen()
        while not self._ends.is_set():
            start = time.monotonic()
            wish, is_due = self.wish, start >= due or self._looks is None
            try:
                if self._looks is None:
                    self.open()
                assert self._looks is not None
                if is_due:
                    self._report = self._looks.look()
                with suppress(UnknownPartitionError):  # cleared meanwhile
                    seen = self._look(self._looks.client, wish, None if is_due else before)
            except DataPlaneError as error:
                self._close()
                seen = Seen(wish, error=f"waiting for the store: {error}")
            if is_due:
                due = time.monotonic() + pause_s(time.monotonic() - start)
            before = wish
            if not self._ends.is_set():
                self.tell(seen)
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
        self._close()

    def _close(self) -> None:
        with suppress(DataPlaneError):  # its store has ended
            self._open.close()
        self._looks = self._rows = None

    def _look(self, client: DataPlaneClient, wish: Wish, before: Wish | None) -> Seen:
        """``before``: the wish of the last look. None: look at all again."""
        partitions = self._report["partitions"]
        shown = newest(partitions)
        seen = Seen(wish, Screen(self._report, shown))
        if not wish.samples:
            return seen
        seen.partition_ids = [partition["partition_id"] for partition in partitions]
        held = self._rows.partition_id if self._rows else None
        name = wish.partition_id if wish.partition_id in seen.partition_ids else held
        if name not in seen.partition_ids:
            name = shown[0]["partition_id"] if shown else None
        if self._rows is None or self._rows.partition_id != name:
            self._rows, self._found, before = None if name is None else Rows(client, name), Found({}, 0, 0), None
        if self._rows is None:
            return seen
        rows, seen.partition_id = self._rows, name
        try:
            if before is None or wish.rows != before.rows:
                self._found = rows.find(where=wish.where, sort=wish.sort, descending=wish.descending, group=wish.group)
                self._refused = ""
        except InvalidRequestError as error:
            self._refused = str(error)
        seen.error = self._refused
        seen.found, seen.fields = self._found, rows.values
        if seen.fields:
            seen.values = {sample.sample_id: sample.values for sample in self._read(wish.ids, fields=rows.values)}
        if wish.chosen is not None:
            try:
                seen.sample = next(iter(self._read([wish.chosen], decode=self._decode)), None)
            except InvalidRequestError as error:  # of the tokenizer
                seen.error = str(error)
        return seen

    def _read(self, ids: Sequence[str], **how: Any) -> list[Sample]:
        there = {sample_id: self._found.tags[sample_id] for sample_id in ids if sample_id in self._found.tags}
        return self._rows.read(Found(there, len(there), len(there)), **how) if self._rows and there else []


# --- what is shown ----------------------------------------------------------------------------------------------------


class Samples(ScrollView, can_focus=True):
    """A table that draws the rows on the screen only, however many there are."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("up,k", "move(-1)"),
        ("down,j", "move(1)"),
        ("pageup", "page(-1)"),
        ("pagedown", "page(1)"),
        ("home", "move(-1000000000)"),
        ("end", "follow"),
    ]

    class Moved(Message):
        """Other rows are on the screen, or another one is chosen."""

    class Sorted(Message):
        """A column's head was clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.columns: list[str] = []
        self.cursor = 0
        self.sort: tuple[str | None, bool] = None, False
        self._cells: Callable[[str, str], Any] = lambda sample_id, column: ""
        self._widths: list[int] = []
        self._follows = False

    @property
    def chosen(self) -> str | None:
        return self.ids[self.cursor] if self.ids else None

    @property
    def on_screen(self) -> tuple[str, ...]:
        first = round(self.scroll_y)
        return tuple(self.ids[first : first + max(self.size.height - 1, 1)])

    def show(self, ids: list[str], columns: list[str], cells: Callable[[str, str], Any]) -> None:
        """Shows rows. The cursor stays on its id."""
        chosen = self.chosen
        self._cells, self.columns = cells, columns
        if ids != self.ids:
            same = self.ids[self.cursor : self.cursor + 1] == ids[self.cursor : self.cursor + 1]
            self.ids = ids
            if self._follows:
                self.cursor = len(ids) - 1
            elif not same and chosen in ids:
                self.cursor = ids.index(chosen)
            self.cursor = min(max(self.cursor, 0), max(len(ids) - 1, 0))
        shown = self.on_screen
        texts = {name: [name + "  ", *(self._text(sample_id, name) for sample_id in shown)] for name in columns}
        self._widths = [min(max(map(len, texts[name])), _WIDEST) + 2 for name in columns]
        self.virtual_size = Size(sum(self._widths), len(ids) + 1)
        self.refresh()
        self._reveal()

    def restart(self) -> None:
        self.ids, self.cursor, self._follows = [], 0, False

    def _text(self, sample_id: str, column: str) -> str:
        value = self._cells(sample_id, column)
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else printable(str(value))

    def render_line(self, y: int) -> Strip:
        """A line of the screen: the heads, or a row."""
        row = round(self.scroll_y) + y - 1
        style = self.rich_style
        if y == 0:
            arrow = {self.sort[0]: " ▾" if self.sort[1] else " ▴"} if self.sort[0] else {}
            cells, style = [printable(name) + arrow.get(name, "") for name in self.columns], style + Style(bold=True)
        elif row < len(self.ids):
            cells = [self._text(self.ids[row], name) for name in self.columns]
            style += Style(reverse=row == self.cursor)
        else:
            cells = []
        text = "".join(set_cell_size(cell, width - 2) + "  " for cell, width in zip(cells, self._widths, strict=False))
        left = round(self.scroll_x)
        return Strip([Segment(text, style)]).crop_extend(left, left + self.size.width, style)

    def action_move(self, count: int) -> None:
        self._follows = False
        self._go(self.cursor + count)

    def action_page(self, count: int) -> None:
        self.action_move(count * max(self.size.height - 2, 1))

    def action_follow(self) -> None:
        """Goes to the last row, and to each that becomes it."""
        self._follows = True
        self._go(len(self.ids) - 1)

    def on_click(self, event: events.Click) -> None:
        """Chooses a row; on a head, sorts by it."""
        if event.y > 0:
            self._follows = False
            self._go(round(self.scroll_y) + event.y - 1)
            return
        place = event.x + round(self.scroll_x)
        for name, width in zip(self.columns, self._widths, strict=False):
            if (place := place - width) < 0:
                self.post_message(self.Sorted(name))
                break

    def watch_scroll_y(self, old: float, new: float) -> None:
        super().watch_scroll_y(old, new)
        self.post_message(self.Moved())

    def _go(self, row: int) -> None:
        self.cursor = min(max(row, 0), max(len(self.ids) - 1, 0))
        self._reveal()
        self.refresh()
        self.post_message(self.Moved())

    def _reveal(self) -> None:
        height = max(self.size.height - 1, 1)  # below the heads
        first = round(self.scroll_y)
        if not first <= self.cursor < first + height:
            y = self.cursor if self.cursor < first else self.cursor - height + 1
            self.scroll_to(y=y, animate=False, immediate=True)


class Live(App[None]):
    """The screen. It starts and ends its watcher."""

    CSS = """
    #stages { width: 44%; padding: 0 1; }
    #stages.alone { width: 100%; }
    #right { width: 1fr; border-left: solid $primary-darken-2; }
    #right.hidden, #filter.hidden { display: none; }
    Samples { height: 1fr; background: $background; }
    #state { height: auto; padding: 0 1; background: $panel; }
    #text { height: 1fr; padding: 0 1; }
    #filter { height: 3; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q,ctrl+c", "quit", "Quit"),
        ("t", "samples", "Stages alone"),
        ("slash", "filter", "Filter"),
        ("s", "sort", "Sort by next"),
        ("r", "turn", "Turn order"),
        ("g", "group", "Group"),
        ("p", "partition", "Next partition"),
        ("tab", "focus_next", "Table or text"),
    ]

    def __init__(self, watcher: Watcher, wish: Wish | None = None) -> None:
        super().__init__()
        self._watcher = watcher
        self._wish = wish or Wish()
        self._seen = Seen()
        self._refused = ""

    def compose(self) -> ComposeResult:
        with Horizontal():
            with VerticalScroll(id="stages", can_focus=False):
                yield Static(id="drawn")
            with Vertical(id="right"):
                yield Samples()
                yield Static(id="state", markup=False)
                with VerticalScroll(id="text"):
                    yield Static(id="sample", markup=False)
        yield Input(id="filter", classes="hidden", placeholder="reward < 0.5 and weight_version >= 7")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Samples).focus()
        self._watcher.tell = self.post_message
        self._want()
        self._watcher.start()

    def on_unmount(self) -> None:
        self._watcher.end()

    def on_seen(self, seen: Seen) -> None:
        if not self.query("#drawn"):  # the screen is being taken down, and this came before the end
            return
        before, self._seen = self._seen, seen
        self.query_one("#drawn", Static).update(seen.stages or Text(printable(seen.error)))
        tags = seen.found.tags
        names = dict.fromkeys(name for row in tags.values() for name in row)
        columns = ["id", *names, *(name for name in seen.fields if name not in names)]

        def cell(sample_id: str, column: str) -> Any:
            if column == "id":
                return sample_id
            own = tags.get(sample_id, {})
            return own[column] if column in own else seen.values.get(sample_id, {}).get(column)

        table = self.query_one(Samples)
        table.sort = seen.wish.sort, seen.wish.descending
        if seen.wish.rows != before.wish.rows:
            table.restart()
        table.show(list(tags), columns, cell)
        if seen.sample is None or seen.sample.sample_id == table.chosen:
            self._show_sample(seen.sample)
        self._show_state()
        self._want()

    def _show_sample(self, sample: Sample | None) -> None:
        lines = [] if sample is None else map(printable, lines_of(sample, {}))
        text = Text("\n".join(lines))
        text.highlight_regex(r"(?m)^\S.*$|^  [^\s:][^:\n]*:", "bold")
        self.query_one("#sample", Static).update(text)

    def _show_state(self) -> None:
        seen, wish = self._seen, self._wish
        found = seen.found
        parts = [f"{seen.partition_id}: {found.num_matching} of {found.num_samples}" if seen.partition_id else "empty"]
        parts += [f"where {wish.where.text}"] if wish.where else []
        parts += [f"group {wish.group}"] if wish.group else []
        text = Text(printable("   ".join(parts)))
        if error := self._refused or (seen.error if seen.stages else ""):
            text.append(f"\n{printable(error)}", "red")
        self.query_one("#state", Static).update(text)

    def _want(self, **changes: Any) -> None:
        """Asks for what is on the screen."""
        table = self.query_one(Samples)
        self._wish = replace(self._wish, **changes, ids=table.on_screen, chosen=table.chosen)
        self.query_one("#stages").set_class(not self._wish.samples, "alone")
        self.query_one("#right").set_class(not self._wish.samples, "hidden")
        self._watcher.ask_for(self._wish)

    def on_samples_moved(self) -> None:
        """Reads the rows that came on the screen, and the chosen one."""
        self._want()

    def on_samples_sorted(self, event: Samples.Sorted) -> None:
        """Sorts by the column; if it does already, the other way round."""
        if event.name == "id":
            self._want(sort=None, descending=False)
        elif event.name == self._wish.sort:
            self.action_turn()
        else:
            self._want(sort=event.name)

    def action_samples(self) -> None:
        """Shows the stages alone, or the samples too."""
        self._want(samples=not self._wish.samples)

    def action_sort(self) -> None:
        """Sorts by the next column; after the last one by the order of writing."""
        names = [None, *self.query_one(Samples).columns[1:]]
        place = names.index(self._wish.sort) if self._wish.sort in names else -1
        self._want(sort=names[(place + 1) % len(names)])

    def action_turn(self) -> None:
        self._want(descending=not self._wish.descending)

    def action_group(self) -> None:
        """Shows the group of the chosen sample, or all again."""
        chosen = self.query_one(Samples).chosen or ""
        self._want(group=None if self._wish.group else group_of_id(chosen) or None)

    def action_partition(self) -> None:
        names = [*self._seen.partition_ids]
        if names:
            place = names.index(self._seen.partition_id) if self._seen.partition_id in names else -1
            self._want(partition_id=names[(place + 1) % len(names)], group=None)

    def action_filter(self) -> None:
        """Asks for a condition."""
        line = self.query_one("#filter", Input)
        line.value = self._wish.where.text if self._wish.where else ""
        line.remove_class("hidden")
        line.focus()

    def on_key(self, event: events.Key) -> None:
        """Escape leaves the condition as it was."""
        if event.key == "escape" and not self.query_one("#filter").has_class("hidden"):
            self._leave_filter()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Filters by the condition; by none if it is empty."""
        try:
            where = parse_where(event.value) if event.value.strip() else None
        except InvalidRequestError as error:
            self._refused = str(error)
            self._show_state()
            return
        self._leave_filter()
        self._want(where=where)

    def _leave_filter(self) -> None:
        self._refused = ""
        self.query_one("#filter").add_class("hidden")
        self.query_one(Samples).focus()
        self._show_state()
