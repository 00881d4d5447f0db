"""The ledger's rules, one behaviour a test. Time is a plain number here."""

import pickle

import pytest

from dataplane_core.errors import (
    CapacityExceededError,
    InvalidRequestError,
    LeaseExpiredError,
    MissingDataError,
    SchemaMismatchError,
    StalePartitionError,
    UnknownPartitionError,
    UnknownTaskError,
    UnsupportedOperationError,
)
from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import FieldSpec, new_id

INT = FieldSpec("tensor", "int64", 1)
FLOAT = FieldSpec("tensor", "float32", 1)


def ledger(num_samples=None, group=None, **options):
    made = Ledger(**options)
    made.apply(commands.Register("p", ["x"], num_samples, ["t", "u"], group, {}, new_id()), 0.0)
    return made


def put(made, ids, *fields, spec=INT, tags=None, size=1):
    specs = dict.fromkeys(fields, spec)
    write_id = made.apply(commands.BeginPut("p", ids, specs, [size] * len(ids), tags, None, ttl_s=10.0), 0.0)
    return write_id, made.apply(commands.CommitPut(write_id), 0.0)


def claim(
    made, n, task="t", fields=("x",), all_or_nothing=False, lease_s=None, tag_filter=None, now=0.0, explain=False
):
    return made.apply(
        commands.ClaimSamples(
            "p",
            task,
            list(fields),
            n,
            all_or_nothing=all_or_nothing,
            lease_s=lease_s,
            tag_filter=tag_filter,
            explain=explain,
            token=new_id(),
        ),
        now,
    )


def test_claims_come_in_order_of_first_write_and_once_per_task():
    made = ledger()
    put(made, ["b", "a"], "y")
    put(made, ["c"], "x")
    put(made, ["a", "b"], "x")
    assert claim(made, 2).sample_ids == ["b", "a"]
    assert claim(made, 2).sample_ids == ["c"]
    assert claim(made, 2).sample_ids == []
    assert claim(made, 9, task="u").sample_ids == ["b", "a", "c"]


def test_a_sample_is_ready_only_with_all_required_fields():
    made = ledger()
    put(made, ["a", "b"], "x")
    assert claim(made, 2, fields=["x", "y"]).sample_ids == []
    put(made, ["b"], "y")
    assert claim(made, 2, fields=["x", "y"]).sample_ids == ["b"]


def test_an_overwrite_does_not_hand_a_sample_out_again():
    made = ledger()
    put(made, ["a"], "x")
    assert claim(made, 1).sample_ids == ["a"]
    put(made, ["a"], "x")
    assert claim(made, 1).sample_ids == []


def test_all_or_nothing_waits_for_the_batch_and_then_for_the_tail():
    made = ledger(num_samples=3)
    put(made, ["a"], "x")
    waiting = claim(made, 2, all_or_nothing=True, explain=True)
    assert (waiting.sample_ids, waiting.exhausted, waiting.num_ready) == ([], False, 1)
    put(made, ["b", "c"], "x")
    assert claim(made, 2, all_or_nothing=True).sample_ids == ["a", "b"]
    tail = claim(made, 2, all_or_nothing=True)
    assert (tail.sample_ids, tail.exhausted) == (["c"], True)
    assert claim(made, 2, all_or_nothing=True).exhausted


def test_the_tail_waits_for_fields_that_remaining_samples_still_miss():
    made = ledger(num_samples=2)
    put(made, ["a", "b"], "y")
    put(made, ["a"], "x")
    waiting = claim(made, 4, all_or_nothing=True, explain=True)
    assert not waiting.sample_ids
    assert waiting.shortfall.missing_cells == {"b": ("x",)}
    put(made, ["b"], "x")
    assert claim(made, 4, all_or_nothing=True).sample_ids == ["a", "b"]


def test_cleared_samples_count_as_written_for_the_tail():
    made = ledger(num_samples=2)
    put(made, ["a"], "x")
    made.apply(commands.Clear("p", ["a"]), 0.0)
    put(made, ["b"], "x")
    assert claim(made, 2, all_or_nothing=True).sample_ids == ["b"]


def test_groups_are_handed_out_whole_and_in_order():
    made = ledger(group=2)
    put(made, ["q_g0", "r_g0", "r_g1"], "x")
    assert claim(made, 4).sample_ids == ["r_g0", "r_g1"]
    put(made, ["q_g1"], "x")
    assert claim(made, 4).sample_ids == ["q_g0", "q_g1"]


