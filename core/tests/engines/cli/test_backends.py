"""`dataplane backends`, and what core knows of the backends and commands of this project."""

import json
import tomllib
from pathlib import Path

import pytest

from dataplane_core.cli import commands, main
from dataplane_core.connecting import find_plugins
from dataplane_core.entry_points import BACKEND_GROUP, COMMAND_GROUP, KNOWN_BACKENDS, KNOWN_COMMANDS, install_command


def test_the_list_names_backend_distribution_and_version(capsys):
    assert main(["backends"]) == 0
    assert "noop" in capsys.readouterr().out


def test_listing_imports_no_backend(python):
    code = "import sys; from dataplane_core.cli import main; main(['backends']); print('dataplane_noop' in sys.modules)"
    assert python.run("-c", code).stdout.splitlines()[-1] == "False"


def test_load_shows_what_each_declares(capsys, monkeypatch):
    noop = [each for each in find_plugins() if each.name == "noop"]  # each costs a process
    monkeypatch.setattr(commands, "find_plugins", lambda: noop)
    main(["backends", "--load", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["noop"]["scope"] == "process"
    assert "claims" in rows["noop"]["capabilities"]
    assert rows["noop"]["options"]["capacity_bytes"] == "None"


COMMANDS = {name: package for name, (package, _) in KNOWN_COMMANDS.items()}


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
