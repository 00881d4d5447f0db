"""On Ray: calls policy workers that are actors, and waits for all of them with one deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dataplane_integrations.errors import ReplicaLeaderError, WorkerFailedError, WorkerTimeoutError
from dataplane_integrations.trainer.groups import WorkerGroup

#: Seconds to wait for errors of other workers once one has failed: the first report may not be of the first failure.
_CAUSE_GRACE_S: Final = 3.0


class RayWorkerGroup(WorkerGroup):
    """Policy workers that are Ray actors. The group gets their handles, and the caller ends them."""

    def call(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        doing: str,
    ) -> list[Any]:
        """As `WorkerGroup.call`. Starts all calls before it waits for the first."""
        calls = {
            name: getattr(actor, method).remote(*own, **(kwargs or {}))
            for name, actor, own in zip(self._names, self._workers, args, strict=True)
        }
        return wait_for_all(calls, timeout_s=timeout_s, doing=doing)


def wait_for_all(calls: Mapping[str, Any], *, timeout_s: float, doing: str) -> list[Any]:
    """Waits for calls on several actors together. The first failure ends the wait.

    Waiting for one after the other would hang: if a rank dies in a collective, its peers wait for it.

    Args:
        calls: The pending results (Ray object references), by the name of the actor.
        timeout_s: For all calls together, in seconds.
        doing: What the actors do, for messages: "training".

    Returns:
        The results in the order of ``calls``.

    Raises:
        WorkerFailedError: An actor died or raised. Its error is the cause, not that of a peer that lost the connection.
        WorkerTimeoutError: Not all answered in time.
    """
    import ray
    from ray.exceptions import RayError

    names = {reference: name for name, reference in calls.items()}
    pending = list(names)
    deadline = time.monotonic() + timeout_s
    failures: list[tuple[str, Exception]] = []
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        try:
            ray.get(ready)
        except RayError as error:
            if not failures:
                deadline = min(deadline, time.monotonic() + _CAUSE_GRACE_S)
            failures.append((names[ready[0]], error))
    if failures:
        raise _failure(failures, doing)
    if pending:
        late = ", ".join(names[reference] for reference in pending)
        raise WorkerTimeoutError(
            f"no answer from {late} within {timeout_s:g} s while {doing}. Expected one from each of {len(calls)} "
            "actors; one of them may hang in a collective that its peers never joined."
        )
    results: list[Any] = ray.get(list(calls.values()))
    return results


def _failure(failures: Sequence[tuple[str, Exception]], doing: str) -> WorkerFailedError:
    from ray.exceptions import RayActorError, RayTaskError

    def cause_of(error: Exception) -> Exception:
        return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error

    def rank(failure: tuple[str, Exception]) -> int:
        """The lower, the more likely the first failure. Peers of a dead actor or a failed leader fail after it."""
        cause = cause_of(failure[1])
        if isinstance(cause, RayActorError):
            return 0
        if isinstance(cause, ReplicaLeaderError):
            return 2
        return 3 if "closed by peer" in str(cause) or "Connection reset" in str(cause) else 1

    name, error = min(failures, key=rank)
    details = "\n\n".join(f"{who}:\n{what}" for who, what in failures)
    cause, died = cause_of(error), isinstance(error, RayActorError)
    what = f"failed while {doing}: {type(cause).__name__}: {cause}"
    hint: str | None = None
    if died:
        what = f"died while {doing}. Its process is gone, with what it held."
        hint = "Ray's log of that worker says why; an out-of-memory kill is the usual cause."
    failed = WorkerFailedError(f"{name} {what}", worker=name, died=died, details=details, hint=hint)
    failed.__cause__ = cause
    return failed
