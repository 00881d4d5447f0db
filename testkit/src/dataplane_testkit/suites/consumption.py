"""What tasks have consumed: the status, cursors that are read and set, and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids, items_of
from dataplane_testkit._store import Store


def _consumed(store: Store, partition: str) -> bool:
    return store.client.check_consumption_status(partition, ["train"])


def _rest(store: Store, partition: str) -> list[str]:
    """What the task is given in a partition whose samples have all been written."""
    return store.claim(partition, 8, blocking=True, timeout_s=10.0).sample_ids


class ConsumptionSuite(Suite, chapter="consumption"):
    """`check_consumption_status`, `list_consumed`, `reset_consumption`, `save`, `load`."""

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
        partition, client = store.filled(4, num_samples=4), store.client
        store.claim(partition, 3)
        assert client.list_consumed(partition, "train") == ids(3)
        client.reset_consumption(partition, "train", ["s2", "nobody", "s2"])
        assert client.list_consumed(partition, "train") == ["s2"]
        assert [_rest(store, partition), _rest(store, partition)] == [["s0", "s1", "s3"], []]
        client.reset_consumption(partition, "train")
        assert (client.list_consumed(partition, "train"), _consumed(store, partition)) == ([], False)
        assert _rest(store, partition) == ids(4)

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
