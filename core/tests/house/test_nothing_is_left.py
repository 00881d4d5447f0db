"""The rule that a test file leaves nothing behind: what it finds, and which file fails."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[3] / "conftest.py"
#: Name of a leak -> what a test does, and what is said of it.
LEAKS = {
    "process": ("subprocess.Popen(['sleep', '60'])", r"process \d+ sleep 60, first seen in test_"),
    "orphan": (  # once it runs: while a process starts a program, its environment cannot be read
        "subprocess.run(['sh', '-c', 'sleep 61 > /dev/null 2>&1 & until grep -q ^sleep /proc/$!/cmdline; do :; done'])",
        r"process \d+ sleep 61, first seen in",
    ),
    "zombie": (
        "os.waitid(os.P_PID, os.posix_spawn('/bin/true', ['true'], {}), os.WEXITED | os.WNOWAIT)",
        r"process \d+ \(ended, not waited for\), first seen in",
    ),
    "thread": (
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        r"thread <.* seen in test_",
    ),
    "entry": ("tempfile.mkdtemp()", r"entry 'tmp.*', first seen in test_"),
    "variable": ("os.environ.update(LEFT='here')", r"\$LEFT is 'here', was None"),
    "directory": ("os.chdir('/')", r"the working directory is '/', was '.*'"),
    "handler": ("signal.signal(signal.SIGTERM, print)", r"the handler of SIGTERM is <built-in function print>, was "),
    "warning": ("cycle.append(open('/dev/null'))", r"unclosed file"),
    "nothing": ("None", None),
}
SOURCE = """
import os, signal, subprocess, tempfile, threading

kept = []

def test_{name}():
    cycle = []
    cycle.append(cycle)
    kept.append({leak})
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What was said of each leak, in a run over a file for each."""
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "tmp").mkdir()
    conftest, changed = re.subn(r"_GRACE_S = \S+", "_GRACE_S = 0.5", CONFTEST.read_text(encoding="utf-8"))
    assert changed == 1
    (folder / "conftest.py").write_text(conftest)
    for name, (leak, _) in LEAKS.items():
        (folder / f"test_{name}.py").write_text(SOURCE.format(name=name, leak=leak))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--tb=short", str(folder)]
    env = os.environ | {"TMPDIR": str(folder / "tmp"), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    for pid in re.findall(r"E +process (\d+) sleep", done.stdout):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _, *parts = re.split(r"^_+ ERROR at teardown of test_(\w+) _+$", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", LEAKS)
def test_the_file_that_leaves_something_behind_fails(said, name):
    _, expected = LEAKS[name]
    if expected is None:
        assert name not in said
    else:
        assert re.search(expected, said[name])
