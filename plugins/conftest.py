"""What tests of several backends ask about processes, and do to them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
import pytest

from dataplane_core.client.connection import LATEST_END
from dataplane_core.errors import DataPlaneError


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def runs() -> Callable[[int], bool]:
    """Whether a process runs: ``runs(pid)``."""
    return _runs


@pytest.fixture(scope="session")
def stopped() -> Callable[[int], AbstractContextManager[None]]:
    """A process does not run during a block: ``with stopped(pid):``."""

    @contextmanager
    def stop(pid: int) -> Iterator[None]:
        os.kill(pid, signal.SIGSTOP)
        try:
            give_up = time.monotonic() + 60  # the signal alone lets its threads run on for a moment
            while any(psutil.Process(t.id).status() != psutil.STATUS_STOPPED for t in psutil.Process(pid).threads()):
                assert time.monotonic() < give_up
                time.sleep(0.005)
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    return stop


@pytest.fixture(scope="session")
def hurries() -> Callable[[float], AbstractContextManager[None]]:
    """The operations of a block have so many seconds in all; those before it had their usual time."""

    @contextmanager
    def limit(seconds: float) -> Iterator[None]:
        before = LATEST_END.set(time.monotonic() + seconds)
        try:
            yield
        finally:
            LATEST_END.reset(before)

    return limit


@pytest.fixture(scope="session")
def told_in_time(hurries: Callable[[float], AbstractContextManager[None]]) -> Callable[..., DataPlaneError]:
    """The error of a call that has so many seconds: ``told_in_time(call, kind, pattern, seconds)``.

    If the deadline comes before what the error is to say is known, as on a busy machine, the call gets more time.
    """

    def ask(call: Callable[[], object], kind: Any, pattern: str, seconds: float) -> DataPlaneError:
        for limit in (seconds, 4 * seconds):
            with hurries(limit), pytest.raises(DataPlaneError) as caught:
                call()
            if isinstance(caught.value, kind) and re.search(pattern, str(caught.value)):
                return caught.value
        with hurries(15 * seconds), pytest.raises(kind, match=pattern) as last:
            call()
        return last.value

    return ask


@pytest.fixture(scope="session")
def actors() -> Callable[[str], set[str]]:
    """The names of our Ray actors that begin so: ``actors("tq-")``."""

    def ask(prefix: str) -> set[str]:
        import ray

        names = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
        return {name for name in names if name.startswith(prefix)}

    return ask


@pytest.fixture(scope="session")
def pid_of(actors: Callable[[str], set[str]]) -> Callable[[str], int]:
    """The process id of a Ray actor of ours, by its name, or by what one name alone begins with: ``tq-default/``."""

    def ask(name: str) -> int:
        import ray

        if name.endswith("/"):
            (name,) = actors(name)
        actor = ray.get_actor(name, namespace="dataplane")
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60))

    return ask
