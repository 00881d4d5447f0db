"""`dataplane new-plugin`: what it writes, and which names and folders it refuses."""

import ast
import tomllib

import pytest

from dataplane_core.cli import main


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_writes_a_project_and_says_what_to_do_next(here, capsys):
    assert main(["new-plugin", "acme_store"]) == 0
    root = here / "dataplane-acme-store"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["name"] == "dataplane-acme-store"
    assert project["entry-points"]["dataplane.backends"] == {"acme_store": "dataplane_acme_store:AcmeStore"}
    assert (root / "src" / "dataplane_acme_store" / "py.typed").is_file()
    assert "class AcmeStore(BlobStore):" in (root / "src" / "dataplane_acme_store" / "__init__.py").read_text()
    test = (root / "tests" / "test_conformance.py").read_text()
    ast.parse(test)
    assert len(test.splitlines()) <= 10
    assert "acme_store" in (root / "README.md").read_text()
    assert not [path for path in root.rglob("*") if path.is_file() and "$" in path.read_text()]
    assert "cd dataplane-acme-store\n  pip install -e '.[testing]'\n  pytest" in capsys.readouterr().out


def test_with_a_journal_it_has_options_and_what_the_kit_asks_for(here):
    assert main(["new-plugin", "acme_store", "--journal"]) == 0
    root = here / "dataplane-acme-store"
    source = (root / "src" / "dataplane_acme_store" / "__init__.py").read_text()
    test = (root / "tests" / "test_conformance.py").read_text()
    for text, names in ((source, ("Config = ", "start", "append", "read", "trim")), (test, ("options", "restart"))):
        ast.parse(text)
        assert all(name in text for name in names)
    assert not [path for path in root.rglob("*") if path.is_file() and "$" in path.read_text()]


def test_it_writes_where_it_is_told_to(here):
    assert main(["new-plugin", "acme", "--dir", "some/where"]) == 0
    assert (here / "some" / "where" / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Acme-Store", "Did you mean 'acme_store'?"),
        ("acme store", "Did you mean 'acme_store'?"),
        ("3d", "cannot name a backend"),
        ("../acme", "Did you mean 'acme'?"),
        ("", "cannot name a backend"),
        ("class", "cannot name a backend"),
        ("none", "cannot name a backend"),
        ("on", "cannot name a backend"),
        ("noop", "'noop' is taken: it is a backend of dataplane-noop already"),
        ("tq_mooncake", "'tq_mooncake' is taken: it is a backend of dataplane-mooncake-backend already"),
        ("core", "'core' is taken: its package would be dataplane-core"),
        ("redis", "'redis' is taken: its package would be dataplane-redis"),
        ("mooncake", "'mooncake' is taken: its package would be dataplane-mooncake"),
    ],
)
def test_a_name_that_is_none_or_is_taken_is_refused(here, capsys, name, says):
    assert main(["new-plugin", name]) == 1
    assert says in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(here, capsys):
    (here / "mine.txt").write_text("precious")
    assert main(["new-plugin", "acme", "--dir", "."]) == 1
    assert "the folder '.' is not empty" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_written_is_an_error(here, capsys):
    (here / "file").write_text("")
    assert main(["new-plugin", "acme", "--dir", "file/inside"]) == 1
    assert "'file/inside' cannot be written: " in capsys.readouterr().err
