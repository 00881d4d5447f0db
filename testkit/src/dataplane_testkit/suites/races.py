"""Threads of one client, and processes, that put, read, claim and clear at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest
import torch

from dataplane_core.errors import DataPlaneError, LeaseExpiredError
from dataplane_core.spec import Capability, Scope, new_id
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, ids, items_of, jagged, rows_of
from dataplane_testkit._profiles import by_profile
from dataplane_testkit._store import Store
from dataplane_testkit._timing import in_threads
from dataplane_testkit._workers import claim_all
from dataplane_testkit.rules import lasts

_FACTOR: Final = by_profile(1, 1, 10)
#: Of the test of claims: how many groups of three, processes besides this one, and the seconds of each claim.
_GROUPS, _PROCESSES, _CLAIM_S = by_profile((80, 2, 60.0), (80, 2, 60.0), (33_000, 7, 600.0))

#: Elements of a row: few, and so many that an engine stores them on another way.
_SIZES: Final = {"small": 2, "large": 64 * 1024}


def _one_after_the_other(first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    reply = first()
    second()
    return reply


class RaceSuite(Suite, chapter="races"):
    """What one call sees and does while others run."""

    @pytest.mark.parametrize("group_size", [None, 3], ids=["alone", "groups"])
    @lasts(900.0)
    def test_many_claimers_get_each_sample_once(self, store: Store, group_size: int | None) -> None:
        store.require(Capability.GROUPS if group_size else None)
        partition = store.register("x", group_size=group_size, num_samples=3 * _GROUPS)
        workers = [] if store.scope is Scope.PROCESS else store.deployment.workers(_PROCESSES)
        for worker in workers:
            worker.start(claim_all, partition, 6, _CLAIM_S)

        def produce(member: int) -> list[list[str]]:
            for part in torch.arange(_GROUPS).chunk(7):
                store.put(partition, [f"q{group}_g{member}" for group in part.tolist()], x=part)
            return []

        consume = partial(claim_all, store.client, partition, 6, _CLAIM_S)
        parts = in_threads(*[partial(produce, m) for m in range(3)], *[consume] * 4, within_s=_CLAIM_S + 120)
        parts += [worker.result(_CLAIM_S + 30) for worker in workers]
        claims = [each for part in parts for each in part]
        given = [name for each in claims for name in each]
        assert len(given) == len(set(given)), "a sample was given to two claimers"
        assert len(given) == 3 * _GROUPS, "samples were lost"
        assert store.client.check_consumption_status(partition, ["train"])
        for each in claims if group_size else []:
            whole = {name.partition("_")[0] for name in each}
            assert len(each) == 3 * len(whole), f"a claim holds a part of a group: {each}"

    def test_many_holders_ack_each_sample_once(self, store: Store) -> None:
        partition, give_up = store.filled(60), time.monotonic() + 60

        def consume(turn: int) -> list[str]:
            acked: list[str] = []
            while not store.client.check_consumption_status(partition, ["train"]):
                assert time.monotonic() < give_up, "samples were lost: the partition is never consumed"
                turn += 1
                is_short = turn % 3 == 0  # a lease that ends about when it is acked
                meta = store.claim(partition, 5, lease_s=0.01 if is_short else 60)
                if is_short:
                    time.sleep(0.001 * (turn % 20))
                elif turn % 5 == 0:
                    store.client.nack(meta)
                    continue
                with suppress(LeaseExpiredError):
                    store.client.ack(meta)
                    acked += meta.sample_ids
            return acked

        acked = [name for part in in_threads(*[partial(consume, turn) for turn in range(5)]) for name in part]
        assert len(acked) == len(set(acked)), "two holders acked the same sample"
        assert sorted(acked) == sorted(ids(60))

    @pytest.mark.parametrize("what", ["schema", "group"])
    def test_of_racing_puts_that_exclude_each_other_one_is_accepted(self, store: Store, what: str) -> None:
        store.require(Capability.GROUPS if what == "group" else None)

        of_one_group, expected = what == "group", {"schema": 1, "group": 2}[what]

        def put(partition: str, name: str, column: Any) -> bool:
            try:
                store.put(partition, [name], x=column)
            except ValueError:
                return False
            return True

        for _ in range(10 * _FACTOR):
            partition, names = store.register("x", group_size=2 if of_one_group else None), ids(4, "q_g")
            columns = [torch.arange(1), torch.zeros(1), torch.zeros(1, 3), as_objects(1)]
            if of_one_group:
                columns = columns[:1] * 4
            accepted = in_threads(*[partial(put, partition, *each) for each in zip(names, columns, strict=True)])
            assert sum(accepted) == expected, f"{sum(accepted)} of 4 puts that exclude each other were accepted"
            assert [store.has(partition, name) for name in names] == accepted

    def test_keep_from_many_clients_at_once(self, store: Store) -> None:
        clients = [client for _ in range(3) for client in (store.same_store_client(), store.client)]

        def register(partition: str, place: int) -> None:
            client = clients[place]
            store.register("x", tasks=[f"t{place}"], client=client, partition_id=partition, if_exists="keep")
            client.put_samples([f"s{place}"], partition, {"x": torch.tensor([place])})

        for _ in range(3):
            partition = store.new_id()
            in_threads(*(partial(register, partition, place) for place in range(6)))
            assert store.get(partition, ids(6))["x"].tolist() == list(range(6))
            for place in range(6):
                assert store.claim(partition, 6, task=f"t{place}").size == 6

    @pytest.mark.parametrize("size", _SIZES)
    def test_puts_with_the_same_id_at_the_same_time_are_carried_out_once(self, store: Store, size: str) -> None:
        store.require(Capability.OVERWRITE)
        for number in range(10):
            partition = store.register("x")
            rows = [batch(3, x=torch.full((3, _SIZES[size]), value, dtype=torch.int32)) for value in range(3)]
            put = partial(store.hooks.put, partition, ids(3), rows[1], request_id=new_id())

            change = partial(store.client.put_samples, ids(3), partition, rows[2])
            replies = in_threads(partial(_one_after_the_other, put, change), put, put)
            assert replies == [3, 3, 3]
            found = store.get(partition, ids(3))["x"]
            assert found.unique().tolist() == [2], f"round {number}: a put was carried out twice"

    def test_first_writes_are_seen_whole_with_their_tags(self, store: Store) -> None:
        count = 120 * _FACTOR
        partition = store.register("x", "y", num_samples=count)

        def produce() -> None:
            for index in range(count):
                rows = jagged([torch.full((index % 5,), index)])
                tags = [{"n": index, "input_lengths": index % 5}]
                store.put(partition, [f"s{index}"], tags, x=rows, y=torch.tensor([index]), o=as_objects(index))

        def check(name: str) -> int:
            found, index = store.get(partition, [name], "o", "y", "x"), int(name[1:])
            assert (found["y"].tolist(), items_of(found["o"])) == ([index], [index])
            assert rows_of(found["x"], 1)[0].tolist() == [index] * (index % 5)
            return index

        def read() -> None:
            for name in ids(count):
                while not store.has(partition, name, "x"):
                    time.sleep(0.0005)
                check(name)

        def consume(required: str) -> None:
            while (meta := store.claim(partition, 1, required, blocking=True, timeout_s=60)).size:
                index = check(*meta.sample_ids)
                assert meta.tags == [{"n": index, "input_lengths": index % 5}], "a sample was claimed without its tags"

        consumers = [partial(consume, name) for name in ("x", "y", "o") if store.declares(Capability.CLAIMS)]
        in_threads(produce, read, *consumers)

    @pytest.mark.parametrize("length", [1, 6400], ids=["small", "large"])
    def test_reads_that_overlap_clears_are_whole_or_keyerrors(self, store: Store, length: int) -> None:
        partition, other = store.register("x", "y"), store.register("x", "y")
        stays, goes = ids(3, "stays"), ids(3, "goes")
        # some reads beside each change: readers that never pause take the processor from the store
        reads, done = threading.Semaphore(0), threading.Event()

        def fill(target: str, names: list[str], value: int) -> None:
            rows = [torch.full((length + (value + index) % 4,), value) for index in range(3)]
            store.put(target, names, x=jagged(rows), y=torch.full((3,), value))

        def churn() -> None:
            for value in range(1, by_profile(20, 40, 400)):
                changes: list[Callable[[], object]] = [
                    partial(fill, partition, goes, value),
                    partial(store.client.clear_samples, goes if value % 2 else goes[1:], partition),
                    partial(store.client.clear_samples, goes[:1], partition),
                    partial(fill, other, goes, -value),  # uses the memory that the clears freed
                    partial(store.client.clear_samples, goes, other),
                ]
                for change in changes:
                    reads.release(12)
                    change()
            done.set()
            reads.release(3)

        def read(names: list[str]) -> None:
            while reads.acquire(timeout=60) and not done.is_set():
                with suppress(KeyError):
                    found = store.get(partition, names, "x", "y")
                    for name, row, value in zip(names, rows_of(found["x"], 6), found["y"].tolist(), strict=True):
                        assert value > 0 if name in goes else value == 0, "a read returned another sample's row"
                        assert row.tolist() == [value] * (length + (value + int(name[-1])) % 4), (
                            "a row mixes two writes"
                        )

        def look() -> None:
            while reads.acquire(timeout=60) and not done.is_set():
                if store.declares(Capability.CLAIMS):
                    store.claim(other, 2)
                if store.declares(Capability.LISTING):
                    assert set(store.client.list_samples(partition).sample_ids) <= {*stays, *goes}

        fill(partition, stays, 0)
        in_threads(churn, partial(read, stays + goes), partial(read, goes + stays), look)
        assert not store.get(partition, stays, "y")["y"].any(), "rows that were not cleared are gone"

    @pytest.mark.parametrize("what", ["clear", "registration"])
    def test_puts_that_overlap_clears_are_whole_or_nothing(self, store: Store, what: str) -> None:
        names, rounds, put_s = ids(16), by_profile(10, 40, 200), 0.0

        def put(partition: str) -> float:
            start = time.monotonic()
            with suppress(DataPlaneError):  # a put that overlaps a clear may fail
                store.put(partition, names, [{"new": 1}] * 16, y=torch.full((16, 64), 7))
            return time.monotonic() - start

        def drop(partition: str, delay_s: float) -> None:
            time.sleep(delay_s)
            if what == "clear":
                store.client.clear_samples(names, partition)
            else:
                store.client.register_partition(partition, ["x", "y"], None, ["train"])

        for number in range(rounds):
            partition = store.filled(16, "x", "y", tags=[{"old": 1}] * 16)
            delay_s = put_s * number / rounds  # another moment of the put each time
            took_s, _ = in_threads(partial(put, partition), partial(drop, partition, delay_s))
            put_s = max(put_s, min(took_s, 0.1))
            there = [name for name in names if store.has(partition, name, "y")]
            assert there in ([], names), f"{len(there)} of 16 rows of a put that overlapped a clear are there"
            assert not any(store.has(partition, name, "x") for name in names), "cleared cells can be read again"
            if there and store.declares(Capability.LISTING):
                meta = store.client.list_samples(partition)
                assert meta.tags == [{"new": 1}] * 16, "a sample that was cleared has its old tags"

    def test_racing_overwrites_leave_whole_cells(self, store: Store) -> None:
        _read_beside_overwrites(store, lambda versions: True)

    def test_reads_see_all_old_or_all_new_cells(self, store: Store) -> None:
        _read_beside_overwrites(store, lambda versions: len(versions) == 1)

    def test_racing_puts_of_different_fields_all_stay(self, store: Store) -> None:
        partition, names = store.filled(10), ids(10)

        def put(writer: int) -> None:
            for turn in range(5):
                tags = [{f"t{writer}-{turn}": index} for index in range(10)]
                store.put(partition, names, tags, {f"f{writer}-{turn}": torch.arange(10) + writer})

        in_threads(*[partial(put, writer) for writer in range(5)])
        keys = [f"{writer}-{turn}" for writer in range(5) for turn in range(5)]
        found, tags = store.get(partition, names, *(f"f{key}" for key in keys)), store.tags_of(partition)
        for key in keys:
            assert found[f"f{key}"].tolist() == [index + int(key[0]) for index in range(10)]
        for index, name in enumerate(names):
            assert tags[name] == {f"t{key}": index for key in keys}, "tags of a concurrent put were lost"


def _read_beside_overwrites(store: Store, may_be_read: Callable[[set[int]], bool]) -> None:
    """Reads samples while three threads overwrite all their cells. A read may find these versions of a sample."""
    partition, names, count = store.register("x", "y", "o"), ids(8), by_profile(10, 30, 300)

    def write(value: int) -> None:
        rows = [torch.full((1 + (value + index) % 5,), value) for index in range(8)]
        store.put(partition, names, x=jagged(rows), y=torch.full((8,), value), o=as_objects(*[value] * 8))

    def write_all(writer: int) -> None:
        for turn in range(count):
            write(3 * turn + writer)

    def read_all() -> None:
        for _ in range(count):
            found = store.get(partition, names, "o", "x", "y")
            rows, values, items = rows_of(found["x"], 8), found["y"].tolist(), items_of(found["o"])
            for index, row in enumerate(rows):
                value = int(row[0])
                assert row.tolist() == [value] * (1 + (value + index) % 5), f"a cell mixes two writes: {row.tolist()}"
                versions = {value, values[index], items[index]}
                assert may_be_read(versions), f"row {index} mixes the versions {sorted(versions)}"

    write(0)
    in_threads(*[partial(write_all, writer) for writer in range(3)], read_all, read_all)
    read_all()
