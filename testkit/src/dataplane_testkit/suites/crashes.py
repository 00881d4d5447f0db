"""Processes killed while they put and claim, at random moments, over and over: what must hold afterwards.

The processes are killed once for all tests of the class. Each test checks one property of what was found then.
For scopes wider than one process.
"""

from __future__ import annotations

from collections import Counter

from dataplane_core.errors import preview
from dataplane_core.spec import Capability, Scope
from dataplane_testkit._base import Suite
from dataplane_testkit._crashes import LEASED, MOST_LOST, PLAIN, Aftermath, aftermath
from dataplane_testkit._marks import lasts, proves
from dataplane_testkit._store import Store

#: Time limit in seconds. The first of these tests does all the kills.
_LIMIT_S = 900.0


def _after(store: Store) -> Aftermath:
    return store.deployment.once(aftermath)


def _usable(store: Store) -> Aftermath:
    """The result of the kills, for tests that need a store that served other clients to the end."""
    found = _after(store)
    assert found.unusable is None, f"{found.unusable} (seed {found.seed})"
    return found


def _repeated(claims: list[str]) -> list[str]:
    return [name for name, count in Counter(claims).items() if count > 1]


class CrashSuite(Suite, chapter="crashes", proof=Scope.HOST):
    """kill -9 in the middle of puts and claims: 20 times, 200 times under the profile ``long``."""

    @lasts(_LIMIT_S)
    def test_the_store_serves_others_after_every_kill(self, store: Store) -> None:
        """Contract: "Every call ends by its deadline: op_timeout_s of the config" ... "No call hangs."

        Check first: locks and reservations that a client takes in the store. A killed client does not release them.
        """
        found = _after(store)
        assert found.unusable is None, f"{found.unusable} (seed {found.seed})"

    @lasts(_LIMIT_S)
    def test_killed_producers_leave_no_half_rows(self, store: Store) -> None:
        """Contract: "The first write of a set of fields is atomic per sample: no reader or claim sees half of it, or
        its data without its tags".

        Check first: the put must mark its cells as produced in one step, after all cells and tags are stored.
        """
        found = _usable(store)
        half = {name: fields for name, fields in found.found.items() if 0 < len(fields) < 3}
        assert not half, (
            f"{len(half)} samples of killed producers are there in part: "
            f"{preview(f'{name} has {sorted(fields)}' for name, fields in half.items())} (seed {found.seed})"
        )
        assert not found.wrong, f"these samples differ from what was put: {preview(found.wrong)} (seed {found.seed})"
        if found.listed is not None:
            bare = [name for name in found.listed if not found.found.get(name)]
            assert not bare, f"listed, but without cells: {preview(bare)} (seed {found.seed})"

    @lasts(_LIMIT_S)
    def test_killed_producers_lose_no_committed_sample(self, store: Store) -> None:
        """Contract: "Returns only when the write is committed and visible to every other client".

        Check first: when put_samples returns, no data of the put may still wait in the client's process.
        """
        found = _usable(store)
        lost = [name for name in found.confirmed if not found.found[name]]
        assert not lost, f"put_samples returned, and {preview(lost)} are gone with their process (seed {found.seed})"

    @lasts(_LIMIT_S)
    def test_what_a_killed_producer_was_putting_can_be_put_again(self, store: Store) -> None:
        """Contract: "A timeout or lost connection raises, and never reports success; the write may then have happened
        or not."

        Check first: what a put reserves in the store. If its client is killed, a later put of the same samples must not
        wait or fail because of it.
        """
        found = _usable(store)
        assert found.retried is None, (
            f"a new put of the samples that a killed process was putting failed: {found.retried} (seed {found.seed})"
        )

    @lasts(_LIMIT_S)
    @proves(Scope.HOST, Capability.CLAIMS)
    def test_killed_consumers_get_no_sample_twice(self, store: Store) -> None:
        """Contract: "Across all clients and processes no sample is given to a task twice." and "Without a lease,
        delivery is at most once: if the reply to a claim is lost, its rows are lost to the task."

        Check first: the store must mark samples as given in the same step that chooses them.
        """
        found = _usable(store)
        given = found.given + found.taken[PLAIN]
        twice = _repeated(given)
        assert not twice, f"given to two consumers: {preview(twice)} (seed {found.seed})"
        lost = {name for name, fields in found.found.items() if fields} - set(given)
        assert len(lost) <= MOST_LOST, (
            f"{len(lost)} samples were given to nobody. Expected at most {MOST_LOST}, one claim per kill, whose "
            f"reply a killed consumer never saw (seed {found.seed})"
        )

    @lasts(_LIMIT_S)
    @proves(Scope.HOST, Capability.LEASES)
    def test_killed_consumers_lose_no_leased_sample(self, store: Store) -> None:
        """Contract: "with lease_s, a claim that is neither acked nor renewed in time is handed out again." and "two
        holders never both succeed."

        Check first: leases must end by the store's clock, also if their holder is dead. An acked sample must never go
        back to the pool.
        """
        found = _usable(store)
        acked = found.acked + found.taken[LEASED]
        twice = _repeated(acked)
        assert not twice, f"two holders acked {preview(twice)} (seed {found.seed})"
        # a victim may have been killed after its ack and before it recorded the ack
        there = {name for name, fields in found.found.items() if fields}
        lost = sorted(there - set(acked) - set(found.acking))
        assert not lost, f"{len(lost)} samples never came back from killed holders: {preview(lost)} (seed {found.seed})"
        assert found.consumed[LEASED], f"the partition never counts as consumed (seed {found.seed})"
