"""Remote procedure calls into a service object inside the TransferQueue controller.

TransferQueue's controller answers all requests in one thread. In ``fetch`` mode it calls its sampler with the
``sampling_config`` of the request. `LedgerSampler` uses that for calls: the config holds a pickled method name with its
arguments, the sampler executes the method on a service object, and the pickled result is returned as ``custom_meta`` of
one row. Calls are atomic: each ends before the next one begins.

Only `PING` comes this way. All other calls come over plain connections, which cost the controller's process far less:
`CallServer`.

Importing this module imports TransferQueue.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from transfer_queue.sampler import BaseSampler

from dataplane_core.errors import BackendError, BackendUnavailableError, DataPlaneError
from dataplane_core.ledger import Ref
from dataplane_tq_simple._book import UNITS_NOTE, UnitBook
from dataplane_tq_simple._line import CallServer
from dataplane_tq_simple._pickles import dumps

if TYPE_CHECKING:
    from dataplane_core.backends import RecordedLedger
    from dataplane_core.hosting import CallId

__all__ = [
    "CALL_FIELD",
    "CALL_KEY",
    "CALL_PARTITION",
    "PING",
    "UNITS",
    "LedgerSampler",
    "decode_reply",
    "encode_call",
]

#: The partition of the controller to which calls are addressed. It holds no data.
CALL_PARTITION = "~dataplane"
#: A field that no partition has, so that the controller's scan for ready rows ends at once.
CALL_FIELD = "~call"
#: Key of the pickled call in ``sampling_config``, and of the pickled reply in ``custom_meta``.
CALL_KEY = "~dataplane"
#: A call that every service answers with its process id and class. It also shows that the factory works.
PING = "~ping"
#: A call of a method of the book of storage units: its name, and the arguments.
UNITS = "~units"

_logger = logging.getLogger(__name__)

#: The exit status of a controller that may answer nobody any more.
_EXIT_STATUS: Final = 70
_REPLY_ROW = 0
_OK, _ERROR, _EXPIRED = "ok", "error", "expired"


class LedgerSampler(BaseSampler):  # type: ignore[misc]  # the base class is untyped
    """Executes calls on a service object inside the controller's process.

    The bootstrapping client creates the sampler and pickles it to the controller. The first call there makes the
    service. The service needs no locks: one call runs at a time. For the same reason a call must not block: it would
    delay every client.

    No request raises, even a malformed one. An exception would write a log entry for each request, and one that is not
    an `Exception` would end the controller's thread.

    Args:
        service_factory: Picklable. Called without arguments in the controller's process, it returns the service, whose
            public methods can be called. Their results and `DataPlaneError`s must pickle. If the service has a method
            ``use_book``, it is called with the book of storage units first. If it keeps a journal, see
            `RecordedService`, the factory is called with ``must_exist=True`` in a controller that was started again.

    Attributes:
        book: The book of storage units of this process.
    """

    def __init__(self, service_factory: Callable[..., object]) -> None:
        super().__init__()
        self._service_factory = service_factory
        self._service: object | None = None
        self._save_book: Callable[[], None] = lambda: None
        self._journal: RecordedLedger | None = None
        self._lock = threading.Lock()
        self.book = UnitBook()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._service_factory,)

    def open_again(self) -> None:
        """Makes the service in a controller that was started again. Its state is in its journal.

        Raises:
            BackendUnavailableError: The journal is not there, or cannot be used.
            CorruptDataError: The journal is damaged.
        """
        with self._lock:
            self._make_service(must_exist=True)

    def note(self, name: str, value: bytes) -> None:
        """Keeps a value for a controller that is started again. Nothing happens without a journal."""
        with self._lock:
            if self._journal is not None:
                self._journal.note(name, value)
                self._commit()

    def noted(self, name: str) -> bytes | None:
        """What `note` was given last, also by an earlier process."""
        return None if self._journal is None else self._journal.notes.get(name)

    def open_line(self, ip: str) -> CallServer:
        """Also answers calls over plain connections to this address. Called once, in the controller's process.

        Returns:
            The server. Its owner tells clients its port and token, and keeps it.
        """
        return CallServer(ip, functools.partial(self._answer, settled=False), self._settle)

    def garbage(self) -> list[Ref]:
        """The refs that the service holds as free, for the keeper of the units."""
        garbage: Callable[[], list[Ref]] = getattr(self._service, "garbage", list)
        return garbage()

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Any = None) -> bool:
        """True, so that the controller calls this sampler even if no row is ready."""
        return True

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, partition: Any = None, **config: Any
    ) -> tuple[list[int], list[int]]:
        """Executes the call in ``config`` and leaves its reply in the partition's ``custom_meta``.

        Returns:
            The row of the reply, and no consumed rows. No row at all if the request holds no call: other clients of the
            same controller can consume nothing through this sampler.
        """
        call = config.get(CALL_KEY)
        if partition is None or not isinstance(call, bytes):
            return [], []
        partition.custom_meta[_REPLY_ROW] = {CALL_KEY: self._answer(call)}
        return [_REPLY_ROW], []

    def _settle(self) -> None:
        """Returns when all that was answered is kept."""
        if self._journal is not None:
            with self._lock:
                self._commit()

    def _commit(self) -> None:
        """Returns when all that was done is kept. If it cannot be, ends the process: nobody gets an answer.

        Ray then starts the controller again, unless another process is the controller already.
        """
        try:
            if self._journal is not None:
                self._journal.commit()
        except (OSError, BackendUnavailableError) as error:
            _logger.critical("this controller may answer nobody any more, and ends: %s", error)
            os._exit(_EXIT_STATUS)

    def _answer(self, call: bytes, *, settled: bool = True) -> bytes:
        """Answers a call. If not ``settled``, `_settle` must be called before the reply is sent."""
        name: Any = "?"
        try:
            name, args, expires_at, call_id = pickle.loads(call)
            if expires_at is not None and time.monotonic() > expires_at:
                return pickle.dumps((_EXPIRED, None, time.monotonic()))
            with self._lock:
                try:
                    result = self._execute(name, args, call_id)
                    try:
                        self._save_book()
                    except BackendUnavailableError as error:
                        if name == UNITS:
                            raise  # no client may know a view that a controller which is started again does not
                        _logger.warning("%s was done. The book of units is saved with the next call: %s", name, error)
                finally:
                    if settled:
                        self._commit()
            return dumps((_OK, result, time.monotonic()))
        except BaseException as error:  # the controller's only thread must survive every call
            return pickle.dumps((_ERROR, _pickle_error(name, error), time.monotonic()))

    def _execute(self, name: str, args: tuple[Any, ...], call_id: CallId | None) -> Any:
        if name == UNITS:
            return self._once(call_id, self._ask_book, args)
        if self._service is None:
            self._make_service()
        if name == PING:
            return {"pid": os.getpid(), "service": type(self._service).__qualname__}
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private")
        return self._once(call_id, getattr(self._service, name), args)

    def _once(self, call_id: CallId | None, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._journal is None or call_id is None:
            return work(*args)
        return self._journal.once(call_id, lambda: work(*args))

    def _make_service(self, **how: Any) -> None:
        service = self._service_factory(**how)
        use_book = getattr(service, "use_book", None)
        if use_book is not None:
            use_book(self.book)
        self._journal = getattr(service, "journal", None)
        self._save_book = getattr(service, "save_book", lambda: None)
        self._service = service

    def _ask_book(self, method: str, *args: Any) -> Any:
        if method not in ("view", "records", "add_units", "remove_unit"):
            raise AttributeError(f"the book of storage units has no {method!r} for clients")
        found = getattr(self.book, method)(*args)
        if self._journal is not None and method in ("add_units", "remove_unit"):
            self._journal.note_outcome(UNITS_NOTE, self.book.pack(), found)
        return found


def _pickle_error(name: object, error: BaseException) -> bytes:
    """Pickles the error so that any client can read it. Anything but a `DataPlaneError` becomes a `BackendError`."""
    if isinstance(error, DataPlaneError):
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
            return data
        except Exception:
            pass  # it does not pickle: described below
    lines = "".join(traceback.format_exception(error)).rstrip()
    failed = BackendError(f"call of {name!r} in the controller failed: {type(error).__name__}: {error}")
    failed.__cause__ = RuntimeError(lines)
    return pickle.dumps(failed)


def encode_call(name: str, args: tuple[Any, ...], expires_at: float | None, call_id: CallId | None = None) -> bytes:
    """Packs one call.

    Args:
        name: A public method of the service, or `PING`.
        args: Its arguments; they must pickle.
        expires_at: Time on the controller's monotonic clock, in seconds. After it the call is not executed, since its
            caller no longer waits. None: never.
        call_id: For a controller with a journal: the same whenever the call is repeated.
    """
    return dumps((name, args, expires_at, call_id))


def decode_reply(reply: bytes) -> tuple[bool, Any, float]:
    """Reads what `LedgerSampler` replied.

    Returns:
        Whether the call was executed (False: it had expired), its result, and the controller's monotonic clock in
        seconds at the time of the reply.

    Raises:
        DataPlaneError: What the call raised; any other exception as a `BackendError` with its traceback.
    """
    status, value, controller_time_s = pickle.loads(reply)
    if status == _ERROR:
        error = pickle.loads(value)
        if not isinstance(error, DataPlaneError):  # this process has another version of its class
            error = BackendError(f"{type(error).__name__}: {error}")
        raise error
    return status == _OK, value, controller_time_s
