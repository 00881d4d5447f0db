"""A journal that was damaged, cut, mixed up or set back is noticed, and what was lost with it meets no other."""

import msgpack
import pytest
import torch
from blob_stores import journaled, open_client

from dataplane_core.errors import (
    CorruptDataError,
    LeaseExpiredError,
    MissingDataError,
    StalePartitionError,
    UnknownPartitionError,
)
from dataplane_core.journal.records import DIGEST_BYTES, Record, seal
from dataplane_testkit import backend_of
from dataplane_testkit._timing import Background, eventually


def column(*values):
    return {"x": torch.tensor(values)}


def used(cls):
    """A store in which two samples were claimed."""
    client = open_client(cls)
    client.register_partition("p", ["x"], None, ["t"])
    client.put_samples(["a", "b"], "p", column(1, 2))
    return client, client.claim_meta("p", "t", ["x"], 2, lease_s=60)


def lose(journal, seq):
    del journal[seq]
    for each in sorted(journal):  # the store numbers what is left
        if each > seq:
            journal[each - 1] = journal.pop(each)


def swap(journal, seq):
    journal[seq], journal[seq + 1] = journal[seq + 1], journal[seq]


def damage(journal, seq):
    journal[seq] = journal[seq][:-1] + bytes([journal[seq][-1] ^ 1])


def rewrite(journal, seq):
    """A record that is whole in itself, but not the one that the next was written after."""
    held = msgpack.unpackb(journal[seq][DIGEST_BYTES:])
    held["partition_id" if "partition_id" in held else "write_id"] = "q" if "partition_id" in held else bytes(16)
    journal[seq] = seal(msgpack.packb(held))


@pytest.mark.parametrize("harm", [lose, swap, damage, rewrite])
@pytest.mark.parametrize("seq", [1, 2, 3])
def test_a_harmed_journal_is_refused_with_the_record(harm, seq):
    cls = journaled()
    used(cls)
    harm(cls.journal, seq)
    with open_client(cls, bootstrap=False) as late, pytest.raises(CorruptDataError, match=rf"record [{seq}{seq + 1}]"):
        late.list_samples("p")


@pytest.mark.parametrize("seq", [0, 4])
def test_the_first_and_the_last_record_are_checked_too(seq):
    cls = journaled()
    used(cls)
    damage(cls.journal, seq)
    with open_client(cls, bootstrap=False) as late, pytest.raises(CorruptDataError, match=f"record {seq} .*digest"):
        late.list_samples("p")


def test_a_journal_without_its_beginning_is_refused():
    cls = journaled()
    used(cls)
    lose(cls.journal, 0)
    with (
        open_client(cls, bootstrap=False) as late,
        pytest.raises(CorruptDataError, match="where record 0 was expected"),
    ):
        late.list_samples("p")


def test_a_record_of_another_store_is_refused():
    cls, other = journaled(), journaled()
    used(cls)
    used(other)
    cls.journal[2] = other.journal[2]
    with open_client(cls, bootstrap=False) as late, pytest.raises(CorruptDataError, match="does not follow record 1"):
        late.list_samples("p")


@pytest.mark.parametrize("change", [{"op": "dance"}, {"token": 7}, {"extra": 1}, {"seq": "4"}, {"v": None}])
def test_a_record_of_another_form_is_refused(change):
    cls = journaled()
    used(cls)
    held = msgpack.unpackb(cls.journal[4][DIGEST_BYTES:])
    cls.journal[4] = seal(msgpack.packb({**held, **change}))
    with open_client(cls, bootstrap=False) as late, pytest.raises(CorruptDataError, match="record 4"):
        late.list_samples("p")


def test_a_client_whose_journal_was_cut_says_so_before_it_writes():
    cls = journaled()
    client, claimed = used(cls)
    del cls.journal[4]  # the claim
    left = dict(cls.journal)
    with client:
        with pytest.raises(StalePartitionError, match=r"another than this client knew: journal record 4 is gone"):
            client.put_samples(["c"], "p", column(3))
        assert cls.journal == left
        # from here on it is a client of the history that is there
        with pytest.raises(LeaseExpiredError):
            client.ack(claimed)
        assert client.claim_meta("p", "t", ["x"], 2, lease_s=60).sample_ids == ["a", "b"]


def test_two_clients_on_two_histories_never_both_ack():
    cls = journaled()
    one, first = used(cls)
    del cls.journal[4]
    with one, open_client(cls, bootstrap=False) as two:
        second = two.claim_meta("p", "t", ["x"], 2, lease_s=60)
        assert (first.sample_ids, sorted(cls.journal)) == (second.sample_ids, [0, 1, 2, 3, 4])
        with pytest.raises(StalePartitionError, match="another record stands in the place of journal record 4"):
            one.ack(first)
        with pytest.raises(LeaseExpiredError):
            one.ack(first)
        two.ack(second)
        assert one.check_consumption_status("p", ["t"])


