"""A `RowStoreBackend` on a dict: which columns of a put are stored together, what a read moves, and damaged rows."""

import pytest
import torch

from dataplane_core import DataPlaneConfig, RowStoreBackend
from dataplane_core.backends import RefsGoneError
from dataplane_core.backends.ledger_backend import writes_of
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import BackendError, ConfigError, CorruptDataError, PluginSignatureError
from dataplane_core.spec import SharedRows
from dataplane_testkit import backend_of

ROW_COST = 4096  # of an engine that is made up


class Plain(RowStoreBackend):
    """Rows in a dict."""

    def __init__(self, config):
        super().__init__(config)
        self.rows = {}

    def put_rows(self, handles, buffer, offsets, deadline):
        for row, handle in enumerate(handles):
            self.rows[handle] = bytes(buffer[offsets[row] : offsets[row + 1]])

    def get_rows(self, handles, deadline):
        gone = [handle for handle in handles if handle not in self.rows]
        if gone:
            raise RefsGoneError("rows are gone", handles=gone)
        return [self.rows[handle] for handle in handles]

    def delete_rows(self, handles, deadline):
        for handle in handles:
            self.rows.pop(handle, None)


def open_client(cls, **options):
    return connect_backend(cls, DataPlaneConfig(backend="plain", options=options), bootstrap=True)


@pytest.mark.parametrize("index", [[0, 1], [0, 1, 2], [0, 0, 0], [0, -1, 1]])
def test_shared_rows_that_do_not_fit_the_samples_are_refused(index):
    with pytest.raises(BackendError, match="'a' has 2 shared rows"):
        writes_of({"a": SharedRows([bytes(1000)] * 2, index)}, 3, ROW_COST)


class Counting(Plain):
    """Counts the bytes that are read."""

    moved = 0

    def get_rows(self, handles, deadline):
        found = super().get_rows(handles, deadline)
        type(self).moved += sum(map(len, found))
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
        assert sum(map(len, backend_of(client).rows.values())) <= (1 << 20) + 16 * 200
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
        assert backend_of(client).rows == {}


@pytest.mark.parametrize("byte", [0, 4, 8, 12, -1], ids=["magic", "count", "length", "second_length", "cut"])
def test_a_row_whose_index_is_damaged_is_named_with_its_sample_and_fields(byte):
    config = DataPlaneConfig(backend="plain", read_cache_bytes=0)  # else it reads "z" only once
    with connect_backend(Plain, config, bootstrap=True) as client:
        client.register_partition("p", ["x", "y", "z"], None, ["t"])
        equal = torch.ones(1, 60_000).expand(4, -1)  # equal rows, which are stored once
        ids = ["a", "b", "c", "d"]
        client.put_samples(ids, "p", {"x": torch.arange(4.0), "y": torch.arange(4.0), "z": equal})
        rows = backend_of(client).rows
        for key, fields in zip([list(rows)[2], list(rows)[4]], [("x", "y"), ("z",)], strict=True):
            kept, row = rows[key], bytearray(rows[key])
            row[byte] ^= 0x40
            rows[key] = bytes(row[:-1] if byte < 0 else row)
            sample_id = "a" if fields == ("z",) else "c"
            with pytest.raises(CorruptDataError, match=f"sample '{sample_id}'.*{fields[0]}") as caught:
                client.get_samples(ids, "p", ["x", "y", "z"])
            assert (caught.value.cells, caught.value.hint is None) == ({sample_id: fields}, False)
            rows[key] = kept


def test_a_class_keeps_a_whole_log_or_none():
    with pytest.raises(PluginSignatureError, match="does not override read_log, trim"):

        class Half(Plain):
            def append(self, number, record, deadline):
                return True


def test_a_class_beside_it_is_told_of_what_is_made_of_both():
    told = []

    class Beside:
        def __init_subclass__(cls):
            told.append(cls)

    class Both(Plain, Beside):
        """Rows in a dict, and more."""

    assert told == [Both]


def test_an_owner_is_refused_without_a_log():
    with pytest.raises(ConfigError, match="keeps no log"):
        open_client(Plain, ledger="owner")
