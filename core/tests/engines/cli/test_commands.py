"""The commands of dataplane: what they list, complete and find wrong."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dataplane_core.cli import _examination, main
from dataplane_core.entry_points import BACKEND_GROUP, COMMAND_GROUP, KNOWN_BACKENDS, KNOWN_COMMANDS, install_command

COMMANDS = {name: known[0] for commands in KNOWN_COMMANDS.values() for name, known in commands.items()}


def test_the_list_imports_no_backend(python):
    code = (
        "import sys; from dataplane_core.cli import main; main(['doctor', '--list'])\n"
        "print('dataplane_noop' in sys.modules)"
    )
    *backends, is_imported = python.run("-c", code).stdout.splitlines()
    assert any(line.startswith("noop  (dataplane-noop ") for line in backends)
    assert is_imported == "False"


def test_the_help_has_each_command_below_its_purpose(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    told = [f"\n{purpose}:" for purpose in KNOWN_COMMANDS] + [f"\n  {name} " for name in COMMANDS]
    assert all(line in shown for line in told)
    assert shown.index("look at a running store:") < shown.index("  top ") < shown.index("look at what was kept:")


@pytest.mark.parametrize(("word", "hint"), [("tpo", "Did you mean 'top'?"), ("xyzzy", "dataplane --help lists all.")])
def test_a_name_of_no_command_is_told_what_to_type(capsys, word, hint):
    with pytest.raises(SystemExit, match="2"):
        main([word, "run.yaml"])
    assert capsys.readouterr().err.endswith(f"there is no command '{word}'. {hint}\n")


@pytest.mark.parametrize(("group", "known"), [(BACKEND_GROUP, KNOWN_BACKENDS), (COMMAND_GROUP, COMMANDS)])
def test_every_backend_and_command_of_this_project_is_known_with_its_package(group, known):
    found, root = {}, Path(__file__).parents[4]
    for path in (*root.glob("*/pyproject.toml"), *root.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        found |= dict.fromkeys(project.get("entry-points", {}).get(group, ()), project["name"])
    assert found == known
    for package in set(known.values()):
        for folder in install_command(package).split()[2:]:
            assert (root / folder / "pyproject.toml").is_file()


# --- completion -------------------------------------------------------------------------------------------------------


def completed(line):
    """What bash offers after ``line``."""
    script = (
        'eval "$(register-python-argcomplete dataplane)"\n'
        f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9\n'
        "_python_argcomplete dataplane\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [shutil.which("bash"), "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="not run: this machine has no bash, which completes")
def test_commands_options_and_backends():
    pytest.importorskip("argcomplete", reason="not run: argcomplete is optional; only completion needs it")
    assert completed("dataplane exp") == ["export"]
    assert completed("dataplane doctor noop --j") == ["--json"]
    assert {"noop", "shm_store", "redis_store"} <= set(completed("dataplane conformance "))
    assert completed("dataplane doctor sh") == ["shm_store"]


# --- doctor -----------------------------------------------------------------------------------------------------------


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

    monkeypatch.setattr(_examination, "ask", lambda function, **asked: getattr(_examination, function)(**asked))


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
