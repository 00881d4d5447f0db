"""A journal stays short: snapshot and tail, whoever writes them, whenever a process dies."""

import contextlib
import itertools
import logging
import threading

import pytest
import torch
from blob_stores import Clock, journaled, open_client, trimmed

from dataplane_core.errors import CorruptDataError, LeaseExpiredError, OperationTimeoutError
from dataplane_core.journal.journal import Journal
from dataplane_core.journal.records import Record
from dataplane_testkit import backend_of


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """A snapshot is due after a few records, and has many chunks."""
    monkeypatch.setattr("dataplane_core.backends.blob_store._TAIL_BYTES", 2_000)
    monkeypatch.setattr("dataplane_core.journal.snapshot._CHUNK_BYTES", 400)
    monkeypatch.setattr("dataplane_core.ledger.state._SECTION_ITEMS", 3)


def column(*values):
    return {"x": torch.tensor(values)}


def step(client, number, keep=0):
    """A training step: rows are written, claimed, acked, cleared; ``keep`` of them stay."""
    ids = [f"s{number}_g{i}" for i in range(4)]
    client.put_samples(ids, "p", column(*range(4)), tags=[{"step": number}] * 4)
    meta = client.claim_meta("p", "t", ["x"], 4, lease_s=60)
    client.ack(meta)
    client.clear_samples(ids[keep:], "p")


def snapshots_of(cls):
    return [seq for seq in cls.journal if Record.from_bytes(cls.journal[seq], seq).command.op == "snapshot"]


def blobs_of(client, prefix):
    return sorted(key for key in backend_of(client).blobs if key.startswith(prefix))


def test_a_store_in_which_no_row_is_left_stays_small():
    cls = trimmed()
    with open_client(cls) as client:
        client.register_partition("p", ["x"], None, ["t"])
        sizes = []
        for number in range(120):
            step(client, number)
            sizes.append(sum(map(len, cls.journal.values())))
        assert len(cls.trims) > 10
        assert max(sizes) < 10_000
        assert len({key.partition("x")[0] for key in blobs_of(client, "snap")}) == 1
        assert blobs_of(client, "row") == []
    with open_client(cls, bootstrap=False) as late:
        assert late.list_samples("p").sample_ids == []


def test_without_trim_there_are_no_snapshots():
    cls = journaled()
    with open_client(cls) as client:
        client.register_partition("p", ["x"], None, ["t"])
        for number in range(20):
            step(client, number)
        assert snapshots_of(cls) == []
        assert min(cls.journal) == 0


def test_a_process_that_opens_the_snapshot_goes_on_where_the_others_are():
    cls = trimmed()
    with open_client(cls) as one:
        clock = Clock(one)
        one.register_partition("p", ["x", "y"], 500, ["t", "u"], grpo_group_size=2, enums={"w": ["a"]})
        one.put_samples(["k_g0", "k_g1", "m_g0", "m_g1"], "p", column(1, 2, 3, 4), tags=[{"n": i} for i in range(4)])
        one.put_samples(["k_g0", "k_g1"], "p", {"y": torch.tensor([5.0, 6.0])})
        held = one.claim_meta("p", "t", ["x"], 2, lease_s=10)
        one.claim_meta("p", "u", ["y"], 2)
        gone = one.claim_meta("p", "t", ["x"], 2, lease_s=3)
        clock.now += 1.0
        for number in range(40):
            ids = [f"s{number}_g0", f"s{number}_g1"]
            one.put_samples(ids, "p", column(1, 2))
            one.clear_samples(ids, "p")
        assert cls.trims
        with open_client(cls, bootstrap=False) as two:
            later = Clock(two, now=77.0)
            for client in (one, two):
                listed = client.list_samples("p")
                assert listed.sample_ids == ["k_g0", "k_g1", "m_g0", "m_g1"]
                assert listed.tags == [{"n": i} for i in range(4)]
                assert client.get_samples(["m_g1", "k_g0"], "p", ["x"])["x"].tolist() == [4, 1]
                assert client.get_samples(["k_g1"], "p", ["y"])["y"].tolist() == [6.0]
            with pytest.raises(ValueError, match="field 'x'"):
                two.put_samples(["z_g0"], "p", {"x": torch.zeros(1)})
            assert two.claim_meta("p", "u", ["y"], 2, blocking=False).sample_ids == []
            two.put_samples(["s0_g0", "s0_g1"], "p", column(8, 9))  # a group that lost members stays out
            assert two.claim_meta("p", "t", ["x"], 2, blocking=False, lease_s=5).sample_ids == []
            later.now += 2.5
            again = two.claim_meta("p", "t", ["x"], 2, blocking=False, lease_s=5)
            assert again.sample_ids == ["m_g0", "m_g1"]
            two.ack(held)
            two.ack(again)
            with pytest.raises(LeaseExpiredError):
                one.ack(gone)
            two.clear_samples(None, "p")
            assert blobs_of(two, "row") == []


