"""Races between threads that use one client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dataplane_core.errors import DataPlaneError, LeaseExpiredError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids, items_of, jagged, rows_of
from dataplane_testkit._profiles import is_long
from dataplane_testkit._store import Store
from dataplane_testkit._timing import in_threads
from dataplane_testkit._workers import claim_all

_FACTOR = 10 if is_long() else 1


def _put_four(store: Store, partition: str, names: list[list[str]], column: Callable[[int], Any], *, wins: int) -> None:
    """Four puts at the same time, of which the store must accept so many."""

    def put(writer: int) -> bool:
        try:
            store.put(partition, names[writer], x=column(writer))
        except ValueError:
            return False
        return True

    won = in_threads(*[partial(put, writer) for writer in range(4)])
    assert sum(won) == wins, f"{sum(won)} of 4 puts were accepted that exclude each other. Expected {wins}"
    assert [store.has(partition, mine[-1]) for mine in names] == won


class RaceSuite(Suite, chapter="races"):
    """Threads that put, read, claim and clear at the same time."""

    def test_many_claimers_get_each_sample_once(self, store: Store) -> None:
        count = 240 * _FACTOR
        partition = store.register("x", num_samples=count)
        names = ids(count)

        def produce(start: int) -> list[str]:
            for index in range(start, count, 24):
                mine = names[index : index + 12]
                store.put(partition, mine, x=torch.arange(len(mine)))
            return []

        consume = partial(claim_all, store.client, partition, "train", 7, 60.0)
        given = in_threads(partial(produce, 0), partial(produce, 12), *[consume] * 6)
        flat = [name for part in given for name in part]
        assert len(flat) == len(set(flat)), "a sample was given to two claimers"
        assert sorted(flat) == sorted(names), "samples were lost"
        assert store.client.check_consumption_status(partition, ["train"])

    def test_many_holders_ack_each_sample_once(self, store: Store) -> None:
        partition = store.register("x")
        names = ids(60)
        store.put(partition, names, x=torch.arange(60))
        give_up = time.monotonic() + 60

        def consume(seed: int) -> list[str]:
            acked: list[str] = []
            turn = seed
            while not store.client.check_consumption_status(partition, ["train"]):
                assert time.monotonic() < give_up, "samples were lost: the partition is never consumed"
                turn += 1
                # every third claim has a lease that is too short, as if its consumer had stalled
                meta = store.claim(partition, 5, lease_s=0.01 if turn % 3 == 0 else 60)
                if turn % 3 == 0:
                    time.sleep(0.02)
                if turn % 5 == 0 and turn % 3:
                    store.client.nack(meta)
                    continue
                try:
                    store.client.ack(meta)
                except LeaseExpiredError:
                    continue
                acked.extend(meta.sample_ids)
            return acked

        given = in_threads(*[partial(consume, seed) for seed in range(5)])
        flat = [name for part in given for name in part]
        assert len(flat) == len(set(flat)), "two holders acked the same sample"
        assert sorted(flat) == sorted(names)

    def test_many_claimers_never_split_groups(self, store: Store) -> None:
        count = 40 * _FACTOR
        partition = store.register("x", group_size=3, num_samples=3 * count)

        def produce(member: int) -> list[list[str]]:
            for group in range(count):
                store.put(partition, [f"q{group}_g{member}"], x=torch.tensor([group]))
            return []

        def consume() -> list[list[str]]:
            mine: list[list[str]] = []
            while True:
                meta = store.claim(partition, 6, blocking=True, timeout_s=60)
                if not meta.size:
                    return mine
                mine.append(meta.sample_ids)

        claims = [
            each for part in in_threads(*[partial(produce, m) for m in range(3)], *[consume] * 3) for each in part
        ]
        for each in claims:
            groups = {name.partition("_")[0] for name in each}
            assert len(each) == 3 * len(groups), f"a claim holds part of a group: {each}"
        assert sum(map(len, claims)) == 3 * count

    def test_racing_puts_never_overfill_a_group(self, store: Store) -> None:
        for _ in range(10 * _FACTOR):
            partition = store.register("x", group_size=2)
            names = [[f"q_g{member}"] for member in range(4)]
            _put_four(store, partition, names, lambda member: torch.tensor([member]), wins=2)

    def test_first_writes_are_seen_whole_with_their_tags(self, store: Store) -> None:
        count = 120 * _FACTOR
        partition = store.register("x", "y", num_samples=count)

        def produce() -> int:
            for index in range(count):
                tags = [{"n": index, "input_lengths": index % 5}]
                rows = jagged([torch.full((index % 5,), index)])
                store.put(partition, [f"s{index}"], tags, x=rows, y=torch.tensor([index]), o=as_objects(index))
            return 0

        def check(index: int) -> None:
            found = store.get(partition, [f"s{index}"], "o", "y", "x")
            assert (found["y"].tolist(), items_of(found["o"])) == ([index], [index])
            assert rows_of(found["x"], 1)[0].tolist() == [index] * (index % 5)

        def consume(required: str) -> int:
            seen = 0
            while True:
                meta = store.claim(partition, 1, required, task="train", blocking=True, timeout_s=60)
                if not meta.size:
                    return seen
                (index,) = (int(name[1:]) for name in meta.sample_ids)
                assert meta.tags == [{"n": index, "input_lengths": index % 5}], (
                    "a claim returned a sample without its tags"
                )
                check(index)
                seen += 1

        def read() -> int:
            for index in range(count):
                while not store.has(partition, f"s{index}", "x"):
                    time.sleep(0.0005)
                check(index)
            return 0

        consumers = [partial(consume, name) for name in ("x", "y", "o") if store.declares(Capability.CLAIMS)]
        counts = in_threads(produce, read, *consumers)
        assert sum(counts) == (count if consumers else 0)

    @pytest.mark.parametrize("length", [1, 6400], ids=["small", "large"])
    def test_reads_that_overlap_clears_are_whole_or_keyerrors(self, store: Store, length: int) -> None:
        partition, other = store.register("x", "y"), store.register("x", "y")
        stays, goes = ids(3, "stays"), ids(3, "goes")
        # some reads beside each change: readers that never pause take the processor from the store
        reads, done = threading.Semaphore(0), threading.Event()

        def fill(target: str, names: list[str], value: int) -> None:
            rows = [torch.full((length + (value + index) % 4,), value) for index in range(3)]
            store.put(target, names, x=jagged(rows), y=torch.full((3,), value))

        def churn() -> int:
            for value in range(1, 1 + 40 * _FACTOR):
                changes: list[Callable[[], object]] = [
                    partial(fill, partition, goes, value),
                    partial(store.client.clear_samples, goes if value % 2 else goes[1:], partition),
                    partial(store.client.clear_samples, goes[:1], partition),
                    partial(fill, other, goes, -value),  # uses the memory that the clears freed
                    partial(store.client.clear_samples, goes, other),
                ]
                for change in changes:
                    reads.release(8)
                    change()
            done.set()
            reads.release(2)
            return 0

        def read(names: list[str]) -> int:
            while reads.acquire(timeout=60) and not done.is_set():
                try:
                    found = store.get(partition, names, "x", "y")
                except KeyError:
                    continue
                for name, row, value in zip(names, rows_of(found["x"], 6), found["y"].tolist(), strict=True):
                    assert value > 0 if name in goes else value == 0, "a read returned another sample's row"
                    whole = len(row) == length + (value + int(name[-1])) % 4 and bool((row == value).all())
                    assert whole, "a read returned a row that mixes two writes"
            return 0

        fill(partition, stays, 0)
        in_threads(churn, partial(read, stays + goes), partial(read, goes + stays))
        assert not store.get(partition, stays, "y")["y"].any(), "rows that were not cleared are gone"

    def test_racing_overwrites_leave_whole_cells(self, store: Store) -> None:
        partition = store.register("x")
        names = ids(4)
        store.put(partition, names, x=torch.zeros(4, 1, dtype=torch.int64))

        def write(value: int) -> int:
            for turn in range(15 * _FACTOR):
                store.put(partition, names, x=torch.full((4, 1 + (value + turn) % 5), value))
            return 0

        def read() -> int:
            for _ in range(40 * _FACTOR):
                for row in rows_of(store.get(partition, names)["x"], 4):
                    assert len(set(row.tolist())) == 1, f"a cell mixes two writes: {row.tolist()}"
            return 0

        in_threads(*[partial(write, value) for value in range(1, 4)], read)
        assert all(row.tolist()[0] in (1, 2, 3) for row in rows_of(store.get(partition, names)["x"], 4))

    def test_racing_puts_of_different_fields_all_stay(self, store: Store) -> None:
        partition = store.register("x")
        names = ids(10)
        store.put(partition, names, x=torch.arange(10))

        def put(writer: int) -> int:
            for turn in range(5):
                store.put(
                    partition,
                    names,
                    [{f"t{writer}-{turn}": index} for index in range(10)],
                    {f"f{writer}-{turn}": torch.arange(10) + writer},
                )
            return 0

        in_threads(*[partial(put, writer) for writer in range(5)])
        fields = [f"f{writer}-{turn}" for writer in range(5) for turn in range(5)]
        found = store.get(partition, names, *fields)
        for name in fields:
            assert found[name].tolist() == [index + int(name[1]) for index in range(10)]
        tags = store.tags_of(partition)
        for index, name in enumerate(names):
            assert tags[name] == {f"t{field[1:]}": index for field in fields}, "tags of a concurrent put were lost"

    def test_racing_first_writes_agree_on_a_schema(self, store: Store) -> None:
        columns: list[Callable[[], Any]] = [
            lambda: torch.zeros(2, dtype=torch.int64),
            lambda: torch.zeros(2),
            lambda: torch.zeros(2, 3),
            lambda: as_objects(1, 2),
        ]
        for _ in range(10 * _FACTOR):
            names = [[f"w{writer}-a", f"w{writer}-b"] for writer in range(4)]
            _put_four(store, store.register("x"), names, lambda writer: columns[writer](), wins=1)

    def test_everything_at_once(self, store: Store) -> None:
        partitions = [store.register("x", "y") for _ in range(2)]
        names = ids(8)

        def work(seed: int) -> int:
            partition = partitions[seed % 2]
            for turn in range(25 * _FACTOR):
                action = (seed + turn) % 6
                try:
                    if action in (0, 3):
                        store.put(partition, names[:4], [{"n": turn}] * 4, {"xy"[turn % 2]: torch.arange(4)})
                    elif action == 1:
                        found = store.get(partition, names[:2], "x")
                        assert found["x"].tolist() == [0, 1]
                    elif action == 2:
                        store.client.clear_samples(names[turn % 4 :], partition)
                    elif action == 4 and store.declares(Capability.CLAIMS):
                        store.claim(partition, 2)
                    elif store.declares(Capability.LISTING):
                        assert set(store.client.list_samples(partition).sample_ids) <= set(names)
                except DataPlaneError as error:
                    # refused where the backend does not declare overwrite or fenced
                    if isinstance(error, TimeoutError):
                        raise
            return 0

        in_threads(*[partial(work, seed) for seed in range(6)], within_s=120)
        for partition in partitions:
            store.client.clear_samples(names, partition)
            store.put(partition, ["end"], x=torch.arange(1))
            assert store.get(partition, ["end"])["x"].tolist() == [0]
