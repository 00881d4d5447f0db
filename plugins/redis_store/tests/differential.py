"""One random history on Redis' scripts and on the ledger, time included. Every reply and every refusal is compared.

    python plugins/redis_store/tests/differential.py --steps 1000000 --seed 0

A history is a list of plain steps that a seed determines. They go through the client's half of the backend, whose clock
is the history's, so that leases and puts end when it says so. In half of the histories, scripts give, look at and
settle a few rows only, so that most operations take several. In the end, all is dropped, and no key may be left.
If the two differ, the history is shrunk by leaving out steps as long as they still differ, and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from both_sides import GRACE_S, BothSides, Clock, Difference
from random_history import EPISODE, History

from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_redis import RedisBackend, _backend, _claims, _puts, _reads, _scripts, _session
from dataplane_testkit import backend_of

__all__ = ["Store", "run", "shrink", "simulate"]


def small_scripts() -> dict[str, _scripts.Script]:
    """The scripts, with lists so short that those of a history have several parts."""
    smaller = {
        "local CHUNK = 1000": "local CHUNK = 4",
        "local MEMBERS = 64": "local MEMBERS = 2",
        "local PART = 1000": "local PART = 2",
        ", MANY_FIELDS = string.rep('\\255', 65), 32": ", MANY_FIELDS = string.rep('\\255', 65), 6",
    }
    read = _scripts._read

    def short(name: str) -> str:
        text = read(name)
        for each in [each for each in smaller if each in text]:
            text = text.replace(each, smaller.pop(each))
        return text

    def kept(name: str) -> str:
        if name not in texts:
            texts[name] = short(name)
        return texts[name]

    texts: dict[str, str] = {}
    with mock.patch.object(_scripts, "_read", kept):
        found = _scripts._load()
    assert not smaller, smaller
    return found


_SMALL = small_scripts()


class Store:
    """A server for many histories, one at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._count = 0

    @contextlib.contextmanager
    def opened(self, options: dict[str, Any]) -> Iterator[BothSides]:
        """A new store on the server."""
        self._count += 1
        capacity_bytes = options["capacity_bytes"]
        clock = Clock()
        module = types.SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
        with contextlib.ExitStack() as stack:
            for each in (_session, _puts, _claims):
                stack.enter_context(mock.patch.object(each, "time", module))
            stack.enter_context(mock.patch.object(_puts, "_ABANDON_GRACE_S", GRACE_S))
            if options["in_turns"]:
                stack.enter_context(mock.patch.dict(_scripts.SCRIPTS, _SMALL))
                for each, names in (
                    (_claims, ("_LOOK_ROWS", "_GIVE_ROWS")),
                    (_reads, ("_LIST_ROWS", "_LOCATE_ROWS", "INLINE_ROWS")),
                    (_backend, ("_CLEAR_ROWS", "_LIST_ROWS", "_SCAN")),
                ):
                    for name in names:
                        stack.enter_context(mock.patch.object(each, name, b"2" if name == "_SCAN" else 3))
            config = DataPlaneConfig(
                backend="redis_store",
                options={
                    "url": self._url,
                    "namespace": f"history-{self._count}",
                    "capacity_bytes": capacity_bytes,
                    "on_full": "raise",
                },
                announce_s=None,
            )
            client = connect_backend(RedisBackend, config, bootstrap=True)
            stack.callback(client.close)
            both = BothSides(backend_of(client), clock, capacity_bytes)
            yield both
            both.redis("FLUSHALL")


def run(store: Store, history: History) -> tuple[int, str] | None:
    """Runs a history. Returns after how many steps the two differ and how, or None."""
    with store.opened(history.options) as both:
        try:
            for name, arguments in history.steps:
                both.step(name, arguments)
            both.end()
        except Exception as error:  # also what neither must raise
            return both.count, f"{type(error).__name__}: {error}"
    return None


def shrink(store: Store, history: History) -> History | None:
    """A history that still differs, with as few steps as leaving out steps can reach. None: now it does not differ."""
    failed = run(store, history)
    if failed is None:
        return None
    steps = history.steps[: failed[0]]
    size = len(steps) // 2
    while size:
        at = 0
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            found = run(store, History(history.options, shorter))
            if found is None:
                at += size
            else:
                steps = shorter[: found[0]]
        size //= 2
    return History(history.options, steps)


def simulate(store: Store, seeds: Sequence[int], num_steps: int = EPISODE) -> None:
    """Runs the histories of seeds.

    Raises:
        Difference: The two differ. It has the shrunk history.
    """
    for seed in seeds:
        history = History.drawn(seed, num_steps)
        found = run(store, history)
        if found is not None:
            small = shrink(store, history) or history
            found = run(store, small) or found
            lines = "\n".join(f"    {step}," for step in small.steps)
            raise Difference(f"seed {seed}: {found[1]}\nHistory({small.options}, [\n{lines}\n])")


def main() -> None:
    """Runs histories on a server of its own."""
    from redis_servers import Server

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    server, start = Server(), time.monotonic()
    try:
        store = Store(f"unix://{server.start().socket}?db=0")
        first = arguments.seed * 1_000_003
        simulate(store, range(first, first + -(-arguments.steps // EPISODE)))
    except Difference as error:
        sys.exit(str(error))
    finally:
        server.end()
    print(f"{arguments.steps} steps: no difference, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