def test_a_process_that_fell_behind_the_trim_goes_on():
    cls = trimmed()
    with open_client(cls) as one, open_client(cls, bootstrap=False) as two:
        one.register_partition("p", ["x"], None, ["t"])
        one.put_samples(["a"], "p", column(7))
        held = two.claim_meta("p", "t", ["x"], 1, lease_s=60)
        for number in range(60):
            step(one, number)
        assert len(cls.trims) > 2
        two.ack(held)
        assert two.get_samples(["a"], "p", ["x"])["x"].tolist() == [7]
        assert one.check_consumption_status("p", ["t"])


def test_a_process_that_is_opening_the_store_while_its_snapshot_goes_begins_anew():
    cls = trimmed()
    with open_client(cls) as one:
        one.register_partition("p", ["x"], None, ["t"])
        numbers = iter(range(1000))
        while not cls.trims:
            step(one, next(numbers), keep=1)

        class Slow(cls):
            def get(self, key):
                before = len(self.trims)
                while key.startswith("snap") and before == len(self.trims) < 4:
                    step(one, next(numbers), keep=1)
                return super().get(key)

        with open_client(Slow, bootstrap=False) as late:
            assert late.list_samples("p").sample_ids == one.list_samples("p").sample_ids
        assert len(cls.trims) == 4


class Died(BaseException):
    """The process ends here."""


def dying(cls, at):
    """A class whose ``at``-th call, of those that shortening makes, is the last one of its process."""

    class Dying(cls):
        calls = 0

        def _count(self):
            if self._shortener._busy.locked():
                type(self).calls += 1
                if type(self).calls == at:
                    raise Died

        def put(self, key, data):
            self._count()
            super().put(key, data)

        def delete(self, key):
            self._count()
            super().delete(key)

        def append(self, seq, record):
            self._count()
            return super().append(seq, record)

        def trim(self, before_seq):
            self._count()
            super().trim(before_seq)

    return Dying


def copy_of(cls):
    """A store of its own that holds what that of ``cls`` does."""
    other = trimmed()
    other.journal.update(cls.journal)
    other.trims.extend(cls.trims)
    other.stored.update(cls.stored)
    return other


def steps_until_it_dies(cls, at, numbers):
    """Steps of a process that dies at its ``at``-th call of shortening: the rows kept, and those of the last step."""
    client, kept = open_client(dying(cls, at), bootstrap=False), set()
    with contextlib.suppress(Died):
        for number in numbers:
            step(client, number, keep=1)
            kept.add(f"s{number}_g0")
    return kept, {f"s{number}_g{i}" for i in range(4)}


def test_crashes_of_two_processes_in_a_row_at_any_moments_leave_a_store_that_opens(monkeypatch):
    monkeypatch.setattr("dataplane_core.journal.snapshot._CHUNK_BYTES", 1_500)
    made = trimmed()
    with open_client(made) as one:
        one.register_partition("p", ["x"], None, ["t"])
        numbers = itertools.count()
        while len(made.trims) < 2:
            step(one, next(numbers), keep=1)
        kept = set(one.list_samples("p").sample_ids)
    begin, moments = next(numbers), range(1, 12)
    for first in moments:
        crashed = copy_of(made)
        kept_first, last_first = steps_until_it_dies(crashed, first, range(begin, begin + 12))
        for second in moments:
            cls = copy_of(crashed)
            kept_second, last_second = steps_until_it_dies(cls, second, range(begin + 12, begin + 24))
            under_way = last_first | last_second
            with open_client(cls, bootstrap=False) as late:
                found = set(late.list_samples("p").sample_ids)
                assert found - under_way == (kept | kept_first | kept_second) - under_way, (first, second)
                step(late, 1_000)


