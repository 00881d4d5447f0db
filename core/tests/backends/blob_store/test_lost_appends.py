"""A journal whose store appends a record and loses the reply: what was asked is carried out once."""

import pytest
import torch
from blob_stores import Clock, journaled, open_client

from dataplane_core.errors import LostReplyError
from dataplane_testkit import backend_of


def losing():
    """A class of stores of which the append of number ``lose``, from now, does its work and raises."""

    class Loses(journaled()):
        lose = None
        num_lost = 0

        def append(self, seq, record):
            done = super().append(seq, record)
            if self.lose is not None:
                self.lose -= 1
                if self.lose < 0:
                    self.lose = None
                    self.num_lost += 1
                    raise LostReplyError("append failed: the connection was lost.")
            return done

    return Loses


@pytest.mark.parametrize("operation", ["put_samples", "tags", "ack", "nack", "renew"])
def test_any_reply_of_an_operation_may_be_lost(operation):
    cls = losing()
    with open_client(cls) as client, open_client(cls) as other:
        clock = Clock(client, other)
        client.register_partition("p", ["x"], None, ["t"])
        other.register_partition("count", ["x"], None, ["t"])
        lost = -1
        for nth in range(10):
            if backend_of(client).num_lost == lost:
                break
            lost = backend_of(client).num_lost
            name = f"s{nth}"
            if operation != "put_samples":
                other.put_samples([name], "p", {"x": torch.tensor([nth])}, tags=[{"n": nth}])
                held = other.claim_meta("p", "t", ["x"], 1, lease_s=60.0)
            records = len(cls.journal)
            backend_of(client).lose = nth
            if operation == "put_samples":
                client.put_samples([name], "p", {"x": torch.tensor([nth])}, tags=[{"n": nth}])
            elif operation == "tags":
                client.put_samples([name], "p", tags=[{"n": nth}])
            elif operation == "renew":
                client.renew(held, 60.0)
            else:
                getattr(client, operation)(held)
            backend_of(client).lose = None
            assert len(cls.journal) > records
            if operation in ("put_samples", "nack"):
                held = other.claim_meta("p", "t", ["x"], 1, lease_s=60.0)
            if operation != "ack":
                other.ack(held)
            assert held.sample_ids == [name]
            assert other.get_samples([name], "p", ["x"])["x"].tolist() == [nth]
        assert lost >= 1
        assert other.check_consumption_status("p", ["t"])
        assert clock.now == 0.0
        other.clear_samples(None, "p")
        assert not [key for key in backend_of(client).blobs if key.startswith("row")]
