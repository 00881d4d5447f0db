"""Rows go in as they are and come back as asked for: what a random history does not show."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from dataplane_core.errors import LostSamplesError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, check_column, ids, items_of, jagged, rows_of, shared
from dataplane_testkit._copies import allocated
from dataplane_testkit._store import Store, not_run
from dataplane_testkit._timing import bounded
from dataplane_testkit.faults import Faults

#: Rows of a put whose copies are counted.
_NUM_ROWS: Final = 32

_ODD_NAMES: Final = [
    *("a b", "x" * 300, "../up", "a/b:c@d|e,f;g", "0", "-1"),
    *("ünïcode-字-🙂", "line\nbreak", "nul\0byte", "{braces}*?[x]", "'quo\"ted'", "%s%d"),
]


class RowSuite(Suite, chapter="rows"):
    """Puts and reads of rows."""

    def test_a_cell_of_16_mb(self, store: Store) -> None:
        partition = store.register("x")
        big = torch.arange(4 * 1024 * 1024, dtype=torch.int32)
        store.put(partition, ["big"], x=big.unsqueeze(0))
        assert torch.equal(store.get(partition, ["big"])["x"][0], big)

    def test_any_string_is_an_id(self, store: Store) -> None:
        partition = store.register("x", partition_id=f"{store.new_id()} / ü:@|\n", tasks=["t a/b:ü"])
        columns = {f"f{name}": torch.arange(len(_ODD_NAMES)) * 100 + place for place, name in enumerate(_ODD_NAMES)}
        store.put(partition, _ODD_NAMES, columns=columns)
        found = store.get(partition, _ODD_NAMES[::-1], *columns)
        for place, name in enumerate(columns):
            assert found[name].tolist() == [100 * row + place for row in reversed(range(len(_ODD_NAMES)))], name
        if store.declares(Capability.CLAIMS):
            assert store.claim(partition, 99, *columns, task="t a/b:ü").sample_ids == _ODD_NAMES

    def test_thousands_of_samples_in_one_call(self, store: Store) -> None:
        names = [f"q_g{number}" for number in range(9000)]
        tags = [{"n": number} for number in range(9000)]
        partition = store.filled(names, tags=tags, group_size=9000 if store.declares(Capability.GROUPS) else None)
        assert store.get(partition, names[::-1])["x"].tolist() == [*range(9000)][::-1]
        if store.declares(Capability.LISTING):
            meta = store.client.list_samples(partition)
            assert (meta.sample_ids, meta.tags) == (names, tags)
        if store.declares(Capability.LEASES):
            held = store.claim(partition, 9000, blocking=True, lease_s=600.0)
            store.client.renew(held, 600.0)
            store.client.nack(held)
        if store.declares(Capability.CLAIMS):
            assert sorted(store.claim(partition, 9000, blocking=True).sample_ids) == sorted(names)
        store.client.clear_samples(names[1:], partition)
        assert [store.has(partition, name) for name in (names[0], names[-1])] == [True, False]

    def test_get_keeps_the_order_asked_for(self, store: Store) -> None:
        partition = store.register("x", "o")
        rows = [torch.full((index % 4,), index) for index in range(12)]
        for names in (ids(12)[6:], ids(12)[:6]):
            numbers = [int(name[1:]) for name in names]
            columns = {"x": jagged([rows[number] for number in numbers]), "y": torch.tensor(numbers)}
            store.put(partition, names, columns=columns, o=as_objects(*numbers))
        for order in ([7, 0, 11, 3, 4, 5, 1], [2, 0, 2, 10, 2, 1, 0]):
            found = store.get(partition, [f"s{index}" for index in order], "x", "y", "o")
            assert found.batch_size == (7,)
            assert found["y"].tolist() == order
            assert items_of(found["o"]) == order
            check_column(found["x"], [rows[index] for index in order])

    def test_lost_payload_is_named(self, store: Store) -> None:
        partition = store.filled(3, "x", "y")
        store.put(partition, ids(3), y=torch.arange(3))
        store.lose(partition, "s1", "x")
        with store.refusal(LostSamplesError, "'s1'", "x") as caught:
            bounded(lambda: store.get(partition, ids(3), "y", "x"), what="a read of lost payload")
        assert not caught.value.retryable
        assert caught.value.missing_cells == {"s1": ("x",)}
        assert store.get(partition, ids(3), "y")["y"].tolist() == [0, 1, 2]
        store.client.clear_samples(["s1"], partition)
        store.put(partition, ["s1"], x=torch.tensor([7]))
        assert store.get(partition, ids(3))["x"].tolist() == [0, 7, 2]

    # --- memory -------------------------------------------------------------------------------------------------------

    def test_what_comes_back_is_owned_by_the_caller(self, store: Store) -> None:
        partition = store.register("x", "y", "o")
        rows = [torch.tensor([1, 2]), torch.tensor([3])]
        store.put(partition, ids(2), x=jagged(rows), y=torch.arange(4).view(2, 2), o=as_objects([1], [2]))
        for names in (ids(2), ["s0", "s1", "s0"]):
            first, second = (store.get(partition, names, "x", "y", "o") for _ in range(2))
            for field in ("x", "y"):
                assert not shared(first[field], second[field]), "two reads share memory"
        first["x"].values()[:3] = -1
        first["y"][:2] = -1
        items_of(first["o"])[0].append("changed")
        assert first["x"].unbind()[2].tolist() == [1, 2], "repeated rows share memory"
        assert first["y"][2].tolist() == [0, 1], "repeated rows share memory"
        assert items_of(first["o"])[2] == [1], "repeated rows share one item"
        for found in (second, store.get(partition, ["s0", "s1", "s0"], "x", "y", "o")):
            check_column(found["x"], [*rows, rows[0]])
            assert found["y"].tolist() == [[0, 1], [2, 3], [0, 1]]
            assert items_of(found["o"]) == [[1], [2], [1]]

    @pytest.mark.parametrize("operation", ["put_samples", "get_samples"])
    def test_the_payload_is_copied_no_more_than_it_may_be(self, store: Store, operation: str) -> None:
        if store.case.through_asyncio:
            not_run("the hooks run in threads, and the kit counts the tensors of one thread")
        partition = store.register("x", "y")
        rows = [torch.randn(64 + index, 128) for index in range(_NUM_ROWS)]
        fields = batch(_NUM_ROWS, x=torch.randn(_NUM_ROWS, 16384), y=jagged(rows))
        payload_bytes = 4 * (_NUM_ROWS * 16384 + sum(row.numel() for row in rows))
        for names in (
            ids(_NUM_ROWS, "first"),
            ids(_NUM_ROWS),
        ):  # the first calls allocate more
            _, put = allocated(partial(store.client.put_samples, names, partition, fields))
            found, get = allocated(partial(store.get, partition, names[::-1], "x", "y"))
        assert rows_of(found["y"], _NUM_ROWS)[0].equal(rows[-1])
        copies = {"put_samples": put, "get_samples": get}[operation] / payload_bytes
        most, _ = store.case.copies_allowed(operation)
        print(f"{operation}: {copies:.2f} copies of the payload, {most:g} allowed")
        assert copies <= most, f"{operation} holds {copies:.1f} copies of its payload. At most {most:g} are allowed."

    # --- the hooks ----------------------------------------------------------------------------------------------------

    def test_hooks_say_what_they_did(self, store: Store) -> None:
        partition = store.register("x", "y", "z")
        fields = batch(2, x=torch.zeros(2, 3, 4, dtype=torch.bfloat16), y=as_objects(1, 2), z=torch.ones(2))
        assert store.hooks.put(partition, ids(2), fields) == 2
        assert store.hooks.put(partition, ids(3), None, [{"n": 1}] * 3) == 3
        reply = store.hooks.ask("get_samples", partition, sample_ids=ids(2), fields=["y", "x"])
        assert {"x", "y"} <= set(reply.columns)
        x, y = reply.specs["x"], reply.specs["y"]
        assert (x.kind, x.dtype, x.rank, tuple(x.trailing)) == ("tensor", "bfloat16", 2, (4,))
        assert y.kind == "object"
        for names, cleared in ((["s0", "nobody"], 1), (["s0"], 0), (None, 2), (None, 0)):
            assert store.hooks.ask("clear_samples", partition, sample_ids=names) == cleared

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
        rest = store.claim(partition, 8, blocking=True, timeout_s=10.0)
        assert rest.sample_ids == ["s2", "s3", "s4", "s6"], "what was cleared no longer counts for num_samples"
        assert store.claim(partition, 9, task="b").sample_ids == ["s1", "s2", "s3", "s4", "s6"]
        if store.declares(Capability.OVERWRITE):
            moving = store.filled(2, tags=[{"n": 0}] * 2)
            puts = [partial(store.put, moving, ["s1"], [{"n": 7}], x=torch.tensor([7]))]

            def once(request: object) -> None:
                if puts:
                    puts.pop()()

            with Faults.of(client).before("get_samples", once):
                client.save(tmp_path, None, [moving])
            client.load(tmp_path)
            row = ((client.list_samples(moving).tags or [])[1], store.get(moving, ["s1"])["x"].tolist())
            assert row == ({"n": 7}, [7]), "a row that is written during a save has tags and cells of different puts"
