"""What the processes of `_workers` are forked with: their clients, and what a first nested tensor would import."""

from dataplane_core._compiler_marks import load_compiler
from dataplane_testkit import _workers  # noqa: F401

load_compiler()
