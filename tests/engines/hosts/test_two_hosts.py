"""Data over a network between two hosts, both ways, bit for bit."""

import pytest


@pytest.mark.timeout(460)
def test_data_crosses_hosts_both_ways_bit_for_bit(pair):
    backends = ["tq_simple", "tq_mooncake", "redis_store"]
    for backend, found in zip(backends, pair.cross(*backends), strict=True):
        assert found["backend"] == backend
        assert found["answered"] == {"ip": pair.there.address, "claimed": 96}, backend
        if backend == "tq_simple":
            assert found["paths"] == {pair.here.address: "memory", pair.there.address: "wire"}
        if backend != "redis_store":  # one unit on each host, under the address that the other can reach
            assert sorted(found["units"]) == [pair.here.address, pair.there.address], backend
