"""What a ledger keeps beside its rows, how its time is told, and that it is cut off, changes no answer."""

import random

import pytest
from histories import History, answer, contents, is_alike, saved_and_loaded, state_of

from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import (
    Ledger,
    batches,
    commands,
    done,
    leases,
    ledger,
    partition,
    put_writes,
    room,
    rows,
    views,
)
from dataplane_testkit._profiles import by_profile

#: The second ledger's clock shows so many seconds more.
AHEAD_S = 1024.0
MODULES = (batches, done, leases, ledger, partition, put_writes, room, rows, views)


def all_commands(history, first):
    """The commands of a history without end. What the ledger answers is sent back."""
    while True:
        for command in history.commands(first):
            while command is not None:
                reply = yield command
                command = history.heard(command, reply)


@pytest.mark.timeout(by_profile(600, 600, 3600))
def test_ledgers_answer_alike(monkeypatch):
    """One rebuilds its views all the time. The other never does, is told what is due, and is saved and loaded."""
    for seed in range(by_profile(8, 20, 2_000)):
        history = History(seed)
        rebuilt = Ledger(**history.options)
        kept = Ledger(**history.options, self_expiring=False)
        drawn, reply = all_commands(history, rebuilt), None
        for step in range(500):
            command = drawn.send(reply)
            monkeypatch.setattr(views, "_SLACK", 0)
            monkeypatch.setattr(leases, "_SLACK", 0)
            monkeypatch.setattr(views, "_MOST_FILTERS", 2)
            reply = answer(rebuilt, command, history.now)
            monkeypatch.setattr(views, "_SLACK", 2000)
            monkeypatch.setattr(leases, "_SLACK", 2000)
            monkeypatch.setattr(views, "_MOST_FILTERS", 2000)
            now = history.now + AHEAD_S
            due = kept.apply(commands.Due(), now)
            if due is not None:
                kept.apply(due, now)
            assert answer(kept, command, now) == reply, (seed, step, command)
            if step % 20 == 0:
                assert contents(kept, now) == contents(rebuilt, history.now), (seed, step, command)
            if step % 40 == 0:
                kept = saved_and_loaded(kept, now)


@pytest.mark.timeout(by_profile(600, 600, 3600))
def test_a_call_that_comes_again_changes_nothing():
    """Of two ledgers that get the same commands, one gets each of them once more, or twice."""
    for seed in range(by_profile(8, 20, 2_000)):
        history, dice = History(seed), random.Random(seed)
        once, often = Ledger(**history.options), Ledger(**history.options)
        drawn, reply = all_commands(history, once), None
        for step in range(300):
            command = drawn.send(reply)
            reply = answer(once, command, history.now)
            assert answer(often, command, history.now) == reply, (seed, step, command)
            for _ in range(dice.randrange(3)):
                again = answer(often, command, history.now)
                assert is_alike(command, reply, again), (seed, step, command, reply, again)
            if step % 10 == 0:
                assert contents(often, history.now) == contents(once, history.now), (seed, step, command)
                assert state_of(often, history.now) == state_of(once, history.now), (seed, step, command)


@pytest.mark.timeout(by_profile(600, 600, 3600))
def test_what_is_cut_off_leaves_no_trace(interrupted):
    """Of two ledgers that get the same commands, those of one are cut off, taken back and given again."""
    dice, cuts, seed, most = random.Random(0), 0, 0, by_profile(400, 1_000, 20_000)

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
        drawn, reply = all_commands(history, whole), None
        for step in range(300):
            command = drawn.send(reply)
            reply = answer(whole, command, history.now)
            assert answer(cut, command, history.now) == reply, (seed, step, command)
            if step % 5 == 0:
                assert contents(cut, history.now) == contents(whole, history.now), (seed, step, command)
        seed += 1
