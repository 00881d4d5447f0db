"""What core knows of the backends and commands of this project, and the names that a user types."""

import tomllib
from pathlib import Path

import pytest

from dataplane_core.cli import main
from dataplane_core.entry_points import (
    BACKEND_GROUP,
    COMMAND_GROUP,
    FORMER_COMMANDS,
    KNOWN_BACKENDS,
    KNOWN_COMMANDS,
    install_command,
)

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


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        *((name, f"Use dataplane {does}.") for name, does in FORMER_COMMANDS.items()),
        ("tpo", "Did you mean 'top'?"),
        ("xyzzy", "dataplane --help lists all."),
    ],
)
def test_a_name_of_no_command_is_told_what_to_type(capsys, word, hint):
    with pytest.raises(SystemExit, match="2"):
        main([word, "run.yaml"])
    assert capsys.readouterr().err.endswith(f"there is no command '{word}'. {hint}\n")


def test_what_does_the_work_of_a_former_command_is_a_command():
    assert {does.split()[0] for does in FORMER_COMMANDS.values()} <= COMMANDS.keys()
    assert not FORMER_COMMANDS.keys() & COMMANDS.keys()


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
