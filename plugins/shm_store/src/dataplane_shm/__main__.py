"""Runs the process of the ledger."""

import sys

from dataplane_shm._server import main

main(sys.argv[1:])
