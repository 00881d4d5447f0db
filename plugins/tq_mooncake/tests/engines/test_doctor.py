"""`dataplane doctor tq_mooncake`: what is wrong on this node is an error with the command that mends it."""

from functools import partial

import pytest
from doctors import findings as findings_of

from dataplane_core.backends import Level
from dataplane_mooncake import TQMooncakeBackend

findings = partial(findings_of, TQMooncakeBackend)


@pytest.fixture(autouse=True)
def no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_this_machine_is_well():
    assert findings(Level.ERROR, segment_size_bytes=64 << 20) == []
    said = [what for what, _ in findings(Level.OK, segment_size_bytes=64 << 20)]
    assert "Mooncake's library loads." in said
    assert any(what.startswith("Ray ") for what in said)


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        ({"protocol": "rdma", "rdma_devices": ["mlx5_77"]}, "the devices 'mlx5_77' are not in", "protocol: tcp"),
        ({"announce_address": "169.254.0.0/16"}, "fits 0 of this node's addresses", "Name an address of this node"),
        ({"segment_size_bytes": 1 << 50}, "this node would need", "Lower segment_size_bytes"),
    ],
)
def test_what_an_option_asks_for_and_the_node_lacks_is_an_error(options, what, hint):
    ((said, mends),) = findings(Level.ERROR, **{"segment_size_bytes": 64 << 20, **options})
    assert what in said
    assert hint in mends
