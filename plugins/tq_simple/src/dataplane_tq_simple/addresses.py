"""The address that a node's processes announce: Ray's address of the node, or one that an option names.

A host has many addresses. One that other nodes cannot reach is refused here by name. Otherwise the process that
announces it would fail later, in another process, with an error that does not mention addresses.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

from dataplane_core.errors import ConfigError

__all__ = [
    "announced_address",
    "check_address",
    "host_and_port",
    "parse_announced",
    "refuses",
    "this_nodes_addresses",
    "with_port",
]

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def host_and_port(address: str) -> tuple[str, int]:
    """Reads ``host:port`` or ``[host]:port``. Raises `ValueError`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def with_port(ip: str, port: int) -> str:
    """The address that `host_and_port` reads."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def refuses(host: str, port: int, within_s: float) -> bool:
    """Whether nothing listens there. False if it cannot be reached in time, which says nothing about it."""
    try:
        socket.create_connection((host, port), timeout=within_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def parse_announced(option: str) -> _Network:
    """The network of the option ``announce_address``: a network in CIDR notation, or a single IP address, which is a
    network of its own. Raises `ValueError` if it is neither."""
    try:
        return ipaddress.ip_network(option, strict=False)
    except ValueError as error:
        raise ValueError(
            f"announce_address {option!r} is neither an IP address nor a network. Expected '10.1.2.3', or "
            "'10.1.0.0/16', in which every node has one address."
        ) from error


def this_nodes_addresses() -> list[str]:
    """The IP addresses of this node's interfaces that are up, in the system's order."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    texts = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            text = address.address.partition("%")[0]
            if name in up and _parsed(text) is not None:
                texts.append(text)
    return texts


def announced_address(option: str | None, *, ray_ip: str, num_nodes: int, mine: Iterable[str] | None = None) -> str:
    """The address that a process of this node announces, by the option ``announce_address``; without it, Ray's.

    Raises:
        ConfigError: The option fits none of this node's addresses (``mine``), or several; or `check_address` refuses
            the address.
    """
    if option is None:
        check_address(ray_ip, num_nodes=num_nodes, of="Ray's address of this node")
        return ray_ip
    network = parse_announced(option)
    addresses = list(dict.fromkeys(this_nodes_addresses() if mine is None else mine))
    fitting = [address for address in addresses if ipaddress.ip_address(address) in network]
    if len(fitting) != 1:
        raise ConfigError(
            f"announce_address '{option}' fits {len(fitting)} of this node's addresses ({', '.join(addresses)}). "
            "Expected one.",
            hint="Name an address of this node, or a network in CIDR notation in which every node has one address.",
        )
    check_address(fitting[0], num_nodes=num_nodes, of=f"announce_address '{option}' here")
    return fitting[0]


def check_address(address: str, *, num_nodes: int, of: str) -> None:
    """Refuses an address under which other nodes cannot reach this one: a link-local, multicast or unspecified one, and
    a loopback address if there are several nodes. ``of`` says what it is, for the message."""
    parsed = _parsed(address)
    if parsed is None:
        kind = "not an IP address"
    elif parsed.is_link_local:
        kind = "a link-local address, which no other host can route to"
    elif parsed.is_unspecified or parsed.is_multicast:
        kind = "not the address of a host"
    elif parsed.is_loopback and num_nodes > 1:
        kind = f"a loopback address, which the other {num_nodes - 1} nodes cannot reach"
    else:
        return
    raise ConfigError(
        f"{of} is {address}: {kind}. Expected an address that every node of the cluster can reach.",
        hint="Start Ray with --node-ip-address (or ray.init(_node_ip_address=...)). With tq_mooncake, the option "
        "announce_address may also name this node's address, or the network (10.0.0.0/8) in which each node has one.",
    )


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None
