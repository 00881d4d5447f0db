"""What only `make test-long` tries, for lists of parameters. A whole test of this kind lies in a folder `long`."""

from __future__ import annotations

import os
from typing import TypeVar

_T = TypeVar("_T")


def in_long(*values: _T) -> list[_T]:
    """These values in `make test-long`, none elsewhere: ``params=["noop", *in_long("shm_store")]``."""
    return list(values) if os.environ.get("DATAPLANE_HYPOTHESIS_PROFILE") == "long" else []
