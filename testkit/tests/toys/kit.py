"""The toys as runs of the kit."""

from __future__ import annotations

import kit_of_broken
import kit_of_folder
import kit_of_host
from run import Run

#: Broken store of several processes -> the tests that it must fail.
_HOST = {
    "KeepsCursorsInTheClient": ["test_each_sample_goes_to_one_process"],
    "GivesUpAtOnce": ["test_an_attach_waits_for_an_owner_that_is_late"],
    "BootstrapsOverWhatRuns": ["test_of_processes_that_connect_with_auto_one_bootstraps"],
    "HangsInForks": ["test_a_fork_opens_a_client_of_its_own"],
    "LocksTheStore": ["test_the_store_serves_others_after_every_kill"],
    "WakesTheDead": ["test_a_claim_of_a_killed_process_does_not_stop_the_next"],
    "DiesBadly": [
        "test_killed_producers_leave_no_half_rows",
        "test_killed_producers_lose_no_committed_sample",
        "test_what_a_killed_producer_was_putting_can_be_put_again",
        "test_killed_consumers_get_no_sample_twice",
        "test_killed_consumers_lose_no_leased_sample",
    ],
}


def _toys(module, tests_of):
    """The toys whose test classes are in a module."""
    classes = {name: getattr(module, f"Test{name}") for name in tests_of}
    kept = {name: {n: m for n, m in vars(cls).items() if not n.startswith("_")} for name, cls in classes.items()}
    return [Run(name, kept[name], tuple(tests)) for name, tests in tests_of.items()]


TOYS = [
    *_toys(kit_of_broken, {cls.__name__: [test] for cls, test in kit_of_broken.BROKEN.items()}),
    *_toys(kit_of_folder, {cls.__name__: [test] for cls, test in kit_of_folder.BROKEN.items()}),
    *_toys(kit_of_host, _HOST),
]