def test_a_batch_size_that_is_no_multiple_of_the_group_is_refused():
    with pytest.raises(InvalidRequestError, match="multiple of the group size 2"):
        claim(ledger(group=2), 3)


def test_a_group_with_a_cleared_member_is_never_given_even_if_written_again():
    made = ledger(group=2)
    put(made, ["q_g0", "q_g1"], "x")
    made.apply(commands.Clear("p", ["q_g0"]), 0.0)
    put(made, ["q_g0"], "x")
    assert claim(made, 2).sample_ids == []


@pytest.mark.parametrize("bad", [["noseparator"], ["q_g0", "q_g1", "q_g2"]])
def test_an_id_without_group_or_a_surplus_member_is_refused_and_nothing_written(bad):
    made = ledger(group=2)
    with pytest.raises(InvalidRequestError):
        put(made, bad, "x")
    assert made.apply(commands.ListSamples("p", None), 0.0).sample_ids == []
    assert made.held_bytes == 0


def test_a_lease_that_runs_out_goes_back_in_its_old_place():
    made = ledger()
    put(made, ["a", "b"], "x")
    first = claim(made, 1, lease_s=5.0, now=0.0)
    assert first.sample_ids == ["a"]
    assert claim(made, 2, lease_s=5.0, now=4.9).sample_ids == ["b"]
    assert claim(made, 2, lease_s=5.0, now=5.0).sample_ids == ["a"]


def test_ack_settles_once_and_a_late_holder_fails_naming_the_ids():
    made = ledger()
    put(made, ["a"], "x")
    old = claim(made, 1, lease_s=5.0, now=0.0)
    new = claim(made, 1, lease_s=5.0, now=6.0)
    with pytest.raises(LeaseExpiredError) as failed:
        made.apply(commands.Ack("p", "t", ["a"], old.lease_tokens), 7.0)
    assert failed.value.sample_ids == ("a",)
    made.apply(commands.Ack("p", "t", ["a"], new.lease_tokens), 7.0)
    made.apply(commands.Ack("p", "t", ["a"], new.lease_tokens), 99.0)  # its reply may have been lost
    assert made.apply(commands.Consumed("p", ["t"]), 0.0)
    assert claim(made, 1, now=100.0).sample_ids == []


def test_ack_settles_all_rows_or_none():
    made = ledger()
    put(made, ["a", "b"], "x")
    held = claim(made, 2, lease_s=5.0)
    made.apply(commands.Clear("p", ["b"]), 0.0)
    with pytest.raises(LeaseExpiredError, match="'b'"):
        made.apply(commands.Ack("p", "t", ["a", "b"], held.lease_tokens), 1.0)
    assert not made.apply(commands.Consumed("p", ["t"]), 0.0)


def test_nack_gives_back_at_once_and_renew_extends():
    made = ledger()
    put(made, ["a"], "x")
    held = claim(made, 1, lease_s=5.0, now=0.0)
    made.apply(commands.Renew("p", "t", ["a"], held.lease_tokens, 5.0), 4.0)
    assert claim(made, 1, now=6.0).sample_ids == []
    made.apply(commands.Nack("p", "t", ["a"], held.lease_tokens), 6.0)
    assert claim(made, 1, now=6.0).sample_ids == ["a"]


@pytest.mark.parametrize(("group", "bytes_a_round"), [(None, 2), (2, 25)])
def test_a_partition_without_end_remembers_of_what_was_cleared_only_the_names_of_groups(group, bytes_a_round):
    made = ledger(group=group)
    claim(made, 2)  # asks once, and never again
    sizes = []
    for number in range(2000):
        ids = [f"v{number:05}_g{member}" for member in range(2)]
        put(made, ids, "x")
        assert claim(made, 2, task="u").sample_ids == ids
        _, freed = made.apply(commands.Clear("p", ids), 0.0)
        made.apply(commands.Collected(freed), 0.0)
        if number in (999, 1999):
            sizes.append(len(pickle.dumps(made)))
    assert sizes[1] - sizes[0] <= 1000 * bytes_a_round
    put(made, ["v00000_g0", "v00000_g1"], "x")  # its group was given and cleared, however long ago
    assert claim(made, 2, task="u").sample_ids == ([] if group else ["v00000_g0", "v00000_g1"])


