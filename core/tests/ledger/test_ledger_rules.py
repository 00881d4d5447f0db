"""Rules of the ledger that the kit does not see."""

import pickle

import pytest
from ledgers import begin, claim, ledger, put, register, saved_and_loaded
from msgspec.structs import replace

from dataplane_core.errors import CapacityExceededError, InvalidRequestError, SchemaMismatchError, UnknownPartitionError
from dataplane_core.ledger import Ledger, commands
from dataplane_core.ledger.queues import KEPT_S
from dataplane_core.spec import FieldSpec
from dataplane_core.spec.costs import Balance


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


# --- the batches of ranks ---------------------------------------------------------------------------------------------


def put_rows(made, *names, **tags):
    made.apply(commands.PutTags("p", names, [tags] * len(names)), 0.0)


def claim_batch(made, batch_index, count=1, **options):
    options = {"all_or_nothing": False, "token": "token", "dp_rank": 0, "batch_epoch": "e", **options}
    return list(made.apply(claim(count, (), batch_index=batch_index, **options), 0.0).sample_ids)


def test_a_sample_that_was_cleared_and_written_anew_is_of_no_batch_before():
    before = ledger()
    put_rows(before, "a", "b")
    assert claim_batch(before, 0, 2) == ["a", "b"]
    before.apply(commands.ClearRequest("p", ["b"], request_id=None), 0.0)
    put_rows(before, "b")
    for made in (before, saved_and_loaded(before)):
        with pytest.raises(InvalidRequestError, match="samples of it were cleared"):
            claim_batch(made, 0, 2)
        assert claim_batch(made, 1) == claim_batch(made, 1) == ["b"]
        assert claim_batch(made, 2) == []


@pytest.mark.parametrize(("balance", "ranks"), [(None, ["ade", "bcf"]), (Balance("flops", 16), ["aef", "bcd"])])
def test_balanced_ranks_get_about_as_many_tokens_or_as_much_work(balance, ranks):
    made = ledger(6)
    for name, length in zip("abcdef", (90, 60, 50, 10, 8, 1), strict=True):
        put_rows(made, name, input_lengths=length)
    for rank, rows in enumerate(ranks):
        assert claim_batch(made, 0, 3, sampler="balanced", dp_rank=rank, dp_size=2, balance=balance) == list(rows)


# --- how far small puts pass a large one that waits for room ----------------------------------------------------------


class Puts:
    """Puts of one sample each to a ledger with room for 100 bytes. Time is a plain number."""

    def __init__(self):
        self.ledger = ledger(capacity_bytes=100)
        self.now = 0.0

    def put(self, name, size):
        """Whether it went through. Else it waits."""
        try:
            put(self.ledger, [name], size=size, ticket=name, ttl_s=90.0, now=self.now)
            return True
        except CapacityExceededError:
            self.ledger.apply(commands.WaitForRoom(name, size, wait_s=60.0), self.now)
            return False

    def clear(self, *names):
        _, freed = self.ledger.apply(commands.ClearRequest("p", names), self.now)
        self.ledger.apply(commands.Collected(freed), self.now)


def test_small_puts_pass_while_no_room_becomes_free_and_then_no_more_than_the_store_holds():
    puts = Puts()
    assert puts.put("a", 50)
    assert not puts.put("large", 80)
    assert not puts.put("needed", 10)  # those who would clear "a" may wait for just this
    puts.now = 0.9
    assert not puts.put("needed", 10)
    puts.now = 1.1
    assert puts.put("needed", 10)
    puts.clear("needed")  # room became free: the large one is next again
    assert not puts.put("more", 10)
    passed = 10
    for turn in range(30):
        puts.now += 1.5
        puts.put("large", 80)
        if puts.put(f"more{turn}", 10):
            passed += 10
            puts.clear(f"more{turn}")
    assert passed == 100


def test_a_put_that_got_its_room_keeps_nobody_waiting():
    puts = Puts()
    assert puts.put("a", 90)
    assert not puts.put("b", 60)
    puts.clear("a")
    assert puts.put("b", 60)
    assert puts.put("c", 40)


# --- requests that were carried out -----------------------------------------------------------------------------------


def test_ids_are_forgotten_when_their_time_is_over():
    made = ledger()
    made.apply(commands.ClearRequest("p", ["a"], request_id="clear"), 0.0)
    for number in range(100):
        left_s = 5.0 if number % 5 else 5000.0
        made.apply(commands.PutTags("p", ["a"], [{}], request_id=f"r{number}", left_s=left_s), 0.0)
    now = 5.0 + KEPT_S - 1
    for each in (made, saved_and_loaded(made)):
        each.apply(commands.PutTags("p", ["a"], [{}], request_id="x", left_s=0.0), now)
        assert {f"r{number}" for number in range(100)} < set(each._done.kept)
        each.apply(commands.PutTags("p", ["a"], [{}], request_id="y", left_s=0.0), now + 2)
        assert "clear" not in each._done
        assert {name for name in each._done.kept if name[0] == "r"} == {f"r{number}" for number in range(0, 100, 5)}
