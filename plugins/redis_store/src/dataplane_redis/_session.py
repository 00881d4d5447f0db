"""`Session`: a client's connection to its instance, and the scripts and commands that it runs there.

An `Instance` is the record of a store in its namespace: the options that all its clients share, and its identity.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dataplane_core.errors import (
    AlreadyRunningError,
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    StalePartitionError,
    UnknownPartitionError,
    UnknownTaskError,
    preview,
)
from dataplane_core.spec import new_id
from dataplane_redis._acknowledged import Acknowledgements, Confirms, Receipt
from dataplane_redis._link import Link
from dataplane_redis._scripts import SCRIPTS, STORE_VERSION, text_of
from dataplane_redis._server import raise_if, store_error
from dataplane_redis.config import RedisConfig, base_of

#: Seconds after the deadline of a request for which the server keeps its id, if it was carried out.
KEPT_S: Final = 60.0
#: A time in seconds.
_TIME: Final = struct.Struct("<d")
#: A client asks for the store's time again if the answer took more seconds than this, at most so often.
_GOOD_ASK_S: Final = 0.005
_MOST_CLOCK_ASKS: Final = 8


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance in its namespace.

    Its id are random bits, drawn when the namespace was empty and kept as long as its data. If the namespace holds
    another id or none, it is no longer the store that this client connected to: it was emptied, or another server took
    over the address.
    """

    capacity_bytes: int | None  # of payload; None: no limit
    on_full: str  # what a put does when there is no room: ``block`` or ``raise``
    id: bytes
    owner: bytes  # random bits of the client that bootstrapped it last; empty if that was another client
    clock_offset_s: float  # the store's time minus this process's monotonic clock
    num_buckets: int  # that the payload is spread over, see `Placing`; fixed when the namespace was empty

    @classmethod
    def connect(cls, action: str, link: Link, config: RedisConfig, deadline: float, num_buckets: int = 1) -> Instance:
        """Asks the script ``instance`` to "attach" to the instance; to "bootstrap" it: to create it, or take it over
        from an earlier client with equal options; or to "bootstrap alone", which takes none over."""
        owner = b"" if action == "attach" else new_id().encode()
        asked = time.monotonic()
        reply = _ask(link, config, deadline, action, owner, num_buckets)
        where = f"namespace '{config.namespace}' on {link.label}"
        if reply[0] == b"none":
            raise BackendUnavailableError(
                f"connect(bootstrap=False) failed: {where} holds no instance.",
                hint="Bootstrap it first: connect(config, bootstrap=True).",
            )
        if reply[0] == b"other" and action == "bootstrap alone":
            raise AlreadyRunningError(f"{where} holds an instance.", retryable=True)
        if reply[0] == b"other":
            raise AlreadyRunningError(
                f"connect(bootstrap=True) refused: {where} holds a running instance with capacity_bytes "
                f"{_capacity_of(reply[1])}, on_full '{reply[2].decode()}'. Expected capacity_bytes "
                f"{config.capacity_bytes}, on_full '{config.on_full}'.",
                hint="Attach with bootstrap=False, choose another namespace, or, if its owner died, run: "
                f"redis-cli HDEL '{base_of(config.namespace).decode()}:instance' owner",
            )
        _, number, capacity, on_full, clock, buckets = reply
        offset_s, took_s = _offset_s(clock), time.monotonic() - asked
        for _ in range(_MOST_CLOCK_ASKS):
            # too low by what the reply took, never too high: on a busy machine that may be much of a short lease
            if took_s <= _GOOD_ASK_S or reply[:2] != [b"ok", number]:
                break
            asked = time.monotonic()
            reply = _ask(link, config, deadline, "attach", b"", num_buckets)
            if reply[:2] == [b"ok", number]:
                offset_s, took_s = max(offset_s, _offset_s(reply[4])), time.monotonic() - asked
        return cls(_capacity_of(capacity), on_full.decode(), number, owner, offset_s, int(buckets))

    def end(self, link: Link, config: RedisConfig, deadline: float) -> None:
        """Removes the owner, unless a later client took over. Then no client can attach. Data and clients stay."""
        _ask(link, config, deadline, "end", self.owner)

    def full_error(self, what: str, size_bytes: int, held_bytes: int, num_before: int) -> CapacityExceededError:
        """The error of a put that does not fit, or would have to wait for earlier puts."""
        assert self.capacity_bytes is not None
        never = size_bytes > self.capacity_bytes
        line = f", and {num_before} {'put waits' if num_before == 1 else 'puts wait'} for room before it"
        return CapacityExceededError(
            f"{what} refused: {size_bytes} bytes do not fit, {held_bytes} of {self.capacity_bytes} bytes are held"
            f"{line if num_before else ''}.",
            retryable=not never,
            hint="Write smaller batches or raise capacity_bytes." if never else "Clear samples that are consumed.",
        )


