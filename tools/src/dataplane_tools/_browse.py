"""`dataplane top` in a terminal: a running store, live.

The screen (`Browser`) asks nothing of the store: it says which rows are on it, and which is chosen, to a thread of its
own (`Watcher`), which hands over what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, Static

from dataplane_core.errors import BackendUnavailableError, InvalidRequestError, printable
from dataplane_tools._read import lines_of
from dataplane_tools._sample import Sample, group_of_id
from dataplane_tools._table import Samples
from dataplane_tools._tokenizer import Tokenizer
from dataplane_tools._watch import Seen, Watcher, Wish
from dataplane_tools._where import parse_where


def run(chosen: argparse.Namespace, shows_samples: bool) -> int:
    """Shows the store of a config until it is left.

    Raises:
        BackendUnavailableError: The store cannot be reached, and waiting does not help. The screen waits for one that
            has not started yet, or has ended.
    """
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
        app = Browser(watcher, wish)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, app.exit)
        await app.run_async()

    asyncio.run(shown())
    return 0


class Browser(App[None]):
    """The screen.

    Args:
        watcher: Asks the store. The screen starts and ends it.
        wish: What is shown at first.
    """

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
        self._values: dict[str, Mapping[str, Any]] = {}
        self._refused = ""

    def compose(self) -> ComposeResult:
        """The panes."""
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
        """Starts to ask."""
        self.query_one(Samples).focus()
        self._watcher.tell = self.post_message
        self._want()
        self._watcher.start()

    def on_unmount(self) -> None:
        """Ends it."""
        self._watcher.end()

    def on_seen(self, seen: Seen) -> None:
        """Shows what was seen."""
        if not self.query("#drawn"):  # the screen is being taken down, and this came before the end
            return
        before, self._seen = self._seen, seen
        self.query_one("#drawn", Static).update(seen.stages or Text(printable(seen.error)))
        self._values = {**seen.values}
        tags = seen.found.tags
        names = dict.fromkeys(name for each in tags.values() for name in each)
        columns = ["id", *names, *(name for name in seen.fields if name not in names)]

        def cell(sample_id: str, column: str) -> Any:
            if column == "id":
                return sample_id
            own = tags.get(sample_id, {})
            return own[column] if column in own else self._values.get(sample_id, {}).get(column)

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
        """The other way round."""
        self._want(descending=not self._wish.descending)

    def action_group(self) -> None:
        """Shows the group of the chosen sample, or all again."""
        chosen = self.query_one(Samples).chosen or ""
        self._want(group=None if self._wish.group else group_of_id(chosen) or None)

    def action_partition(self) -> None:
        """Shows the next partition."""
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
