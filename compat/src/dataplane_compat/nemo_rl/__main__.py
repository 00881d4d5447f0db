"""``python -m dataplane_compat.nemo_rl SCRIPT [ARGUMENTS]``: activates, then runs a script of NeMo RL."""

from __future__ import annotations

import os
import runpy
import sys

from dataplane_compat.nemo_rl.adapter import activate


def main() -> None:
    """Runs the script as ``python SCRIPT`` would."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m dataplane_compat.nemo_rl SCRIPT [ARGUMENTS]")
    activate()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
