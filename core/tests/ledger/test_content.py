"""Rows that are kept by content, while puts that rely on them are under way."""

import pytest
from ledgers import register, saved_and_loaded
from msgspec.structs import replace

from dataplane_core.errors import ContentGoneError
from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import FieldSpec

IMAGE, OTHER, PROBE = b"i" * 16, b"o" * 16, b"p" * 8
SPECS = {"x": FieldSpec("tensor", "uint8", 1)}


def begin(ledger, name, write_id, brought=(), known=(), partition_id="p"):
    """Begins a put of one sample for each row."""
    ids = [f"{name}{number}" for number in range(len(brought) + len(known))]
    write = commands.Write(["x"], [100] * len(brought), list(range(len(ids))), brought, known)
    put = commands.BeginPut(partition_id, ids, SPECS, [write], None, write_id=write_id, ttl_s=9.0)
    put.check()
    return ledger.apply(put, 0.0)


@pytest.fixture
def ledger():
    ledger = Ledger()
    for name in ("p", "q"):
        ledger.apply(replace(register(), partition_id=name), 0.0)
    return ledger


def put(ledger, *args, **kwargs):
    return ledger.apply(commands.CommitPut(begin(ledger, *args, **kwargs)), 0.0)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("ending", ["commit", "abort", "expiry"])
def test_a_row_stays_while_a_put_relies_on_it(ledger, ending, loaded):
    put(ledger, "a", 10, [IMAGE])
    begin(ledger, "b", 20, known=[(10, 0)], partition_id="q")
    assert ledger.apply(commands.ClearRequest("p", None), 0.0)[1] == []
    assert ledger.payload()[10] == ([100], [0])
    ledger = saved_and_loaded(ledger) if loaded else ledger
    assert ledger.held_bytes == 100
    if ending == "commit":
        assert ledger.apply(commands.CommitPut(20), 0.0) == []
        assert ledger.partition("q").held_bytes == 100
        assert ledger.apply(commands.ClearRequest("q", ["b0"]), 0.0)[1] == [(10, 0)]
    elif ending == "abort":
        assert ledger.apply(commands.AbortPut(20), 0.0) == [(10, 0)]
    else:
        assert ledger.garbage(10.0) == [(10, 0)]
    assert (ledger.held_bytes, ledger.content_refs()) == (0, [])


def test_of_two_puts_that_bring_a_cell_the_first_that_is_committed_keeps_its_row(ledger):
    begin(ledger, "a", 10, [IMAGE])
    begin(ledger, "b", 20, [OTHER, IMAGE])
    assert ledger.held_bytes == 300
    assert ledger.apply(commands.CommitPut(20), 0.0) == []
    assert ledger.apply(commands.CommitPut(10), 0.0) == [(10, 0)]
    assert ledger.held_bytes == 200
    (part,) = ledger.apply(commands.Locate("p", ["a0"], ["x"]), 0.0).parts
    assert (part.write_id, part.positions, part.by_content) == (20, [1], True)


def test_of_two_puts_that_bring_a_probe_one_must_ask_again(ledger):
    begin(ledger, "a", 10, [PROBE])
    put(ledger, "b", 20, [OTHER, PROBE])
    for step in (lambda: ledger.apply(commands.CommitPut(10), 0.0), lambda: begin(ledger, "a", 30, [PROBE])):
        with pytest.raises(ContentGoneError, match="Ask again"):
            step()
    assert ledger.garbage(0.0) == [(10, 0)]
    assert ledger.apply(commands.FindContent([PROBE]), 0.0) == {PROBE: (20, 1)}
    put(ledger, "a", 30, known=[(20, 1)])
    assert ledger.held_bytes == 200


def test_a_begin_that_is_repeated_with_other_rows_is_another_one(ledger):
    def begin_again(*brought):
        write = commands.Write(["x"], [100] * len(brought), list(range(len(brought))), brought)
        ids = [f"a{number}" for number in range(len(brought))]
        return ledger.apply(commands.BeginPut("p", ids, SPECS, [write], None, ttl_s=9.0, request_id="r"), 0.0)

    first = begin_again(IMAGE, OTHER)
    assert begin_again(IMAGE, OTHER) == first
    assert begin_again(OTHER) != first


def test_equal_cells_of_two_columns_of_a_put_are_kept_once(ledger):
    writes = [commands.Write([name], [100], [0], [IMAGE]) for name in ("x", "y")]
    begun = commands.BeginPut("p", ["a"], dict.fromkeys("xy", SPECS["x"]), writes, write_id=10, ttl_s=9.0)
    ledger.apply(begun, 0.0)
    assert ledger.apply(commands.CommitPut(10), 0.0) == [(11, 0)]
    assert ledger.held_bytes == 100


def test_what_is_gone_or_lost_must_be_brought(ledger):
    put(ledger, "a", 10, [IMAGE])
    begin(ledger, "b", 20, known=[(10, 0)])
    ledger.apply(commands.ForgetContent([(10, 0), (99, 0)]), 0.0)
    assert ledger.apply(commands.FindContent([IMAGE, OTHER]), 0.0) == {}
    with pytest.raises(ContentGoneError):
        ledger.apply(commands.CommitPut(20), 0.0)
    for ref in ((10, 0), (10, 1), (10, -1), (99, 0)):
        with pytest.raises(ContentGoneError):
            begin(ledger, "c", 30, known=[ref])
    put(ledger, "b", 40, [IMAGE])
    ledger = saved_and_loaded(ledger)
    assert ledger.content_refs() == [(40, 0)]
    assert ledger.held_bytes == 200
    assert sorted(ledger.apply(commands.ClearRequest("p", None), 0.0)[1]) == [(10, 0), (40, 0)]
    assert ledger.held_bytes == 0
