"""Prints the oldest versions that packages of the workspace accept, as constraints for pip (`make test-minimum`).

Usage: python scripts/lower_bounds.py FOLDER...
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_BOUND = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)$")


def main(folders: list[str]) -> None:
    """Prints a line for each requirement with a lower bound, those of the extras too."""
    found: set[str] = set()
    for folder in folders:
        project = tomllib.loads(Path(folder, "pyproject.toml").read_text())["project"]
        for requirements in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            found |= {f"{match[1]}=={match[2]}" for match in map(_BOUND.match, requirements) if match}
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
