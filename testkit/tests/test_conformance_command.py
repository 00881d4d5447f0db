"""`dataplane conformance NAME`, also with `--chaos`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dataplane_core.cli import main
from dataplane_noop import NoopBackend


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


def _chaos(folder, *arguments):
    words = ["conformance", "noop", "--chaos", "--minutes", "0.03", "--seed", "7"]
    return main([*words, "--json", str(folder / "r.json"), "-o", str(folder / "found"), *arguments])


def test_chaos_prints_its_seed_and_what_ran(tmp_path, capsys):
    status = _chaos(tmp_path)
    printed = capsys.readouterr()
    assert status == 0, printed.out
    assert printed.out.startswith("chaos on noop: 0.03 min, seed 7\n")
    assert printed.out.endswith("no rule of the contract was broken\n")
    assert printed.err == ""  # no progress line where nobody looks
    summary = json.loads((tmp_path / "r.json").read_text())
    assert summary["passed"]
    assert summary["calls"]["put"]["ok"] > 0
    assert not (tmp_path / "found").exists()


def test_chaos_names_the_fault_and_the_page(tmp_path, capsys, monkeypatch):
    right = NoopBackend.claim

    def backwards(self, request):
        claim = right(self, request)
        return replace(claim, sample_ids=claim.sample_ids[::-1], tags=claim.tags[::-1])

    monkeypatch.setattr(NoopBackend, "claim", backwards)
    status = _chaos(tmp_path)
    said = capsys.readouterr().out
    assert status == 1
    assert "FAULT order: " in said
    assert said.endswith(f"see {tmp_path / 'found' / 'finding.md'}\n")
    text = (tmp_path / "found" / "finding.md").read_text()
    assert "dataplane conformance noop --chaos --minutes 0.03 --seed 7" in text
    assert not json.loads((tmp_path / "r.json").read_text())["passed"]


@pytest.mark.parametrize(
    "arguments", [["--chaos", "-x"], ["--chaos", "-k", "put"], ["--seed", "1"], ["--minutes", "2"], ["-o", "here"]]
)
def test_options_of_chaos_go_with_chaos_only(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["conformance", "noop", *arguments])
    assert ended.value.code == 2
    assert "--chaos" in capsys.readouterr().err
