"""A save that is killed at any step, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path


def test_a_save_killed_at_any_step_leaves_a_whole_one(tmp_path, python):
    program = Path(__file__).with_name("save_killed.py")
    ran = python.run(program, tmp_path)
    results = json.loads(ran.stdout)
    renamed = [each["step"] for each in results].index("replace")
    assert renamed > 10
    for number, each in enumerate(results):
        assert each["whole"], each
        assert each["read"] == (1 if number <= renamed else 2), each
        assert each["next"] == 3, each
        assert each["files"] == 2, each
