"""Errors keep what they carry through pickling, and read as sentences."""

import inspect
import pickle

import pytest

from dataplane_core import errors
from dataplane_core.errors import DataPlaneError, MissingDataError, preview, printable

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, DataPlaneError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickling_with_attributes_and_cause(cls):
    try:
        raise cls("It broke.", backend="noop", retryable=True, hint="Mend it.") from OSError(28, "disk full")
    except DataPlaneError as error:
        original = error
    read = pickle.loads(pickle.dumps(original))
    assert type(read) is cls
    assert (read.backend, read.retryable, read.hint) == ("noop", True, "Mend it.")
    assert str(read) == str(original) == "[noop] It broke. Mend it."
    assert isinstance(read.__cause__, OSError)
    assert read.__cause__.errno == 28
    assert read.args == ("It broke.",)


def test_own_attributes_survive_too_and_a_cause_that_cannot_be_pickled_as_its_description():
    class LocalError(Exception):
        pass

    error = MissingDataError("Gone.", partition_id="p", missing_samples=["a"], missing_cells={"b": ["x"]})
    error.__cause__ = LocalError("deep down")
    read = pickle.loads(pickle.dumps(error))
    assert (read.partition_id, read.missing_samples, read.missing_cells) == ("p", ("a",), {"b": ("x",)})
    assert "LocalError: deep down" in str(read.__cause__)


def test_a_preview_names_the_first_and_counts_the_rest():
    assert preview([]) == ""
    assert preview(["a"]) == "'a'"
    assert preview("abcde") == "'a', 'b', 'c' and 2 more"
    assert preview(iter("abcde"), limit=4) == "'a', 'b', 'c', 'd' and 1 more"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2J\x9b1m\x07", "\\x1b[2J\\x9b1m\\x07"),
        ("a\nb\r\u2028c", "a\\nb\\r\\u2028c"),
        ("a\0b", "a\\x00b"),
        ("\u202edog\u2066", "\\u202edog\\u2066"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("Größe 大小 [bold]", "Größe 大小 [bold]"),
    ],
)
def test_names_of_a_store_are_shown_with_escapes(name, shown):
    assert printable(name) == shown
    error = DataPlaneError(f"partition '{name}' is not registered.", hint=f"Register '{name}'.")
    assert str(error) == f"partition '{shown}' is not registered. Register '{shown}'."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
