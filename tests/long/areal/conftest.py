"""AReaL's own code over our backends. These tests run in an environment of their own: ``make test-areal``."""

import importlib.util

if importlib.util.find_spec("areal") is None:
    collect_ignore_glob = ["test_*.py"]
