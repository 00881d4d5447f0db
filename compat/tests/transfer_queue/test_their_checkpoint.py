"""Checkpoints that TransferQueue saved. They are made with its own classes, without Ray, or by a run of it."""

import json
import os
import pickle
from collections import OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy._core import multiarray, numeric
from tensordict import TensorDict

import dataplane_compat.transfer_queue as module
from dataplane_compat.transfer_queue._their_pickles import load_pickle
from dataplane_core.errors import CorruptDataError, InvalidTypeError, UnsupportedOperationError

pytest.importorskip("transfer_queue")


def write_theirs(folder, **cells):
    """A checkpoint with rows ``k0``, ``k1``, ... of the partition ``train``."""
    from transfer_queue.controller import DataPartitionStatus
    from transfer_queue.storage.simple_storage import StorageUnitData

    indexes = list(range(len(next(iter(cells.values())))))
    status = DataPartitionStatus("train")
    status.global_indexes = set(indexes)
    status.revert_keys_mapping = {index: f"k{index}" for index in indexes}
    status.keys_mapping = {f"k{index}": index for index in indexes}
    status.custom_meta = {index: {"n": index} for index in indexes}
    status.field_name_mapping = {name: place for place, name in enumerate(cells)}
    status.production_status = torch.ones(len(indexes), len(cells), dtype=torch.int8)
    status.consumption_status = {"t": torch.tensor([index == 1 for index in indexes], dtype=torch.int8)}
    state = {
        "controller_id": "c",
        "partitions": {"train": status},
        "index_manager": {"global_index_counter": len(indexes)},
        "sampler": {"_states": {}},
    }
    units = folder / "simple_storage"
    units.mkdir(parents=True)
    (folder / "controller_state.pkl").write_bytes(pickle.dumps(state))
    (folder / "metadata.json").write_text(json.dumps({"storage_saved": True, "user_metadata": {}}))
    (units / "storage_unit_info.json").write_text(json.dumps([{"position": 0, "storage_unit_id": "u"}]))
    unit = StorageUnitData()
    unit.put_data(cells, indexes)
    unit.save_checkpoint(units / "su_0_u.pkl", "u")


@pytest.fixture
def noop():
    module.init({"backend": "noop", "controller": {"polling_mode": True}})
    yield module
    module.close()


def test_rows_tags_and_what_was_consumed_come_over(noop, tmp_path):
    folder = tmp_path / "checkpoint"
    write_theirs(folder, x=[torch.ones(2), torch.zeros(2), torch.ones(2)], info=[{"a": 1}, None, "text"])
    noop.kv_put("old", "other", tag={})
    noop.load_checkpoint(folder)
    assert noop.kv_list() == {"train": {f"k{n}": {"n": n} for n in range(3)}}
    read = noop.kv_batch_get(["k2", "k1"], "train")
    assert [row.tolist() for row in read["x"].unbind()] == [[1, 1], [0, 0]]
    assert read.get("info").tolist() == ["text", None]
    given = noop.get_client().get_meta(["x"], 2, "train", task_name="t")
    assert given.custom_meta == [{"n": 0}, {"n": 2}]  # the task was given k1 before
    assert given.field_schema["x"]["is_nested"] is False
    noop.save_checkpoint(tmp_path / "ours")
    noop.load_checkpoint(tmp_path / "ours")
    assert noop.get_client().check_consumption_status("t", "train")


def test_a_config_may_allow_other_classes(tmp_path):
    write_theirs(tmp_path / "checkpoint", x=[Path("a"), Path("b")])
    module.init({"backend": "noop", "allow_pickle": True})
    try:
        module.load_checkpoint(tmp_path / "checkpoint")
        assert module.kv_batch_get(["k0", "k1"], "train").get("x").tolist() == [Path("a"), Path("b")]
    finally:
        module.close()


def _call(function, *arguments, state=None):
    """An object that unpickles as a call, and then gets a state."""

    class Call:
        def __reduce__(self):
            return (function, arguments) if state is None else (function, arguments, state)

    return Call()


