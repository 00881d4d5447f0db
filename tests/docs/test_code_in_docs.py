"""The code that the README, the user guide and the page on images show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL)


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


def test_the_snippets_on_asynchronous_training_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = []
    names = {"train_on": trained.append}
    run = 0
    for number, block in enumerate(blocks("docs/async.md")):
        exec(compile(block, f"docs/async.md, block {number}", "exec"), names)
        run += 1
    assert run >= 5
    assert len(trained) == 16
    names["client"].close()


#: One rank that holds both modules: what the page on images leaves to the reader's launcher and config.
ONE_RANK = """
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
cfg = {name: {"shape": [1, 1, 1], "first": 0} for name in ("vision", "language")}
"""
SAID = """
assert needs_data and module == "vision"
assert mine is micro_batch
dist.destroy_process_group()
print(len(patches), "patches")
"""


def test_the_page_on_images_runs_from_top_to_bottom():
    # Megatron's import warns, which is an error in this process
    program = "\n".join([ONE_RANK, *blocks("docs/multimodal.md"), SAID])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[-2] == "18 patches"
