"""The wire guard: what was put comes back, and what was not is caught and named, on every form of the wire."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from one_store import joined
from tensordict import NonTensorStack, TensorDict

from dataplane_core import DataPlaneConfig, WireFormat, connect
from dataplane_core.codec import byte_array
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import ConfigError, CorruptDataError, LostReplyError, MissingDataError
from dataplane_core.spec import Ragged
from dataplane_noop import NoopBackend
from dataplane_testkit import Faults, backend_of
from dataplane_testkit._columns import items_of


class Promotes(NoopBackend):
    wire = WireFormat(promote_1d=True)


class CarriesBytes(NoopBackend):
    wire = WireFormat(bytes=True)

    def store_write(self, write_id, columns, num_samples, deadline):
        frames = {name: [bytearray(frame) for frame in column] for name, column in columns.items()}
        super().store_write(write_id, frames, num_samples, deadline)


WIRES = {"native": NoopBackend, "promoted": Promotes, "bytes": CarriesBytes}
IDS = ["a", "b", "c"]
ITEMS = [{"turns": ["hi", "there"], "image": torch.arange(6).view(2, 3)}, None, b"raw"]


@pytest.fixture(params=WIRES)
def guarded(request):
    """A guarded client of one form of the wire, with a partition."""
    config = DataPlaneConfig(backend="noop", middleware=["wire_guard"])
    with connect_backend(WIRES[request.param], config) as client:
        client.register_partition("p", [], None, ["t"])
        yield client


def columns(seed=0):
    """Every kind of column, three rows each."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 100, (length,), generator=generator) for length in (3, 0, 5)]
    return TensorDict(
        {
            "tokens": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "dense": torch.randn(3, 4, 2, generator=generator).to(torch.bfloat16),
            "other": torch.randn(3, 4, 2, generator=generator).to(torch.bfloat16),
            "reward": torch.randn(3, generator=generator),
            "mask": torch.tensor([True, False, True]),
            "items": NonTensorStack(*ITEMS),
        },
        [3],
    )


def stored(client, name):
    """The columns of that field in the store, past the client: of each put one."""
    return [segment._columns[name] for segment in backend_of(client)._segments.values() if name in segment._columns]


def flip_a_bit(client, name, row):
    """In the store's own memory."""
    (column,) = stored(client, name)
    if isinstance(column, Ragged):
        first, end = (column.offsets[row : row + 2] * column.values[0].nbytes).tolist()
        byte_array(column.values)[first:end][-1] ^= 1
    elif isinstance(column, torch.Tensor) or isinstance(column[row], torch.Tensor):
        byte_array(column[row])[-1] ^= 1
    elif isinstance(column[row], bytearray):
        column[row][-1] ^= 1
    else:
        byte_array(column[row]["image"])[3] ^= 1


def swap(column, one, other):
    if isinstance(column, torch.Tensor):
        column[[one, other]] = column[[other, one]]
    else:
        column[one], column[other] = column[other], column[one]


def swaps_rows(*names):
    return lambda client: [swap(stored(client, name)[0], 0, 2) for name in names]


def swaps_fields(client):
    """With their checksums."""
    (segment,) = backend_of(client)._segments.values()
    for prefix in ("", "~xxh3."):
        swap(segment._columns, f"{prefix}dense", f"{prefix}other")


#: What happens to the samples in the store; and the cells that are not what was put.
DAMAGE = {
    **{
        f"a bit of {name}": (partial(flip_a_bit, name=name, row=0), {"a": (name,)})
        for name in ("tokens", "dense", "reward", "mask", "items")
    },
    "a bit of a checksum": (partial(flip_a_bit, name="~xxh3.reward", row=1), {"b": ("reward",)}),
    "swapped rows": (swaps_rows("dense"), {"a": ("dense",), "c": ("dense",)}),
    "swapped rows and checksums": (swaps_rows("dense", "~xxh3.dense"), {"a": ("dense",), "c": ("dense",)}),
    "swapped fields": (swaps_fields, dict.fromkeys(IDS, ("dense", "other"))),
}


