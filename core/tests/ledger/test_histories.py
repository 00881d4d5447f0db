"""What a ledger keeps beside its rows, and how its time is told, changes no answer. See `histories`."""

import pytest
from histories import History, answer, contents, saved_and_loaded

from dataplane_core.ledger import Ledger, commands, leases, views

#: The second ledger's clock shows so many seconds more.
AHEAD_S = 1024.0


@pytest.mark.parametrize("count", [20, pytest.param(2_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_ledgers_answer_alike(monkeypatch, count):
    """One rebuilds its views all the time. The other never does, is told what is due, and is saved and loaded."""
    for seed in range(count):
        history = History(seed)
        rebuilt = Ledger(**history.options)
        kept = Ledger(**history.options, self_expiring=False)
        for step in range(500):
            command = history.command()
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
            history.heard(command, reply)
