"""Completion of the `dataplane` command in a real bash."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


def completed(line):
    """What bash offers after ``line``."""
    script = (
        'eval "$(register-python-argcomplete dataplane)"\n'
        f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9\n'
        "_python_argcomplete dataplane\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [shutil.which("bash"), "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_commands_options_and_backends():
    assert completed("dataplane exp") == ["export"]
    assert completed("dataplane doctor noop --j") == ["--json"]
    assert {"noop", "shm_store", "redis_store"} <= set(completed("dataplane conformance "))
    assert completed("dataplane doctor sh") == ["shm_store"]
