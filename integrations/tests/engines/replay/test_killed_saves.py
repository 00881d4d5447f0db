"""A save that is killed at any step, in a process of its own."""

import json
from pathlib import Path


def test_a_save_killed_at_any_step_leaves_a_whole_one(tmp_path, python):
    found = json.loads(python.run(Path(__file__).with_name("save_killed.py"), tmp_path).stdout)
    assert found == sorted(found), "the one before up to some step, the new one from there on"
    assert found.count(1) > 8
    assert found.count(2) > 1