@pytest.mark.parametrize(("damage", "cells"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_what_was_put_is_named_and_the_rest_is_read(guarded, damage, cells):
    guarded.put_samples(IDS, "p", columns())
    damage(guarded)
    names = list(columns().keys())
    with pytest.raises(CorruptDataError) as caught:
        guarded.get_samples(IDS, "p", names)
    first, (field, *_) = next(iter(cells.items()))
    assert f"'{first}' in '{field}'" in str(caught.value)
    assert (caught.value.cells, caught.value.backend) == (cells, "noop")
    assert pickle.loads(pickle.dumps(caught.value)).cells == cells
    for sample_id in IDS:
        whole = [name for name in names if name not in cells.get(sample_id, ())]
        assert guarded.get_samples([sample_id], "p", whole).batch_size == (1,)


def test_cells_are_checked_that_were_put_before_the_type_of_their_field_was_known(guarded):
    guarded.put_samples(["a"], "p", {"reward": [1], "tokens": [[]]})
    guarded.put_samples(["b"], "p", {"reward": [0.5], "tokens": [[2]]})
    back = guarded.get_samples(["b", "a"], "p", ["reward", "tokens"])
    assert (back["reward"].tolist(), [row.tolist() for row in back["tokens"].unbind()]) == ([0.5, 1.0], [[2], []])
    guarded.put_samples(["c"], "p", {"more": [7]})
    guarded.put_samples(["d"], "p", {"more": torch.tensor([8])})
    assert guarded.get_samples(["c", "d"], "p", ["more"])["more"].tolist() == [7, 8]


def test_cells_of_a_client_without_the_guard_are_refused_and_not_passed_on(guarded):
    guarded.put_samples(["a", "c"], "p", {"reward": torch.zeros(2)})
    without = connect_backend(type(backend_of(guarded)), DataPlaneConfig(backend="noop"))
    with joined(guarded, without) as unguarded:
        unguarded.put_samples(["b"], "p", {"reward": torch.zeros(1)})
        with pytest.raises(ConfigError, match="put without wire_guard and have no checksum: 'b' in 'reward'"):
            guarded.get_samples(["a", "b"], "p", ["reward"])
        assert unguarded.get_samples(["a", "b"], "p", ["reward"])["reward"].tolist() == [0.0, 0.0]
        unguarded.put_samples(["c"], "p", {"reward": torch.ones(1)})
        with pytest.raises(CorruptDataError, match=r"'c' in 'reward'.*overwritten by a client without wire_guard"):
            guarded.get_samples(["a", "c"], "p", ["reward"])


def test_cells_not_yet_produced_are_still_told_by_the_users_names_alone(guarded):
    guarded.put_samples(IDS, "p", {"reward": torch.zeros(3)})
    with pytest.raises(MissingDataError, match=r"'a' lacks 'dense'; 'b' lacks 'dense'; 'c' lacks 'dense'\.") as caught:
        guarded.get_samples(IDS, "p", ["reward", "dense"])
    assert caught.value.missing_cells == dict.fromkeys(IDS, ("dense",))
    with pytest.raises(MissingDataError, match="'zz' is not in the partition"):
        guarded.get_samples(["zz"], "p", ["reward"])


def test_it_stands_anywhere_among_other_middleware():
    for middleware in (["metrics", "wire_guard"], ["wire_guard", "metrics"], [{"wire_guard": {}}]):
        with connect({"backend": "noop", "middleware": middleware, "allow_pickle": True}) as client:
            client.register_partition("p", [], None, [])
            client.put_samples(IDS, "p", {**columns(), "odd": np.array([{1, 2}, None, "a"], dtype=object)})
            back = client.get_samples(IDS, "p", ["mask", "odd"])
            assert (back["mask"].tolist(), items_of(back["odd"])) == ([True, False, True], [{1, 2}, None, "a"])


def test_a_put_that_is_made_again_is_guarded_once_and_hands_middleware_the_columns_as_they_were():
    given, faults = [], Faults()

    def encode(request):
        given.append((list(request.sample_ids), {name: list(column) for name, column in request.columns.items()}))
        for column in request.columns.values():
            column[0] = b"encoded"
        if len(given) == 1:
            request.sample_ids.clear()
            raise LostReplyError("lost.")

    config = DataPlaneConfig(backend="noop", middleware=["wire_guard", faults])
    with connect_backend(CarriesBytes, config) as client, faults.before("put_samples", encode):
        client.register_partition("p", [], None, [])
        client.put_samples(["a"], "p", {"role": ["tool"]})
    first, second = given
    assert first == second
    assert (first[0], set(first[1])) == (["a"], {"role", "~xxh3.role"})
