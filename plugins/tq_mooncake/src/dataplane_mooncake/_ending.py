"""Ends calls into Mooncake's engine early, and lets a process exit while some of them run.

A transfer to a suspended process waits for a minute, and polls while it waits. When a process exits, C++ destroys the
engine even if threads are still in it: the process then dies by a segmentation fault and loses its exit status. But the
engine only ever waits for connections, so shutting a connection down ends the call at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Collection

import psutil

#: An address and a port.
Endpoint = tuple[str, int]


def listening_ports(pid: int | None = None) -> set[int]:
    """The TCP ports that a process listens on, by default this one."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def end_connections(peers: Collection[Endpoint]) -> int:
    """Shuts down this process's connections to these peers: a call that waits for one of them fails at once. Returns
    how many were shut down that were not before."""
    num_ended = 0
    wanted = {(address, port) for host, port in peers for address in _addresses(host)}
    for each in psutil.Process().net_connections("tcp"):
        if each.fd < 0 or not each.raddr or (each.raddr.ip.removeprefix("::ffff:"), each.raddr.port) not in wanted:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:
            # the descriptor may belong to another connection by now
            if connection.getpeername()[1] == each.raddr.port and connection.getsockname()[1] == each.laddr.port:
                connection.shutdown(socket.SHUT_RDWR)
                num_ended += each.status == psutil.CONN_ESTABLISHED
    return num_ended


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}


def skip_cpp_teardown() -> None:
    """For an ``atexit`` handler: lets this process exit without running the destructors of C++ libraries. Python shuts
    down as usual; then the C library, if it has ``on_exit``, flushes its files and exits with the same status."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        # the one registered last runs first
        for function in (libc._exit, libc.fcloseall):
            libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)
