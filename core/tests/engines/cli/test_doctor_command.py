"""`dataplane doctor`: what it prints, and when it exits with 1."""

import json

import pytest

from dataplane_core.cli import _examination, main


@pytest.fixture
def config(tmp_path):
    """Writes a config file and returns its path."""

    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def here(monkeypatch):
    """The backend is examined in this process, which spares a fresh one's imports."""

    def ask(function, **arguments):
        return getattr(_examination, function)(**arguments)

    monkeypatch.setattr(_examination, "ask", ask)


def test_a_backend_that_needs_nothing_is_well(capsys):
    assert main(["doctor", "noop"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("noop  (dataplane-noop ")
    assert "  scope: process\n" in out
    assert "  options: capacity_bytes=None, on_full='block'\n" in out
    assert "ok       It needs nothing from this machine." in out
    assert out.endswith("0 errors, 0 warnings\n")


def test_a_config_is_examined_as_a_whole(here, capsys, config):
    path = config("{backend: noop, options: {capcity_bytes: 1}, middleware: [wire_gard, metrics], allow_pickle: true}")
    assert main(["doctor", "--config", path, "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == "noop"
    options, pickles, middleware = report["findings"]
    assert options["level"] == "error"
    assert "did you mean 'capacity_bytes'?" in options["what"]
    assert pickles["level"] == "warning"
    assert "allow_pickle" in pickles["what"]
    assert middleware["level"] == "error"
    found = "Found: metrics, opentelemetry, prometheus, recorder, wire_guard"
    assert f"'wire_gard' is not installed. {found}" in middleware["what"]
    assert middleware["hint"] == "Did you mean 'wire_guard'?"


def test_values_that_are_none_of_a_config_are_findings(capsys, config):
    path = config(
        "{backend: noop, options: {capacity_bytes: 2020-01-01}, middleware: [3, {metrics: {}, wire_guard: {}}]}"
    )
    assert main(["doctor", "--config", path, "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    options, number, two = [finding["what"] for finding in report["findings"]]
    assert "date is not JSON serializable" in options
    assert number == "A middleware entry must be a name or {name: options}, got 3."
    assert two.startswith("A middleware entry must be")


def test_a_config_for_another_backend_than_the_named_one_is_refused(capsys, config):
    assert main(["doctor", "redis_store", "--config", config("backend: noop")]) == 1
    assert "'redis_store' was asked for, but" in capsys.readouterr().err


def test_a_backend_that_is_not_installed_is_an_error_with_the_nearest_name(here, capsys):
    assert main(["doctor", "noob"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("noob  (not installed)\n  error ")
    assert "Did you mean 'noop'?" in out
