"""The checks that backends share: real import failures, real addresses of this machine."""

import ctypes
import socket

import pytest

from dataplane_core.backends import Finding, Level, check_announced_address, missing_library
from dataplane_core.errors import PluginImportError

HINT = "Set the announce address."


def test_a_missing_shared_library_is_named_from_the_cause_of_an_import_that_failed():
    with pytest.raises(OSError) as caught:
        ctypes.CDLL("libacme_fabric.so.7")
    error = PluginImportError("backend 'acme' cannot be imported.")
    error.__cause__ = caught.value
    assert missing_library(error) == "libacme_fabric.so.7"
    assert missing_library(ImportError("cannot import name 'Store' from 'acme.store'")) is None


@pytest.mark.parametrize(
    ("address", "level", "says"),
    [
        ("169.254.7.9", Level.ERROR, "link-local"),
        ("fe80::1", Level.ERROR, "link-local"),
        ("0.0.0.0", Level.ERROR, "not the address of a host"),
        ("203.0.113.7", Level.ERROR, "no interface of this machine has it"),
        ("no-such-host.invalid", Level.ERROR, "does not resolve"),
        ("127.0.0.1", Level.WARNING, "only this host reaches"),
        ("localhost", Level.WARNING, "only this host reaches"),
    ],
)
def test_an_address_that_other_hosts_cannot_use_is_found(address, level, says):
    finding = check_announced_address(address, "Ray", HINT)
    assert finding.level is level
    assert finding.what.startswith(f"Ray announces this host as {address}")
    assert says in finding.what
    assert finding.hint == HINT


def test_an_address_of_an_interface_of_this_machine_is_as_it_should_be():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.7", 9))  # sends nothing: it asks which interface would be used
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = probe.getsockname()[0]
    assert check_announced_address(address, "Ray", HINT) == Finding.ok(f"Ray announces this host as {address}.")
