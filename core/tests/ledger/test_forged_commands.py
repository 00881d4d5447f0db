"""Commands that no client makes are refused before they run, so that they change nothing for other clients."""

import pytest
from ledgers import ledger

from dataplane_core.errors import InvalidRequestError
from dataplane_core.hosting import Messages
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec

MESSAGES = Messages()
X = FieldSpec("tensor", "int64", 1)


def put(**others):
    made = {"sample_ids": ["a", "b"], "specs": {"x": X, "y": X}, "write_id": 1, "ttl_s": 9.0}
    return commands.BeginPut("p", **{**made, "writes": [commands.Write(["x", "y"], [8, 8])], **others})


def claim(**others):
    made = {"all_or_nothing": False, "lease_s": 5.0, "token": "k", **others}
    return commands.ClaimRequest("p", "t", ["x"], made.pop("batch_size", 2), **made)


def read(command):
    """The command, as a host reads it from a socket."""
    return MESSAGES.decode_request(MESSAGES.encode_request(command)[4:])


def together(row_bytes):
    return put(writes=[commands.Write(["x", "y"], row_bytes)])


def apart(row_bytes, positions, fields=("y",), others=("x",)):
    return put(writes=[commands.Write(list(others), [8, 8]), commands.Write(list(fields), row_bytes, positions)])


FORGED = [
    together([8]),
    together([8, -8]),
    together([2**60, 8]),
    put(writes=[]),
    put(sample_ids=["a", "a"]),
    put(tags=[{}]),
    put(write_id=-1),
    put(ttl_s=float("nan")),
    apart([8], [0, 1]),
    apart([8, 8], [0, 0]),
    apart([8], [0]),
    apart([8], None),
    apart([8, 8], None, ["z"]),
    apart([8, 8], None, ["x", "y"]),
    apart([8, 8], None, ["x", "y"], []),
    put(specs={}),
    commands.RegisterRequest("p", [], -1, [], None, {}, "e"),
    commands.RegisterRequest("p", [], None, [], 0, {}, "e"),
    commands.CommitPut(-1),
    commands.WaitForRoom("k", -8, wait_s=1.0),
    commands.WaitForRoom("k", 8, wait_s=float("nan")),
    commands.PutTags("p", ["a", "b"], [{}]),
    commands.Locate("p", ["a"], []),
    commands.ListRequest("p", {"n": ("~", 1)}),
    claim(batch_size=0),
    claim(lease_s=float("inf")),
    claim(lease_s=-1.0),
    claim(tag_filter={"n": ("in", 3)}),
    claim(sampler="balanced"),
    claim(sampler="balanced", dp_rank=0, dp_size=2**40),
    claim(dp_rank=2, dp_size=2),
    commands.AckRequest("p", "t", ["a", "b"], ["k"]),
    commands.RenewRequest("p", "t", ["a"], ["k"], float("nan")),
]


@pytest.mark.parametrize("command", FORGED, ids=lambda command: command.op)
def test_a_command_whose_parts_do_not_fit_is_refused(command):
    with pytest.raises(InvalidRequestError, match=r"refused|is no request|tag_filter"):
        read(command)


def test_what_clients_make_is_accepted():
    for command in (
        *(put(), put(writes=[commands.Write(["x", "y"], [8], [0, 0])]), put(specs={}, writes=[]), apart([8, 8], None)),
        *(claim(), claim(sampler="balanced", dp_rank=1, dp_size=2), claim(lease_s=None, dp_rank=7)),
        *(commands.AckRequest("p", "t", ["a", "a"], ["k", "k"]), commands.WaitForRoom("k", 8, wait_s=-1.0)),
    ):
        assert read(command) == command


def test_a_write_id_is_used_once():
    made = ledger()
    made.apply(put(), 0.0)
    with pytest.raises(InvalidRequestError, match="write id"):
        made.apply(put(sample_ids=["c", "d"]), 0.0)
    made.apply(commands.CommitPut(1), 0.0)
    with pytest.raises(InvalidRequestError, match="write id"):
        made.apply(put(sample_ids=["c", "d"]), 0.0)
    assert made.held_bytes == 16


def test_a_sample_that_is_named_twice_is_given_back_once():
    made = ledger()
    made.apply(put(), 0.0)
    made.apply(commands.CommitPut(1), 0.0)
    made.apply(claim(), 0.0)
    made.apply(commands.NackRequest("p", "t", ["a", "a", "b"], ["k"] * 3), 0.0)
    assert made.apply(claim(), 0.0).sample_ids == ["a", "b"]
