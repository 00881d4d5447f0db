"""A client repeats what lost its reply, and says at the end whether it was carried out."""

import copy

import pytest
import torch

from dataplane_core import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import (
    BackendUnavailableError,
    CapacityExceededError,
    LeaseExpiredError,
    LostReplyError,
    OperationTimeoutError,
    RoomTimeoutError,
)
from dataplane_core.spec import Capability
from dataplane_noop import NoopBackend
from dataplane_testkit import backend_of


class Fails(NoopBackend):
    """Raises the next of ``errors`` for each put or ack: a lost reply after it was carried out, others instead."""

    def __init__(self, config):
        super().__init__(config)
        self.errors, self.requests = [], []

    def put_samples(self, request):
        return self._act(super().put_samples, request)

    def ack(self, request):
        return self._act(super().ack, request)

    def _act(self, act, request):
        self.requests.append(request.request_id)
        error = self.errors.pop(0) if self.errors else None
        if error is None or type(error) is LostReplyError:
            reply = act(request)
        if error is not None:
            raise error
        return reply


class FailsForGood(Fails):
    capabilities = NoopBackend.capabilities - {Capability.REPEATABLE}


def opened(cls=Fails, **config):
    client = connect_backend(cls, DataPlaneConfig(backend="fails", op_timeout_s=60.0, **config), bootstrap=True)
    client.register_partition("p", ["x"], None, ["t"])
    return client


def put(client, *errors, name="a"):
    """A put that meets these errors."""
    backend_of(client).errors = list(errors)
    return client.put_samples([name], "p", {"x": torch.ones(1)})


def test_a_lost_reply_is_repeated_with_the_same_id_however_the_store_fails_meanwhile():
    with opened() as client:
        backend = backend_of(client)
        put(client, LostReplyError("lost"), BackendUnavailableError("down"), LostReplyError("lost"), None)
        held = client.claim_meta("p", "t", ["x"], 1, lease_s=60.0)
        backend.errors = [LostReplyError("lost")]
        client.ack(held)
        put(client, name="b")
        puts, acks = backend.requests[:4], backend.requests[4:6]
        assert (len(set(puts)), len(set(acks)), len(set(backend.requests))) == (1, 1, 3)
        assert all(len(each) == 32 for each in backend.requests)


def test_what_was_not_sent_or_may_not_be_repeated_is_not_repeated():
    for cls, error in (
        (Fails, BackendUnavailableError("down", outcome="not_done")),
        (Fails, OperationTimeoutError("slow")),
        (FailsForGood, LostReplyError("lost")),
    ):
        with opened(cls) as client:
            with pytest.raises(type(error)) as caught:
                put(client, error)
            assert caught.value is error
            assert len(backend_of(client).requests) == 1


LOST, NOT_DONE = LostReplyError("gone."), OperationTimeoutError("x.", outcome="not_done")
DONE = OperationTimeoutError("x.", outcome="done")
GONE = BackendUnavailableError("gone.", retryable=False, outcome="not_done")


@pytest.mark.parametrize(
    ("errors", "raised", "outcome", "words"),
    [
        ([BackendUnavailableError("down.")], BackendUnavailableError, "unknown", "It may have been done or not."),
        ([DONE], OperationTimeoutError, "done", "It was done."),
        ([NOT_DONE], OperationTimeoutError, "not_done", "It was not done."),
        ([GONE], BackendUnavailableError, "not_done", "It was not done."),
        ([LOST, NOT_DONE], LostReplyError, "unknown", "gone. It may have been done or not. It was repeated: x."),
        ([LOST, DONE], OperationTimeoutError, "done", "done."),
        ([LOST, LeaseExpiredError("refused.")], LeaseExpiredError, None, "refused."),
    ],
)
def test_the_error_at_the_end_says_what_is_known(errors, raised, outcome, words):
    with opened() as client:
        with pytest.raises(raised) as caught:
            put(client, *map(copy.copy, errors))
        assert (type(caught.value), getattr(caught.value, "outcome", None)) == (raised, outcome)
        assert words in str(caught.value)


def test_a_store_that_is_gone_for_good_is_not_to_be_asked_again_and_a_put_that_waited_for_room_is_not_done():
    gone = BackendUnavailableError("it has ended.", retryable=False, hint="Connect again.")
    with opened() as client:
        with pytest.raises(LostReplyError, match="It was repeated: it has ended") as caught:
            put(client, LostReplyError("gone."), gone)
        assert (caught.value.retryable, caught.value.hint) == (False, "Connect again.")
        late = RoomTimeoutError.after(CapacityExceededError("full."))
        with pytest.raises(RoomTimeoutError) as caught:
            put(client, LostReplyError("gone."), late)
        assert (caught.value, caught.value.outcome) == (late, "not_done")
