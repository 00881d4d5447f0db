"""Which columns of a put are stored together, and that a read then moves little else than what it asks for."""

import pytest
import torch
from blob_stores import Plain, open_client

from dataplane_core.backends import writes_of
from dataplane_core.errors import BackendError
from dataplane_core.spec import SharedRows
from dataplane_testkit import backend_of

ROW_COST = 4096  # of an engine that is made up


def frames(num_rows, size):
    return [bytes(size) for _ in range(num_rows)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a": 100, "b": 1 << 20, "c": 50_000, "d": 8}, ["b", "c"]),
        ({"a": 200_000, "b": 10_000, "c": 5_000}, ["a", "b"]),
        # the rows of a second one would cost more than 4 % of the put
        ({"a": 90_000, "b": 9_000, "c": 5_000}, ["a"]),
        # small cells, and a single column, stay together
        ({"a": 30_000, "b": 30_000, "c": 30_000}, []),
        ({"a": 1 << 20, "b": 1000, "c": 999}, ["a"]),
        ({"a": 1 << 20}, []),
        ({"a": 1 << 20, "b": 1 << 20}, ["a"]),
    ],
)
def test_the_largest_columns_are_apart_as_far_as_their_rows_cost_little(sizes, expected):
    columns = {name: frames(10, size) for name, size in sizes.items()}
    together, *rest = writes_of(columns, 10, ROW_COST)
    assert [name for write in rest for name in write.fields] == expected
    assert [*together.fields, *sorted(expected)] == sorted(sizes, key=lambda name: (name in expected, name))
    assert sum(sum(write.row_bytes) for write in (together, *rest)) == 10 * sum(sizes.values())


def test_columns_of_engines_that_address_cells_stay_together():
    columns = {"a": frames(3, 1 << 20), "b": frames(3, 8)}
    (together,) = writes_of(columns, 3, None)
    assert list(together.fields) == ["a", "b"]
    assert together.row_bytes == [(1 << 20) + 8] * 3


def test_shared_rows_are_apart_with_the_row_of_each_sample():
    columns = {"a": SharedRows(frames(2, 1000), [0, 1, 0]), "b": frames(3, 8)}
    together, shared = writes_of(columns, 3, ROW_COST)
    assert (list(together.fields), together.row_bytes, together.positions) == (["b"], [8, 8, 8], None)
    assert (list(shared.fields), shared.row_bytes, list(shared.positions)) == (["a"], [1000, 1000], [0, 1, 0])


@pytest.mark.parametrize("index", [[0, 1], [0, 1, 2], [0, 0, 0], [0, -1, 1]])
def test_shared_rows_that_do_not_fit_the_samples_are_refused(index):
    with pytest.raises(BackendError, match="'a' has 2 shared rows"):
        writes_of({"a": SharedRows(frames(2, 1000), index)}, 3, ROW_COST)


class Counting(Plain):
    """Counts the bytes that are read."""

    moved = 0

    def get(self, key):
        found = super().get(key)
        type(self).moved += len(found or b"")
        return found


@pytest.mark.parametrize(("field", "cell_bytes"), [("big", 1 << 20), ("mid", 24 << 10), ("scalar", 8)])
def test_a_read_of_one_field_moves_little_else(field, cell_bytes):
    """Of a put of 1 MB per sample, which has room in its budget for the large columns."""
    num_samples = 8
    columns = {
        "big": torch.randint(0, 256, (num_samples, 1 << 20), dtype=torch.uint8),
        "mid": torch.randint(0, 256, (num_samples, 24 << 10), dtype=torch.uint8),
        "scalar": torch.arange(num_samples),
        "other": torch.arange(num_samples),
    }
    with open_client(Counting) as client:
        ids = [f"s{row}" for row in range(num_samples)]
        client.register_partition("p", list(columns), None, ["t"])
        client.put_samples(ids, "p", columns)
        Counting.moved = 0
        found = client.get_samples(ids[1:5], "p", [field])[field]
        assert torch.equal(found, columns[field][1:5])
        assert Counting.moved <= 4 * (cell_bytes + 200)


def test_a_row_that_samples_share_is_moved_once():
    image = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    with open_client(Counting) as client:
        ids = [f"p_g{row}" for row in range(16)]
        client.register_partition("p", ["image", "n"], None, ["t"])
        client.put_samples(ids, "p", {"image": image.expand(16, -1), "n": torch.arange(16)})
        assert sum(map(len, backend_of(client).blobs.values())) <= (1 << 20) + 16 * 200
        Counting.moved = 0
        found = client.get_samples(ids, "p", ["image", "n"])
        assert torch.equal(found["image"], image.expand(16, -1))
        assert Counting.moved <= (1 << 20) + 16 * 200
        for row, name in enumerate(ids):  # each sample's other cells lie elsewhere
            client.put_samples([name], "p", {"n": torch.tensor([row])})
        Counting.moved = 0
        client.get_samples(ids, "p", ["image", "n"])
        assert Counting.moved <= (1 << 20) + 16 * 200
        client.clear_samples(ids[:15], "p")
        assert torch.equal(client.get_samples(ids[15:], "p", ["image"])["image"][0], image)
        client.clear_samples(ids[15:], "p")
        assert backend_of(client).blobs == {}
