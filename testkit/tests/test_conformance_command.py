"""`dataplane conformance NAME`."""

import json

import pytest
from msgspec.structs import replace

from dataplane_core.cli import main
from dataplane_noop import NoopBackend


def test_the_command_runs_the_kit_and_writes_reports(tmp_path, capsys):
    files = ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    words = ["conformance", "noop", "--options", "{capacity_bytes: 9000000}", "-k", "order_asked_for or never_waits"]
    status = main([*words, *files])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "conformance of noop" in said
    assert "2 tests, the quick ones first\n" in said
    assert "warning" not in said
    (report,) = json.loads((tmp_path / "r.json").read_text())
    assert report["backend"] == "noop"
    assert report["counts"]["pass"] == 2
    assert "| claims | in part | 1 |" in " ".join((tmp_path / "r.md").read_text().split())


def test_a_failure_is_told_at_once_with_its_rule(capsys, monkeypatch):
    right = NoopBackend.get_samples
    wrong = lambda self, request: right(self, replace(request, sample_ids=sorted(request.sample_ids)))  # noqa: E731
    monkeypatch.setattr(NoopBackend, "get_samples", wrong)
    assert main(["conformance", "noop", "-k", "order_asked_for or get_repeats_rows"]) == 1
    told, _, rest = capsys.readouterr().out.partition("= FAILURES =")
    assert "FAILED test_get_keeps_the_order_asked_for: " in told
    assert '\n    Contract: "Exactly one row per id given, in that order, repeats included."\n' in told
    assert "\n    Check first: bring the engine's rows into the order of request.sample_ids.\n" in told
    assert "conformance of noop" in rest


def test_a_selection_of_nothing_is_no_success(capsys):
    assert main(["conformance", "noop", "-k", "no_such_test_at_all"]) == 1
    assert " deselected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_backend"], "no_such_backend"),
        (["noop", "--options", "[1, 2]"], "must be a mapping"),
        (["noop", "--options", "{a: "], "not valid YAML"),
        (["noop", "--options", "{url: redis://:hunter2@h"], "--options"),
        (["noop", "--options", "redis://:hunter2@h"], "--options"),
        (["noop", "--options", "{url: *hunter2}"], "--options"),
        (["noop", "--options", "{capacity_byte: 1}"], "capacity_bytes"),
        (["noop", "--chaos", "--minutes", "0"], "--minutes"),
        (["noop", "--json", "/no/such/folder/report.json"], "/no/such/folder/report.json"),
    ],
)
def test_wrong_arguments_are_explained_and_no_secret_in_them_is_shown(arguments, words, capsys):
    assert main(["conformance", *arguments]) == 1
    printed = capsys.readouterr()
    assert words in printed.err
    assert "hunter2" not in printed.out + printed.err


@pytest.mark.parametrize(
    "arguments", [["--chaos", "-x"], ["--chaos", "-k", "put"], ["--seed", "1"], ["--minutes", "2"], ["-o", "here"]]
)
def test_options_of_chaos_go_with_chaos_only(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["conformance", "noop", *arguments])
    assert "--chaos" in capsys.readouterr().err
