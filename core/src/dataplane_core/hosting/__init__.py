"""A ledger, and a service of extents, served to other processes.

What lives here: one encoding of commands and replies (`Messages`), one loop that answers clients over a Unix socket or
over TCP (`Server`), what it serves (`LedgerHost`, `ExtentService`), and a client's `Session` with it. Backends whose
ledger is in another process use it: shm_store, and those on Ray.
"""

from dataplane_core.durable_files import disk_hint, sync_path
from dataplane_core.hosting.durable import (
    KeptExtentHost,
    Owner,
    check_extents,
    has_extents,
    is_locked,
    is_open,
    lock_folder,
    open_extents,
    owner_of,
)
from dataplane_core.hosting.extent_host import (
    AboutExtents,
    Allocate,
    CheckRoom,
    Drop,
    ExtentHost,
    Fetch,
    Fetched,
    Fill,
    Find,
    Found,
    Memory,
    PutWhole,
    Retain,
    Written,
)
from dataplane_core.hosting.extents import ExtentService, ExtentStatistics, Holds, Place, Wanted
from dataplane_core.hosting.host import Client, Host, LedgerHost, Receiving, Sending
from dataplane_core.hosting.kept_extents import ADDRESSES, KeptExtents, digest_of
from dataplane_core.hosting.layout import Bytes, Column, Layout, offsets_at
from dataplane_core.hosting.messages import (
    VERSION,
    ClaimOrWait,
    Messages,
    Release,
    Request,
    StopWaiting,
    Together,
    decode_about,
    decode_welcome,
)
from dataplane_core.hosting.server import Server, listen_as, listen_at, listen_on, new_socket_name, new_token
from dataplane_core.hosting.session import Address, Pin, Session, TcpAddress, UnixAddress, Watch
from dataplane_core.hosting.tls import new_certificate, serve_tls

__all__ = [
    "ADDRESSES",
    "VERSION",
    "AboutExtents",
    "Address",
    "Allocate",
    "Bytes",
    "CheckRoom",
    "ClaimOrWait",
    "Client",
    "Column",
    "Drop",
    "ExtentHost",
    "ExtentService",
    "ExtentStatistics",
    "Fetch",
    "Fetched",
    "Fill",
    "Find",
    "Found",
    "Holds",
    "Host",
    "KeptExtentHost",
    "KeptExtents",
    "Layout",
    "LedgerHost",
    "Memory",
    "Messages",
    "Owner",
    "Pin",
    "Place",
    "PutWhole",
    "Receiving",
    "Release",
    "Request",
    "Retain",
    "Sending",
    "Server",
    "Session",
    "StopWaiting",
    "TcpAddress",
    "Together",
    "UnixAddress",
    "Wanted",
    "Watch",
    "Written",
    "check_extents",
    "decode_about",
    "decode_welcome",
    "digest_of",
    "disk_hint",
    "has_extents",
    "is_locked",
    "is_open",
    "listen_as",
    "listen_at",
    "listen_on",
    "lock_folder",
    "new_certificate",
    "new_socket_name",
    "new_token",
    "offsets_at",
    "open_extents",
    "owner_of",
    "serve_tls",
    "sync_path",
]
