"""A process that bootstraps a store, and is killed."""

import subprocess
from contextlib import contextmanager


@contextmanager
def owning(python, config, expression):
    """The process, and what an expression of its ``client`` and ``backend`` gives there. Killed at the end."""
    code = f"import os, time; from dataplane_core import connect; client = connect({config!r}, bootstrap=True)\n"
    code += f"backend = client._connection.backend\nprint({expression}, flush=True)\ntime.sleep(1000)"
    with python.start("-c", code, stdout=subprocess.PIPE, text=True) as owner:
        try:
            yield owner, owner.stdout.readline()
        finally:
            owner.kill()
