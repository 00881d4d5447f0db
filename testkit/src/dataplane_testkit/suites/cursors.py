"""Cursors that are read and set, and saves."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import CorruptDataError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, bits, ids, items_of, jagged, rows_of
from dataplane_testkit._store import Store


class CursorSuite(Suite, chapter="cursors"):
    """`list_consumed`, `reset_consumption`, `save` and `load`."""

    def test_consumed_samples_are_listed(self, store: Store) -> None:
        partition = store.filled(8, tasks=["train", "other"])
        store.claim(partition, 4)
        store.client.clear_samples(["s1"], partition)
        expected = ["s0", "s2", "s3"]
        if store.declares(Capability.LEASES):
            leased = store.claim(partition, 2, lease_s=600.0)
            store.client.ack(leased.subset([1]))
            expected.append("s5")
        assert store.client.list_consumed(partition, "train") == expected
        assert store.client.list_consumed(partition, "other") == []
        with store.refusal(KeyError, "nobody"):
            store.client.list_consumed(partition, "nobody")
        with store.refusal(KeyError, "nowhere"):
            store.client.list_consumed("nowhere", "train")

    def test_reset_consumption(self, store: Store) -> None:
        partition = store.filled(6, num_samples=6, tasks=["train", "other"])
        leases = store.declares(Capability.LEASES)
        store.claim(partition, 6, task="other")
        store.claim(partition, 3)
        leased = store.claim(partition, 2, lease_s=600.0) if leases else None
        store.client.reset_consumption(partition, "train")
        assert not store.client.check_consumption_status(partition, ["train"])
        if leased is not None:
            with store.refusal(RuntimeError, "s3"):
                store.client.ack(leased)
        assert store.claim(partition, 6, blocking=True, timeout_s=10.0).sample_ids == ids(6)
        assert store.claim(partition, 1, blocking=True, timeout_s=10.0).size == 0
        assert store.client.check_consumption_status(partition, ["train", "other"])
        store.client.reset_consumption(partition, "train", ["s4", "s1", "nobody"])
        assert store.client.list_consumed(partition, "train") == ["s1", "s4"]
        assert store.claim(partition, 6, blocking=True, timeout_s=10.0).sample_ids == ["s0", "s2", "s3", "s5"]
        store.client.reset_consumption(partition, "train", [*ids(5), "s4"])
        assert not store.client.check_consumption_status(partition, ["train"]), "an id that is repeated counted twice"
        assert store.claim(partition, 6, blocking=True, timeout_s=10.0).sample_ids == ["s5"]
        for unknown in ((partition, "nobody"), ("nowhere", "train")):
            with store.refusal(KeyError):
                store.client.reset_consumption(*unknown)

    def test_reset_consumption_before_the_fields_are_produced(self, store: Store) -> None:
        sizes = (None, 2) if store.declares(Capability.GROUPS) else (None,)
        for group_size in sizes:
            partition = store.register("x", group_size=group_size, tasks=[])
            names = ["k_g0", "k_g1", "l_g0", "l_g1"]
            store.put(partition, names, [{"n": row} for row in range(4)])
            assert store.client._set_cursor("test", partition, "train", names[2:], create=True) == 2
            store.put(partition, names, x=torch.arange(4))
            assert store.client.list_consumed(partition, "train") == names[2:]
            assert store.claim(partition, 4).sample_ids == names[:2]
            assert store.claim(partition, 4).size == 0

    def test_reset_consumption_of_groups(self, store: Store) -> None:
        partition = store.register("x", num_samples=4, group_size=2)
        names = ["k_g0", "k_g1", "l_g0", "l_g1"]
        store.put(partition, names, x=torch.arange(4))
        store.claim(partition, 2)
        if store.declares(Capability.TAG_FILTERS):
            assert store.claim(partition, 2, tag_filter={"n": 1}).size == 0
        store.client.reset_consumption(partition, "train")
        assert store.claim(partition, 4, blocking=True, timeout_s=10.0).sample_ids == names
        assert store.claim(partition, 2, blocking=True, timeout_s=10.0).size == 0
        store.client.reset_consumption(partition, "train", names[:2])
        assert store.claim(partition, 4, blocking=True, timeout_s=10.0).sample_ids == names[2:]
        partition = store.register("x", num_samples=4, group_size=2)
        store.put(partition, [names[0], *names[2:]], x=torch.arange(3))
        store.client.reset_consumption(partition, "train", names[:1])
        store.put(partition, names[1:2], x=torch.arange(1))
        assert store.claim(partition, 4, blocking=True, timeout_s=10.0).sample_ids == names[2:]
        store.client.clear_samples(names[:1], partition)
        assert store.claim(partition, 4, blocking=True, timeout_s=10.0).size == 0

    def test_a_save_is_loaded(self, store: Store, tmp_path: Path) -> None:
        partition, other = store.register("x", "y", num_samples=12, tasks=["train", "b"]), store.register("x")
        shared = torch.arange(40_000)
        columns = {
            "x": jagged([torch.arange(row) for row in range(8)]),
            "y": torch.linspace(0, 1, 8, dtype=torch.bfloat16),
            "o": as_objects(*({"n": [row, None, b"b"]} for row in range(8))),
            "large": shared.expand(8, -1),
        }
        store.put(partition, ids(8), [{"n": row, "f": 0.5, "s": "ü"} for row in range(8)], columns)
        store.put(partition, ["tagged"], [{"only": True}])
        store.put(partition, ids(4), late=torch.ones(4, 2))
        store.put(other, ["a"], x=torch.tensor([1]))
        store.claim(partition, 2)
        if store.declares(Capability.LEASES):
            store.claim(partition, 2, lease_s=600.0)
        store.client.clear_samples(["s0", "s7"], partition)
        before = _content(store.client, partition)
        held_bytes = store.client.describe(partition).held_bytes
        store.client.save(tmp_path, {"step": 7}, [partition])
        store.put(partition, ["s0", "s7", "after"], y=torch.zeros(3, dtype=torch.bfloat16))
        store.claim(partition, 8, task="b")
        assert store.client.load(tmp_path) == {"step": 7}
        assert _content(store.client, partition) == before
        assert store.client.describe(partition).held_bytes <= 1.1 * held_bytes
        assert store.get(other, ["a"])["x"].tolist() == [1]
        assert store.client.list_consumed(partition, "train") == ["s1"]
        assert store.claim(partition, 9).sample_ids == ids(7)[2:]
        store.put(partition, ["t0", "t1"], x=torch.zeros(2, 1, dtype=torch.int64))
        # with the cleared ones, 11 of 12 samples were written
        assert store.claim(partition, 9, task="b").sample_ids == [*ids(7)[1:], "t0", "t1"]
        with store.refusal(TimeoutError):
            store.claim(partition, 1, task="b", blocking=True, timeout_s=0.05)
        store.put(partition, ["t2"], x=torch.zeros(1, 1, dtype=torch.int64))
        store.client.clear_samples(["tagged"], partition)  # it will never be ready
        assert store.claim(partition, 9, task="b", blocking=True, timeout_s=10.0).size == 1

    def test_a_save_keeps_broken_groups(self, store: Store, tmp_path: Path) -> None:
        for num_samples in (None, 8):
            partition = store.register("x", num_samples=num_samples, group_size=2)
            names = [f"{group}_g{member}" for group in "klm" for member in range(2)]
            store.put(partition, names, x=torch.arange(6))
            store.claim(partition, 2)
            store.client.clear_samples(["l_g0", "k_g1"], partition)
            store.put(partition, ["l_g0"], x=torch.arange(1))
            store.client.save(tmp_path, None, [partition])
            store.client.load(tmp_path)
            assert store.claim(partition, 6).sample_ids == ["m_g0", "m_g1"]
            store.put(partition, ["k_g1", "n_g0", "n_g1"], x=torch.arange(3))
            assert store.claim(partition, 6).sample_ids == ["n_g0", "n_g1"]

    def test_a_save_is_whole_or_not_there(self, store: Store, tmp_path: Path) -> None:
        partition = store.filled(3)
        with store.refusal(KeyError, "save"):
            store.client.load(tmp_path / "none")
        store.client.save(tmp_path, None, [partition])
        with store.refusal(KeyError, "nowhere"):
            store.client.save(tmp_path, None, [partition, "nowhere"])
        with store.refusal(ValueError, "nowhere"):
            store.client.load(tmp_path, ["nowhere"])
        with store.refusal(TypeError, "metadata"):
            store.client.save(tmp_path, {"bytes": b""}, [partition])
        rows = next(tmp_path.glob("rows-*.bin"))
        whole = rows.read_bytes()
        store.put(partition, ["s3"], x=torch.arange(1))
        for damaged in (whole[:-1], whole + b"x", whole[:-1] + bytes([whole[-1] ^ 1]), b""):
            rows.write_bytes(damaged)
            with store.refusal(CorruptDataError):
                store.client.load(tmp_path)
        rows.write_bytes(whole)
        manifest = (tmp_path / "manifest.json").read_text()
        (tmp_path / "manifest.json").write_text(manifest.replace('"num_blocks":1', '"num_blocks":0'))
        with store.refusal(CorruptDataError):
            store.client.load(tmp_path)
        assert json.loads(manifest.splitlines()[1])["partitions"][0]["num_samples"] == 3
        (tmp_path / "manifest.json").write_text(manifest)
        assert store.client.list_sample_ids(partition) == ids(4)
        store.client.load(tmp_path)
        assert store.client.list_sample_ids(partition) == ids(3)

    def test_an_empty_partition_is_saved(self, store: Store, tmp_path: Path) -> None:
        partition = store.register("x", num_samples=2, tasks=["a"], enums={"word": ["u"]}, followers=["a"])
        before = store.client.describe(partition).info
        store.client.save(tmp_path, None, [partition])
        store.client.clear_samples(None, partition)
        store.client.load(tmp_path)
        after = store.client.describe(partition).info
        assert after.epoch != before.epoch
        assert after.registration() == before.registration()


def _content(client: DataPlaneClient, partition_id: str) -> dict[str, object]:
    """Every cell and tag, in order."""
    meta = client.list_samples(partition_id)
    content: dict[str, object] = {}
    for sample_id, tags in zip(meta.sample_ids, meta.tags or (), strict=True):
        found = client.get_samples([sample_id], partition_id, None)
        cells = {
            name: (str(column.dtype), tuple(rows_of(column, 1)[0].shape), bits(rows_of(column, 1)[0]))
            if isinstance(column, torch.Tensor)
            else items_of(column)
            for name, column in found.items()
        }
        content[sample_id] = (tags, cells)
    content["order"] = meta.sample_ids
    return content
