"""The commands as objects: they travel between processes, cannot be changed, and the ledger knows them all."""

import pickle

import pytest
from ledgers import begin, register
from msgspec.structs import replace

from dataplane_core.errors import UnknownPartitionError
from dataplane_core.ledger import Command, Ledger, LedgerService, commands
from dataplane_core.ledger.state import pack_state
from dataplane_core.spec import ClientInfo

PUT = begin(["a"], tags=[{"n": 1}], write_id=1)
CLAIM = commands.ClaimRequest("p", "t", ["x"], 1, all_or_nothing=False, lease_s=5.0, token="k", holder="h")
ONE_OF_EACH = [
    register(),
    commands.DescribeRequest("p"),
    PUT,
    commands.WaitForRoom("ticket", 8, wait_s=1.0),
    commands.CommitPut(1),
    commands.AbortPut(2),
    commands.PutTags("p", ["a"], [{"n": 2}]),
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
