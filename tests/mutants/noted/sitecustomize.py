"""Notes which functions of the packages a process enters, see `tests/mutants/run.py`.

Python imports this module at its start in each process that a test starts while the map is made.
"""

import os
import sys
import threading

#: The functions that were entered. A test begins with none.
seen = set()


def to_file(name):
    file = os.open(os.environ["DATAPLANE_MUTANTS_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{name}\n".encode())
    os.close(file)


#: Is called with each function. The process that runs the tests has another one here.
tell = to_file


def note(frame, event, _):
    if event == "call" and (code := frame.f_code) not in seen:
        seen.add(code)
        if "/src/dataplane_" in code.co_filename:
            tell(f"{code.co_filename}::{code.co_qualname}")


def _forked():
    global tell
    tell = to_file
    seen.clear()


os.register_at_fork(after_in_child=_forked)
threading.setprofile(note)
sys.setprofile(note)