def test_groups_are_settled_as_a_whole():
    made = ledger(group=2)
    put(made, ["q_g0", "q_g1"], "x")
    held = claim(made, 2, lease_s=5.0)
    with pytest.raises(InvalidRequestError, match="1 of the 2 samples"):
        made.apply(commands.Ack("p", "t", ["q_g0"], held.lease_tokens[:1]), 1.0)
    made.apply(commands.Nack("p", "t", ["q_g0", "q_g1"], held.lease_tokens), 1.0)
    assert claim(made, 2, now=1.0).sample_ids == ["q_g0", "q_g1"]


def test_consumed_counts_acks_not_leases_and_is_false_while_empty():
    made = ledger()
    assert not made.apply(commands.Consumed("p", ["t"]), 0.0)
    put(made, ["a"], "x")
    held = claim(made, 1, lease_s=5.0)
    assert not made.apply(commands.Consumed("p", ["t"]), 0.0)
    made.apply(commands.Ack("p", "t", ["a"], held.lease_tokens), 1.0)
    assert made.apply(commands.Consumed("p", ["t"]), 0.0)
    assert not made.apply(commands.Consumed("p", ["t", "u"]), 0.0)
    assert not made.apply(commands.Consumed("p", ["unheard"]), 0.0)
    assert not made.apply(commands.Consumed("unheard", ["t"]), 0.0)
    made.apply(commands.Clear("p", ["a"]), 0.0)
    assert not made.apply(commands.Consumed("p", ["t"]), 0.0)


def test_tag_filters_pass_over_what_does_not_match_and_leave_it():
    made = ledger()
    put(made, ["a", "b", "c"], "x", tags=[{"v": 1}, {"v": 2}, {"w": 1}])
    assert claim(made, 3, tag_filter={"v": (">=", 2)}).sample_ids == ["b"]
    assert made.apply(commands.ListSamples("p", {"v": ("in", [1, 2])}), 0.0).sample_ids == ["a", "b"]
    assert claim(made, 3).sample_ids == ["a", "c"]


def test_tags_merge_key_by_key():
    made = ledger()
    put(made, ["a"], tags=[{"v": 1, "w": 1}])
    put(made, ["a"], "x", tags=[{"v": 2}])
    assert made.apply(commands.ListSamples("p", None), 0.0).tags == [{"v": 2, "w": 1}]


def test_a_field_keeps_dtype_rank_and_trailing_shape():
    made = ledger()
    put(made, ["a"], "x")
    for other in (FLOAT, FieldSpec("tensor", "int64", 2, (3,)), FieldSpec("object")):
        with pytest.raises(SchemaMismatchError, match="field 'x'"):
            put(made, ["b"], "x", "y", spec=other)
    assert made.apply(commands.ListSamples("p", None), 0.0).sample_ids == ["a"]
    put(made, ["b"], "y", spec=FLOAT)  # 'y' was not fixed by the refused puts


def test_of_two_overlapping_first_writes_the_second_with_another_schema_fails():
    made = ledger()
    one = made.apply(commands.BeginPut("p", ["a"], {"x": INT}, [8], None, None, ttl_s=10.0), 0.0)
    two = made.apply(commands.BeginPut("p", ["b"], {"x": FLOAT}, [4], None, None, ttl_s=10.0), 0.0)
    made.apply(commands.CommitPut(one), 0.0)
    with pytest.raises(SchemaMismatchError):
        made.apply(commands.CommitPut(two), 0.0)
    assert made.garbage(0.0) == [(two, 0)]
    assert made.held_bytes == 8


@pytest.mark.parametrize("overlap", ["clear", "clear_all", "register"])
def test_a_put_that_overlaps_a_clear_or_registration_is_fenced(overlap):
    made = ledger()
    put(made, ["a"], "x")
    begun = made.apply(commands.BeginPut("p", ["a"], {"y": INT}, [8], None, None, ttl_s=10.0), 0.0)
    if overlap == "clear":
        made.apply(commands.Clear("p", ["a"]), 0.0)
    elif overlap == "clear_all":
        made.apply(commands.Clear("p", None), 0.0)
    else:
        made.apply(commands.Register("p", ["x"], None, ["t"], None, {}, new_id()), 0.0)
    with pytest.raises(StalePartitionError):
        made.apply(commands.CommitPut(begun), 0.0)
    if overlap != "clear_all":
        assert made.apply(commands.ListSamples("p", None), 0.0).sample_ids == []


def test_a_put_checked_against_an_old_registration_is_refused():
    made = ledger()
    old = made.apply(commands.Describe("p"), 0.0).epoch
    made.apply(commands.Register("p", ["x"], None, ["t"], None, {}, new_id()), 0.0)
    with pytest.raises(StalePartitionError):
        made.apply(commands.BeginPut("p", ["a"], {"x": INT}, [8], None, old, ttl_s=1.0), 0.0)


