"""A command that an interrupt cuts off before any instruction is taken back whole, as if it had never come."""

import random

import pytest
from simulation import Schedule, run

from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import Ledger, batches, done, leases, ledger, partition, put_writes, room, rows, views

MODULES = (batches, done, leases, ledger, partition, put_writes, room, rows, views)


@pytest.fixture
def simulate_with_cuts(monkeypatch, interrupted):
    """Runs random schedules in which commands are cut off, taken back and given again, against the naive model."""
    take_back = Ledger.take_back

    def simulate(num_cuts):
        dice, cuts, seed = random.Random(0), 0, 0

        def cut_off(self, command, now):
            nonlocal cuts
            handler, answers = ledger._handler_of(type(command)), []

            def answer():
                try:
                    answers.append(handler(self, command, now))
                except DataPlaneError as error:
                    answers.append(error)

            if interrupted(answer, dice.randrange(dice.choice([100, 400, 2000])), *MODULES) is not None:
                cuts += 1
                cuts += interrupted(lambda: take_back(self), dice.randrange(2000), *MODULES) is not None
                take_back(self)
                answer()
            self._undo.clear()
            (found,) = answers
            if isinstance(found, DataPlaneError):
                raise found
            return found

        monkeypatch.setattr(Ledger, "apply", cut_off)
        while cuts < num_cuts:
            schedule = Schedule.drawn(seed, 300)
            failed = run(schedule, 5)
            assert failed is None, (seed, failed)
            seed += 1

    return simulate


def test_what_is_cut_off_leaves_no_trace(simulate_with_cuts):
    simulate_with_cuts(1_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_thousand_cuts_leave_no_trace(simulate_with_cuts):
    simulate_with_cuts(20_000)
