"""The kit finds out broken backends: here a few, all of them in `engines`."""

from pathlib import Path

from dataplane_testkit.suites.machine import Failure, shrunk

_RUN = Path(__file__).parent / "toys" / "run.py"
#: Broken backends that are found out fast, each by another chapter of the kit.
_FEW = """
ReordersRows ChangesDtype KeepsRowsAcrossRegistrations RefusesToPutAgain ClaimsTwice SplitsGroups IgnoresFilters
SettlesRowByRow TellsTheEndToOne ConsumesBeforeTheEnd LeaksRoom DeclaresHalf ForgetsTheCalls ReadsAPage DropsATenth
"""


def test_the_kit_finds_out_broken_backends(python):
    done = python.run(_RUN, *_FEW.split(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_of_a_history_that_failed_the_calls_that_matter_are_left():
    def again(steps):
        failed = {3, 17} <= set(steps)
        return Failure(steps[: steps.index(17) + 1], AssertionError("both")) if failed else None

    assert shrunk(again(list(range(40))), again).steps == [3, 17]