def test_a_snapshot_whose_blobs_are_gone_is_passed_over_where_a_newer_one_stands_behind_it():
    cls = trimmed()

    class Untrimmed(cls):
        def trim(self, before_seq):
            if self.trims:
                raise OSError("the disk is read-only")
            super().trim(before_seq)

    with open_client(Untrimmed) as one:
        one.register_partition("p", ["x"], None, ["t"])
        for number in range(40):
            step(one, number, keep=1)
        first = snapshots_of(cls)[0]
        assert len(snapshots_of(cls)) > 1
        assert cls.trims == [first] == [min(cls.journal)]
        gone = Record.from_bytes(cls.journal[first], first).command.snapshot
        for key in blobs_of(one, f"snap{gone}"):
            del backend_of(one).blobs[key]
        with open_client(cls, bootstrap=False) as late:
            assert late.list_samples("p").sample_ids == one.list_samples("p").sample_ids


def test_what_others_record_while_a_snapshot_is_written_is_in_it():
    cls = trimmed()

    class Writing(cls):
        def put(self, key, data):
            super().put(key, data)
            if key.startswith("snap") and len(self.trims) < 2:
                other.put_samples([f"w{key}"], "p", column(1))

    with open_client(Writing) as one, open_client(cls, bootstrap=False) as other:
        backend_of(other)._shortener = None
        one.register_partition("p", ["x"], None, ["t"])
        number = 0
        while len(cls.trims) < 2:
            step(one, number, keep=1)
            number += 1
        with open_client(cls, bootstrap=False) as late:
            listed = late.list_samples("p").sample_ids
            assert listed == one.list_samples("p").sample_ids == other.list_samples("p").sample_ids
            assert sum(each.startswith("w") for each in listed) > 3


def test_of_several_that_notice_at_once_one_writes():
    cls = trimmed()
    clients = [open_client(cls, bootstrap=index == 0) for index in range(4)]
    clients[0].register_partition("p", ["x"], None, ["t"])
    barrier = threading.Barrier(4)
    failed = []

    def work(index):
        try:
            for number in range(15):
                barrier.wait(30)
                clients[index].put_samples([f"c{index}s{number}"], "p", column(number))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    with open_client(cls, bootstrap=False) as late:
        expected = sorted(f"c{index}s{number}" for index in range(4) for number in range(15))
        for client in [*clients, late]:
            assert sorted(client.list_samples("p").sample_ids) == expected
        assert cls.trims == sorted(set(cls.trims))
    for client in clients:
        client.close()


def test_a_snapshot_that_fails_fails_no_call_and_is_tried_again(caplog):
    cls = trimmed()
    broken = [True]

    class Failing(cls):
        def trim(self, before_seq):
            if broken[0]:
                raise OSError("the disk is read-only")
            super().trim(before_seq)

    with open_client(Failing) as client, caplog.at_level(logging.WARNING):
        client.register_partition("p", ["x"], None, ["t"])
        for number in range(10):
            step(client, number)
        assert "could not be shortened" in caplog.text
        assert "the disk is read-only" in caplog.text
        assert min(cls.journal) == 0
        broken[0] = False
        for number in range(10, 40):
            step(client, number)
        assert min(cls.journal) > 0
        assert len({key.partition("x")[0] for key in blobs_of(client, "snap")}) == 1


@pytest.mark.parametrize("harm", ["damage", "lose", "swap"])
def test_a_harmed_snapshot_is_refused_with_its_name(harm):
    cls = trimmed()
    with open_client(cls) as client:
        client.register_partition("p", ["x"], None, ["t"])
        number = 0
        while not cls.trims:
            step(client, number, keep=2)
            number += 1
        blobs = backend_of(client).blobs
        first, second = blobs_of(client, "snap")[:2]
        if harm == "damage":
            blobs[first] = blobs[first][:-1] + b"?"
        elif harm == "lose":
            del blobs[second]
        else:
            blobs[first], blobs[second] = blobs[second], blobs[first]
        with open_client(cls, bootstrap=False) as late, pytest.raises(CorruptDataError, match="snap"):
            late.list_samples("p")


def test_a_call_is_not_delayed_beyond_half_of_its_time_by_a_store_that_hangs():
    cls = trimmed()
    hung = []

    class Hanging(cls):
        def put(self, key, data):
            if key.startswith("snap"):
                hung.append(self.seconds_left())
                raise TimeoutError
            super().put(key, data)

    with open_client(Hanging, op_timeout_s=40) as client:
        client.register_partition("p", ["x"], None, ["t"])
        for number in range(12):
            step(client, number)
        assert hung
        assert max(hung) <= 20


