"""The code that the READMEs and the pages of docs/ show runs as it stands."""

import builtins
import re
from pathlib import Path
from textwrap import indent

import pytest
from tiers import in_long

from dataplane_core import connect, errors
from dataplane_core.config import load_config
from dataplane_core.connecting import load_backend
from dataplane_integrations import DataPlaneWorkerMixin, errors as trainer_errors
from dataplane_integrations.trainer.groups import InProcessWorkerGroup

ROOT = Path(__file__).resolve().parents[3]


def blocks(path, section=""):
    """The blocks of Python of a page, or of one section of it (a heading of the second level)."""
    text = (ROOT / path).read_text(encoding="utf-8")
    text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else text
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def run_as_a_program(python):
    """Runs code in a process of its own, where it may start servers and processes, and returns its output."""

    def run(source, folder):
        (folder / "program.py").write_text(source, encoding="utf-8")
        return python.run("program.py", cwd=folder).stdout

    return run


def run_page(page, names=None, without=(), section=""):
    """Runs its snippets in one namespace, which it returns, but for those with one of these words."""
    names = {} if names is None else names
    for number, block in enumerate(blocks(page, section)):
        if not any(word in block for word in without):
            lines = [line for line in block.splitlines() if "(..." not in line]
            exec(compile("\n".join(lines), f"{page}, block {number}", "exec"), names)
    return names


def _lines(source):
    """The code without its indentation and blank lines, which differ in an excerpt."""
    return "\n".join(["", *[line.strip() for line in source.splitlines() if line.strip()], ""])


def test_the_author_guides_code_runs_or_is_the_examples_own():
    source = (ROOT / "examples/third_party_sqlite/src/dataplane_sqlite_example/__init__.py").read_text(encoding="utf-8")
    names = {"__name__": "guide"}
    shown = blocks("docs/writing-a-backend.md")
    lines = _lines(source)
    run = [block for block in shown if _lines(block) not in lines]
    for number, block in enumerate(run):
        exec(compile(block, f"docs/writing-a-backend.md, block {number}", "exec"), names)
    assert len(shown) - len(run) == 5
    assert names["rewards"].tolist() == [0.5, 1.0]
    assert names["TestDictStore"].under_test() is names["DictStore"]
    said = re.search(r"limited.describe\(\)  # '(.*)'", "\n".join(shown))
    assert said is not None
    assert said.group(1) == names["limited"].describe()


def test_the_readmes_program_runs_and_prints_what_it_says(capsys):
    run_page("README.md")
    said = re.search(r"# (tensor\(.*\))", "".join(blocks("README.md")))
    assert said is not None
    assert said.group(1) in capsys.readouterr().out


MAIN = 'if __name__ == "__main__":'
ON_RAY = "import ray\n"


def test_the_guides_snippets_run_one_after_the_other():
    names = run_page("docs/guide.md", {"fields": ["reward"], "train_on": lambda columns: None}, without=[MAIN])
    assert names["client"].scope == "process"


def _programs_of_the_guide():
    programs = [block for block in blocks("docs/guide.md") if MAIN in block]
    assert len(programs) == 2
    return programs


def _trainers_parts(count):
    """The first blocks of the page on workers: the third is on Ray."""
    checks = """
assert result["loss"].shape == result["grad_norm"].shape == (1,)
assert len(result["all_mb_metrics"]["loss"]) >= 2
"""
    shown = blocks("integrations/README.md")
    assert len(shown) == 3
    return "\n".join([*shown[:count], checks])


OVER_SERVERS = [f"plugins/{name}/README.md" for name in ("redis_store", "shm_store", "tq_simple", "tq_mooncake")]
#: What makes a program of a page, and what it prints; None where the program itself checks it. For those over servers,
#: each backend's own tests make the same calls.
PROGRAMS = [
    pytest.param(lambda: _programs_of_the_guide()[0], "['q0_g0', 'q0_g1'] [0.5, 1.0]\n", id="of two processes"),
    pytest.param(lambda: _programs_of_the_guide()[1], f"{[f's{row}' for row in range(8)]}\n", id="with a DataLoader"),
    pytest.param(lambda: _trainers_parts(2), None, id="a trainer's parts"),
    pytest.param(lambda: blocks("docs/trainer.md", "From an FSDP2 trainer")[0], None, id="a step with FSDP2"),
    *in_long(
        *(pytest.param(lambda page=page: "\n".join(blocks(page)), None, id=page) for page in OVER_SERVERS),
        pytest.param(lambda: _trainers_parts(3), None, id="a trainer's parts on Ray"),
    ),
]


