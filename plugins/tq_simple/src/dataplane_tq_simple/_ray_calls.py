"""Guards around Ray: calls that would wait for a dead head are cut short, and use after a fork is refused."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import ray

from dataplane_core.errors import BackendUnavailableError

_logger = logging.getLogger(__name__)

#: Threads that Ray's core runs in every connected process. One of them is enough as proof.
_RAY_THREADS: Final = frozenset({"worker.io", "gcs_client_io_s", "task_event_buff", "worker.user_obj"})

#: Whether this process has used Ray through this package, and whether it is a fork of a process that used Ray.
_used = False
_forked_from_ray = False


def _note_fork() -> None:
    global _forked_from_ray
    _forked_from_ray = _forked_from_ray or _used or ray.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


def refuse_fork() -> None:
    """Refuses the use of Ray in a fork of a process that used it. A fork lacks the threads that Ray needs.

    Raises:
        BackendUnavailableError: This process is such a fork.
    """
    global _used
    if _forked_from_ray or _ray_threads_are_missing():
        raise BackendUnavailableError(
            f"process {os.getpid()} was forked from one that used Ray, and Ray does not work in a fork: every call "
            "would hang.",
            retryable=False,
            hint="Start such processes by spawn: multiprocessing.get_context('spawn'), or "
            "DataLoader(..., multiprocessing_context='spawn'); then call connect(config, bootstrap=False) in them, "
            "with ray_address (host:port of the cluster) among the options.",
        )
    _used = True


def _ray_threads_are_missing() -> bool:
    """Whether Ray is connected but has no threads: then a parent that did not import this module has forked."""
    if not ray.is_initialized():
        return False
    listener = getattr(ray._private.worker.global_worker, "listener_thread", None)  # only a driver has one
    if listener is not None and listener.is_alive():
        return False
    try:
        names = {comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")}
    except OSError:  # not Linux, or a thread that has just ended
        return False
    return bool(names) and names.isdisjoint(_RAY_THREADS)


def end_within(limit_s: float, what: str, work: Callable[[], object]) -> None:
    """Runs a call that ends something on Ray. Returns after ``limit_s`` even if Ray does not answer.

    Args:
        limit_s: In seconds.
        what: What Ray is asked to do, for the log.
        work: Runs in a thread of its own, which is left behind if it takes longer.

    Raises:
        Exception: What ``work`` raised.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="dataplane-ray-end", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        _logger.warning("Ray did not %s within %g s: its head node is dead or does not respond.", what, limit_s)
    elif errors:
        raise errors[0]