def _numpy_pickle(kind):
    """A dtype of objects that says that it holds none: numpy would take the bytes for the address of an object."""
    plain = (3, "|", None, None, None, -1, -1, 0)
    dtype, address = _call(np.dtype, "O8", False, True, state=plain), b"A" * 8
    if kind == "scalar":
        return pickle.dumps(_call(multiarray.scalar, dtype, address))
    if kind == "frombuffer":
        return pickle.dumps(_call(numeric._frombuffer, address, dtype, (1,), "C"))
    if kind == "state of an array":
        return pickle.dumps(
            _call(multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, (1,), dtype, False, address))
        )
    field = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
    dtype = _call(np.dtype, "V8", False, True, state=field)
    return pickle.dumps(_call(multiarray.scalar, dtype, address))


@pytest.mark.parametrize("kind", ["scalar", "frombuffer", "state of an array", "a field"])
def test_no_dtype_makes_numpy_read_an_address_from_a_file(tmp_path, python, kind):
    (tmp_path / "x.pkl").write_bytes(_numpy_pickle(kind))
    script = "import sys, pathlib; from dataplane_compat.transfer_queue._their_pickles import load_pickle\n"
    script += "print(load_pickle(pathlib.Path(sys.argv[1]), False))"
    done = python.run("-c", script, tmp_path / "x.pkl", check=False)
    assert done.returncode == 1, (done.returncode, done.stdout)
    assert "InvalidTypeError" in done.stderr


@pytest.mark.parametrize(
    ("named", "state"),
    [
        (b"ctorch._utils\n_rebuild_tensor_v2\n", b"N}X\x08\x00\x00\x00__name__X\x01\x00\x00\x00x\x73\x86"),
        (b"ctorch\nfloat32\n", b"}X\x01\x00\x00\x00aK\x01s"),
        (b"ccollections\nOrderedDict\n", b"}X\x01\x00\x00\x00aK\x01s"),
        (b"cnumpy\ndtype\nX\x02\x00\x00\x00f8\x85R", b"(K\x03X\x01\x00\x00\x00>t"),
    ],
)
def test_a_file_changes_nothing_that_it_names(tmp_path, named, state):
    (tmp_path / "x.pkl").write_bytes(b"\x80\x02" + named + state + b"b.")
    with suppress(Exception):
        load_pickle(tmp_path / "x.pkl", False)
    assert torch._utils._rebuild_tensor_v2.__name__ == "_rebuild_tensor_v2"
    assert not hasattr(torch.float32, "a")
    assert np.dtype("f8").isnative


def test_a_tensor_lies_inside_of_its_storage(tmp_path):
    def load(tensor):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps(tensor))
        return load_pickle(tmp_path / "x.pkl", False)

    rebuild, args = torch.ones(3).__reduce_ex__(2)
    for part in [(0, (1000,), (1,)), (2, (2,), (1,)), (0, (2,), (3,)), (-1, (1,), (1,)), (0, (2,), (-1,))]:
        with pytest.raises(RuntimeError):
            load(_call(rebuild, args[0], *part, False, OrderedDict()))
    with pytest.raises(RuntimeError):  # one that is changed after it was made
        load(_call(rebuild, *args, state=(torch.ones(1), 0, (1000,), (1,))))
    storage = pickle.dumps(torch.ones(3)).replace(b"\x03" + b"\0" * 7, b"\x04" + b"\0" * 7)
    (tmp_path / "x.pkl").write_bytes(storage.replace(b"K\x03Nt", b"K\x04Nt"))
    with pytest.raises(ValueError, match="has 12 bytes"):
        load_pickle(tmp_path / "x.pkl", False)


@pytest.mark.parametrize(
    "cell",
    [
        *(torch.arange(3).to(dtype) for dtype in (torch.bfloat16, torch.uint16, torch.bool, torch.complex64)),
        *(
            torch.ones(2, 0),
            torch.tensor(7),
            torch.arange(6).view(2, 3).t(),
            torch.arange(9)[4:6],
            torch.ones(1).expand(4),
        ),
        *(
            np.float32(1.5),
            np.int64(-3),
            np.bool_(True),
            np.str_("äx"),
            np.str_(""),
            np.bytes_(b"ab"),
            np.dtype(">f8").type(2),
        ),
        *({1, 2}, OrderedDict(a=1), defaultdict(set, a={3}), torch.Size([2, 3])),
    ],
    ids=repr,
)
@pytest.mark.parametrize("protocol", [3, pickle.HIGHEST_PROTOCOL])
def test_what_a_file_may_hold(tmp_path, cell, protocol):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(cell, protocol))
    loaded = load_pickle(tmp_path / "x.pkl", False)
    if isinstance(cell, torch.Tensor):
        assert torch.equal(loaded, cell)
        assert loaded.dtype == cell.dtype
    else:
        assert loaded == cell


