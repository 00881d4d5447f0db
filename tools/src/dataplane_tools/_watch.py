"""What the live `dataplane top` asks of a store: rarely, and no more than what is on the screen. It changes nothing.

Ids and tags are read for all rows, numbers for the rows on the screen, and the other columns for the chosen row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from rich.console import RenderableType
from textual.message import Message

from dataplane_core.errors import DataPlaneError, InvalidRequestError, UnknownPartitionError
from dataplane_tools._report import Looks, newest
from dataplane_tools._rows import Found, Rows
from dataplane_tools._sample import Decode, Sample
from dataplane_tools._screen import Screen
from dataplane_tools._store import PAUSE_S, attach, pause_s
from dataplane_tools._where import Where


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
    """What a watcher saw last.

    Attributes:
        wish: What it was asked for.
        stages: The stages, drawn.
        partition_ids: The partitions.
        partition_id: That of the samples. None: there is none.
        found: Its samples, without their fields.
        fields: Its fields of one number.
        values: Id -> the values of these, of rows on the screen.
        sample: The chosen one.
        error: What is refused, or why nothing is seen.
    """

    wish: Wish = field(default_factory=Wish)
    stages: RenderableType = ""
    partition_ids: Sequence[str] = ()
    partition_id: str | None = None
    found: Found = field(default_factory=lambda: Found({}, 0, 0))
    fields: Sequence[str] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sample: Sample | None = None
    error: str = ""


class Watcher(Thread):
    """Asks a store for what is wished, and again each second; rarely enough to take 2 % of its time.

    Args:
        config_path: The config file of the store. When the store ends, the next one is looked for.
        partition_id: The only partition to look at. None: all.
        decode: The text of token ids.

    Attributes:
        wish: What to ask for. A new one is asked for at once.
        tell: Gets what was seen, in this thread.
    """

    def __init__(self, config_path: str, partition_id: str | None = None, decode: Decode | None = None) -> None:
        super().__init__(name="dataplane-browse", daemon=True)
        self.wish = Wish()
        self.tell: Callable[[Seen], object] = lambda _: None
        self._config_path = config_path
        self._partition_id = partition_id
        self._decode = decode
        self._looks: Looks | None = None
        self._rows: Rows | None = None
        self._found = Found({}, 0, 0)
        self._refused = ""
        self._wake, self._ends = Event(), Event()
        self._open = ExitStack()

    def open(self) -> None:
        """Attaches to the store.

        Raises:
            DataPlaneError: There is none, or it has not the partition.
        """
        client = attach(self._config_path)
        self._open.callback(client.close)
        try:
            if self._partition_id is not None:
                client.describe(self._partition_id)
        except DataPlaneError:
            self._close()
            raise
        self._looks = Looks(client, self._partition_id)
        for _ in range(3):  # the first screen at once
            self._looks.ask()

    def ask_for(self, wish: Wish) -> None:
        """Sets what is wished."""
        if wish != self.wish:
            self.wish = wish
            self._wake.set()

    def end(self) -> None:
        """Ends the thread."""
        self._ends.set()
        self._wake.set()
        self.join(PAUSE_S)

    def run(self) -> None:
        """Looks, until it is to end."""
        before, due, seen = Wish(), 0.0, Seen()
        while not self._ends.is_set():
            start = time.monotonic()
            wish, is_due = self.wish, start >= due
            try:
                if self._looks is None:
                    self.open()
                assert self._looks is not None
                if is_due:
                    self._looks.ask()
                with suppress(UnknownPartitionError):  # cleared meanwhile
                    seen = self._look(self._looks, wish, None if is_due else before)
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

    def _look(self, looks: Looks, wish: Wish, before: Wish | None) -> Seen:
        """``before``: the wish of the last look. None: look at all again."""
        shown = newest(looks.partitions)
        seen = Seen(wish, Screen(looks.report, shown))
        if not wish.samples:
            return seen
        seen.partition_ids = list(looks.partitions) or looks.client.list_partitions()
        held = self._rows.partition_id if self._rows else None
        name = wish.partition_id if wish.partition_id in seen.partition_ids else held
        if name not in seen.partition_ids:
            names = [report["partition_id"] for report in shown] or [*seen.partition_ids]
            name = names[0] if names else None
        if self._rows is None or self._rows.partition_id != name:
            self._rows, self._found, before = None if name is None else Rows(looks.client, name), Found({}, 0, 0), None
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
            seen.values = {each.sample_id: each.values for each in self._read(wish.ids, fields=rows.values)}
        if wish.chosen is not None:
            try:
                seen.sample = next(iter(self._read([wish.chosen], decode=self._decode)), None)
            except InvalidRequestError as error:  # of the tokenizer
                seen.error = str(error)
        return seen

    def _read(self, ids: Sequence[str], **how: Any) -> list[Sample]:
        there = {each: self._found.tags[each] for each in ids if each in self._found.tags}
        return self._rows.read(Found(there, len(there), len(there)), **how) if self._rows and there else []