@pytest.mark.parametrize(("program", "said"), PROGRAMS)
def test_a_program_of_a_page_runs(tmp_path, program, said, run_as_a_program):
    printed = run_as_a_program(program(), tmp_path)
    assert said is None or printed == said


def test_the_guides_config_file_is_one(tmp_path):
    text = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "plane.yaml").write_text(file, encoding="utf-8")
    config = load_config(tmp_path / "plane.yaml")
    assert load_backend(config.backend).Config.model_validate(config.options).namespace == "run7"


def test_the_table_of_errors_says_what_the_classes_do():
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    said = set()
    for line in re.findall(r"^\| `\w+Error`.*", text, re.MULTILINE):
        names, bases, retryable = (cell.strip() for cell in line.strip("|").split("|")[:3])
        kinds = re.findall(r"`(\w+)`", names)
        builtins_named = re.findall(r"`(\w+)`", bases) or ["Exception"]
        for number, kind in enumerate(kinds):
            cls = getattr(errors, kind, None) or getattr(trainer_errors, kind)
            base = builtins_named[number if len(builtins_named) > 1 else 0]
            assert issubclass(cls, getattr(builtins, base)), kind
            assert cls.default_retryable == retryable.startswith("yes"), kind
        said |= set(kinds)
    assert {name for name in vars(errors) if name.endswith("Error")} - {"DataPlaneError"} <= said


#: Pages of which another test here runs the code; scripts/checkouts runs the lines for other trainers.
NAMES = ("guide", "writing-a-backend", "trainer", "trainers", "async", "operating", "looking", "surviving")
OF_OTHER_TESTS = {"README.md", "integrations/README.md", *OVER_SERVERS, *(f"docs/{name}.md" for name in NAMES)}
PAGES = [path for pattern in ("*.md", "docs/*.md", "*/*/README.md", "*/README.md") for path in ROOT.glob(pattern)]
WITH_CODE = {str(path.relative_to(ROOT)) for path in PAGES if "```python" in path.read_text(encoding="utf-8")}
PARTS = [(page, "") for page in sorted(WITH_CODE - OF_OTHER_TESTS)]
PARTS += [("docs/trainer.md", "Batches"), ("docs/trainers.md", "Programs on TransferQueue")]


