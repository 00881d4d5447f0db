"""Who gets the room in a full store: first come, first served, within a bound. Time is a plain number here."""

import pytest
from ledgers import begin, ledger, put

from dataplane_core.errors import CapacityExceededError
from dataplane_core.ledger import commands


class Puts:
    """Puts of one sample each to a ledger with room for 100 bytes."""

    def __init__(self):
        self.ledger = ledger(capacity_bytes=100)
        self.now = 0.0

    def put(self, name, size, queues=True, wait_s=60.0):
        """Whether it went through."""
        try:
            put(self.ledger, [name], size=size, ticket=name if queues else None, ttl_s=90.0, now=self.now)
            return True
        except CapacityExceededError:
            if queues:
                self.ledger.apply(commands.WaitForRoom(name, size, wait_s=wait_s), self.now)
            return False

    def clear(self, *names):
        _, freed = self.ledger.apply(commands.ClearRequest("p", names), self.now)
        self.ledger.apply(commands.Collected(freed), self.now)


def test_puts_that_wait_go_in_the_order_in_which_they_came():
    puts = Puts()
    assert puts.put("a", 50)
    assert puts.put("b", 50)
    assert [puts.put(name, 40) for name in ("first", "second", "third")] == [False] * 3
    puts.clear("a")
    assert [puts.put(name, 40) for name in ("third", "second", "first")] == [False, False, True]
    puts.clear("b")
    assert [puts.put(name, 40) for name in ("third", "second")] == [False, True]


def test_a_put_passes_others_that_keep_their_room():
    puts = Puts()
    assert puts.put("a", 100)
    assert not puts.put("first", 40)
    puts.clear("a")  # and the first has not asked again yet
    assert puts.put("later", 60)
    assert not puts.put("another", 1)
    assert puts.put("first", 40)


def test_a_put_that_does_not_queue_is_refused_while_others_wait():
    puts = Puts()
    assert puts.put("a", 60)
    assert not puts.put("large", 80)
    assert not puts.put("raises", 10, queues=False)
    puts.clear("a")
    assert puts.put("large", 80)
    assert puts.put("raises", 10, queues=False)


def test_small_puts_pass_while_no_room_becomes_free_and_then_no_more_than_the_store_holds():
    puts = Puts()
    assert puts.put("a", 50)
    assert not puts.put("large", 80)
    assert not puts.put("needed", 10)  # those who would clear "a" may wait for just this
    puts.now = 0.9
    assert not puts.put("needed", 10)
    puts.now = 1.1
    assert puts.put("needed", 10)
    puts.clear("needed")  # room became free: the large one is next again
    assert not puts.put("more", 10)
    passed = 10
    for turn in range(30):
        puts.now += 1.5
        puts.put("large", 80)
        if puts.put(f"more{turn}", 10):
            passed += 10
            puts.clear(f"more{turn}")
    assert passed == 100


def test_who_says_that_it_gave_up_leaves_the_queue_at_once_and_who_must_queue_is_told_so():
    puts = Puts()
    assert puts.put("a", 60)
    assert not puts.put("large", 80)
    with pytest.raises(
        CapacityExceededError, match="10 bytes would fit, 60 of 100 bytes are held, but 1 put waits"
    ) as told:
        puts.ledger.apply(begin(["b"], size=10, ticket="b"), 0.0)
    assert "Clear" not in told.value.hint
    puts.ledger.apply(commands.WaitForRoom("large", 80, wait_s=0.0), 0.0)
    assert puts.put("b", 10)


@pytest.mark.parametrize(("wait_s", "gone_after"), [(3.0, 3.0), (600.0, 30.0)])
def test_who_gave_up_or_died_is_forgotten(wait_s, gone_after):
    puts = Puts()
    assert puts.put("a", 50)
    assert not puts.put("large", 80, wait_s=wait_s)
    assert not puts.put("small", 10)
    puts.now += gone_after - 0.01
    puts.clear("a")
    assert not puts.put("b", 90)  # there is no room for it beside the large one
    puts.now += 0.02
    assert puts.put("small", 10)
    assert puts.put("b", 90)
