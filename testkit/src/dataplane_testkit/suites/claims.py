"""`claim_meta`: gives each ready sample to each task once, in the order of first write."""

from __future__ import annotations

import os
import pickle
import time
from functools import partial

import pytest
import torch

from dataplane_core.errors import ClaimTimeoutError, UnknownPartitionError, UnknownTaskError
from dataplane_core.spec import Capability, ClaimRequest, this_process
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._marks import proves
from dataplane_testkit._store import Store
from dataplane_testkit._timing import Background, bounded, eventually

_LONG_S = 60.0


class ClaimSuite(Suite, chapter="claims", proof=Capability.CLAIMS):
    """Claims without groups, leases or tag filters."""

    # --- what is handed out -------------------------------------------------------------------------------------------

    def test_each_sample_is_given_once(self, store: Store) -> None:
        """Contract: "Across all clients and processes no sample is given to a task twice." and "A claim with
        blocking=False returns what is ready now: up to batch_size samples, perhaps none."

        Check first: the store must choose samples and mark them as given in one atomic step. Without all_or_nothing,
        the claim hook must give the samples that are ready, even if they are fewer than batch_size.
        """
        partition = store.register("x")
        empty = store.claim(partition, 4)
        assert (empty.sample_ids, empty.tags, empty.size) == ([], [], 0)
        store.put(partition, ids(10), x=torch.arange(10))
        given = [store.claim(partition, 4).sample_ids for _ in range(4)]
        assert given == [ids(10)[:4], ids(10)[4:8], ids(10)[8:], []]

    def test_each_task_has_its_own_cursor(self, store: Store) -> None:
        """Contract: "Task: a named use of the samples, with its own cursor."

        Check first: the store must record per task which samples it gave.
        """
        partition = store.filled(4, tasks=["train", "eval"])
        assert store.claim(partition, 3).sample_ids == ids(3)
        assert store.claim(partition, 4, task="eval").sample_ids == ids(4)
        assert store.claim(partition, 4).sample_ids == ["s3"]

    def test_only_ready_samples_are_given(self, store: Store) -> None:
        """Contract: "Hands out samples whose required fields are all produced and that task_name has not been given."
        and "Samples come in order of first write, unless a sampler says otherwise."

        Check first: a sample is ready when all required fields are produced, also those that were not registered. The
        fields may come from different puts. The put that makes a row ready must not change its place in the order.
        """
        partition = store.filled(5)
        for sample_id in ("s3", "s1"):
            store.put(partition, [sample_id], y=torch.zeros(1))
        assert store.claim(partition, 5, "x", "y").sample_ids == ["s1", "s3"]
        assert store.claim(partition, 5, "y", "x").size == 0
        store.put(partition, ["s4", "s0"], y=torch.zeros(2))
        assert store.claim(partition, 5, "x", "y").sample_ids == ["s0", "s4"]

    def test_required_fields_share_one_cursor(self, store: Store) -> None:
        """Contract: "that task_name has not been given".

        Check first: the cursor must not depend on the required fields. A sample that a task has been given must not be
        given to it again for other or additional fields.
        """
        partition = store.filled(3, "x", "y")
        assert store.claim(partition, 2, "x").sample_ids == ["s0", "s1"]
        store.put(partition, ids(3), y=torch.zeros(3))
        assert store.claim(partition, 3, "y").sample_ids == ["s2"]

    # --- order --------------------------------------------------------------------------------------------------------

    def test_claims_come_in_order_of_first_write(self, store: Store) -> None:
        """Contract: "Samples come in order of first write, unless a sampler says otherwise."

        Check first: the store must number rows when they are first written, within a put in the order of its ids. It
        must not sort by id.
        """
        partition = store.register("x")
        order = ["z", "a", "m10", "m9", "b", "y"]
        store.put(partition, order[:3], x=torch.arange(3))
        store.put(partition, order[3:], x=torch.arange(3))
        assert store.claim(partition, 2).sample_ids == order[:2]
        assert store.claim(partition, 9).sample_ids == order[2:]

    def test_tags_alone_are_a_first_write(self, store: Store) -> None:
        """Contract: "A put of tags alone creates the sample: it counts for the order of first write and for
        num_samples."

        Check first: the first put that names an id must number its row and count the id, even if the put holds only
        tags.
        """
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
        """Contract: "Their tags come along. sequence_lengths is filled from the tag input_lengths if all samples have
        it."

        Check first: Claim.tags must have one entry per sample id, in the same order.
        """
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
        """Contract: "A meta can be pickled (Ray sends it in this way) and stays small: it holds no tensors."

        Check first: the tags, lease tokens and ids in the reply must be plain Python values, which can be pickled.
        """
        partition = store.register("x")
        store.put(partition, ids(100), [{"n": index} for index in range(100)], x=torch.zeros(100, 1000))
        meta = store.claim(partition, 100)
        data = pickle.dumps(meta)
        assert len(data) < 10_000
        assert pickle.loads(data) == meta  # pickled by this process
        assert store.client.get_data(pickle.loads(data)).batch_size == torch.Size([100])

    # --- blocking -----------------------------------------------------------------------------------------------------

    def test_blocking_waits_until_enough_are_ready(self, store: Store) -> None:
        """Contract: "A blocking claim waits until batch_size samples are ready".

        Check first: with all_or_nothing, the claim hook must give no sample until it can give batch_size samples.
        """
        partition = store.register("x")
        waiting = store.waiting_claim(partition, 4)
        for start in (0, 2):
            assert waiting.running
            store.put(partition, [f"s{start}", f"s{start + 1}"], x=torch.arange(2))
        assert waiting.result(what="a claim of samples that are ready").sample_ids == ids(4)

    def test_a_waiting_claim_takes_nothing(self, store: Store) -> None:
        """Contract: "A blocking claim waits until batch_size samples are ready" and "With None, a blocking claim always
        waits for a full batch."

        Check first: with all_or_nothing, the claim hook must give no sample, and mark none as given, until it can give
        batch_size samples. If the partition was registered with num_samples=None, it must never set Claim.exhausted.
        """
        partition = store.filled(3)
        with store.refusal(TimeoutError):
            store.claim(partition, 4, blocking=True, timeout_s=0.1)
        assert store.claim(partition, 4).sample_ids == ids(3), "a claim that timed out marked samples as given"

    def test_blocking_gives_the_tail(self, store: Store) -> None:
        """Contract: "the samples left for the task may be fewer than batch_size. Then the claim waits until all of
        these are ready, and returns them." and "If none is left, it returns an empty meta at once."

        Check first: with all_or_nothing, the claim hook must give the remaining samples, even if they are fewer than
        batch_size, once num_samples ids were written. It must set Claim.exhausted also when no sample remains:
        consumers end their loops by it.
        """
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
        """Contract: "num_samples distinct ids were written (cleared ones included)".

        Check first: the store must count an id when it is first written, not puts or rows. A clear must not reduce this
        count, and a row that is written again must not raise it.
        """
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
        """Contract: "Hands out samples whose required fields are all produced".

        Check first: the claim hook must not treat the partition as finished only because num_samples ids were written.
        Samples that lack a required field can become ready later.
        """
        partition = store.filled(3, "x", "y", num_samples=3)
        store.put(partition, ["s0"], y=torch.zeros(1))
        with store.refusal(TimeoutError):
            store.claim(partition, 2, "y", blocking=True, timeout_s=0.05)
        store.put(partition, ["s2"], y=torch.zeros(1))
        assert store.claim(partition, 2, "y", blocking=True).sample_ids == ["s0", "s2"]

    def test_a_timeout_says_what_is_missing(self, store: Store) -> None:
        """Contract: "it raises a subclass of TimeoutError that says how many samples were ready and which fields the
        next ones lack" and "or timeout_s of a blocking claim. No call hangs."

        Check first: the claim hook must return immediately; the client waits. If the request has explain set, the hook
        must fill Claim.num_ready and Claim.shortfall, although it gives no sample.
        """
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
        """Contract: "If the partition is cleared while it waits, it raises KeyError at once."

        Check first: the claim hook must raise UnknownPartitionError as soon as the partition is cleared.
        """
        partition = store.register("x")
        waiting = store.waiting_claim(partition, 1)
        store.client.clear_samples(None, partition)
        with store.refusal(KeyError, partition):
            waiting.result(what="a claim of a partition that was cleared")

    # --- refusals -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("blocking", [False, True])
    def test_unknown_partition_or_task_is_refused(self, store: Store, blocking: bool) -> None:
        """Contract: "An unknown partition or task raises KeyError."

        Check first: the claim hook must raise UnknownPartitionError or UnknownTaskError. It must not create the task.
        """
        partition, unknown = store.register("x"), store.new_id()
        store.put(partition, ["a"], x=torch.zeros(1))
        with store.refusal(UnknownPartitionError, unknown):
            store.claim(unknown, 1, blocking=blocking, timeout_s=_LONG_S)
        with store.refusal(UnknownTaskError, "nobody"):
            store.claim(partition, 1, task="nobody", blocking=blocking, timeout_s=_LONG_S)

    # --- the hook -----------------------------------------------------------------------------------------------------

    def test_claim_hook_never_waits(self, store: Store) -> None:
        """Hook spec: "The hook never waits: the client asks again until its deadline."

        Check first: if nothing is ready, the claim hook must return an empty Claim immediately. The client waits.
        """
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.zeros(1))
        for all_or_nothing in (True, False):
            claim = bounded(
                partial(store.hooks.within(600).claim, partition, 2, ["y"], all_or_nothing=all_or_nothing),
                what="a claim hook with nothing to give",
            )
            assert list(claim.sample_ids) == []

    def test_claim_hook_gives_all_or_nothing(self, store: Store) -> None:
        """Hook spec: "Hand out batch_size samples or none; but hand out the rest if the partition can give no more than
        that."

        Check first: how the claim hook treats ClaimRequest.all_or_nothing, and when it sets Claim.exhausted.
        """
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
        """Contract: "Each poll of a waiting claim is a request of its own, which middleware may change."

        Check first: the backend must not keep or change a request after the claim hook has returned. All else in this
        test is core's.
        """
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

    @proves(Capability.CLAIMS, Capability.LEASES)
    def test_a_timeout_says_who_holds_the_samples(self, store: Store) -> None:
        """Contract: "samples under a lease, with the holder and the time left of those whose leases end first".

        Check first: Shortfall.num_leased and Shortfall.leased, which name holders by ClaimRequest.holder. Acked samples
        must not be counted.
        """
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

    @proves(Capability.CLAIMS, Capability.TAG_FILTERS)
    def test_a_timeout_counts_what_the_filter_passes_over(self, store: Store) -> None:
        """Contract: "samples that the tag filter excludes".

        Check first: Shortfall.num_not_matching. A sample that does not match the filter must be counted here, even if
        it also lacks fields.
        """
        partition = store.filled(5, "x", "y", tags=[{"v": number} for number in range(5)])
        store.put(partition, ["s9"], [{"v": 0}], y=torch.zeros(1))
        with store.refusal(ClaimTimeoutError, "4 are passed over by the tag filter") as caught:
            store.claim(partition, 4, blocking=True, timeout_s=0.05, tag_filter={"v": (">=", 3)})
        found = caught.value.shortfall
        assert found is not None
        assert (caught.value.num_ready, found.num_not_matching, found.num_lacking) == (2, 4, 0)

    @proves(Capability.CLAIMS, Capability.GROUPS)
    def test_a_timeout_names_groups_that_are_not_whole(self, store: Store) -> None:
        """Contract: "samples of groups that lack a member, or have lost one".

        Check first: Shortfall.num_incomplete and Shortfall.incomplete_groups. If a group has all its members, but a
        member lacks a field, all its members must be counted as lacking fields.
        """
        partition = store.filled(["whole_g0", "whole_g1", "part_g0", "late_g0", "late_g1"], "x", "y", group_size=2)
        store.put(partition, ["whole_g0", "whole_g1", "part_g0", "late_g0"], y=torch.zeros(4))
        with store.refusal(ClaimTimeoutError, "'part' holds 1", "'late_g1' lacks 'y'") as caught:
            store.claim(partition, 4, "x", "y", blocking=True, timeout_s=0.05)
        found = caught.value.shortfall
        assert found is not None
        assert (caught.value.num_ready, found.num_incomplete, found.num_lacking) == (2, 1, 2)
        assert dict(found.incomplete_groups) == {"part": 1}

    @proves(Capability.CLAIMS, Capability.GROUPS)
    def test_large_groups_are_written_and_given_whole(self, store: Store) -> None:
        """Contract: "whole groups only".

        Check first: the engine's limits on the number of arguments or results of one call.
        """
        size = 9000
        partition = store.register("x", group_size=size)
        names = [f"q_g{number}" for number in range(size)]
        store.put(partition, names, x=torch.arange(size))
        meta = store.claim(partition, size, blocking=True)
        assert sorted(meta.sample_ids) == sorted(names)
        assert store.get(partition, [names[-1], names[0]])["x"].tolist() == [size - 1, 0]
