"""The kit finds out broken backends: here a few, all of them in `engines`."""

from __future__ import annotations

from pathlib import Path

_RUN = Path(__file__).parent / "toys" / "run.py"
#: Broken backends that are found out fast, each by another chapter of the kit.
_FEW = (
    "ReordersRows",
    "ChangesDtype",
    "ReplacesTags",
    "KeepsRowsAcrossRegistrations",
    "RefusesToPutAgain",
    "ClearsByPrefix",
    "ClaimsTwice",
    "SplitsGroups",
    "IgnoresFilters",
    "SettlesRowByRow",
    "RanksTakeWhatIsLeft",
    "ConsumesNothing",
    "LeaksRoom",
    "DeclaresHalf",
    "CountsAllSamples",
    "ReadsAPage",
    "DropsATenth",
)


def test_the_kit_finds_out_broken_backends(python):
    done = python.run(_RUN, *_FEW, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
