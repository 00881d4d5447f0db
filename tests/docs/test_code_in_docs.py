"""The code that the README and the user guide show runs as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL)


def test_the_author_guides_code_runs_or_is_the_examples_own():
    source = (ROOT / "examples/third_party_sqlite/src/dataplane_sqlite_example/__init__.py").read_text(encoding="utf-8")
    names = {"__name__": "guide"}
    shown = blocks("docs/writing-a-backend.md")
    run = [block for block in shown if block not in source]
    for number, block in enumerate(run):
        exec(compile(block, f"docs/writing-a-backend.md, block {number}", "exec"), names)
    assert len(shown) - len(run) == 4
    assert names["rewards"].tolist() == [0.5, 1.0]
    assert names["TestDictStore"].under_test() is names["DictStore"]
    said = re.search(r"narrow.describe\(\)  # '(.*)'", shown[-2])
    assert said is not None
    assert said.group(1) == names["narrow"].describe()


def test_the_readmes_program_runs_and_prints_what_it_says(capsys):
    (program,) = blocks("README.md")
    exec(compile(program, "README.md", "exec"), {})
    said = re.search(r"# (tensor\(.*\))", program)
    assert said is not None
    assert said.group(1) in capsys.readouterr().out


def test_the_guides_snippets_run_one_after_the_other():
    names = {"fields": ["reward"], "train_on": lambda columns: None}
    run = 0
    for number, block in enumerate(blocks("docs/guide.md")):
        lines = [line for line in block.splitlines() if "(..." not in line]
        exec(compile("\n".join(lines), f"docs/guide.md, block {number}", "exec"), names)
        run += 1
    assert run >= 5
    assert names["client"].scope == "process"
