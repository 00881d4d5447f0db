"""The lines of Python and Lua that each part of the project may have, by budget.toml. They only fall.

``python scripts/budget.py`` prints lines and budgets; ``--lower`` lowers each budget to the lines that there are.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "budget.toml"
#: Folders of the repository that hold no files of the project.
_NOT_OURS = {"out", "site", "dist", "build"}


def lines() -> dict[str, dict[str, int]]:
    """Part -> kind (``src``, ``tests`` or ``other``) -> its lines of Python and Lua, blank ones included."""
    counts: dict[str, Counter[str]] = {}
    for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.lua")]):
        place = path.relative_to(ROOT).parts
        if place[0] in _NOT_OURS or any(folder.startswith(".") for folder in place):
            continue
        part = "/".join(place[: 2 if place[0] in ("plugins", "examples") and len(place) > 2 else 1])
        kind = "tests" if "tests" in place[:-1] else "src" if "src" in place else "other"
        counts.setdefault(part, Counter())[kind] += path.read_bytes().count(b"\n")
    return {part: dict(kinds) for part, kinds in counts.items()}


def budgets() -> dict[str, dict[str, int]]:
    """The same of budget.toml."""
    with BUDGET.open("rb") as file:
        return tomllib.load(file)


def over(have: Mapping[str, Mapping[str, int]], may: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What has more lines than its budget."""
    return [
        f"{part} has {count} lines of {kind}, and its budget is {may.get(part, {}).get(kind, 0)}"
        for part, kinds in have.items()
        for kind, count in kinds.items()
        if count > may.get(part, {}).get(kind, 0)
    ]


def lower() -> None:
    """Lowers the numbers of budget.toml to the lines that there are. Comments stay, and no number rises."""
    have, part, text = lines(), "", []
    for line in BUDGET.read_text(encoding="utf-8").splitlines():
        if head := re.fullmatch(r"\[\"?([^\"\]]+)\"?\]", line):
            part = head[1]
        if entry := re.match(r"(\w+) = (\d+)", line):
            fewer = min(int(entry[2]), have.get(part, {}).get(entry[1], 0))
            line = f"{entry[1]} = {fewer}{line[entry.end() :]}"
        text.append(line)
    BUDGET.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--lower"]:
        lower()
    have, may = lines(), budgets()
    for part, kinds in have.items():
        allowed = may.get(part, {})
        print(f"{part:28}", *(f"{kind} {count:6} of {allowed.get(kind, 0):6}" for kind, count in kinds.items()))
    for kind in ("src", "tests", "other"):
        print(f"{kind}: {sum(kinds.get(kind, 0) for kinds in have.values())} lines")
    sys.exit("\n".join(over(have, may)) or 0)
