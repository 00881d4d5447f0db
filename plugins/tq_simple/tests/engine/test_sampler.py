"""The sampler alone, as the controller calls it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane_core.errors import BackendError, BackendUnavailableError, LeaseExpiredError
from dataplane_tq_simple._sampler import CALL_KEY, PING, UNITS, LedgerSampler, decode_reply, encode_call


@pytest.fixture
def sampler(stand_in: type) -> LedgerSampler:
    return LedgerSampler(stand_in)


def answer(sampler: LedgerSampler, call: bytes) -> bytes:
    partition = SimpleNamespace(custom_meta={})
    rows, consumed = sampler([], 0, partition=partition, **{CALL_KEY: call})
    assert consumed == []
    reply: bytes = partition.custom_meta[rows[0]][CALL_KEY]
    return reply


def call(sampler: LedgerSampler, name: str, *args: Any) -> Any:
    executed, result, _ = decode_reply(answer(sampler, encode_call(name, args, None)))
    assert executed
    return result


def test_a_call_reaches_the_service_and_its_result_comes_back(sampler: LedgerSampler) -> None:
    assert call(sampler, "echo", {"a": [1, b"2"]}) == {"a": [1, b"2"]}
    assert call(sampler, PING)["service"] == "StandIn"


def test_a_data_plane_error_comes_back_as_itself(sampler: LedgerSampler) -> None:
    with pytest.raises(LeaseExpiredError, match="too late") as caught:
        call(sampler, "expire")
    assert caught.value.sample_ids == ("a", "b")
    assert caught.value.hint == "Renew sooner."


def test_any_other_exception_comes_back_with_its_traceback(sampler: LedgerSampler) -> None:
    with pytest.raises(BackendError, match="ZeroDivisionError") as caught:
        call(sampler, "divide", 0)
    assert "in divide" in str(caught.value.__cause__)


@pytest.mark.parametrize("name", ["exit", "return_a_lambda", "no_such_method", "_execute", "__init__", "total"])
def test_no_call_gets_past_the_sampler(sampler: LedgerSampler, name: str) -> None:
    with pytest.raises(BackendError, match=name):
        call(sampler, name)
    assert call(sampler, "echo", 1) == 1


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x80", b"not a pickle", pickle.dumps(1), pickle.dumps((1, 2, None, None)), pickle.dumps(("echo",))],
)
def test_garbage_is_answered_with_an_error(sampler: LedgerSampler, garbage: bytes) -> None:
    with pytest.raises(BackendError):
        decode_reply(answer(sampler, garbage))


def test_requests_of_other_clients_get_no_rows(sampler: LedgerSampler) -> None:
    partition = SimpleNamespace(custom_meta={})
    assert sampler([3, 4], 2, partition=partition) == ([], [])
    assert sampler([3, 4], 2, partition=None, **{CALL_KEY: b""}) == ([], [])
    assert sampler([3, 4], 2, "positional", partition=partition, dp_rank=1, **{CALL_KEY: 5}) == ([], [])


def test_an_expired_call_is_not_executed(sampler: LedgerSampler) -> None:
    _, _, now_s = decode_reply(answer(sampler, encode_call(PING, (), None)))
    executed, _, _ = decode_reply(answer(sampler, encode_call("note", ("late",), now_s - 1)))
    assert not executed
    assert call(sampler, "note", "in time") == ["in time"]


def test_a_call_that_was_done_is_answered_though_the_book_of_units_cannot_be_saved(
    sampler: LedgerSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_book() -> None:
        raise BackendUnavailableError("the journal's disk is full. Nothing was done.")

    call(sampler, PING)
    monkeypatch.setattr(sampler, "_save_book", save_book)
    assert call(sampler, "note", "done") == ["done"]
    with pytest.raises(BackendUnavailableError):
        call(sampler, UNITS, "view")  # a controller that is started again would not know it


def test_the_factory_runs_in_the_controller_and_its_failure_is_reported(broken_factory: Any) -> None:
    sampler = LedgerSampler(broken_factory)
    with pytest.raises(LeaseExpiredError, match="no service today"):
        call(sampler, PING)
