"""What needs an environment of its own is not collected here: ``make test-areal``, ``test-skyrl``, ``test-verl``."""

collect_ignore = ["areal", "skyrl", "verl"]
