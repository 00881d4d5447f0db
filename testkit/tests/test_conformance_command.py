"""`dataplane conformance NAME`."""

from __future__ import annotations

import json

import pytest

from dataplane_core.cli import main


def test_the_command_runs_the_kit_and_writes_reports(tmp_path, capsys):
    files = ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    arguments = ["conformance", "noop", "--options", "{capacity_bytes: 9000000}", "-k", "order_asked_for or given_once"]
    status = main([*arguments, *files])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "conformance of noop" in said
    assert "2 tests, the quick ones first\n" in said
    assert "warning" not in said
    (report,) = json.loads((tmp_path / "r.json").read_text())
    assert report["backend"] == "noop"
    assert report["counts"]["pass"] == 2
    assert "| claims | in part | 1 |" in (tmp_path / "r.md").read_text()


def test_a_selection_of_nothing_is_no_success(tmp_path, capsys):
    assert main(["conformance", "noop", "-k", "no_such_test_at_all"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_backend"], "no_such_backend"),
        (["noop", "--options", "[1, 2]"], "must be a mapping"),
        (["noop", "--options", "{a: "], "not valid YAML"),
        (["noop", "--options", "{capacity_byte: 1}"], "capacity_bytes"),
        (["noop", "--chaos", "--minutes", "0"], "--minutes"),
        (["noop", "--json", "/no/such/folder/report.json"], "/no/such/folder/report.json"),
    ],
)
def test_wrong_arguments_are_explained(arguments, words, capsys):
    assert main(["conformance", *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("options", ["{url: redis://:hunter2@h", "redis://:hunter2@h", "{url: *hunter2}"])
def test_wrong_options_are_not_quoted(options, capsys):
    assert main(["conformance", "noop", "--options", options]) == 1
    printed = capsys.readouterr()
    assert "--options" in printed.err
    assert "hunter2" not in printed.out + printed.err


@pytest.mark.parametrize(
    "arguments", [["--chaos", "-x"], ["--chaos", "-k", "put"], ["--seed", "1"], ["--minutes", "2"], ["-o", "here"]]
)
def test_options_of_chaos_go_with_chaos_only(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["conformance", "noop", *arguments])
    assert ended.value.code == 2
    assert "--chaos" in capsys.readouterr().err
