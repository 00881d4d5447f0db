"""SkyRL's own code over our backends. These tests run in an environment of their own: ``make test-skyrl``."""

import importlib.util
import os
import runpy
from pathlib import Path

HERE = Path(__file__).parent

if importlib.util.find_spec("skyrl") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_path(str(HERE / "sitecustomize.py"))
