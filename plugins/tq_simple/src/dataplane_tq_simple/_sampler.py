"""Remote procedure calls into a service object that lives inside the TransferQueue controller.

TransferQueue's controller answers all requests from one thread, and in `fetch` mode it calls its sampler with the
``sampling_config`` of the request. `LedgerSampler` takes that as a call: the config carries a pickled method name with
arguments, the sampler executes it on a service object of ours, and the pickled result goes back as ``custom_meta`` of
the one row it returns. Calls are therefore atomic: each runs to its end between two other requests of the controller.

Importing this module imports TransferQueue; only `_engine` and the controller's process do that.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from transfer_queue.sampler import BaseSampler

from dataplane_core.errors import BackendError, DataPlaneError

__all__ = [
    "CALL_FIELD",
    "CALL_KEY",
    "CALL_PARTITION",
    "PING",
    "LedgerSampler",
    "decode_reply",
    "encode_call",
]

#: The controller's partition that calls are addressed to. It holds no data.
CALL_PARTITION = "~dataplane"
#: A field that no partition has, so that the controller's scan for ready rows ends at once.
CALL_FIELD = "~call"
#: Key of the pickled call in ``sampling_config``, and of the pickled reply in ``custom_meta``.
CALL_KEY = "~dataplane"
#: A call that every service answers: who and where it is, and that its factory works.
PING = "~ping"

_REPLY_ROW = 0
_OK, _ERROR, _EXPIRED = "ok", "error", "expired"


class LedgerSampler(BaseSampler):  # type: ignore[misc]  # the base class is untyped
    """Executes calls on a service object inside the controller's process.

    The sampler itself is created by the bootstrapping client and pickled to the controller; the service is built there,
    by the first call. It needs no locks as long as nothing but its calls touches it: all of them run in the
    controller's request thread. For the same reason a call must not block: it would hold up every client.

    No request, however malformed, raises: an exception would cost the controller a log entry per request, and one
    outside of `Exception` its thread.

    Args:
        service_factory: Picklable, called without arguments in the controller's process. The public methods of what it
            returns can be called; their results and `DataPlaneError`s must pickle.
    """

    def __init__(self, service_factory: Callable[[], object]) -> None:
        super().__init__()
        self._service_factory = service_factory
        self._service: object | None = None

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Any = None) -> bool:
        """True: the controller shall ask this sampler even when no row is ready."""
        return True

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, partition: Any = None, **config: Any
    ) -> tuple[list[int], list[int]]:
        """Executes the call in ``config`` and leaves its reply in the partition's ``custom_meta``.

        Returns:
            The reply's row, and no consumed rows. No rows where the request holds no call: other clients of the same
            controller get nothing to consume from this sampler.
        """
        call = config.get(CALL_KEY)
        if partition is None or not isinstance(call, bytes):
            return [], []
        partition.custom_meta[_REPLY_ROW] = {CALL_KEY: self._answer(call)}
        return [_REPLY_ROW], []

    def _answer(self, call: bytes) -> bytes:
        name: Any = "?"
        try:
            name, args, kwargs, expires_at = pickle.loads(call)
            if expires_at is not None and time.monotonic() > expires_at:
                return pickle.dumps((_EXPIRED, None, time.monotonic()))
            result = self._execute(name, args, kwargs)
            return pickle.dumps((_OK, result, time.monotonic()), protocol=pickle.HIGHEST_PROTOCOL)
        except BaseException as error:  # the controller's only thread must survive whatever a call does
            return pickle.dumps((_ERROR, _pickle_error(name, error), time.monotonic()))

    def _execute(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._service is None:
            self._service = self._service_factory()
        if name == PING:
            return {"pid": os.getpid(), "service": type(self._service).__qualname__}
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private")
        return getattr(self._service, name)(*args, **kwargs)


def _pickle_error(name: object, error: BaseException) -> bytes:
    """The error as bytes that any client can read: a `DataPlaneError` itself, anything else described in one."""
    if isinstance(error, DataPlaneError):
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
            return data
        except Exception:
            pass  # described below
    lines = "".join(traceback.format_exception(error)).rstrip()
    return pickle.dumps(
        BackendError(f"call of {name!r} in the controller failed: {type(error).__name__}: {error}\n{lines}")
    )


def encode_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], expires_at: float | None) -> bytes:
    """The bytes of one call.

    Args:
        name: A public method of the service, or `PING`.
        args: Positional arguments; they must pickle.
        kwargs: Keyword arguments; they must pickle.
        expires_at: Reading of the controller's monotonic clock, in seconds, after which the call is not executed any
            more because its caller has given up. None: never.
    """
    return pickle.dumps((name, args, dict(kwargs), expires_at), protocol=pickle.HIGHEST_PROTOCOL)


def decode_reply(reply: bytes) -> tuple[bool, Any, float]:
    """Reads what `LedgerSampler` replied.

    Returns:
        Whether the call was executed (False: it had expired), its result, and the controller's monotonic clock in
        seconds at the time of the reply.

    Raises:
        DataPlaneError: The one that the call raised; `BackendError` for any other exception, with its traceback.
    """
    status, value, controller_time_s = pickle.loads(reply)
    if status == _ERROR:
        error = pickle.loads(value)
        if not isinstance(error, DataPlaneError):  # a class that this process knows under another base
            error = BackendError(f"{type(error).__name__}: {error}")
        raise error
    return status == _OK, value, controller_time_s
