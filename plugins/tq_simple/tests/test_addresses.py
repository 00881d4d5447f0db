"""Addresses that other nodes cannot reach are refused by name."""

import pytest

from dataplane_core.errors import ConfigError
from dataplane_tq_simple.addresses import announced_address, check_address, parse_announced, this_nodes_addresses

MINE = ["127.0.0.1", "169.254.7.1", "192.168.5.4", "10.1.2.3", "fe80::1", "fd00::2"]


def test_rays_address_is_announced_by_default():
    assert announced_address(None, ray_ip="10.1.2.3", num_nodes=2) == "10.1.2.3"
    assert announced_address(None, ray_ip="127.0.0.1", num_nodes=1) == "127.0.0.1"


@pytest.mark.parametrize("option", ["10.1.2.3", "10.0.0.0/8", "10.1.2.99/24"])
def test_an_option_names_an_address_or_its_network(option):
    assert announced_address(option, ray_ip="192.168.5.4", num_nodes=2, mine=MINE) == "10.1.2.3"


@pytest.mark.parametrize(("option", "count"), [("10.9.9.9", 0), ("0.0.0.0/0", 4), ("172.16.0.0/12", 0)])
def test_an_option_that_fits_no_address_or_several_is_refused(option, count):
    with pytest.raises(ConfigError, match=rf"fits {count} of this node's addresses \(127\.0\.0\.1, 169\.254\.7\.1"):
        announced_address(option, ray_ip="192.168.5.4", num_nodes=2, mine=MINE)


@pytest.mark.parametrize(
    ("address", "num_nodes", "said"),
    [
        ("169.254.7.1", 1, "link-local"),
        ("fe80::1", 1, "link-local"),
        ("127.0.0.1", 3, "loopback address, which the other 2 nodes cannot reach"),
        ("::1", 2, "loopback"),
        ("0.0.0.0", 1, "not the address of a host"),
        ("node-7", 1, "not an IP address"),
    ],
)
def test_addresses_that_others_cannot_reach_are_refused(address, num_nodes, said):
    message = rf"Ray's address of this node is {address}: .*{said}.* --node-ip-address.* announce_address"
    with pytest.raises(ConfigError, match=message):
        announced_address(None, ray_ip=address, num_nodes=num_nodes)
    with pytest.raises(ConfigError, match="the unit is"):
        check_address(address, num_nodes=num_nodes, of="the unit")


def test_neither_an_address_nor_a_network_is_refused():
    with pytest.raises(ValueError, match="'eth0' is neither an IP address nor a network"):
        parse_announced("eth0")


def test_this_nodes_addresses_are_those_of_its_interfaces():
    assert "127.0.0.1" in this_nodes_addresses()