def _offset_s(clock: bytes) -> float:
    """The store's time minus this process's monotonic clock."""
    return float(_TIME.unpack_from(clock)[0]) - time.monotonic()


def _ask(link: Link, config: RedisConfig, deadline: float, action: str, owner: bytes, num_buckets: int = 1) -> Any:
    """Runs the ``instance`` script and returns its reply."""
    script = SCRIPTS["instance"]
    asked = {
        "action": action,
        "version": str(STORE_VERSION),
        "id": new_id(),
        "owner": owner,
        "capacity_bytes": "" if config.capacity_bytes is None else str(config.capacity_bytes),
        "on_full": config.on_full,
        "buckets": str(num_buckets),
    }
    what = "close" if action == "end" else "connect"
    reply = link.script(what, deadline, script, base_of(config.namespace), script.pack(asked))
    if reply[0] == b"version":
        raise_if(store_error(link.label, reply[1]))
    return reply


def _capacity_of(text: bytes) -> int | None:
    return int(text) if text else None


class Session:
    """The link and the instance; both are None until the backend is started.

    A private server, which nobody starts again, has no acknowledgements. ``base`` is the prefix of all keys.
    """

    def __init__(self, namespace: str, acknowledgements: Acknowledgements | None = None) -> None:
        self.base = base_of(namespace)
        self.link: Link | None = None
        self.instance: Instance | None = None
        self.acknowledgements = acknowledgements

    def connected(self) -> tuple[Link, Instance]:
        """The link and the instance."""
        if self.link is None or self.instance is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self.link, self.instance

    def run(
        self,
        what: str,
        deadline: float,
        script: str,
        /,
        *rows: memoryview,
        confirms: Confirms | None = None,
        **asked: Any,
    ) -> Any:
        """Runs a script on the values that its file names, and on rows, and returns the reply.

        If ``confirms`` says that the reply acknowledges something, waits for replicas, if it should.

        Raises:
            UnknownPartitionError, UnknownTaskError: They are not registered.
            StalePartitionError: The namespace now holds another store than the one that this client connected to; or it
                went back behind what this client was told is done.
        """
        link, _ = self.connected()
        packed = SCRIPTS[script].pack(asked)
        with self.receipt(confirms) as receipt:
            context = self.context(receipt)
            reply = link.script(what, deadline, SCRIPTS[script], self.base, packed, *rows, context, receipt=receipt)
            self.accept(what, receipt, reply)
        if reply[0] in (b"unknown_partition", b"unknown_task"):
            hint = f"Registered: {preview(sorted(map(text_of, reply[1])), limit=5) or 'none'}."
            partition_id, task_name = asked.get("name", ""), asked.get("task_name", "")
            if reply[0] == b"unknown_task":
                raise UnknownTaskError(f"partition '{partition_id}' has no consumer task '{task_name}'.", hint=hint)
            raise UnknownPartitionError(f"partition '{partition_id}' is not registered.", hint=hint)
        return reply

    @contextlib.contextmanager
    def receipt(self, confirms: Confirms | None) -> Iterator[Receipt | None]:
        """For a call that acknowledges something. None if it does not, or for a private server."""
        if self.acknowledgements is None or confirms is None:
            yield None
        else:
            with self.acknowledgements.receipt(confirms) as receipt:
                yield receipt

    def context(self, receipt: Receipt | None) -> bytes:
        """The last argument of every script: the instance's id, 16 random bytes, the store's time, and a mark."""
        _, instance = self.connected()
        now = _TIME.pack(instance.clock_offset_s + time.monotonic())
        return instance.id + os.urandom(16) + now + (b"" if receipt is None else receipt.mark)

    def accept(self, what: str, receipt: Receipt | None, reply: Any) -> None:
        """Notes what a script's reply acknowledges. Raises if too few replicas have it, or if the server has another
        store."""
        label = self.connected()[0].label
        if reply[0] == b"other_history":
            raise StalePartitionError(
                f"{what} refused: {label} no longer holds the store that this client connected to: it was emptied, or "
                "replaced. Nothing was changed in what is there now.",
                retryable=False,
                hint="Connect again, register the partitions and produce their samples again.",
            )
        if receipt is not None and self.acknowledgements is not None:
            self.acknowledgements.accept(what, label, receipt, reply)

    def quietly(self) -> contextlib.AbstractContextManager[None]:
        """For calls that are not the user's own: they do not tell what a server lost."""
        return contextlib.nullcontext() if self.acknowledgements is None else self.acknowledgements.quietly()

    def command(self, what: str, deadline: float, *words: bytes) -> Any:
        """Sends a command and returns the reply."""
        return self.connected()[0].command(what, deadline, *words)


def unknown_reply(reply: Sequence[Any]) -> BackendError:
    """The error of a reply that no script of this version gives."""
    return BackendError(f"the server's script replied {reply[0]!r}, which this client does not know.")
