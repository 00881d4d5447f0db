"""What a ledger keeps beside its rows, and how its time is told, changes no answer."""

import random

import pytest
from ledgers import History, answer, contents, is_alike, saved_and_loaded, state_of

from dataplane_core.ledger import Ledger, rows
from dataplane_testkit._profiles import by_profile

#: The second ledger's clock shows so many seconds more.
AHEAD_S = 1024.0


def all_commands(history, first):
    """The commands of a history without end. What the ledger answers is sent back."""
    while True:
        for command in history.commands(first):
            while command is not None:
                reply = yield command
                command = history.heard(command, reply)


@pytest.mark.timeout(by_profile(600, 600, 3600))
def test_ledgers_answer_alike(monkeypatch):
    """One rebuilds its views all the time. The other never does, and is saved and loaded."""
    for seed in range(by_profile(8, 20, 2_000)):
        history = History(seed)
        rebuilt = Ledger(**history.options)
        kept = Ledger(**history.options)
        drawn, reply = all_commands(history, rebuilt), None
        for step in range(500):
            command = drawn.send(reply)
            monkeypatch.setattr(rows, "_VIEW_SLACK", 0)
            monkeypatch.setattr(rows, "_SLACK", 0)
            monkeypatch.setattr(rows, "_MOST_FILTERS", 2)
            reply = answer(rebuilt, command, history.now)
            monkeypatch.setattr(rows, "_VIEW_SLACK", 2000)
            monkeypatch.setattr(rows, "_SLACK", 2000)
            monkeypatch.setattr(rows, "_MOST_FILTERS", 2000)
            now = history.now + AHEAD_S
            assert answer(kept, command, now) == reply, (seed, step, command)
            if step % 20 == 0:
                assert contents(kept, now) == contents(rebuilt, history.now), (seed, step, command)
            if step % 40 == 0:
                kept = saved_and_loaded(kept)


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
                assert state_of(often) == state_of(once), (seed, step, command)
