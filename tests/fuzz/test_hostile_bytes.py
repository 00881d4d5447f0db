"""Encodings, valid and forged, to every decoder: a value, or an error of the product, and no huge allocation."""

import resource

import pytest
from run import run_plain
from targets import TARGETS, resources

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

#: The targets that take the most time for each input, and how many inputs they get beside 500 for the others.
_SLOW = {"log": 90, "state": 90, "save": 130, "save file": 130, "recording": 90, "weights": 150}


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    resources.close()


@pytest.mark.parametrize("name", TARGETS)
def test_forged_bytes_are_read_or_refused(name):
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_plain(TARGETS[name], _SLOW.get(name, 500), seed=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 300_000
