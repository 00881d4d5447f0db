"""Findings of `dataplane doctor` about a machine, and checks that backends share.

A backend returns its findings from `Backend.diagnose`. Nothing here starts, writes or changes anything.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """No problem."""
    WARNING = "warning"
    """It works, but an operator should know this."""
    ERROR = "error"
    """`connect` or an operation will fail; `dataplane doctor` exits with 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        level: How bad it is.
        what: What was found, in one sentence or more. If it is a problem, also what was expected. Never a secret.
        hint: How to fix it: a command, or an option to set. None if nothing needs to be done.
    """

    level: Level
    what: str
    hint: str | None = None

    @classmethod
    def ok(cls, what: str) -> Finding:
        """No problem."""
        return cls(Level.OK, what)

    @classmethod
    def warning(cls, what: str, hint: str | None = None) -> Finding:
        """It works, but an operator should know this."""
        return cls(Level.WARNING, what, hint)

    @classmethod
    def error(cls, what: str, hint: str | None = None) -> Finding:
        """`connect` or an operation will fail."""
        return cls(Level.ERROR, what, hint)


_NO_LIBRARY = re.compile(r"([\w.+-]+\.so[\w.]*): cannot open shared object file")


def missing_library(error: BaseException) -> str | None:
    """The shared library that an import did not find, such as ``libibverbs.so.1``. None: it failed for another reason.

    Args:
        error: What the import raised. Its causes and contexts are searched too.
    """
    seen: BaseException | None = error
    while seen is not None:
        library = _NO_LIBRARY.search(str(seen))
        if library is not None:
            return library.group(1)
        seen = seen.__cause__ or seen.__context__
    return None


def never_reachable(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Why no other host can ever reach a host at this address. None if one may."""
    if ip.is_link_local:
        return "a link-local address, which no other host can route to"
    if ip.is_unspecified or ip.is_multicast:
        return "not the address of a host"
    return None


def check_announced_address(address: str, who: str, hint: str) -> Finding:
    """Checks whether other hosts can reach this one at the address that it announces.

    Args:
        address: An IP address of this host, or a name that resolves to one.
        who: The software that announces it, such as ``Ray``. The message begins with it.
        hint: How to announce another one.

    Returns:
        An error if the address is link-local, not the address of a host, or on no interface of this machine. A warning
        if it is a loopback address, which only this host can reach. Else ok.
    """
    said = f"{who} announces this host as {address}"
    try:
        numbers = {item[4][0] for item in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return Finding.error(f"{said}, a name that does not resolve: {error.strerror or error}.", hint)
    for number in sorted(str(number) for number in numbers):
        ip = ipaddress.ip_address(number.partition("%")[0])
        where = said if number == address else f"{said}, which is {number}"
        reason = never_reachable(ip)
        if reason is not None:
            return Finding.error(f"{where}: {reason}.", hint)
        if ip.is_loopback:
            return Finding.warning(f"{where}: a loopback address, which only this host reaches.", hint)
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((str(ip), 0))
            except OSError as error:
                return Finding.error(f"{where}: no interface of this machine has it ({error.strerror}).", hint)
    return Finding.ok(f"{said}.")
