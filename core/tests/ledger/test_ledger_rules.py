"""Rules of the ledger that neither the kit nor the comparison with Redis' scripts sees, one a test."""

import pickle

import pytest
from histories import saved_and_loaded
from ledgers import INT, begin, claim, ledger, put, register
from msgspec.structs import replace

from dataplane_core.errors import (
    CapacityExceededError,
    InvalidRequestError,
    SchemaMismatchError,
    StalePartitionError,
    UnknownPartitionError,
)
from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import FieldSpec

FLOAT = FieldSpec("tensor", "float32", 1)


@pytest.mark.parametrize(("group", "bytes_a_round"), [(None, 2), (2, 25)])
def test_a_partition_without_end_remembers_of_what_was_cleared_only_the_names_of_groups(group, bytes_a_round):
    made = ledger(group=group, tasks=("t", "u"))
    ask = claim(2, task="u", all_or_nothing=False)
    made.apply(claim(2), 0.0)  # asks once, and never again
    sizes = []
    for number in range(2000):
        ids, now = [f"v{number:05}_g{member}" for member in range(2)], 100.0 * number  # requests are known for less
        put(made, ids, now=now)
        assert list(made.apply(replace(ask, token=f"k{number:05}"), now).sample_ids) == ids
        _, freed = made.apply(commands.ClearRequest("p", ids), now)
        made.apply(commands.Collected(freed), now)
        if number in (999, 1999):
            sizes.append(len(pickle.dumps(made)))
    assert sizes[1] - sizes[0] <= 1000 * bytes_a_round
    put(made, ["v00000_g0", "v00000_g1"])  # its group was given and cleared, however long ago
    assert list(made.apply(ask, 0.0).sample_ids) == ([] if group else ["v00000_g0", "v00000_g1"])


def test_a_put_is_judged_without_a_trace():
    made = ledger(capacity_bytes=10)
    put(made, ["a"], size=6)
    made.apply(begin(["dies"], size=3), 0.0)

    def judge(size, now, spec=INT):
        put = replace(begin(["b"], size=size), specs={"x": spec})
        made.check_put(put, now)

    before = pickle.dumps(made)
    judge(1, now=9.0)
    with pytest.raises(CapacityExceededError, match="2 bytes do not fit, 9 of 10 bytes are held") as full:
        judge(2, now=9.0)
    assert full.value.retryable
    with pytest.raises(SchemaMismatchError):
        judge(99, now=9.0, spec=FLOAT)
    assert pickle.dumps(made) == before
    judge(4, now=10.0)  # what the dead put reserved is free by then


def test_an_abandoned_put_is_reaped_with_its_payload():
    made = ledger()
    begun = made.apply(begin(["a", "b"]), 0.0)
    assert made.garbage(9.0) == []
    assert made.garbage(10.0) == [(begun, 0), (begun, 1)]
    assert made.held_bytes == 0
    with pytest.raises(StalePartitionError):
        made.apply(commands.CommitPut(begun), 0.0)
    made.apply(commands.Collected([(begun, 0), (begun, 1)]), 0.0)
    assert made.garbage(11.0) == []


def test_aborting_a_committed_put_frees_nothing():
    made = ledger()
    write_id, _ = put(made, ["a"])
    assert made.apply(commands.AbortPut(write_id), 0.0) == []
    assert made.apply(commands.Locate("p", ["a"], ["x"]), 0.0).parts[0].write_id == write_id


# --- rows that samples share ------------------------------------------------------------------------------------------


def put_shared(made, ids, positions, row_bytes, now=0.0):
    """A put of ``x`` with a row for each sample, and of ``y`` with rows that samples share."""
    both = commands.BeginPut(
        "p",
        ids,
        {"x": INT, "y": INT},
        [commands.Write(["x"], [1] * len(ids)), commands.Write(["y"], row_bytes, positions)],
        ttl_s=10.0,
    )
    write_id = made.apply(both, now)
    made.apply(commands.CommitPut(write_id), now)
    return write_id


def test_ids_of_the_writes_of_a_put_are_not_given_again():
    made = ledger()
    first = put_shared(made, ["a", "b"], [0, 1], [5, 5])
    second = put_shared(made, ["c"], None, [5])
    assert second >= first + 4


# --- what is registered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize(
    ("about", "error"),
    [({"declared": {"x": "tensor:float32:-1:"}}, SchemaMismatchError), ({"enums": {"x": ["b"]}}, InvalidRequestError)],
)
def test_what_is_declared_while_a_put_is_under_way_holds_for_it(about, error, loads):
    made = ledger()
    begun = made.apply(begin(["a"], strings={"x": ["a"]}), 0.0)
    made.apply(replace(register(epoch="later"), if_exists="keep", **about), 0.0)
    made = saved_and_loaded(made) if loads else made
    with pytest.raises(error):
        made.apply(commands.CommitPut(begun), 0.0)
    with pytest.raises(error):
        put(made, ["b"], strings={"x": None})


def test_what_is_declared_of_a_field_that_lists_left_open_holds_from_then_on():
    made = ledger()
    begun = made.apply(replace(begin(["a"]), specs={"x": FieldSpec.of_ints(0)}), 0.0)
    made.apply(commands.CommitPut(begun), 0.0)
    made.apply(replace(register(epoch="later"), if_exists="keep", declared={"x": "tensor:float32:-1:"}), 0.0)
    with pytest.raises(SchemaMismatchError):
        made.apply(replace(begin(["b"]), specs={"x": FieldSpec("tensor", "int64")}), 0.0)
    made.apply(replace(begin(["b"]), specs={"x": FieldSpec("tensor", "float32")}), 0.0)


def test_a_claim_that_comes_again_after_a_clear_opens_no_partition():
    made, opens = Ledger(), replace(register(), if_exists="keep")
    asks = claim(opens=opens, task="other")
    assert made.may_claim(asks, 0.0)
    assert not made.apply(asks, 0.0).sample_ids
    assert made.partition("p").info.consumer_tasks == ("t", "other")
    for again in (made, saved_and_loaded(made)):
        again.apply(commands.ClearRequest("p", None), 0.0)
        for command in (asks, begin(["a"], opens=opens)):
            with pytest.raises(UnknownPartitionError):
                again.apply(command, 0.0)
    put(made, ["a"], opens=replace(opens, epoch="another"))
    assert made.partition("p").info.epoch == "another"
