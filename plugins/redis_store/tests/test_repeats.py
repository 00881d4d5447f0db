"""Puts, acks, nacks and renewals whose reply was lost are repeated, and carried out once."""

import time

import pytest
import torch

from dataplane_core.errors import BackendUnavailableError, LostReplyError
from dataplane_core.spec import AckRequest, NackRequest, RenewRequest, new_id
from dataplane_redis import _claims
from dataplane_testkit import backend_of


@pytest.fixture
def cutter(plain, start_relay):
    """Can lose replies."""
    return start_relay(plain.port)


_CASES = [("put_samples", 1, 2), ("put_samples", 3, 200_000), ("put_samples", 1, 0), ("ack", 2, 2), ("ack", 250, 2)]
_CASES += [("nack", 2, 2), ("nack", 250, 2), ("renew", 250, 2)]


def test_an_operation_of_which_any_reply_was_lost_is_carried_out_once(plain, cutter, connect, monkeypatch):
    """Each operation is called until it ends without a loss: first its first reply is lost, then its second, ..."""
    monkeypatch.setattr(_claims, "_GIVE_ROWS", 100)  # more take several scripts
    made = connect(url=cutter.url, namespace="repeats", op_timeout_s=60.0)
    other = connect(url=plain.url, namespace="repeats", op_timeout_s=60.0)
    made.register_partition("p", ["x"], None, ["train"])

    def claim(count):
        return other.claim_meta("p", "train", [], count, blocking=False, lease_s=600)

    def call(operation, count, size, pass_on):
        """Calls it with the reply of that number lost. Returns whether that reply came."""
        number, num_cuts = len(other.list_samples("p").sample_ids), cutter.num_cuts
        ids = [f"s{number + each}" for each in range(count)]
        columns = {"x": torch.full((count, size), number)} if size else None
        if operation == "put_samples":
            cutter.pass_on = pass_on
            made.put_samples(ids, "p", columns, tags=[{"n": number}] * count)
        else:
            other.put_samples(ids, "p", columns)
        held = claim(count + 1)
        assert held.sample_ids == ids  # what was put before is all acked
        cutter.pass_on = pass_on if operation != "put_samples" else None
        if operation == "ack":
            made.ack(held)
        elif operation == "nack":
            made.nack(held)
            held = claim(count + 1)
            assert held.sample_ids == ids
        elif operation == "renew":
            made.renew(held, 300)
        cutter.pass_on = None
        if operation != "ack":
            other.ack(held)
        if columns is not None:
            assert other.get_samples(ids[-1:], "p", ["x"])["x"][0, 0] == number
        assert other.check_consumption_status("p", ["train"])
        return cutter.num_cuts > num_cuts

    for case in _CASES:
        num_lost = next(nth for nth in range(100) if not call(*case, nth))
        assert num_lost, f"no reply of {case} was lost"
    other.clear_samples(list(other.list_samples("p").sample_ids), "p")
    kept = plain.admin("KEYS", "dp:{repeats}:done:*")
    assert kept
    assert all(plain.admin("PTTL", each) > 0 for each in kept)
    assert int(plain.admin("HGET", "dp:{repeats}:instance", "held")) == 0
    assert not plain.admin("KEYS", "dp:{repeats}:w:*")


def test_the_error_at_the_deadline_says_what_is_known(plain, cutter, connect, told_in_time):
    made = connect(url=cutter.url, namespace="known", partition="p")
    rows = {"x": torch.ones(1, 2)}
    made.put_samples(["first"], "p", rows)  # else the server lacks the script

    def loses_the_reply():
        cutter.refuses = False
        made.ping()  # there is a connection
        cutter.pass_on, cutter.refuses = 0, True
        made.put_samples(["a"], "p", rows)

    repeated = r"It may have been done or not\. It was repeated: "
    assert told_in_time(loses_the_reply, LostReplyError, repeated, 2.0).outcome == "unknown"
    not_sent = told_in_time(
        lambda: made.put_samples(["b"], "p", rows), BackendUnavailableError, r"It was not done\.", 1.0
    )
    assert not_sent.outcome == "not_done"
    cutter.refuses = False
    assert made.list_samples("p").sample_ids == ["first", "a"]


@pytest.mark.parametrize("operation", ["ack", "nack", "renew"])
def test_a_settling_that_was_carried_out_between_two_scripts_of_its_repetition_succeeds(
    plain, connect, scripts_of, monkeypatch, operation
):
    one = connect(url=plain.url, op_timeout_s=60.0)
    two = connect(url=plain.url, namespace=one.config.options["namespace"], bootstrap=False, op_timeout_s=60.0)
    one.register_partition("p", ["x"], None, ["train"])
    ids = [f"s{row}" for row in range(450)]
    one.put_samples(ids, "p", tags=[{}] * len(ids))
    kinds = {"ack": AckRequest, "nack": NackRequest, "renew": RenewRequest}

    def repeats(act_at):
        """Whether a repetition of the request ran so many scripts. After that number, the first request is done."""
        monkeypatch.setattr(_claims, "_GIVE_ROWS", 200)
        one.reset_consumption("p", "train")
        held = one.claim_meta("p", "train", [], len(ids), lease_s=600).subset(range(1, len(ids)))
        request = kinds[operation](
            partition_id="p",
            task_name="train",
            sample_ids=held.sample_ids,
            lease_tokens=held.lease_tokens,
            deadline=time.monotonic() + 60,
            request_id=new_id(),
            **({"lease_s": 60.0} if operation == "renew" else {}),
        )
        ran = scripts_of(one, act_at, lambda: getattr(backend_of(two), operation)(request))
        assert getattr(backend_of(one), operation)(request).num_samples == len(ids) - 1
        monkeypatch.undo()
        return len(ran) >= act_at

    num_scripts = next(number for number in range(1, 100) if not repeats(number))
    assert num_scripts > 5
