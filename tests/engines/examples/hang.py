"""Lets a process of a run hang after a given operation, for a test that then kills the run.

The test copies this module into a folder of its own, which the processes have in their path. The run's config names
`on_event` as the listener of the middleware ``metrics``. ``hang.json`` beside the module says where to hang.
"""

import json
import time
from pathlib import Path

_HERE = Path(__file__).parent
_WHERE = json.loads((_HERE / "hang.json").read_text())
_calls = 0


def on_event(event):
    """Called in the thread of each operation, when it is done."""
    global _calls
    if (
        event.op == _WHERE["op"]
        and event.partition_id == _WHERE["partition"]
        and _WHERE["field"] in (*event.fields, "")
    ):
        _calls += 1
        if _calls == _WHERE["nth"]:
            (_HERE / "hangs").touch()
            time.sleep(600)
