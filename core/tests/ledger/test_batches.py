"""What the ledger keeps of the batches that ranks were given."""

import pytest
from histories import saved_and_loaded
from ledgers import ledger as registered

from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger import commands
from dataplane_core.ledger.state import pack_state


@pytest.fixture
def made():
    return registered()


def put(ledger, *names):
    ledger.apply(commands.PutTags("p", names, [{}] * len(names)), 0.0)


def clear(ledger, *names):
    ledger.apply(commands.ClearRequest("p", names, request_id=None), 0.0)


def claim(ledger, batch_index, count=1, **options):
    options = {"all_or_nothing": False, "lease_s": None, "token": "token", "dp_rank": 0, **options}
    command = commands.ClaimRequest("p", "t", [], count, batch_index=batch_index, batch_epoch="e", **options)
    return list(ledger.apply(command, 0.0).sample_ids)


def size_bytes(ledger):
    return len(pack_state(ledger))


def test_a_sample_that_was_cleared_and_written_anew_is_of_no_batch_before(made):
    put(made, "a", "b")
    assert claim(made, 0, 2) == ["a", "b"]
    clear(made, "b")
    put(made, "b")
    for ledger in (made, saved_and_loaded(made)):
        with pytest.raises(InvalidRequestError, match="samples of it were cleared"):
            claim(ledger, 0, 2)
        assert claim(ledger, 1) == claim(ledger, 1) == ["b"]
        assert claim(ledger, 2) == []


@pytest.mark.parametrize("options", [{}, {"sampler": "balanced", "dp_size": 2}])
def test_batches_whose_rows_are_cleared_cost_nothing(made, options):
    put(made, "stays", "stays too")
    first = claim(made, 0, 2, **options)
    sizes = []
    for number in range(1, 801):
        put(made, "a", "b")
        assert claim(made, number, 2, **options)
        clear(made, "a", "b")
        if number % 200 == 0:
            sizes.append(size_bytes(made))
    assert max(sizes) < sizes[0] + 50  # numbers become longer
    for ledger in (made, saved_and_loaded(made)):
        assert claim(ledger, 0, 2, **options) == first
        for number in (1, 400, 800):
            with pytest.raises(InvalidRequestError, match="samples of it were cleared"):
                claim(ledger, number, 2, **options)


def test_what_one_claim_chose_for_all_ranks_stays_so():
    ranks = {"dp_size": 3, "all_or_nothing": True, "lease_s": 5.0}
    made = registered(5)
    put(made, *"abcde")
    for ledger in (made, saved_and_loaded(made)):
        claims = [
            commands.ClaimRequest("p", "t", [], 1, token=f"{index} {rank}", dp_rank=rank, batch_index=index, **ranks)
            for index, rank in [(0, 2), (0, 0), (0, 1), (1, 2), (1, 1), (1, 0), (2, 0)]
        ]
        found = [(each.token, ledger.apply(each, 0.0)) for each in claims]
        assert [(token, "".join(claim.sample_ids), claim.num_ranks) for token, claim in found] == [
            *[("0 2", "c", 3), ("0 0", "a", 3), ("0 1", "b", 3)],
            *[("1 2", "", 2), ("1 1", "e", 2), ("1 0", "d", 2), ("2 0", "", 0)],
        ]
        ledger.apply(commands.NackRequest("p", "t", ["a"], ["0 2"]), 0.0)
        for later in (ledger, saved_and_loaded(ledger)):
            end = commands.ClaimRequest("p", "t", [], 1, token="later", dp_rank=1, batch_index=2, **ranks)
            assert not later.may_claim(end, 0.0)
            told = later.apply(end, 0.0)
            assert (list(told.sample_ids), told.exhausted, told.num_ranks) == ([], True, 0)
            assert claim(later, 3, **ranks) == ["a"]
            assert claim(later, 1, **ranks) == ["d"]


def test_batches_of_any_index_are_refused_once_they_are_gone_and_no_others(made):
    given = [7, 3, 5, 4, 100, 6, 0]
    for number in given:
        put(made, "a")
        assert claim(made, number) == ["a"]
        clear(made, "a")
    for number in range(101):
        if number in given:
            with pytest.raises(InvalidRequestError):
                claim(made, number)
        else:
            assert claim(made, number) == []
