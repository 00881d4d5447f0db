"""The table of samples of the live `dataplane top`: it draws the rows on the screen only, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dataplane_core.errors import printable

#: The most cells of a column.
_WIDEST: Final = 28


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
        """The id under the cursor."""
        return self.ids[self.cursor] if self.ids else None

    @property
    def on_screen(self) -> tuple[str, ...]:
        """The ids of the rows on the screen."""
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
        texts = {name: [name + "  ", *(self._text(each, name) for each in self.on_screen)] for name in columns}
        self._widths = [min(max(map(len, texts[name])), _WIDEST) + 2 for name in columns]
        self.virtual_size = Size(sum(self._widths), len(ids) + 1)
        self.refresh()
        self._reveal()

    def restart(self) -> None:
        """Goes to the first row."""
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
        """Moves the cursor."""
        self._follows = False
        self._go(self.cursor + count)

    def action_page(self, count: int) -> None:
        """Moves it by a screen."""
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
        """Other rows are on the screen."""
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