def test_capacity_counts_reservations_and_frees_what_is_cleared():
    made = ledger(capacity_bytes=10)
    put(made, ["a"], "x", size=6)
    with pytest.raises(CapacityExceededError) as full:
        put(made, ["b"], "x", size=5)
    assert full.value.retryable
    with pytest.raises(CapacityExceededError) as never:
        put(made, ["b"], "x", size=11)
    assert not never.value.retryable
    made.apply(commands.Clear("p", ["a"]), 0.0)
    put(made, ["b"], "x", size=10)
    assert made.held_bytes == 10


def test_a_put_is_judged_by_another_bound_without_a_trace():
    made = ledger()
    put(made, ["a"], "x", size=6)
    made.apply(commands.BeginPut("p", ["dies"], {"x": INT}, [3], None, None, ttl_s=10.0), 0.0)

    def judge(size, now, epoch=None, spec=INT):
        put = commands.BeginPut("p", ["b"], {"x": spec}, [size], None, epoch, ttl_s=10.0)
        made.apply(commands.CheckPut(put, capacity_bytes=10), now)

    before = pickle.dumps(made)
    judge(1, now=9.0)
    with pytest.raises(CapacityExceededError, match="2 bytes do not fit, 9 of 10 bytes are held") as full:
        judge(2, now=9.0)
    assert full.value.retryable
    judge(4, now=10.0)  # what the dead put reserved is free by then
    with pytest.raises(SchemaMismatchError):
        judge(99, now=9.0, spec=FLOAT)
    with pytest.raises(StalePartitionError):
        judge(99, now=9.0, epoch="another")
    assert pickle.dumps(made) == before


def test_an_overwrite_frees_the_row_it_replaces_once_no_cell_names_it():
    made = ledger()
    first, _ = put(made, ["a"], "x", "y", size=8)
    _, freed = put(made, ["a"], "x", size=8)
    assert freed == []
    _, freed = put(made, ["a"], "y", size=8)
    assert freed == [(first, 0)]
    assert made.held_bytes == 16


def test_an_abandoned_put_is_reaped_with_its_payload():
    made = ledger()
    begun = made.apply(commands.BeginPut("p", ["a", "b"], {"x": INT}, [8, 8], None, None, ttl_s=10.0), 0.0)
    assert made.garbage(9.0) == []
    assert made.garbage(10.0) == [(begun, 0), (begun, 1)]
    assert made.held_bytes == 0
    with pytest.raises(StalePartitionError):
        made.apply(commands.CommitPut(begun), 0.0)
    made.apply(commands.Collected([(begun, 0), (begun, 1)]), 0.0)
    assert made.garbage(11.0) == []


def test_aborting_a_committed_put_frees_nothing():
    made = ledger()
    write_id, _ = put(made, ["a"], "x")
    assert made.apply(commands.AbortPut(write_id), 0.0) == []
    assert made.apply(commands.Locate("p", ["a"], ["x"]), 0.0).parts[0].write_id == write_id


def test_locate_groups_rows_by_write_and_names_what_is_missing():
    made = ledger()
    first, _ = put(made, ["a", "b", "c"], "x", "y")
    second, _ = put(made, ["b"], "y")
    parts = {part.write_id: [] for part in made.apply(commands.Locate("p", ["c", "b", "a"], ["x", "y"]), 0.0).parts}
    for part in made.apply(commands.Locate("p", ["c", "b", "a"], ["x", "y"]), 0.0).parts:
        parts[part.write_id].append((part.fields, part.slots, part.rows, part.positions))
    assert parts == {
        first: [(("x", "y"), (0, 1), [0, 2], [2, 0]), (("x",), (0,), [1], [1])],
        second: [(("y",), (0,), [1], [0])],
    }
    with pytest.raises(MissingDataError) as missing:
        made.apply(commands.Locate("p", ["a", "zz"], ["x"]), 0.0)
    assert missing.value.missing_samples == ("zz",)
    with pytest.raises(MissingDataError, match="'a' lacks 'z'") as cells:
        made.apply(commands.Locate("p", ["a"], ["x", "z"]), 0.0)
    assert cells.value.missing_cells == {"a": ("z",)}


