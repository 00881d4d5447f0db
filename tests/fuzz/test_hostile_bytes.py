"""Encodings, valid and forged, to every decoder: a value, or an error of the product, and no huge allocation.

The forged ones are mutations of valid ones that a seed determines. A failure prints the input. By the environment:

    FUZZ_TARGET="save file" FUZZ_INPUTS=1000000 python -m pytest --timeout 0 tests/fuzz    # so many for one decoder
    FUZZ_SEED=7 python -m pytest tests/fuzz                                                # other ones, for each
    FUZZ_TARGET=row FUZZ_INPUT=c4ff python -m pytest tests/fuzz                            # one, in hexadecimal digits
"""

import os
import random
import resource
import tracemalloc

import pytest
from mutations import mutate
from targets import TARGETS, Target, resources

from dataplane_core.errors import DataPlaneError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

TARGET, INPUTS, SEED, INPUT = (os.environ.get(f"FUZZ_{name}") for name in ("TARGET", "INPUTS", "SEED", "INPUT"))
#: The targets that take the most time for each input, and how many inputs they get beside 500 for the others.
SLOW = {"log": 90, "state": 90, "save": 130, "save file": 130, "recording": 90, "weights": 150}
#: An input of n bytes may allocate so many bytes and n times the factor: buffers and small structures have a size of
#: their own, and a value takes up to some hundred times the byte that it is in msgpack.
LIMIT_BYTES = 24 << 20
LIMIT_FACTOR = 300
#: Of so many inputs, one is measured.
MEASURE_EVERY = 16


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    resources.close()


def is_read(target: Target, data: bytes, *, measured: bool) -> bool:
    """Whether an input is read, not refused. If it is measured, which takes more time, also what it allocates."""
    if measured:
        tracemalloc.start()
    try:
        target.read(data)
        read = True
    except DataPlaneError as error:
        str(error)
        read = False
    except Exception as error:
        raise AssertionError(f"{target.name}: {error!r} for the input {data.hex()}") from error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= LIMIT_BYTES + LIMIT_FACTOR * len(data), f"{len(data)} bytes made it allocate {peak}: {data.hex()}"
    return read


@pytest.mark.parametrize("name", [TARGET] if TARGET else TARGETS)
def test_forged_bytes_are_read_or_refused(name):
    target = TARGETS[name]
    if INPUT is not None:
        is_read(target, bytes.fromhex(INPUT), measured=True)
        return
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seeds = target.seeds()
    assert 2 * sum(is_read(target, data, measured=True) for data in seeds) >= len(seeds), "most valid ones are refused"
    dice = random.Random(f"{name} {SEED or 1}")
    for number in range(int(INPUTS or SLOW.get(name, 500))):
        data = mutate(dice.choice(seeds), dice, seeds, target.form)
        is_read(target, data, measured=number % MEASURE_EVERY == 0)
    if INPUTS is None:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 300_000
