"""The commands as objects: they travel, cannot be changed, and forged ones are refused before they run."""

import pickle
from functools import partial

import pytest
from ledgers import begin, claim, ledger, register
from msgspec.structs import replace

from dataplane_core.errors import InvalidRequestError, UnknownPartitionError
from dataplane_core.hosting import Messages
from dataplane_core.ledger import Command, Ledger, LedgerService, commands
from dataplane_core.ledger.state import pack_state
from dataplane_core.spec import ClientInfo

PUT = begin(["a"], tags=[{"n": 1}], write_id=1)
CLAIM = claim(all_or_nothing=False, lease_s=5.0, token="k", holder="h")
ONE_OF_EACH = [
    register(),
    commands.DescribeRequest("p"),
    PUT,
    commands.WaitForRoom("ticket", 8, wait_s=1.0),
    commands.CommitPut(1),
    commands.AbortPut(2),
    commands.PutTags("p", ["a"], [{"n": 2}]),
    commands.FindContent([bytes(16)]),
    commands.ForgetContent([(1, 0)]),
    commands.Locate("p", ["a"], ["x"]),
    commands.ListRequest("p"),
    commands.ListPartitionsRequest(),
    commands.InspectRequest("p"),
    commands.FieldsRequest("p", ["a"]),
    commands.ExportRequest("p"),
    commands.AnnounceRequest(ClientInfo(client_id="c", host="h", pid=1, role="r", open_s=0.0), ttl_s=9.0),
    commands.ListClientsRequest(),
    commands.SetCursorRequest("p", "u", ["a"], create=True),
    CLAIM,
    commands.RenewRequest("p", "t", ["a"], ["k"], 5.0),
    commands.NackRequest("p", "t", ["a"], ["k"]),
    replace(CLAIM, token="l"),
    commands.AckRequest("p", "t", ["a"], ["l"]),
    commands.ConsumptionRequest("p", ["t"]),
    commands.ClearRequest("p", ["a"]),
    commands.Collected([(1, 0)]),
]


def test_each_answers_alike_after_a_journey_and_what_only_reads_changes_nothing():
    here, there = LedgerService(clock=lambda: 0.0), LedgerService(clock=lambda: 0.0)
    for command in ONE_OF_EACH:
        arrived, before = pickle.loads(pickle.dumps(command)), pack_state(here.ledger)
        assert arrived == command
        assert there.call(arrived) == here.call(command)
        if command.reads:
            assert pack_state(here.ledger) == before


def test_all_are_listed_and_their_names_differ():
    made = [each for each in vars(commands).values() if isinstance(each, type) and issubclass(each, Command)]
    assert {each for each in made if hasattr(each, "op")} == set(commands.COMMANDS)
    assert {type(each) for each in ONE_OF_EACH} == set(commands.COMMANDS)
    assert len({each.op for each in commands.COMMANDS}) == len(commands.COMMANDS)


def test_a_command_cannot_be_changed_and_a_stranger_is_refused():
    with pytest.raises(AttributeError):
        PUT.write_id = 2
    with pytest.raises(TypeError, match="the ledger knows no command 'str'"):
        Ledger().apply("describe", 0.0)
    with pytest.raises(UnknownPartitionError):
        Ledger().apply(commands.DescribeRequest("p"), 0.0)


# --- forged ones ------------------------------------------------------------------------------------------------------

MESSAGES = Messages()
#: What they differ from.
a_put, a_claim = partial(replace, begin(["a", "b"], "xy", write_id=1)), partial(replace, CLAIM)


def together(row_bytes):
    return a_put(writes=[commands.Write(["x", "y"], row_bytes)])


def apart(row_bytes, positions, fields=("y",)):
    return a_put(writes=[commands.Write(["x"], [8, 8]), commands.Write(list(fields), row_bytes, positions)])


FORGED = [
    together([8]),
    together([8, -8]),
    together([2**60, 8]),
    a_put(writes=[]),
    a_put(sample_ids=["a", "a"]),
    a_put(tags=[{}]),
    a_put(write_id=-1),
    a_put(ttl_s=float("nan")),
    apart([8], [0, 1]),
    apart([8, 8], [0, 0]),
    apart([8], [0]),
    apart([8], None),
    apart([8, 8], None, ["z"]),
    apart([8, 8], None, ["x", "y"]),
    a_put(writes=[commands.Write([], [8, 8]), commands.Write(["x", "y"], [8, 8])]),
    a_put(specs={}),
    commands.RegisterRequest("p", [], -1, [], None, {}, "e"),
    commands.RegisterRequest("p", [], None, [], 0, {}, "e"),
    commands.CommitPut(-1),
    commands.WaitForRoom("k", -8, wait_s=1.0),
    commands.WaitForRoom("k", 8, wait_s=float("nan")),
    commands.PutTags("p", ["a", "b"], [{}]),
    commands.Locate("p", ["a"], []),
    commands.ListRequest("p", {"n": ("~", 1)}),
    a_claim(batch_size=0),
    a_claim(lease_s=float("inf")),
    a_claim(lease_s=-1.0),
    a_claim(tag_filter={"n": ("in", 3)}),
    a_claim(sampler="balanced"),
    a_claim(sampler="balanced", dp_rank=0, dp_size=2**40),
    a_claim(dp_rank=2, dp_size=2),
    commands.AckRequest("p", "t", ["a", "b"], ["k"]),
    commands.RenewRequest("p", "t", ["a"], ["k"], float("nan")),
]


@pytest.mark.parametrize("command", FORGED, ids=lambda command: command.op)
def test_a_command_whose_parts_do_not_fit_is_refused(command):
    with pytest.raises(InvalidRequestError, match=r"refused|is no request|tag_filter"):
        MESSAGES.decode_request(MESSAGES.encode_request(command)[4:])  # as a host reads it from a socket


def test_a_write_id_is_used_once():
    made = ledger()
    made.apply(a_put(), 0.0)
    with pytest.raises(InvalidRequestError, match="write id"):
        made.apply(a_put(sample_ids=["c", "d"]), 0.0)
    made.apply(commands.CommitPut(1), 0.0)
    with pytest.raises(InvalidRequestError, match="write id"):
        made.apply(a_put(sample_ids=["c", "d"]), 0.0)
    assert made.held_bytes == 16
