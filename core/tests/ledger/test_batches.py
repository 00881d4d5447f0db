"""What the ledger keeps of the batches that ranks were given."""

import msgpack
import pytest
from histories import saved_and_loaded
from ledgers import ledger as registered

from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger import commands, to_state


@pytest.fixture
def made():
    return registered()


def put(ledger, *names):
    ledger.apply(commands.PutTags("p", names, [{}] * len(names), None), 0.0)


def clear(ledger, *names):
    ledger.apply(commands.ClearRequest("p", names), 0.0)


def claim(ledger, batch_index, count=1, **options):
    options = {"all_or_nothing": False, "lease_s": None, "token": "token", "dp_rank": 0, **options}
    command = commands.ClaimRequest("p", "t", [], count, batch_index=batch_index, batch_epoch="e", **options)
    return list(ledger.apply(command, 0.0).sample_ids)


def size_bytes(ledger):
    return sum(len(msgpack.packb(section)) for section in to_state(ledger, 0.0))


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
