"""What tasks have consumed: the status, cursors that are read and set, and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids, items_of
from dataplane_testkit._store import Store

_LONG_S = 600.0


def _consumed(store: Store, partition: str, *tasks: str) -> bool:
    return store.client.check_consumption_status(partition, list(tasks or ("train",)))


def _rest(store: Store, partition: str) -> list[str]:
    """What the task is given in a partition whose samples have all been written."""
    return store.claim(partition, 8, blocking=True, timeout_s=10.0).sample_ids


class ConsumptionSuite(Suite, chapter="consumption"):
    """`check_consumption_status`, `list_consumed`, `reset_consumption`, `save`, `load`."""

    def test_every_sample_counts(self, store: Store) -> None:
        partition = store.register("x", "y", tasks=["train", "eval"])
        assert not _consumed(store, partition), "a partition without samples is consumed"
        store.put(partition, ids(4), x=torch.arange(4))
        store.claim(partition, 2)
        store.client.clear_samples(["s3"], partition)
        assert not _consumed(store, partition), "s2 was not given"
        store.client.clear_samples(["s2", "s0"], partition)
        assert _consumed(store, partition)
        assert not _consumed(store, partition, "train", "eval")
        assert not _consumed(store, partition, "nobody")
        assert not _consumed(store, store.new_id())
        store.claim(partition, 2, task="eval")
        assert _consumed(store, partition, "train", "eval")
        for fields in ({"x": torch.arange(1)}, {"y": torch.zeros(1)}):
            store.put(partition, ["s9"], columns=fields)
            assert not _consumed(store, partition), "a sample that was not given is consumed"
            store.client.clear_samples(["s9"], partition)
        store.client.clear_samples(["s1"], partition)
        assert not _consumed(store, partition), "a partition without samples is consumed"

    def test_num_samples_must_be_written_and_consumed(self, store: Store) -> None:
        partition = store.filled(2, num_samples=4)
        store.claim(partition, 2)
        assert not _consumed(store, partition), "two of four samples are not written"
        store.client.clear_samples(ids(2), partition)
        assert not _consumed(store, partition), "two of four samples are not written"
        store.put(partition, ["s2", "s3"], x=torch.arange(2))
        assert not store.client.is_finished(partition, ["train"]), "two of four samples are not consumed"
        store.claim(partition, 2)
        assert store.client.is_finished(partition, ["train"])
        store.client.clear_samples(ids(4), partition)
        assert _consumed(store, partition), "cleared samples do not count as written and consumed"

    # --- cursors ------------------------------------------------------------------------------------------------------

    def test_reset_consumption(self, store: Store) -> None:
        partition, client = store.filled(6, num_samples=6, tasks=["train", "other"]), store.client
        store.claim(partition, 6, task="other")
        store.claim(partition, 3)
        leased = store.claim(partition, 2, lease_s=_LONG_S) if store.declares(Capability.LEASES) else None
        assert client.list_consumed(partition, "train") == ids(3)
        client.reset_consumption(partition, "train")
        if leased is not None:
            with store.refusal(RuntimeError, "s3"):
                client.ack(leased)
        assert (client.list_consumed(partition, "train"), _consumed(store, partition)) == ([], False)
        assert _rest(store, partition) == ids(6)
        assert _consumed(store, partition, "train", "other")
        client.reset_consumption(partition, "train", ["s4", "s1", "nobody"])
        assert client.list_consumed(partition, "train") == ["s1", "s4"]
        assert _rest(store, partition) == ["s0", "s2", "s3", "s5"]
        client.reset_consumption(partition, "train", [*ids(5), "s4"])
        assert not _consumed(store, partition), "an id that is repeated counted twice"
        assert [_rest(store, partition), _rest(store, partition)] == [["s5"], []]
        client.clear_samples(["s1"], partition)
        assert client.list_consumed(partition, "train") == ["s0", "s2", "s3", "s4", "s5"]
        for unknown in ((partition, "nobody"), ("nowhere", "train")):
            for ask in (client.list_consumed, client.reset_consumption):
                with store.refusal(KeyError, "no"):
                    ask(*unknown)

    def test_reset_consumption_before_the_fields_are_produced(self, store: Store) -> None:
        names = ["k_g0", "k_g1", "l_g0", "l_g1"]
        for group_size in (None, 2) if store.declares(Capability.GROUPS) else (None,):
            partition = store.register("x", group_size=group_size, tasks=[])
            store.put(partition, names, [{"n": row} for row in range(4)])
            assert store.client._set_cursor("test", partition, "train", names[2:], create=True) == 2
            store.put(partition, names, x=torch.arange(4))
            assert store.client.list_consumed(partition, "train") == names[2:]
            assert [store.claim(partition, 4).sample_ids for _ in range(2)] == [names[:2], []]

    def test_reset_consumption_of_groups(self, store: Store) -> None:
        names = ["k_g0", "k_g1", "l_g0", "l_g1"]
        partition = store.filled([names[0], *names[2:]], num_samples=4, group_size=2)
        store.client.reset_consumption(partition, "train", names[:1])
        store.put(partition, names[1:2], x=torch.arange(1))
        assert [_rest(store, partition), _rest(store, partition)] == [names[2:], []]
        for consumed in (names[:2], []):
            store.client.reset_consumption(partition, "train", consumed)
            assert [_rest(store, partition), _rest(store, partition)] == [names[len(consumed) :], []]

    # --- saves --------------------------------------------------------------------------------------------------------

    def test_a_save_is_loaded(self, store: Store, tmp_path: Path) -> None:
        client, empty = store.client, store.register("x", num_samples=2)
        partition = store.filled(6, num_samples=8, tasks=["train", "b"], tags=[{"n": row} for row in range(6)])
        store.put(partition, ["tagged"], [{"only": True}])
        store.put(partition, ids(4), late=as_objects(*([row, None, b"b"] for row in range(4))))
        store.put(partition, ids(6), large=torch.arange(40_000).expand(6, -1))
        store.claim(partition, 2)
        client.clear_samples(["s0", "s5"], partition)

        def content() -> list[Any]:
            meta = client.list_samples(partition)
            about = [(each.info.registration(), each.num_rows) for each in map(client.describe, (partition, empty))]
            late = items_of(store.get(partition, ["s3", "s1"], "late")["late"])
            return [meta.sample_ids, meta.tags, about, store.get(partition, ids(5)[1:])["x"].tolist(), late]

        before, held_bytes = content(), client.describe(partition).held_bytes
        client.save(tmp_path, {"step": 7}, [partition, empty])
        store.put(partition, ["s0"], x=torch.arange(1))
        store.claim(partition, 8, task="b")
        client.clear_samples(None, empty)
        assert client.load(tmp_path) == {"step": 7}
        assert content() == before
        assert client.describe(partition).held_bytes <= 1.1 * held_bytes, "equal cells are no longer stored once"
        assert client.list_consumed(partition, "train") == ["s1"]
        store.put(partition, ["s6"], x=torch.arange(1))
        client.clear_samples(["tagged"], partition)  # it will never be ready
        assert _rest(store, partition) == ["s2", "s3", "s4", "s6"], "what was cleared no longer counts for num_samples"
        assert store.claim(partition, 9, task="b").sample_ids == ["s1", "s2", "s3", "s4", "s6"]

    def test_a_save_keeps_broken_groups(self, store: Store, tmp_path: Path) -> None:
        for num_samples in (None, 8):
            names = [f"{group}_g{member}" for group in "klm" for member in range(2)]
            partition = store.filled(names, num_samples=num_samples, group_size=2)
            store.claim(partition, 2)
            store.client.clear_samples(["l_g0", "k_g1"], partition)
            store.put(partition, ["l_g0"], x=torch.arange(1))
            store.client.save(tmp_path, None, [partition])
            store.client.load(tmp_path)
            assert store.claim(partition, 6).sample_ids == ["m_g0", "m_g1"]
            store.put(partition, ["k_g1", "n_g0", "n_g1"], x=torch.arange(3))
            assert store.claim(partition, 6).sample_ids == ["n_g0", "n_g1"]
