"""Weights of which only the changes are sent: bit-equal at every version, chains, anchors, and who dies in between."""

import gc
import itertools
import signal
import subprocess
import threading

import numpy as np
import pytest
import torch
from bits import bits
from hypothesis import given, strategies as st
from tiers import in_long

from dataplane_core import connect
from dataplane_core.codec import ALL_DTYPES
from dataplane_core.errors import (
    ClaimTimeoutError,
    CorruptDataError,
    InvalidRequestError,
    LostSamplesError,
    MissingDataError,
    OperationTimeoutError,
)
from dataplane_integrations import _packed_weights, weights as module
from dataplane_integrations.weights import WEIGHTS, WeightReader, open_weights, publish_weights
from dataplane_testkit._timing import STARTS_S, Background

SHM = {"backend": "shm_store", "options": {"capacity_bytes": 40_000_000}}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        value = value.detach() if isinstance(value, torch.Tensor) else value
        assert bits(found[name]) == bits(value), name
        assert not isinstance(value, torch.Tensor) or found[name].is_contiguous()


def model(version, size=4096):
    """Weights of which few elements, all, or none change from version to version."""
    dice = torch.Generator().manual_seed(0)
    few = torch.randn(size, generator=dice).bfloat16()
    few[: version * 3] *= 1.5
    return {
        "few": few.view(-1, 4),
        "all": torch.full((3, 5), float(version)),
        "none": torch.arange(100),
        "step": torch.tensor(version),
        "extra._extra_state": {"version": version},
    }


def rows(client):
    """The versions in the store: version -> its anchor."""
    tags = client.list_samples(WEIGHTS).tags
    return {tag["weight_version"]: tag["weight_anchor"] for tag in tags}


def held_bytes(client, version):
    return client.get_samples([f"v{version}"], WEIGHTS, ["weight_bytes"])["weight_bytes"].numel()


@pytest.fixture(scope="module", params=["noop", "shm_store", *in_long("redis_store", "tq_simple")])
def store(request, config_of):
    with connect(config_of(request.param)) as client:
        yield client


@pytest.fixture
def client(store):
    open_weights(store)
    yield store
    open_weights(store)  # drops the copy that the next delta would be of


