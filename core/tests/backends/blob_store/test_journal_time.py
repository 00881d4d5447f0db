"""Leases are judged by durations that each process measures itself: no clock of a host says when one ends."""

import pytest
import torch
from blob_stores import Clock, journaled, open_client

from dataplane_core.errors import LeaseExpiredError


def filled(client, *ids):
    client.register_partition("p", ["x"], None, ["t"])
    client.put_samples(list(ids), "p", {"x": torch.zeros(len(ids))})


def take(client, n=1, lease_s=10.0):
    return client.claim_meta("p", "t", ["x"], n, blocking=False, lease_s=lease_s)


def test_a_lease_ends_after_its_duration_in_a_process_that_saw_it_granted():
    cls = journaled()
    with open_client(cls) as one, open_client(cls, bootstrap=False) as two:
        ours, theirs = Clock(one), Clock(two, now=5000.0)
        filled(one, "a")
        held = take(one)
        assert take(two).sample_ids == []  # it reads of the lease now
        ours.now += 9.9
        theirs.now += 9.9
        assert take(two).sample_ids == []
        theirs.now += 0.2
        again = take(two)
        assert again.sample_ids == ["a"]
        with pytest.raises(LeaseExpiredError):
            one.ack(held)
        two.ack(again)
        assert one.check_consumption_status("p", ["t"])


def test_a_description_ends_the_leases_whose_time_is_over_and_writes_no_other_record():
    cls = journaled()
    with open_client(cls) as client:
        clock = Clock(client)
        filled(client, "a", "b")
        take(client)
        before = len(cls.journal)
        for passed_s, num_leased, num_records in [(9.9, 1, 0), (0.2, 0, 1), (9.9, 0, 1)]:
            clock.now += passed_s
            assert client.describe("p").tasks["t"].num_leased == num_leased
            assert len(cls.journal) == before + num_records


def test_a_process_whose_clock_is_far_ahead_ends_no_lease_and_stops_none_from_ending():
    """Its first call comes late, so that a shared time would leap with it, and then stand still."""
    cls = journaled()
    with open_client(cls) as one, open_client(cls, bootstrap=False) as ahead:
        ours, theirs = Clock(one), Clock(ahead, now=3600.0)
        filled(one, "a", "b")
        held = take(one)
        ahead.put_samples(["c"], "p", {"x": torch.zeros(1)})
        one.renew(held, 10.0)
        assert take(ahead, 3).sample_ids == ["b", "c"]
        ours.now += 10.1
        assert take(one, 3).sample_ids == ["a"]
        theirs.now += 9.0
        assert take(one, 3).sample_ids == []


def test_a_process_that_was_idle_or_came_late_ends_no_lease_early():
    """An idle process has measured an hour; a new one grants a lease; to the idle one that lease is new."""
    cls = journaled()
    with open_client(cls) as idle:
        clock = Clock(idle)
        filled(idle, "a")
        clock.now += 3600.0
        with open_client(cls, bootstrap=False) as late:
            Clock(late)
            held = take(late)
            assert take(idle).sample_ids == []
            clock.now += 9.9
            assert take(idle).sample_ids == []
            late.ack(held)


def test_a_renewal_that_was_not_read_yet_counts():
    cls = journaled()
    with open_client(cls) as one, open_client(cls, bootstrap=False) as two:
        Clock(one)
        theirs = Clock(two)
        filled(one, "a")
        held = take(one)
        assert take(two).sample_ids == []
        one.renew(held, 10.0)
        theirs.now += 10.1  # the first grant is over, as this process measures
        assert take(two).sample_ids == []
        one.ack(held)


def test_time_goes_on_in_a_store_where_nothing_is_written():
    cls = journaled()
    with open_client(cls) as one, open_client(cls, bootstrap=False) as two:
        clock = Clock(one, two)
        filled(one, "a")
        take(one)
        assert take(two).sample_ids == []
        before = len(cls.journal)
        clock.now += 10.1
        assert not one.check_consumption_status("p", ["t"])
        assert len(cls.journal) == before
        assert take(two).sample_ids == ["a"]


def test_after_a_restart_of_all_processes_a_lease_ends_after_its_own_duration():
    cls = journaled()
    with open_client(cls) as one:
        filled(one, "a")
        held = take(one)
    with open_client(cls) as two:
        clock = Clock(two, now=-1e6)
        assert take(two).sample_ids == []
        clock.now += 10.1
        assert take(two).sample_ids == ["a"]
        with pytest.raises(LeaseExpiredError):
            two.ack(held)


def test_a_holder_learns_that_its_lease_is_over_though_nobody_else_asked():
    cls = journaled()
    with open_client(cls) as one:
        clock = Clock(one)
        filled(one, "a", "b")
        held = take(one, 2)
        clock.now += 10.1
        for settle in (one.ack, one.nack, lambda meta: one.renew(meta, 10.0)):
            with pytest.raises(LeaseExpiredError):
                settle(held)
