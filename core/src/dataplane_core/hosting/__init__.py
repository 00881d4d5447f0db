"""A ledger, and a service of extents, served to other processes.

What lives here: the messages of clients and hosts (`messages`), a client's `Session` with a host (`session`), one loop
that answers clients over a Unix socket or over TCP, and what it serves (`server`): a ledger, and extents of shared
memory (`extents`, `extent_host`). Backends whose ledger or rows are in another process use it.
"""

from dataplane_core.hosting.extent_host import AboutExtents, Allocate, Drop, ExtentHost, Memory, Retain
from dataplane_core.hosting.extents import ExtentService, ExtentStatistics
from dataplane_core.hosting.messages import Messages, Request, decode_about
from dataplane_core.hosting.server import Client, LedgerHost, Server, listen_at, listen_on, listen_unseen, new_token
from dataplane_core.hosting.session import (
    HostGoneError,
    LedgerLink,
    Session,
    TcpAddress,
    UnixAddress,
    Watch,
    failure_of,
)

__all__ = [
    "AboutExtents",
    "Allocate",
    "Client",
    "Drop",
    "ExtentHost",
    "ExtentService",
    "ExtentStatistics",
    "HostGoneError",
    "LedgerHost",
    "LedgerLink",
    "Memory",
    "Messages",
    "Request",
    "Retain",
    "Server",
    "Session",
    "TcpAddress",
    "UnixAddress",
    "Watch",
    "decode_about",
    "failure_of",
    "listen_at",
    "listen_on",
    "listen_unseen",
    "new_token",
]
