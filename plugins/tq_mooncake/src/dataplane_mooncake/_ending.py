"""How calls into Mooncake's engine are ended before their time, and how a process ends with some of them running.

A transfer to a process that stands still waits for a minute, and polls while it waits. And when a process exits, C++
destroys the engine also under the threads that are in it, which ends the process by a segmentation fault in place of
its own exit status. Every wait of the engine is for a connection, though, so shutting that down ends the call at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Collection

import psutil

__all__ = ["Endpoint", "end_connections", "listening_ports", "parse_endpoint", "skip_cpp_teardown"]

#: An address and a port.
Endpoint = tuple[str, int]


def parse_endpoint(address: str) -> Endpoint:
    """Reads ``host:port`` or ``[host]:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def end_connections(peers: Collection[Endpoint]) -> None:
    """Shuts down this process's connections to these peers; what waits for one of them fails at once.

    Hosts that are named otherwise than by an IP address are resolved.
    """
    wanted = {(address, port) for host, port in peers for address in _addresses(host)}
    for each in psutil.Process().net_connections("tcp"):
        if each.fd < 0 or not each.raddr or (_plain(each.raddr.ip), each.raddr.port) not in wanted:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:
            # the descriptor may be another's by now
            if connection.getpeername()[1] == each.raddr.port and connection.getsockname()[1] == each.laddr.port:
                connection.shutdown(socket.SHUT_RDWR)


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}


def _plain(ip: str) -> str:
    return ip.removeprefix("::ffff:")


def skip_cpp_teardown() -> None:
    """Has this process end, when it exits, without the destructors of C++ libraries, with the exit status that it has.

    Called while Python's own handlers run at exit, after which Python ends as ever: the C library then flushes its
    files and leaves. Without effect where the C library has no ``on_exit``.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        # the last that is registered runs first
        for function in (libc._exit, libc.fcloseall):
            libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)