def test_a_store_that_was_set_back_gives_no_id_twice():
    """The whole store comes back from a copy: rows, claims and writes that were lost with it meet no others."""
    cls = journaled()
    one, _ = used(cls)
    records, blobs = dict(cls.journal), dict(backend_of(one).blobs)
    with one, open_client(cls, bootstrap=False) as two:
        one.put_samples(["c"], "p", column(3))
        lost = one.claim_meta("p", "t", ["x"], 1, lease_s=60)
        cls.journal.clear()
        cls.journal.update(records)
        for key in set(backend_of(one).blobs) - set(blobs):
            del backend_of(one).blobs[key]
        two.put_samples(["c"], "p", column(4))
        again = two.claim_meta("p", "t", ["x"], 1, lease_s=60)
        assert lost.sample_ids == again.sample_ids == ["c"]
        with pytest.raises(StalePartitionError):
            one.get_samples(["c"], "p", ["x"])
        with pytest.raises(LeaseExpiredError):
            one.ack(lost)
        assert one.get_samples(["c"], "p", ["x"])["x"].tolist() == [4]
        two.ack(again)


def test_a_put_under_way_when_the_store_is_set_back_is_refused():
    cls = journaled()

    class SetBack(cls):
        def put(self, key, data):
            super().put(key, data)
            while len(self.journal) > 2:
                del self.journal[max(self.journal)]

    with open_client(SetBack) as client:
        client.register_partition("p", ["x"], None, ["t"])
        with pytest.raises(StalePartitionError):
            client.put_samples(["a"], "p", column(1))
        with pytest.raises(MissingDataError):
            client.get_samples(["a"], "p", ["x"])
        assert client.list_samples("p").sample_ids == []


def test_a_store_that_was_emptied_or_replaced_is_another_history():
    cls, other = journaled(), journaled()
    client, _ = used(cls)
    used(other)
    with client:
        cls.journal.clear()
        with pytest.raises(StalePartitionError):
            client.list_samples("p")
        with pytest.raises(UnknownPartitionError):
            client.list_samples("p")
        client.register_partition("q", ["x"], None, ["t"])
        cls.journal.clear()
        cls.journal.update(other.journal)
        with pytest.raises(StalePartitionError):
            client.list_samples("q")
        assert client.list_samples("p").sample_ids == ["a", "b"]


def test_a_hole_behind_the_last_record_known_is_refused():
    cls = journaled()
    client, claimed = used(cls)
    with client, open_client(cls, bootstrap=False) as other:
        other.ack(claimed)
        other.put_samples(["c"], "p", column(3))
        del cls.journal[5]

        class Skipping(cls):
            """Gives what it has, without a look at what lies between."""

            def read(self, from_seq):
                return [self.journal[seq] for seq in sorted(self.journal) if seq >= from_seq]

        backend_of(client).read = Skipping.read.__get__(backend_of(client))
        with pytest.raises(CorruptDataError, match=r"record 6 .* where record 5 was expected"):
            client.list_samples("p")


def test_when_nothing_is_new_a_call_reads_one_record():
    cls = journaled()
    reads = []

    class Counting(cls):
        def read(self, from_seq):
            found = super().read(from_seq)
            reads.append((from_seq, len(found)))
            return found

    with open_client(Counting) as client:
        client.register_partition("p", ["x"], None, ["t"])
        reads.clear()
        waiting = Background(lambda: client.claim_meta("p", "t", ["x"], 1, timeout_s=600.0))
        eventually(lambda: len(reads) > 1, what="a claim that asks again")
        assert set(reads) == {(1, 1)}
        client.put_samples(["a"], "p", column(1))
        assert waiting.result().sample_ids == ["a"]


def test_a_replay_that_is_too_long_for_one_call_goes_on_in_the_next(monkeypatch):
    monkeypatch.setattr("dataplane_core.journal.journal._CHECK_EVERY", 1)
    cls = journaled()
    used(cls)
    with open_client(cls, bootstrap=False) as late:
        journal = backend_of(late)._journal
        for seq in range(1, 6):
            with pytest.raises(TimeoutError, match=f"up to record {seq - 1} by the deadline"):
                journal.catch_up(0.0)
        assert late.list_samples("p").sample_ids == ["a", "b"]


def test_every_record_names_the_one_before_it():
    cls = journaled()
    used(cls)
    records = [Record.from_bytes(cls.journal[seq], seq) for seq in range(5)]
    assert [record.command.op for record in records] == ["begin", "register", "begin_put", "commit_put", "claim"]
    assert [record.prev for record in records] == [b"", *(cls.journal[seq][:DIGEST_BYTES] for seq in range(4))]
