"""Weights through the data plane: versions, readers that wait, and trainers that begin again."""

import io

import numpy as np
import pytest
import torch
from tiers import in_long

from dataplane_core import connect
from dataplane_core.errors import (
    InvalidRequestError,
    InvalidTypeError,
    OperationTimeoutError,
    SchemaMismatchError,
    UnknownPartitionError,
)
from dataplane_integrations.weights import WEIGHTS, WeightReader, open_weights, publish_weights
from dataplane_testkit._timing import STARTS_S, Background, eventually


def weights_of(version):
    return {
        "layers.0.weight": torch.full((3, 2), float(version), dtype=torch.bfloat16, requires_grad=True),
        "norm.num_batches_tracked": torch.tensor(version),
        "head/bias": torch.full((1, 400), -float(version)),  # so long that a delta is smaller
    }


def assert_is_version(found, version):
    expected = weights_of(version)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value.detach()), name


@pytest.fixture(params=["noop", *in_long("shm_store", "redis_store")])
def client(request):
    with connect({"backend": request.param}) as client:
        open_weights(client)
        yield client


def test_a_reader_takes_the_newest_and_each_only_once(client):
    reader, other = WeightReader(client, "a"), WeightReader(client, "b")
    assert reader.newest() is None
    for version in (0, 1, 5):
        publish_weights(client, version, weights_of(version))
    assert_is_version(reader.newest(), 5)
    assert reader.version == 5
    assert reader.newest() is None
    assert_is_version(other.wait(timeout_s=60.0), 5)
    assert client.list_sample_ids(WEIGHTS) == ["v1", "v5"]


def test_small_values_that_are_no_tensors_are_carried(client):
    others = {"layer._extra_state": None, "scale": 1.5, "steps": [1, 2], "state": {"amax": torch.ones(2)}, "raw": b"x"}
    arrays = {"array": np.full((2, 3), 0.5, np.float16)}
    publish_weights(client, 0, {**weights_of(0), **others, **arrays})
    found = WeightReader(client, "a").newest()
    assert torch.equal(found["state"].pop("amax"), torch.ones(2))
    assert {name: found.pop(name) for name in others} == {**others, "state": {}}
    assert torch.equal(found.pop("array"), torch.full((2, 3), 0.5, dtype=torch.float16))
    assert_is_version(found, 0)


def test_readers_wait_each_for_a_version_that_it_has_not_had(client):
    readers = [WeightReader(client, f"r{number}") for number in range(3)]
    publish_weights(client, 1, weights_of(1))
    for reader in readers:
        assert_is_version(reader.wait(timeout_s=60.0), 1)
    waiting = [Background(lambda reader=reader: reader.wait(timeout_s=60.0)) for reader in readers]
    publish_weights(client, 2, weights_of(2))
    for each in waiting:
        assert_is_version(each.result(STARTS_S), 2)
    open_weights(client)  # as a run does that begins again
    publish_weights(client, 3, weights_of(3))
    assert_is_version(readers[0].wait(timeout_s=60.0), 3)
    with pytest.raises(OperationTimeoutError):  # or ClaimTimeoutError, which is one
        readers[0].wait(timeout_s=0.1)
    assert_is_version(WeightReader(client, "r0").wait(timeout_s=60.0), 3)  # one that is started again
    waiting = Background(lambda: readers[0].wait(timeout_s=60.0))
    client.clear_samples(None, WEIGHTS)
    with pytest.raises(UnknownPartitionError):
        waiting.result(STARTS_S)


def test_a_reader_may_be_first_and_outlives_a_trainer_that_begins_again():
    with connect({"backend": "noop"}) as client:
        reader = WeightReader(client, "early")
        with pytest.raises(UnknownPartitionError):
            reader.newest()
        for version in (0, 3, 1, 1):  # also at an older version, or at the same
            waiting = Background(lambda: reader.wait(timeout_s=60.0))
            eventually(client.list_partitions, within_s=STARTS_S, what="the reader's registration")
            open_weights(client)
            publish_weights(client, version, weights_of(version))
            assert_is_version(waiting.result(STARTS_S), version)


def without_bias(**more):
    weights = weights_of(7)
    del weights["head/bias"]
    return {**weights, **more}


def with_more(name, value):
    return {**weights_of(7), name: value}


#: Of `publish_weights`: the version, the weights, further arguments, the error, and what its text names.
REFUSED = [
    (-1, weights_of(0), {}, InvalidRequestError, "version must be at least 0"),
    (7, weights_of(7), {"keep": 1}, InvalidRequestError, "keep at least 2"),
    (7, weights_of(7), {"keep": 0}, InvalidRequestError, "keep at least 2"),
    (7, {}, {}, InvalidRequestError, "0 weights"),
    (5, weights_of(9), {}, InvalidRequestError, "version 6 is published"),
    (7, weights_of(7), {"anchor_every": 0}, InvalidRequestError, "anchor_every must be at least 1"),
    (7, weights_of(7), {"anchor_every": "3"}, InvalidTypeError, "anchor_every must be an int, got str"),
    (7, weights_of(7), {"keep": 2.5}, InvalidTypeError, "keep must be an int, got float"),
    (None, weights_of(7), {}, InvalidTypeError, "version must be an int, got NoneType"),
    (7, [torch.ones(1)], {}, InvalidTypeError, "weights must be a dict, got list"),
    *(
        (7, with_more(name, torch.ones(1)), {"delta": delta}, InvalidRequestError, f"named '{name}'")
        for name in ("weight_version", "weight_header", "weight_bytes", "weight_bytes.7")
        for delta in (True, False)
    ),
    (7, without_bias(other=torch.ones(1)), {}, SchemaMismatchError, "lack 'head/bias' and add 'other'"),
    (7, without_bias(**{"head/bias": torch.zeros(2, 4, 1)}), {}, SchemaMismatchError, "head/bias"),
    (7, without_bias(**{"head/bias": io.BytesIO()}), {}, InvalidTypeError, r"head/bias.*BytesIO"),
    (7, with_more("extra", io.BytesIO()), {"delta": True}, InvalidTypeError, r"extra.*BytesIO"),
    (7, with_more("none", torch.eye(3).to_sparse()), {"delta": True}, InvalidTypeError, "weight 'none'.*sparse"),
    (7, with_more("none", torch.empty(3, device="meta")), {"delta": True}, InvalidTypeError, "weight 'none'.*meta"),
    (7, with_more(7, torch.ones(3)), {"delta": True}, InvalidTypeError, "the name 7"),
]


@pytest.mark.parametrize(("version", "weights", "options", "error", "named"), REFUSED)
def test_what_is_refused_leaves_the_versions_as_they_are(version, weights, options, error, named):
    with connect({"backend": "noop"}) as client:
        with pytest.raises(UnknownPartitionError):
            publish_weights(client, 5, weights_of(5))
        open_weights(client)
        delta = options.get("delta", False)
        for each in (5, 6):
            publish_weights(client, each, weights_of(each), delta=delta)
        reader = WeightReader(client, "r")
        with pytest.raises(error, match=named):
            publish_weights(client, version, weights, **options)
        assert client.list_sample_ids(WEIGHTS) == ["v5", "v6"]
        assert_is_version(reader.newest(), 6)
        publish_weights(client, 7, weights_of(7), delta=delta)
        assert_is_version(reader.newest(), 7)