def test_a_snapshot_that_fails_again_and_again_is_tried_ever_more_rarely(caplog):
    cls = trimmed()

    class Failing(cls):
        def put(self, key, data):
            if key.startswith("snap"):
                raise OSError("the disk is full")
            super().put(key, data)

    with open_client(Failing) as client, caplog.at_level(logging.WARNING):
        client.register_partition("p", ["x"], None, ["t"])
        while sum(map(len, cls.journal.values())) < 40_000:
            client.put_samples(["a"], "p", column(1))
    # at 2,000 bytes, and then after 2,000, 4,000, 8,000 and 16,000 more
    assert 3 <= caplog.text.count("could not be shortened") <= 5


def test_no_snapshot_is_written_in_the_time_of_a_lease(monkeypatch):
    cls = trimmed()
    with open_client(cls) as client:
        client.register_partition("p", ["x"], None, ["t"])
        with monkeypatch.context() as patched:
            patched.setattr(backend_of(client)._shortener, "_tail_bytes", 1 << 30)
            client.put_samples([f"s{i}" for i in range(1_000)], "p", column(*range(1_000)))
        meta = client.claim_meta("p", "t", ["x"], 1, lease_s=60)
        client.renew(meta, 60)
        assert blobs_of(client, "snap") == []
        client.ack(meta)
        assert blobs_of(client, "snap") != []


def test_records_are_no_longer_collected_at_any_moment(monkeypatch):
    cls = trimmed()
    with open_client(cls) as client:
        client.register_partition("p", ["x"], None, ["t"])
        looks = []

        def look(journal):
            looks.append(journal)
            return [] if len(looks) % 2 else None

        monkeypatch.setattr(Journal, "tail", property(look, lambda journal, value: None), raising=False)
        client.put_samples(["a"], "p", column(1))
        assert looks
        assert client.list_samples("p").sample_ids == ["a"]


def test_a_snapshot_that_is_too_long_for_one_call_is_loaded_in_several():
    cls = trimmed()
    with open_client(cls) as one:
        one.register_partition("p", ["x"], None, ["t"])
        for number in range(20):
            step(one, number, keep=1)
        expected = one.list_samples("p").sample_ids
        count = Record.from_bytes(cls.journal[min(cls.journal)], 0).command.chunks
    assert count > 3

    reads = []

    class Slow(cls):
        def get(self, key):
            if key.startswith("snap"):
                reads.append(key)
                if len(reads) % 3 == 0:
                    raise OperationTimeoutError("the disk is slow")
            return super().get(key)

    with open_client(Slow, bootstrap=False) as late:
        for _ in range(count):
            with contextlib.suppress(OperationTimeoutError):
                late.list_samples("p")
        assert late.list_samples("p").sample_ids == expected
        assert len(set(reads)) == count
    with open_client(cls, bootstrap=False) as late:
        for num_read in range(1, count):
            with pytest.raises(OperationTimeoutError, match=f"{num_read} of the {count} blobs"):
                backend_of(late)._journal.catch_up(0.0)
        assert late.list_samples("p").sample_ids == expected


def test_a_slow_client_opens_a_store_that_others_shorten_all_the_time():
    cls = trimmed()
    with open_client(cls) as one:
        one.register_partition("p", ["x"], None, ["t"])
        one.put_samples([f"kept{i}" for i in range(100)], "p", column(*range(100)))
        numbers = itertools.count()

        def shortened(steps):
            before = len(cls.trims)
            for _ in range(steps):
                step(one, next(numbers))
            return len(cls.trims) - before

        assert shortened(80) > 8  # while nobody loads
        count = Record.from_bytes(cls.journal[min(cls.journal)], 0).command.chunks
        assert count > 8
        with open_client(cls, bootstrap=False) as late:
            calls, opened = 0, False
            while not opened and calls < 4 * count:
                calls += 1
                try:
                    backend_of(late)._journal.catch_up(0.0)  # loads one chunk
                    opened = True
                except OperationTimeoutError:
                    shortened(4)
            assert opened
            assert calls > count
            assert late.list_samples("p").sample_ids == one.list_samples("p").sample_ids
        assert shortened(80) > 8
