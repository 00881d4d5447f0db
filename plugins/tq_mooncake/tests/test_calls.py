"""Calls into the engine that are bounded in time."""

from __future__ import annotations

import time

import pytest

from dataplane_mooncake import _calls


def test_an_interrupt_is_not_lost_where_the_call_has_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = _calls.Call.wait

    def interrupted(call: _calls.Call, timeout_s: float) -> bool:
        assert wait(call, 30.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(_calls.Call, "wait", interrupted)
    monkeypatch.setattr(_calls, "_MAX_IDLE", 0)  # its thread ends with it
    with pytest.raises(KeyboardInterrupt):
        _calls.bounded("a call", lambda _: 1, time.monotonic() + 30)
