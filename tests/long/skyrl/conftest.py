"""SkyRL's own code over our backends. These tests run in an environment of their own: ``make test-skyrl``."""

import os
import runpy
from pathlib import Path

FOR_PYTHON_3_11 = Path(__file__).parents[3] / "scripts/checkouts"

os.environ["PYTHONPATH"] = os.pathsep.join([str(FOR_PYTHON_3_11), *filter(None, [os.environ.get("PYTHONPATH")])])
runpy.run_path(str(FOR_PYTHON_3_11 / "sitecustomize.py"))
