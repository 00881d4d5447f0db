"""`claim_meta`: gives each ready sample to each task once, in the order of first write."""

from __future__ import annotations

import os
import pickle
import time
from functools import partial

import pytest
import torch

from dataplane_core.errors import ClaimTimeoutError, UnknownPartitionError, UnknownTaskError
from dataplane_core.spec import ClaimRequest, this_process
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._store import Store
from dataplane_testkit._timing import Background, bounded, eventually

_LONG_S = 60.0


class ClaimSuite(Suite, chapter="claims"):
    """Claims without groups, leases or tag filters."""

    # --- what is handed out -------------------------------------------------------------------------------------------

    def test_each_sample_is_given_once(self, store: Store) -> None:
        partition = store.register("x")
        empty = store.claim(partition, 4)
        assert (empty.sample_ids, empty.tags, empty.size) == ([], [], 0)
        store.put(partition, ids(10), x=torch.arange(10))
        given = [store.claim(partition, 4).sample_ids for _ in range(4)]
        assert given == [ids(10)[:4], ids(10)[4:8], ids(10)[8:], []]

    def test_each_task_has_its_own_cursor(self, store: Store) -> None:
        partition = store.filled(4, tasks=["train", "eval"])
        assert store.claim(partition, 3).sample_ids == ids(3)
        assert store.claim(partition, 4, task="eval").sample_ids == ids(4)
        assert store.claim(partition, 4).sample_ids == ["s3"]

    def test_only_ready_samples_are_given(self, store: Store) -> None:
        partition = store.filled(5)
        for sample_id in ("s3", "s1"):
            store.put(partition, [sample_id], y=torch.zeros(1))
        assert store.claim(partition, 5, "x", "y").sample_ids == ["s1", "s3"]
        assert store.claim(partition, 5, "y", "x").size == 0
        store.put(partition, ["s4", "s0"], y=torch.zeros(2))
        assert store.claim(partition, 5, "x", "y").sample_ids == ["s0", "s4"]

    def test_required_fields_share_one_cursor(self, store: Store) -> None:
        partition = store.filled(3, "x", "y")
        assert store.claim(partition, 2, "x").sample_ids == ["s0", "s1"]
        store.put(partition, ids(3), y=torch.zeros(3))
        assert store.claim(partition, 3, "y").sample_ids == ["s2"]

    # --- order --------------------------------------------------------------------------------------------------------

    def test_claims_come_in_order_of_first_write(self, store: Store) -> None:
        partition = store.register("x")
        order = ["z", "a", "m10", "m9", "b", "y"]
        store.put(partition, order[:3], x=torch.arange(3))
        store.put(partition, order[3:], x=torch.arange(3))
        assert store.claim(partition, 2).sample_ids == order[:2]
        assert store.claim(partition, 9).sample_ids == order[2:]

    def test_tags_alone_are_a_first_write(self, store: Store) -> None:
        partition = store.register("x", num_samples=3)
        store.put(partition, ["b"], [{"n": 1}])
        store.put(partition, ["a", "c"], x=torch.arange(2))
        store.client.clear_samples(["c"], partition)
        with store.refusal(TimeoutError, "'b'", "x"):
            store.claim(partition, 3, blocking=True, timeout_s=0.05)
        store.put(partition, ["b"], x=torch.arange(1))
        assert store.claim(partition, 3, blocking=True).sample_ids == ["b", "a"]

    # --- what comes along ---------------------------------------------------------------------------------------------

    def test_claims_bring_tags(self, store: Store) -> None:
        partition = store.register("x")
        tags = [{"input_lengths": 5 + index, "n": str(index)} for index in range(4)]
        store.put(partition, ids(4), tags, x=torch.arange(4))
        store.put(partition, ["s4"], [{"n": "4"}], x=torch.zeros(1, dtype=torch.int64))
        meta = store.claim(partition, 2)
        assert meta.tags == tags[:2]
        assert meta.sequence_lengths == [5, 6]
        assert (meta.task_name, meta.fields, meta.lease_tokens) == ("train", ["x"], None)
        rest = store.claim(partition, 9)
        assert rest.tags == [*tags[2:], {"n": "4"}]
        assert rest.sequence_lengths is None

    def test_metas_travel(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ids(100), [{"n": index} for index in range(100)], x=torch.zeros(100, 1000))
        meta = store.claim(partition, 100)
        data = pickle.dumps(meta)
        assert len(data) < 10_000
        assert pickle.loads(data) == meta  # pickled by this process
        assert store.client.get_data(pickle.loads(data)).batch_size == torch.Size([100])

    # --- blocking -----------------------------------------------------------------------------------------------------

    def test_blocking_waits_until_enough_are_ready(self, store: Store) -> None:
        partition = store.register("x")
        waiting = store.waiting_claim(partition, 4)
        for start in (0, 2):
            assert waiting.running
            store.put(partition, [f"s{start}", f"s{start + 1}"], x=torch.arange(2))
        assert waiting.result(what="a claim of samples that are ready").sample_ids == ids(4)

    def test_a_waiting_claim_takes_nothing(self, store: Store) -> None:
        partition = store.filled(3)
        with store.refusal(TimeoutError):
            store.claim(partition, 4, blocking=True, timeout_s=0.1)
        assert store.claim(partition, 4).sample_ids == ids(3), "a claim that timed out marked samples as given"

    def test_blocking_gives_the_tail(self, store: Store) -> None:
        partition = store.filled(3, num_samples=5)
        assert store.claim(partition, 2, blocking=True).size == 2
        waiting = store.waiting_claim(partition, 4)
        store.put(partition, ["s3"], x=torch.zeros(1, dtype=torch.int64))
        assert waiting.running
        store.put(partition, ["s4"], x=torch.zeros(1, dtype=torch.int64))
        assert waiting.result(what="a claim of the tail").sample_ids == ["s2", "s3", "s4"]
        for _ in range(2):
            meta = bounded(lambda: store.claim(partition, 2, blocking=True, timeout_s=_LONG_S), what="an empty claim")
            assert meta.size == 0

    def test_the_tail_counts_distinct_ids(self, store: Store) -> None:
        partition = store.filled(3, "x", "y", num_samples=4)
        store.put(partition, ids(3), y=torch.arange(3))
        store.client.clear_samples(["s0", "s2"], partition)
        store.put(partition, ["s0"], x=torch.arange(1))
        with store.refusal(TimeoutError):
            store.claim(partition, 3, blocking=True, timeout_s=0.05)
        store.put(partition, ["s3"], x=torch.arange(1))
        meta = bounded(lambda: store.claim(partition, 4, blocking=True, timeout_s=_LONG_S), what="a claim of the tail")
        assert meta.sample_ids == ["s1", "s0", "s3"]

    def test_the_tail_waits_for_required_fields(self, store: Store) -> None:
        partition = store.filled(3, "x", "y", num_samples=3)
        store.put(partition, ["s0"], y=torch.zeros(1))
        with store.refusal(TimeoutError):
            store.claim(partition, 2, "y", blocking=True, timeout_s=0.05)
        store.put(partition, ["s2"], y=torch.zeros(1))
        assert store.claim(partition, 2, "y", blocking=True).sample_ids == ["s0", "s2"]

    def test_a_timeout_says_what_is_missing(self, store: Store) -> None:
        partition = store.filled(5, "x", "y", "z")
        store.put(partition, ["s0", "s3"], y=torch.zeros(2), z=torch.zeros(2))
        store.put(partition, ["s1"], y=torch.zeros(1))
        start = time.monotonic()
        with store.refusal(ClaimTimeoutError, "2", "4", "'s1'", "z") as caught:
            bounded(
                lambda: store.claim(partition, 4, "x", "y", "z", blocking=True, timeout_s=0.2), what="a claim's timeout"
            )
        assert time.monotonic() - start >= 0.2, "a claim timed out too early"
        error = caught.value
        assert isinstance(error, TimeoutError)
        assert error.num_ready == 2
        assert {name: sorted(fields) for name, fields in error.missing_cells.items()} == {
            "s1": ["z"],
            "s2": ["y", "z"],
            "s4": ["y", "z"],
        }

    def test_a_claim_of_a_cleared_partition_ends_at_once(self, store: Store) -> None:
        partition = store.register("x")
        waiting = store.waiting_claim(partition, 1)
        store.client.clear_samples(None, partition)
        with store.refusal(KeyError, partition):
            waiting.result(what="a claim of a partition that was cleared")

    # --- refusals -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("blocking", [False, True])
    def test_unknown_partition_or_task_is_refused(self, store: Store, blocking: bool) -> None:
        partition, unknown = store.register("x"), store.new_id()
        store.put(partition, ["a"], x=torch.zeros(1))
        with store.refusal(UnknownPartitionError, unknown):
            store.claim(unknown, 1, blocking=blocking, timeout_s=_LONG_S)
        with store.refusal(UnknownTaskError, "nobody"):
            store.claim(partition, 1, task="nobody", blocking=blocking, timeout_s=_LONG_S)

    # --- the hook -----------------------------------------------------------------------------------------------------

    def test_claim_hook_never_waits(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.zeros(1))
        for all_or_nothing in (True, False):
            claim = bounded(
                partial(store.hooks.within(600).claim, partition, 2, ["y"], all_or_nothing=all_or_nothing),
                what="a claim hook with nothing to give",
            )
            assert list(claim.sample_ids) == []

    def test_claim_hook_gives_all_or_nothing(self, store: Store) -> None:
        partition = store.filled(3, num_samples=4)
        none = store.hooks.claim(partition, 4, all_or_nothing=True)
        assert (list(none.sample_ids), none.exhausted) == ([], False)
        store.put(partition, ["s3"], x=torch.zeros(1, dtype=torch.int64))
        assert list(store.hooks.claim(partition, 3, all_or_nothing=True).sample_ids) == ids(3)
        tail = store.hooks.claim(partition, 3, all_or_nothing=True)
        assert (list(tail.sample_ids), tail.exhausted) == (["s3"], True)
        end = store.hooks.claim(partition, 3, all_or_nothing=True)
        assert (list(end.sample_ids), end.exhausted) == ([], True)
        other = store.register("x", num_samples=3)
        store.put(other, ids(3), x=torch.arange(3))
        rest = store.hooks.claim(other, 8)
        assert (list(rest.sample_ids), rest.exhausted) == (ids(3), True)

    # --- while a claim waits, and when it waited in vain --------------------------------------------------------------

    def test_a_waiting_claim_is_asked_anew_each_time(self, store: Store) -> None:
        partition = store.register("x", "y")
        asked: list[list[str]] = []

        def change(request: ClaimRequest) -> None:
            asked.append(list(request.required_fields))
            request.required_fields.append("y")
            request.wake = None  # so that it asks again by itself

        with store.faults.before("claim", change):
            waiting = Background(lambda: store.claim(partition, 1, blocking=True, timeout_s=_LONG_S))
            eventually(lambda: len(asked) >= 3, what="the third request of a waiting claim")
            store.put(partition, ["a"], x=torch.zeros(1), y=torch.zeros(1))
            assert waiting.result(what="the claim").sample_ids == ["a"]
        assert set(map(tuple, asked)) == {("x",)}, "a request contains what middleware changed in an earlier request"

    def test_a_timeout_says_who_holds_the_samples(self, store: Store) -> None:
        partition = store.filled(6)
        store.client.ack(store.claim(partition, 1, lease_s=_LONG_S))
        store.claim(partition, 3, lease_s=_LONG_S)
        with store.refusal(ClaimTimeoutError, "3 are leased", "'s1'", str(os.getpid())) as caught:
            store.claim(partition, 4, blocking=True, timeout_s=0.05)
        found = caught.value.shortfall
        assert found is not None
        assert (caught.value.num_ready, found.num_leased) == (2, 3)
        assert {each.sample_id for each in found.leased} <= {"s1", "s2", "s3"}
        for each in found.leased:
            assert each.holder == this_process()
            assert 0 < each.left_s <= _LONG_S

    def test_a_timeout_counts_what_the_filter_passes_over(self, store: Store) -> None:
        partition = store.filled(5, "x", "y", tags=[{"v": number} for number in range(5)])
        store.put(partition, ["s9"], [{"v": 0}], y=torch.zeros(1))
        with store.refusal(ClaimTimeoutError, "4 are passed over by the tag filter") as caught:
            store.claim(partition, 4, blocking=True, timeout_s=0.05, tag_filter={"v": (">=", 3)})
        found = caught.value.shortfall
        assert found is not None
        assert (caught.value.num_ready, found.num_not_matching, found.num_lacking) == (2, 4, 0)

    def test_a_timeout_names_groups_that_are_not_whole(self, store: Store) -> None:
        partition = store.filled(["whole_g0", "whole_g1", "part_g0", "late_g0", "late_g1"], "x", "y", group_size=2)
        store.put(partition, ["whole_g0", "whole_g1", "part_g0", "late_g0"], y=torch.zeros(4))
        with store.refusal(ClaimTimeoutError, "'part' holds 1", "'late_g1' lacks 'y'") as caught:
            store.claim(partition, 4, "x", "y", blocking=True, timeout_s=0.05)
        found = caught.value.shortfall
        assert found is not None
        assert (caught.value.num_ready, found.num_incomplete, found.num_lacking) == (2, 1, 2)
        assert dict(found.incomplete_groups) == {"part": 1}

    def test_large_groups_are_written_and_given_whole(self, store: Store) -> None:
        size = 9000
        partition = store.register("x", group_size=size)
        names = [f"q_g{number}" for number in range(size)]
        store.put(partition, names, x=torch.arange(size))
        meta = store.claim(partition, size, blocking=True)
        assert sorted(meta.sample_ids) == sorted(names)
        assert store.get(partition, [names[-1], names[0]])["x"].tolist() == [size - 1, 0]