@pytest.fixture
def noop():
    with connect({"backend": "noop"}) as client:
        open_weights(client)
        yield client


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@given(st.data())
def test_any_change_of_any_tensor_of_one_chunk_or_several_is_carried_bit_for_bit(data):
    shapes = st.lists(st.sampled_from([0, 1, 2, 7, 50, 300]), max_size=3).filter(lambda shape: np.prod(shape) < 20_000)
    dice = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    with connect({"backend": "noop"}) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_packed_weights, "_CHUNK_BYTES", data.draw(st.sampled_from([16, _packed_weights._CHUNK_BYTES])))
        open_weights(client)
        reader = WeightReader(client, "r")
        weights = {str(dtype): torch.empty(data.draw(shapes), dtype=dtype) for dtype in sorted(ALL_DTYPES, key=str)}
        memory = {name: dice.integers(0, 256, tensor.nbytes, dtype=np.uint8) for name, tensor in weights.items()}
        for version in range(4):
            for name, each in memory.items():
                share = data.draw(st.sampled_from([0.0, 1e-3, 0.05, 0.4, 0.6, 1.0]))
                changed = dice.random(len(each)) < share
                each[changed] ^= dice.integers(1, data.draw(st.sampled_from([2, 256])), changed.sum(), dtype=np.uint8)
                if len(each):
                    kind = each & 1 if weights[name].dtype is torch.bool else each
                    weights[name].view(-1).view(torch.uint8).copy_(torch.from_numpy(kind))
            publish_weights(client, version, weights, delta=True)
            assert held_bytes(client, version) <= sum(-(-len(each) // 8) * 8 for each in memory.values())
            assert_same(reader.newest(), weights)


def test_views_parameters_arrays_and_tied_tensors_which_caller_and_reader_may_change(noop):
    memory = torch.randn(60, 40)
    layer = torch.nn.Linear(40, 60, bias=False)
    late, reader = WeightReader(noop, "late"), WeightReader(noop, "r")
    for version in range(3):
        with torch.no_grad():
            memory[version] += 1
            layer.weight[version] += 1
        given = {
            "transposed": memory.T,
            "strided": memory[::3, 1::2],
            "expanded": memory[:1].expand(50, 40),
            "parameter": layer.weight,
            "tied": layer.weight,
            "part": layer.weight[1:],
            "conj": torch.view_as_complex(memory.view(60, 20, 2)).conj(),
        }
        publish_weights(noop, version, {**given, "array": memory.numpy()[:, 3]}, delta=True)
        expected = {**given, "array": memory[:, 3]}
        expected = {name: value.detach().resolve_conj().clone() for name, value in expected.items()}
        memory.neg_()
        found = reader.newest()
        assert_same(found, expected)
        found["tied"].zero_()  # each is the caller's own
        assert_same({"parameter": found["parameter"]}, {"parameter": expected["parameter"]})
        memory.neg_()
    assert_same(late.newest(), expected)
    assert held_bytes(noop, 0) < sum(each.nbytes for each in expected.values())  # the tied ones once


# --- chains -----------------------------------------------------------------------------------------------------------


def test_deltas_are_small_and_an_anchor_comes_every_few_versions(client):
    reader, seldom = WeightReader(client, "r"), WeightReader(client, "seldom")
    anchors = []
    for version in (0, 1, 2, 3, 7, 8, 20, 21, 40):
        publish_weights(client, version, model(version), delta=True, anchor_every=4)
        assert_same(reader.newest(), model(version))
        assert reader.newest() is None
        assert_same(WeightReader(client, "late").newest(), model(version))
        if version in (0, 2, 21):  # within a chain, and over an anchor
            assert_same(seldom.newest(), model(version))
            assert seldom.version == version
        anchors.append(rows(client)[version])
        if anchors[-1] != version:
            assert held_bytes(client, version) < held_bytes(client, anchors[-1]) / 10
    assert anchors == [0, 0, 0, 0, 7, 7, 7, 7, 40]


@pytest.mark.parametrize(("keep", "every"), [(2, 1), (4, 1), (6, 2), (2, 5), (3, 4)])
def test_what_the_newest_versions_build_on_is_kept_and_nothing_else(noop, monkeypatch, keep, every):
    before_the_clear = []
    clear = noop.clear_samples
    monkeypatch.setattr(noop, "clear_samples", lambda *args: (before_the_clear.append(len(rows(noop))), clear(*args)))
    last = 3 * (keep + every)

    def oldest(newest):
        """The anchor of the oldest version that readers may still ask for."""
        return (max(newest - keep + 1, 0) // every) * every

    for version in range(last):
        publish_weights(noop, version, model(version), delta=True, anchor_every=every, keep=keep)
        assert list(rows(noop)) == list(range(oldest(version), version + 1))
    assert max(before_the_clear) == keep + every
    publish_weights(noop, last, model(last), keep=keep)  # whole: it builds on nothing, but those before it do
    assert list(rows(noop)) == list(range(oldest(last), last + 1))


def test_bytes_of_many_parts(client, monkeypatch):
    monkeypatch.setattr(_packed_weights, "_CELL_BYTES", 1000)
    reader = WeightReader(client, "r")

    def check(version, size, *, delta=True, **options):
        weights = model(version, size)
        publish_weights(client, version, weights, delta=delta, **options)
        reader.version = None
        for each in (reader, WeightReader(client, "late")):
            assert_same(each.newest(), weights)
        return delta and client.get_samples([f"v{version}"], WEIGHTS, ["weight_header"])["weight_header"][0]["cells"]

    parts = check(0, 4096)
    assert len(parts) == 10  # of 9.1 kB
    columns = client.get_samples(["v0"], WEIGHTS, parts)
    assert [columns[name].numel() for name in parts[:-1]] == [1000] * 9
    assert check(1, 4096) == ["weight_bytes"]
    assert rows(client) == {0: 0, 1: 0}
    assert len(check(2, 4096, anchor_every=1)) == 10
    assert len(check(2, 1024)) == 3  # over the ten
    for delta in (False, True, False):
        check(3, 1024, delta=delta)


@pytest.mark.parametrize("gone", [["v0"], ["v1"], ["v0", "v1"]])
def test_an_anchor_or_a_delta_that_was_dropped(noop, gone):
    reader = WeightReader(noop, "r")
    for version in range(3):
        publish_weights(noop, version, model(version), delta=True)
    reader.newest()
    noop.clear_samples(gone, WEIGHTS)
    with pytest.raises(LostSamplesError, match=r"build on version [01], which is not in the store"):
        WeightReader(noop, "late").newest()
    assert reader.newest() is None
    publish_weights(noop, 3, model(3), delta=True)
    assert rows(noop)[3] == 3
    for each in (reader, WeightReader(noop, "late")):
        assert_same(each.newest(), model(3))


#: Of NaNs, zeros, an infinity and the smallest bfloat16.
_BITS = [0x7FC0, 0x7FC1, 0xFFC1, 0x8000, 0x0000, 0x7F80, 0x0001]
_ODD = [torch.tensor((_BITS[at:] + _BITS[:at]) * 500, dtype=torch.uint16).view(torch.bfloat16) for at in range(7)]
_NOISE = [{"w": torch.randint(0, 256, (10_000,), dtype=torch.uint8)} for _ in range(3)]
_TIED, _OTHER = torch.randn(500), torch.randn(500)


def changed(**others):
    """Two versions of a layout that differs from the one before; None: without the name."""
    other = {name: value for name, value in {**model(1), **others}.items() if value is not None}
    return [model(0), other, other]


#: Versions, and version -> anchor in the store in the end.
SEQUENCES = {
    "special values are compared by their bits": ([{"w": each} for each in _ODD], {6: 0}),
    "no byte": ([{"w": torch.empty(0, 3)}] * 3, {2: 2}),
    "no tensor": ([{"extra": version} for version in range(3)], {2: 2}),
    "names in another order": ([model(0), dict(reversed(model(1).items())), model(2)], {2: 0}),
    "no longer tied": ([{"a": _TIED, "b": each} for each in (_TIED, _TIED, _TIED.clone(), _TIED + 1)], {2: 2, 3: 2}),
    "tied to another": ([{"a": _TIED, "b": _OTHER, "c": each} for each in (_TIED, _OTHER, _OTHER)], {1: 1, 2: 1}),
    "a delta that is not smaller": (_NOISE, {1: 1, 2: 2}),
    "another dtype": (changed(all=torch.zeros(3, 5, dtype=torch.float64)), {1: 1, 2: 1}),
    "another shape": (changed(all=torch.zeros(5, 3)), {1: 1, 2: 1}),
    "fewer dims": (changed(all=torch.zeros(15)), {1: 1, 2: 1}),
    "fewer rows": (changed(few=torch.zeros(8, 4).bfloat16()), {1: 1, 2: 1}),
    "one more name": (changed(more=torch.zeros(2)), {1: 1, 2: 1}),
    "an object for a tensor": (changed(all={"is": "an object"}), {1: 1, 2: 1}),
    "fewer names": (changed(all=None, few=None), {1: 1, 2: 1}),
}


@pytest.mark.parametrize(("versions", "held"), SEQUENCES.values(), ids=SEQUENCES)
def test_a_version_is_read_as_it_was_given_and_an_anchor_begins_where_a_delta_will_not_do(noop, versions, held):
    reader = WeightReader(noop, "r")
    for version, weights in enumerate(versions):
        publish_weights(noop, version, weights, delta=True)
        assert_same(reader.newest(), weights)
    found = rows(noop)
    assert {version: found[version] for version in held} == held


def test_a_trainer_that_begins_again_with_and_without_opening():
    with connect(SHM) as client:
        open_weights(client)
        reader = WeightReader(client, "r")
        for version in range(3):
            publish_weights(client, version, model(version), delta=True)
        reader.wait(STARTS_S)
        with connect(SHM, bootstrap=False) as again:
            with pytest.raises(InvalidRequestError, match="version 2 is published"):
                publish_weights(again, 1, model(9), delta=True)
            publish_weights(again, 3, model(7), delta=True)
            assert_same(reader.wait(STARTS_S), model(7))
            publish_weights(again, 4, model(8), delta=True)
            assert rows(client) == {3: 3, 4: 3}
            assert_same(reader.wait(STARTS_S), model(8))
        # the first trainer's chain is not the newest any more
        publish_weights(client, 5, model(5), delta=True)
        assert rows(client)[5] == 5
        assert_same(reader.wait(STARTS_S), model(5))
        with connect(SHM, bootstrap=False) as again:
            for version in (5, 6):  # the same versions, with others under them
                waiting = Background(lambda: reader.wait(STARTS_S))
                if version == 5:
                    open_weights(again)
                publish_weights(again, version, model(version + 20), delta=True)
                assert_same(waiting.result(STARTS_S), model(version + 20))
        publish_weights(client, 6, model(6), delta=True)
        assert rows(client)[6] == 6


def test_a_version_that_is_published_again_is_an_anchor(noop):
    for version in (0, 1, 1):
        publish_weights(noop, version, model(version), delta=True)
    assert rows(noop) == {0: 0, 1: 1}
    assert_same(WeightReader(noop, "late").newest(), model(1))


@pytest.mark.parametrize("delta", [False, True])
def test_a_row_without_its_cells_ends_the_read(noop, monkeypatch, delta):
    publish_weights(noop, 0, model(0), delta=delta)
    asked = []

    def fail(sample_ids, *_):
        assert len(asked) < 5
        asked.append(sample_ids)
        raise MissingDataError("a cell is not there")

    monkeypatch.setattr(noop, "get_samples", fail)
    for take in (WeightReader(noop, "r").newest, lambda: WeightReader(noop, "r").wait(0.0)):
        asked.clear()
        with pytest.raises(MissingDataError, match="a cell is not there"):
            take()
        assert len(asked) == 2


def test_the_wait_ends_also_if_versions_are_dropped_while_they_are_read(noop, monkeypatch):
    publish_weights(noop, 0, model(0))
    versions = itertools.count(1)

    def fail(*_):
        version = next(versions)
        assert version < 50
        publish_weights(noop, version, model(version))
        raise MissingDataError("dropped")

    monkeypatch.setattr(noop, "get_samples", fail)
    with pytest.raises(ClaimTimeoutError, match="no weights newer"):
        WeightReader(noop, "r").wait(0.0)


def test_a_reader_goes_on_after_an_error_of_the_store_from_where_it_was(noop, monkeypatch):
    reader, read = WeightReader(noop, "r"), []
    get = noop.get_samples

    def fails_once(sample_ids, *args):
        read.append(sample_ids[0])
        if read == ["v2", "v3"]:
            raise OperationTimeoutError("slow")
        return get(sample_ids, *args)

    for version in range(5):
        publish_weights(noop, version, model(version), delta=True)
        if version == 1:
            reader.newest()
    monkeypatch.setattr(noop, "get_samples", fails_once)
    with pytest.raises(OperationTimeoutError):
        reader.newest()
    assert_same(reader.newest(), model(4))
    assert read == ["v2", "v3", "v3", "v4"]


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_clients_that_are_strict_about_fields(caplog, strict, delta):
    with connect({"backend": "noop", "strict_fields": strict}) as client:
        open_weights(client)
        reader = WeightReader(client, "r")
        for version in range(2):
            publish_weights(client, version, model(version), delta=delta)
            assert_same(reader.wait(STARTS_S), model(version))
    assert not caplog.messages


@pytest.mark.parametrize("damage", [None, {}, {"cells": 3}, "a bit of the bytes"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_version_is_never_given_as_weights(noop, which, damage):
    for version in range(3):
        publish_weights(noop, version, model(version), delta=True)
    if damage == "a bit of the bytes":
        found = noop.get_samples([f"v{which}"], WEIGHTS, ["weight_bytes"])["weight_bytes"].clone()
        found[0, -20] ^= 1  # the last tensor is so small that a delta holds all of it
        noop.put_samples([f"v{which}"], WEIGHTS, {"weight_bytes": found})
        named = None
    else:
        header = np.empty(1, dtype=object)
        header[0] = damage
        noop.put_samples([f"v{which}"], WEIGHTS, {"weight_header": header})
        named = f"version {which} of the weights is damaged"
    reader = WeightReader(noop, "r")
    with pytest.raises(CorruptDataError, match=named):
        reader.newest()
    publish_weights(noop, 3, model(3), delta=True, anchor_every=3)
    assert_same(reader.newest(), model(3))


@pytest.mark.parametrize("options", [{}, {"delta": True, "anchor_every": 3}], ids=["whole", "deltas"])
def test_weights_are_never_mixed_while_versions_follow_fast(client, options):
    reader, ended = WeightReader(client, "r"), threading.Event()

    def publish():
        for version in range(40):
            publish_weights(client, version, model(version), **options)
        ended.set()

    thread = threading.Thread(target=publish)
    thread.start()
    seen = []
    while not ended.is_set() or not seen:
        found = reader.newest()
        if found is not None:
            assert_same(found, model(reader.version))
            seen.append(reader.version)
    thread.join()
    assert seen == sorted(set(seen))


def test_the_copy_of_the_last_version_goes_with_its_client():
    def publish_and_close():
        with connect({"backend": "noop"}) as client:
            for step in (lambda: publish_weights(client, 9, model(9)), lambda: open_weights(client)):
                open_weights(client)
                publish_weights(client, 1, model(1), delta=True)
                assert module._bases[client][WEIGHTS].number == 1
                step()
                assert module._bases[client] == {}
            publish_weights(client, 1, model(1), delta=True)

    publish_and_close()
    gc.collect()
    assert not any(module._bases.values())


# --- processes that die -----------------------------------------------------------------------------------------------

_PUBLISHES = """
import sys, torch
from dataplane_core import connect
from dataplane_integrations.weights import publish_weights
def model(version):
    weights = torch.zeros(200_000, dtype=torch.bfloat16)
    weights[: version % 199_000] = float(version)
    return {"w": weights, "step": torch.tensor(version)}
with connect({"backend": "shm_store", "options": {"capacity_bytes": 40_000_000}}, bootstrap=False) as client:
    for version in range(int(sys.argv[1]), 10**6):
        publish_weights(client, version, model(version), delta=True, anchor_every=5)
        print(version, flush=True)
"""
_READS = """
import torch
from dataplane_core import connect
from dataplane_integrations.weights import WeightReader
with connect({"backend": "shm_store", "options": {"capacity_bytes": 40_000_000}}, bootstrap=False) as client:
    reader = WeightReader(client, "child")
    while True:
        found = reader.wait(timeout_s=120.0)
        version, weights = reader.version, torch.zeros(200_000, dtype=torch.bfloat16)
        weights[: version % 199_000] = float(version)
        print(version, found["step"].item() == version and torch.equal(found["w"], weights), flush=True)
"""


@pytest.mark.parametrize("rounds", [(1, 7), *in_long((1, 7, 3, 12) * 3)], ids=len)
def test_writers_and_readers_that_are_killed_in_the_middle(python, rounds):
    """Each time others go on from what is in the store, and every version that is read is one that was published."""
    first = 0
    with connect(SHM) as client:
        open_weights(client)
        watcher = WeightReader(client, "watcher")
        for lines in rounds:
            with (
                python.start("-c", _PUBLISHES, str(first), stdout=subprocess.PIPE, text=True) as writer,
                python.start("-c", _READS, stdout=subprocess.PIPE, text=True) as reader,
            ):
                for line in itertools.islice(reader.stdout, lines):
                    assert line.endswith(" True\n"), line
                for child in (reader, writer):
                    child.send_signal(signal.SIGKILL)
                for line in reader.stdout:
                    assert line.endswith(" True\n") or not line.endswith("\n"), line
            found = watcher.newest()
            assert found["step"].item() == watcher.version
            assert torch.count_nonzero(found["w"]) == watcher.version % 199_000
            assert WeightReader(client, "late").newest()["step"].item() == watcher.version
            first = watcher.version + 1