@pytest.mark.parametrize(("page", "section"), PARTS)
def test_the_snippets_of_a_page_run_one_after_the_other(page, section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page(page, section=section)
    if "client" in names:
        names["client"].close()


def test_the_snippets_on_operating_and_looking_run():
    class Writer:
        def add_scalar(self, name, value, step):
            logged.append((name, value, step))

    logged = []
    client = connect({"backend": "noop"})
    names = {"writer": Writer(), "client": client, "workers": InProcessWorkerGroup([DataPlaneWorkerMixin()])}
    names |= {"generate": list, "prompts": ["2 + 3 ="]}
    run_page("docs/operating.md", names)
    run_page("docs/looking.md", names)
    run_page("docs/surviving.md", names, section="Storage units")
    client.close()
    assert logged == [("dataplane/staleness", 0, 1)]


#: What the page on Megatron takes for granted: one process of a group, a trainer with a small model, a rollout.
MEGATRON_AUTHOR = """
import contextlib, sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from tiny_megatron import TinyMegatronTrainer, loss_of as my_loss, megatron_on_cpu

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ended = contextlib.ExitStack()
ended.enter_context(megatron_on_cpu({{"experts": 4}}))


class MyMegatronTrainer(TinyMegatronTrainer):
    def __init__(self):
        super().__init__({{"experts": 4}}, packed=True)


def my_rollout():
    lengths = torch.tensor([3, 5, 2, 4])
    inside = torch.arange(5) < lengths.unsqueeze(1)
    experts = torch.rand(4, 5, 2, 4).topk(2, -1).indices.short()
    ids = torch.randint(1, 16, (4, 5)) * inside
    mask = inside.float()
    return dict(
        input_ids=ids, input_lengths=lengths, token_mask=mask, sample_mask=torch.ones(4), routed_experts=experts
    )


my_advantages = torch.randn(4, 5)
{program}
assert multiple == 4
assert result["grad_norm"].item() > 0
part = dict(my_rollout(), position_ids=torch.arange(5).expand(4, -1))
logits, _ = forward_step(iter([part]), worker.model)
assert logits.shape == (4, 5, 16)
ended.close()
dist.destroy_process_group()
"""


def test_the_snippets_on_asynchronous_training_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = []
    names = run_page("docs/async.md", {"train_on": trained.append}, without=[ON_RAY])
    assert len(trained) == 20
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


def test_the_pages_on_megatron_and_on_images_run_from_top_to_bottom(python):
    """One after the other in one process, since Megatron's import takes long; it also warns, an error in this one."""
    megatron = MEGATRON_AUTHOR.format(
        tests=str(ROOT / "integrations" / "tests"), program="\n".join(blocks("docs/trainer.md", "Megatron"))
    )
    images = "\n".join([ONE_RANK, *blocks("docs/trainer.md", "Images"), SAID])
    pages = f"for page in {[megatron, images]!r}:\n    exec(compile(page, 'page', 'exec'), {{'__name__': '__main__'}})"
    assert python.run("-c", pages).stdout.split("\n")[-2] == "18 patches"


WEIGHTS_AUTHOR = """
import subprocess, sys
import torch

model, step, rank = torch.nn.Linear(2, 2), 100, 0

def train_step(model, steps=[]):
    steps.append(1)
    if len(steps) == 10:
        raise SystemExit(reader.wait(120))

def generate(model, weight_version):
    if weight_version > 3:
        print("read", weight_version > 3)
        raise SystemExit(0)

if len(sys.argv) == 1:
    reader = subprocess.Popen([sys.executable, sys.argv[0], "reader"])
"""


def test_the_page_on_weights_runs(tmp_path, run_as_a_program):
    """The trainer and the reader as two processes; then a gathering of shards on one rank, and a delta."""
    trainer, reader, deltas, shards = blocks("docs/trainer.md", "Weights")
    program = f"{WEIGHTS_AUTHOR}\nif len(sys.argv) > 1:\n{indent(reader, '    ')}\n{trainer}"
    assert run_as_a_program(program, tmp_path) == "read True\n"
    gathering = (
        f"{WEIGHTS_AUTHOR.partition('if len')[0]}\nfrom dataplane_core import connect\n"
        "from dataplane_integrations.weights import open_weights, publish_weights\n"
        "client = connect({'backend': 'noop'})\nopen_weights(client)\n"
        f"{shards}\nstep += 1\n{deltas}\nprint(client.list_sample_ids('weights'))"
    )
    assert run_as_a_program(gathering, tmp_path) == "['v100', 'v101']\n"


def test_the_page_on_trl_shows_lines_of_the_example():
    """Which its own tests run, where TRL is installed."""
    lines = "".join(_lines(path.read_text(encoding="utf-8")) for path in (ROOT / "examples/trl").glob("*.py"))
    *shown, in_short = blocks("docs/trainers.md", "TRL")  # the last one is the asynchronous example without its details
    assert len(shown) == 3
    assert all(name in lines for name in ("StoreRolloutWorker(", "StoreWeightTransfer(", "AsyncGRPOTrainer("))
    assert "AsyncGRPOTrainer(" in in_short
    assert [block for block in shown if _lines(block) not in lines] == []


def test_the_page_on_what_survives_runs_again_and_again(tmp_path, run_as_a_program):
    (store,), (step,) = (blocks("docs/surviving.md", section) for section in ("One host", "A run that goes on"))
    for _ in range(2):
        assert run_as_a_program(store, tmp_path) == "0 samples are left from before\n"
        assert run_as_a_program(step, tmp_path) == "['p1']\n"
