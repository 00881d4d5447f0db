"""A command that an interrupt cuts off before any instruction is taken back whole, as if it had never come."""

import random

import pytest
from histories import History, answer, contents

from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import Ledger, batches, done, leases, ledger, partition, put_writes, room, rows, views

MODULES = (batches, done, leases, ledger, partition, put_writes, room, rows, views)


@pytest.mark.parametrize("most", [1_000, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_what_is_cut_off_leaves_no_trace(interrupted, most):
    """Of two ledgers that get the same commands, those of one are cut off, taken back and given again."""
    dice, cuts, seed = random.Random(0), 0, 0

    class Cut(Ledger):
        def apply(self, command, now):
            nonlocal cuts
            handler, answers = ledger._handler_of(type(command)), []

            def act():
                try:
                    answers.append(handler(self, command, now))
                except DataPlaneError as error:
                    answers.append(error)

            if interrupted(act, dice.randrange(dice.choice([100, 400, 2000])), *MODULES) is not None:
                cuts += 1
                cuts += interrupted(self.take_back, dice.randrange(2000), *MODULES) is not None
                self.take_back()
                act()
            self._undo.clear()
            (found,) = answers
            if isinstance(found, DataPlaneError):
                raise found
            return found

    while cuts < most:
        history = History(seed)
        whole, cut = Ledger(**history.options), Cut(**history.options)
        for step in range(300):
            command = history.command()
            reply = answer(whole, command, history.now)
            assert answer(cut, command, history.now) == reply, (seed, step, command)
            if step % 5 == 0:
                assert contents(cut, history.now) == contents(whole, history.now), (seed, step, command)
            history.heard(command, reply)
        seed += 1
