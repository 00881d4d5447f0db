"""`BlobStore`: one process without a journal, many with one; every process comes to the same state."""

import itertools

import pytest
import torch

from dataplane_core import BlobStore, Capability, DataPlaneConfig
from dataplane_core.capabilities import Scope
from dataplane_core.errors import BackendError, BackendUnavailableError, CorruptDataError, LeaseExpiredError
from dataplane_core.registry import connect_backend


class Plain(BlobStore):
    """Blobs in a dict."""

    def __init__(self, config):
        super().__init__(config)
        self.blobs = {}

    def put(self, key, data):
        self.blobs[key] = data

    def get(self, key):
        return self.blobs.get(key)

    def delete(self, key):
        self.blobs.pop(key, None)


def journaled():
    """A class whose instances share one store, as processes share a disk."""
    blobs, journal = {}, {}

    class Shared(Plain):
        def __init__(self, config):
            super().__init__(config)
            self.blobs, self.journal = blobs, journal

        def append(self, seq, record):
            return journal.setdefault(seq, record) is record

        def read(self, from_seq):
            return list(itertools.takewhile(lambda r: r is not None, map(journal.get, itertools.count(from_seq))))

    return Shared


def open_client(cls, bootstrap=True):
    return connect_backend(cls, DataPlaneConfig(backend="blobs", op_timeout_s=5), bootstrap=bootstrap)


def test_without_a_journal_the_scope_is_process_and_attaching_is_refused():
    assert Plain.scope is Scope.PROCESS
    assert Capability.DURABLE not in Plain.capabilities
    with pytest.raises(BackendUnavailableError, match="lives in one process"):
        open_client(Plain, bootstrap=False)


def test_with_a_journal_it_is_durable_and_others_attach():
    cls = journaled()
    assert cls.scope is Scope.HOST
    assert Capability.DURABLE in cls.capabilities


def test_clients_of_one_journal_share_rows_claims_and_acks():
    cls = journaled()
    with open_client(cls) as one, open_client(cls, bootstrap=False) as two:
        one.register_partition("p", ["x"], 4, ["t"])
        one.put_samples(list("abcd"), "p", {"x": torch.arange(4)}, tags=[{"n": i} for i in range(4)])
        assert two.get_samples(["d", "a"], "p", ["x"])["x"].tolist() == [3, 0]
        mine = one.claim_meta("p", "t", ["x"], 2, lease_s=60)
        yours = two.claim_meta("p", "t", ["x"], 2, lease_s=60)
        assert (mine.sample_ids, yours.sample_ids) == (["a", "b"], ["c", "d"])
        two.ack(mine)  # a token is worth the same in every process
        one.ack(yours)
        assert one.check_consumption_status("p", ["t"])
        with pytest.raises(LeaseExpiredError):
            one.nack(mine)


def test_a_restart_replays_to_the_same_state():
    cls = journaled()
    with open_client(cls) as first:
        first.register_partition("p", ["x"], None, ["t"], grpo_group_size=2)
        first.put_samples(["q_g0", "q_g1", "r_g0"], "p", {"x": torch.tensor([1.0, 2.0, 3.0])})
        first.claim_meta("p", "t", ["x"], 2)
        first.clear_samples(["r_g0"], "p")
    with open_client(cls) as second:
        assert second.list_samples("p").sample_ids == ["q_g0", "q_g1"]
        assert second.claim_meta("p", "t", ["x"], 2, blocking=False).sample_ids == []
        assert second.get_samples(["q_g1"], "p", ["x"])["x"].tolist() == [2.0]
        second.clear_samples(None, "p")
        assert second._backend.blobs == {}


def test_a_refused_operation_is_refused_in_replay_too_and_changes_nothing():
    cls = journaled()
    with open_client(cls) as one:
        one.register_partition("p", ["x"], None, ["t"])
        one.put_samples(["a"], "p", {"x": torch.zeros(1)})
        with pytest.raises(ValueError, match="field 'x'"):
            one.put_samples(["b"], "p", {"x": torch.zeros(1, dtype=torch.int64)})
        with open_client(cls, bootstrap=False) as two:
            assert two.list_samples("p").sample_ids == ["a"]


def test_vain_questions_of_a_waiting_claim_are_not_recorded():
    cls = journaled()
    with open_client(cls) as client:
        client.register_partition("p", ["x"], None, ["t"])
        before = len(client._backend.journal)
        with pytest.raises(TimeoutError):
            client.claim_meta("p", "t", ["x"], 1, timeout_s=0.2)
        assert len(client._backend.journal) == before


def test_a_lease_that_another_process_let_run_out_comes_back(monkeypatch):
    cls = journaled()
    with open_client(cls) as one, open_client(cls, bootstrap=False) as two:
        one.register_partition("p", ["x"], None, ["t"])
        one.put_samples(["a"], "p", {"x": torch.zeros(1)})
        held = one.claim_meta("p", "t", ["x"], 1, lease_s=0.05)
        again = two.claim_meta("p", "t", ["x"], 1, lease_s=60, timeout_s=5)
        assert again.sample_ids == ["a"]
        with pytest.raises(LeaseExpiredError):
            one.ack(held)
        two.ack(again)


def test_a_process_that_asked_later_replays_an_earlier_ack_as_it_was(monkeypatch):
    clock = 100.0
    monkeypatch.setattr("dataplane_core.blobstore.time.time", lambda: clock)
    cls = journaled()
    with open_client(cls) as one, open_client(cls, bootstrap=False) as two:
        one.register_partition("p", ["x"], None, ["t"])
        one.put_samples(["a"], "p", {"x": torch.zeros(1)})
        held = one.claim_meta("p", "t", ["x"], 1, lease_s=10)
        clock = 111.0
        assert not two.check_consumption_status("p", ["t"])  # after the lease, by its own clock
        clock = 109.0
        one.ack(held)  # in time: a record that `two` had not seen when it asked
        clock = 112.0
        assert two.check_consumption_status("p", ["t"])
        assert two.claim_meta("p", "t", ["x"], 1, blocking=False, lease_s=10).sample_ids == []


@pytest.mark.parametrize("record", [b"", b"\xc1", b"\x93\x01\x02\x03"])
def test_a_journal_that_cannot_be_read_is_an_error_not_a_crash(record):
    cls = journaled()
    with open_client(cls) as client:
        client._backend.journal[0] = record
        with pytest.raises(CorruptDataError, match="journal record 0"):
            client.list_samples("p")


def test_a_store_that_fails_reaches_the_user_with_its_cause():
    class Failing(Plain):
        def put(self, key, data):
            raise OSError(28, "No space left on device")

    with open_client(Failing) as client:
        client.register_partition("p", ["x"], None, ["t"])
        with pytest.raises(BackendError, match="No space left on device") as failed:
            client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        assert isinstance(failed.value.__cause__, OSError)
        assert client.list_samples("p").sample_ids == []
