"""`dataplane new-plugin`: what it writes, and what it refuses. A test in `tests/engines` installs and runs it."""

import ast
import tomllib

import pytest

from dataplane_core.cli import main


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("log", [[], ["--log"]])
def test_it_writes_a_project_and_says_what_to_do_next(here, capsys, log):
    assert main(["new-plugin", "two_words", *log]) == 0
    assert "cd dataplane-two-words\n  pip install -e '.[testing]'\n  pytest" in capsys.readouterr().out
    root = here / "dataplane-two-words"
    files = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
    source, test = files["src/dataplane_two_words/__init__.py"], files["tests/test_conformance.py"]
    assert files.keys() - {"src/dataplane_two_words/__init__.py", "tests/test_conformance.py"} == {
        "pyproject.toml",
        "README.md",
        "src/dataplane_two_words/py.typed",
    }
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "dataplane-two-words"
    assert project["entry-points"]["dataplane.backends"] == {"two_words": "dataplane_two_words:TwoWords"}
    assert "class TwoWords(RowStoreBackend):" in source
    assert ("def append" in source) == ("def restart" in test) == ("--options" in files["README.md"]) == bool(log)
    assert "acme" not in "".join((*files, *files.values())).lower(), "a name of the template is left"
    assert len(source.splitlines()) <= 120
    assert ast.parse(source)
    assert ast.parse(test)


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


def test_it_writes_where_it_is_told_to_and_overwrites_nothing(here, capsys):
    assert main(["new-plugin", "acme", "--dir", "some/where"]) == 0
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    for folder, says in (("some", "'some' is not empty"), ("some/where/README.md/in", "cannot be written: ")):
        assert main(["new-plugin", "acme", "--dir", folder]) == 1
        assert says in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before
