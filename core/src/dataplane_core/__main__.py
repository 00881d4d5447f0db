"""``python -m dataplane_core`` is the command `dataplane`."""

from dataplane_core.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