def test_a_later_save_in_the_same_folder_is_the_one_that_is_loaded(noop, tmp_path):
    write_theirs(tmp_path, x=[torch.ones(2)])
    noop.load_checkpoint(tmp_path)
    noop.kv_put("new", "train", tag={})
    noop.save_checkpoint(tmp_path)
    noop.load_checkpoint(tmp_path)
    assert sorted(noop.kv_list("train")["train"]) == ["k0", "new"]


def _set_counter(folder, count):
    path = folder / "controller_state.pkl"
    state = pickle.loads(path.read_bytes())
    state["index_manager"]["global_index_counter"] = count
    path.write_bytes(pickle.dumps(state))


def test_numbers_go_on_after_very_many(noop, tmp_path):
    write_theirs(tmp_path, x=[torch.ones(2)])
    _set_counter(tmp_path, 10**15)
    noop.load_checkpoint(tmp_path)
    client = noop.get_client()
    new = client.put(TensorDict({"x": torch.ones(2000, 2)}, batch_size=[2000]), partition_id="rows")
    assert new.global_indexes[0] >= 10**15
    assert new.global_indexes == list(range(new.global_indexes[0], new.global_indexes[0] + 2000))
    assert len(client.store.list_sample_ids("~tq:blocks")) < 200


class Harmful:
    """Unpickled without a restriction, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


UNIT = Path("simple_storage", "su_0_u.pkl")
METADATA = Path("metadata.json")
HYBRID = pickle.dumps({"format": "transfer_queue_hybrid_storage_v1"})


def halve(folder):
    whole = (folder / UNIT).read_bytes()
    (folder / UNIT).write_bytes(whole[: len(whole) // 2])


def as_saved(folder):
    """Nothing is changed: a cell is what is refused."""


#: A cell, what happens to the folder then, the error, and what its text names.
REFUSED = {
    "code": (Harmful(), as_saved, InvalidTypeError, r"posix\.mkdir.*Expected tensors"),
    "an object that no store takes": ({1, 2}, as_saved, TypeError, "'y'"),
    "a number that no store takes": (2**100, as_saved, (TypeError, ValueError), "'y'"),
    "a negative counter": (0, lambda folder: _set_counter(folder, -1), CorruptDataError, "-1"),
    "a huge counter": (0, lambda folder: _set_counter(folder, 2**62 + 1), CorruptDataError, str(2**62 + 1)),
    "half a unit": (0, halve, CorruptDataError, "damaged"),
    "no unit": (0, lambda folder: (folder / UNIT).unlink(), CorruptDataError, "0 of 1 storage units"),
    "a unit on disks": (0, lambda at: (at / UNIT).write_bytes(HYBRID), UnsupportedOperationError, "ssd_offload"),
    "a save without rows": (
        0,
        lambda folder: (folder / METADATA).write_text('{"storage_saved": false}'),
        UnsupportedOperationError,
        "no data of rows",
    ),
    "no save": (0, lambda folder: (folder / METADATA).unlink(), FileNotFoundError, r"metadata\.json"),
}


@pytest.mark.parametrize(("cell", "change", "error", "named"), REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_that_is_refused_removes_nothing(noop, tmp_path, monkeypatch, cell, change, error, named):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint"
    write_theirs(folder, x=[torch.ones(2)], y=[cell])
    change(folder)
    noop.kv_put("old", "other", tag={})
    with pytest.raises(error, match=named):
        noop.load_checkpoint(folder)
    assert noop.kv_list() == {"other": {"old": {}}}, "it is read before anything is changed"
    assert not Path("harm").exists()
