"""How far small puts pass a large one that waits for room. The order of the queue is compared with Redis' scripts."""

from ledgers import ledger, put

from dataplane_core.errors import CapacityExceededError
from dataplane_core.ledger import commands


class Puts:
    """Puts of one sample each to a ledger with room for 100 bytes. Time is a plain number."""

    def __init__(self):
        self.ledger = ledger(capacity_bytes=100)
        self.now = 0.0

    def put(self, name, size):
        """Whether it went through. Else it waits."""
        try:
            put(self.ledger, [name], size=size, ticket=name, ttl_s=90.0, now=self.now)
            return True
        except CapacityExceededError:
            self.ledger.apply(commands.WaitForRoom(name, size, wait_s=60.0), self.now)
            return False

    def clear(self, *names):
        _, freed = self.ledger.apply(commands.ClearRequest("p", names), self.now)
        self.ledger.apply(commands.Collected(freed), self.now)


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
