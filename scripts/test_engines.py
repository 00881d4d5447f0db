"""Runs tests that start engines, and runs each test that failed once more, alone and in a fresh process.

``python scripts/test_engines.py PYTHON -m pytest ARGUMENTS``. A test that passes alone is FLAKY: it is printed, and the
run counts as passed. Each FLAKY is a fault of the test or of the product that somebody has to mend.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

#: What pytest returns if tests ran and some of them failed. Any other status is no matter of single tests.
_SOME_FAILED = 1
#: If more tests fail, something is broken, and none is run again.
_MOST = 20


def main(command: list[str]) -> int:
    """Runs the tests; returns the status for the shell."""
    with tempfile.TemporaryDirectory() as cache:
        status = subprocess.run([*command, "-o", f"cache_dir={cache}"], check=False).returncode
        if status != _SOME_FAILED:
            return status
        failed = json.loads(Path(cache, "v", "cache", "lastfailed").read_text())
    if len(failed) > _MOST:
        return status
    failed = [re.sub(r"@[^]]*$", "", test) for test in failed]  # what `--dist loadgroup` adds
    alone = command[: command.index("pytest") + 1]
    again = {test: subprocess.run([*alone, "-p", "no:cacheprovider", test], check=False) for test in sorted(failed)}
    broken = [test for test, done in again.items() if done.returncode]
    print()
    for test in again:
        print("FAILED, alone too:" if test in broken else "FLAKY, passed alone:", test)
    return _SOME_FAILED if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