def test_without_overwrite_a_second_write_is_refused_whole():
    made = ledger(overwrite=False)
    put(made, ["a"], "x")
    with pytest.raises(UnsupportedOperationError, match="'overwrite'"):
        put(made, ["b", "a"], "x")
    assert made.apply(commands.ListSamples("p", None), 0.0).sample_ids == ["a"]


def test_unknown_partitions_and_tasks_are_named():
    made = ledger()
    with pytest.raises(UnknownPartitionError, match="'q' is not registered"):
        made.apply(commands.Describe("q"), 0.0)
    with pytest.raises(UnknownTaskError, match="no consumer task 'z'"):
        claim(made, 1, task="z")
    assert made.apply(commands.Clear("q", None), 0.0) == (0, [])


# --- rows that samples share ------------------------------------------------------------------------------------------


def put_shared(made, ids, positions, row_bytes, now=0.0):
    """A put of ``x`` with a row for each sample, and of ``y`` with rows that samples share."""
    begin = commands.BeginPut(
        "p",
        ids,
        {"x": INT, "y": INT},
        [1] * len(ids),
        splits=[commands.Split(("y",), row_bytes, positions)],
        ttl_s=10.0,
    )
    write_id = made.apply(begin, now)
    made.apply(commands.CommitPut(write_id), now)
    return write_id


def test_a_shared_row_is_free_with_the_last_of_its_samples():
    made = ledger()
    write_id = put_shared(made, ["a", "b", "c"], [0, 1, 0], [100, 200])
    assert made.held_bytes == 303
    located = made.apply(commands.Locate("p", ["c", "b", "a"], ["y"]), 0.0)
    assert located.refs == [(write_id + 3, 0), (write_id + 3, 1), (write_id + 3, 0)]
    assert made.apply(commands.Clear("p", ["a"]), 0.0) == (1, [(write_id, 0)])
    made.apply(commands.Collected([(write_id, 0)]), 0.0)
    assert made.held_bytes == 302
    assert made.apply(commands.Clear("p", ["c"]), 0.0) == (1, [(write_id, 2), (write_id + 3, 0)])
    assert made.held_bytes == 201


def test_an_overwrite_gives_up_one_reference():
    made = ledger()
    write_id = put_shared(made, ["a", "b"], [0, 0], [100])
    _, freed = put(made, ["a"], "y")
    assert freed == []
    assert made.held_bytes == 103
    _, freed = put(made, ["b"], "y")
    assert freed == [(write_id + 2, 0)]
    assert made.held_bytes == 4


def test_an_unfinished_put_frees_each_of_its_rows_once():
    made = ledger()
    begin = commands.BeginPut(
        "p", ["a", "b"], {"y": INT}, [0, 0], splits=[commands.Split(("y",), [9], [0, 0])], ttl_s=10.0
    )
    write_id = made.apply(begin, 0.0)
    assert made.held_bytes == 9
    assert made.apply(commands.AbortPut(write_id), 0.0) == [(write_id + 2, 0)]
    assert made.apply(commands.AbortPut(write_id), 0.0) == [(write_id + 2, 0)]
    assert made.held_bytes == 0


def test_ids_of_the_writes_of_a_put_are_not_given_again():
    made = ledger()
    first = put_shared(made, ["a", "b"], [0, 1], [5, 5])
    second = put_shared(made, ["c"], None, [5])
    assert second >= first + 4


def test_of_two_puts_that_together_are_too_many_one_is_refused():
    made = ledger(num_samples=3)
    first, second = (
        made.apply(commands.BeginPut("p", ids, {"x": INT}, [1] * 2, ttl_s=10.0), 0.0)
        for ids in (["a", "b"], ["c", "d"])
    )
    made.apply(commands.CommitPut(first), 0.0)
    with pytest.raises(InvalidRequestError, match=r"4 distinct samples .* at most 3"):
        made.apply(commands.CommitPut(second), 0.0)
    put(made, ["b", "c"], "x")
    assert made.apply(commands.ListSamples("p"), 0.0).sample_ids == ["a", "b", "c"]


def test_a_put_under_way_is_refused_once_the_partition_is_finished():
    made = ledger()
    put(made, ["a"], "x")
    write_id = made.apply(commands.BeginPut("p", ["b"], {"x": INT}, [1], ttl_s=10.0), 0.0)
    info, _ = made.apply(commands.Register("p", [], 0, [], None, {}, new_id(), "keep"), 0.0)
    assert info.num_samples == 1
    with pytest.raises(InvalidRequestError, match="at most 1"):
        made.apply(commands.CommitPut(write_id), 0.0)
