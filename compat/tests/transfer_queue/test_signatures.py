"""Functions and methods take the arguments that those of the installed TransferQueue take."""

import inspect

import pytest
import transfer_queue as theirs

import dataplane_compat.transfer_queue as ours

FUNCTIONS = sorted(name for name in theirs.__all__ if inspect.isfunction(getattr(theirs, name)))
CLASSES = sorted(name for name in theirs.__all__ if inspect.isclass(getattr(theirs, name)))
#: Methods that have no counterpart: how TransferQueue's client is made, and the two parts of a checkpoint.
ABSENT = {"initialize_storage_manager"} | {
    f"{form}{what}_{part}_checkpoint"
    for form in ("", "async_")
    for what in ("load", "save")
    for part in ("controller", "storage")
}
#: Constructors that are made by `init`, or that differ as said there: arguments may be left out.
MADE_HERE = {("TransferQueueClient", "__init__"), ("BatchMeta", "__init__"), ("StorageKeyNotFoundError", "__init__")}
#: What ROLL calls, and with which arguments, as of commit 8eb27cc2: names, or for positions a number.
#: `scripts/checkouts/test_roll_checkout.py` compares it with a checkout of ROLL.
CALLS_OF_ROLL = {
    "init": [(), (0,)],
    "kv_batch_put": [("fields", "keys", "partition_id")],
    "kv_batch_get": [("keys", "partition_id", "select_fields")],
    "kv_clear": [("keys", "partition_id")],
}


def parameters(call):
    found = inspect.signature(call).parameters.values()
    return [(each.name, each.kind, each.default) for each in found if each.name != "socket"]  # theirs is internal


def test_all_public_names_are_there():
    assert set(theirs.__all__) <= set(ours.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))
    assert inspect.iscoroutinefunction(getattr(ours, name)) == inspect.iscoroutinefunction(getattr(theirs, name))


@pytest.mark.parametrize("name", CLASSES)
def test_methods(name):
    their_class, our_class = getattr(theirs, name), getattr(ours, name)
    for method, theirs_of in inspect.getmembers(their_class):
        if method.startswith("_") and method != "__init__":
            continue
        if method in ABSENT or (name, method) in MADE_HERE or method not in vars(their_class):
            continue
        ours_of = getattr(our_class, method)
        if inspect.isfunction(theirs_of) or inspect.ismethod(theirs_of):
            assert parameters(ours_of) == parameters(theirs_of), method
            assert inspect.iscoroutinefunction(ours_of) == inspect.iscoroutinefunction(theirs_of), method


def test_a_batch_can_be_made_without_arguments():
    """verl makes one so, for workers whose output is not collected. TransferQueue's takes two arguments at least."""
    named = parameters(theirs.BatchMeta)
    assert [each[0] for each in parameters(ours.BatchMeta)] == [each[0] for each in named]
    assert ours.BatchMeta().size == 0


def test_the_module_takes_the_calls_of_roll():
    for name, calls in CALLS_OF_ROLL.items():
        for call in calls:
            positions = [each for each in call if isinstance(each, int)]
            named = {each: None for each in call if isinstance(each, str)}
            inspect.signature(getattr(ours, name)).bind(*positions, **named)
