"""In a clean environment with core and the kit: what `dataplane new-plugin` writes, and commands of other packages."""

import json

import pytest

JOB = """
import torch
from dataplane_core import connect

with connect({"backend": "acme_store"}) as client:
    client.register_partition("train", ["x"], 2, ["trainer"])
    client.put_samples(["a", "b"], "train", {"x": torch.tensor([1.0, 2.0])})
    meta = client.claim_meta("train", "trainer", ["x"], 2)
    print(type(client._backend).__name__, meta.sample_ids, client.get_data(meta)["x"].tolist())
"""


@pytest.fixture(scope="module")
def project(clean):
    """The generated project, installed."""
    return generated(clean, "acme_store")


@pytest.fixture(scope="module")
def with_journal(clean):
    """A generated project with a journal, installed."""
    return generated(clean, "acme_files", "--journal")


def generated(clean, name, *words):
    done = clean.run("dataplane", "new-plugin", name, *words)
    assert done.returncode == 0, done.stderr
    folder = clean.folder / f"dataplane-{name.replace('_', '-')}"
    clean.install(folder)
    return folder


def run_kit(forked, project, tmp_path, *select):
    report = tmp_path / "report.json"
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", project, "-c", project / "pyproject.toml", project / "tests"]
    done = forked.run("-m", "pytest", *words, "--dataplane-json", report, *select, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (result,) = json.loads(report.read_text(encoding="utf-8"))
    assert result["counts"]["fail"] == 0
    return result["counts"]


def test_it_connects_by_name_works_and_passes_a_taste_of_the_kit(forked, project, tmp_path):
    assert forked.run("-c", JOB).stdout.strip() == "AcmeStore ['a', 'b'] [1.0, 2.0]"
    select = "order_asked_for or given_once or objects_come_back or overlap or full_store or two_holders"
    assert run_kit(forked, project, tmp_path, "-k", select)["pass"] >= 8


# The example of a third party has a journal too, and runs the whole kit. A store of files differs in its engine.
OF_THE_ENGINE = "blob or journal or append or deleting or engine or kill or smoke or full or attach or bootstrap"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("select", "least"), [(("-k", OF_THE_ENGINE), 40), pytest.param((), 350, marks=pytest.mark.long)]
)
def test_with_a_journal_it_passes_the_kit(forked, with_journal, tmp_path, select, least):
    assert run_kit(forked, with_journal, tmp_path, *select)["pass"] > least


# --- commands of packages that are not there --------------------------------------------------------------------------

LOADED = """
import sys
from dataplane_core.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted(name for name in ("dataplane_testkit", "torch") if name in sys.modules))
"""


def test_a_command_of_a_package_that_is_not_installed_says_which_to_install(clean):
    done = clean.run("dataplane", "top", "run.yaml")
    assert done.returncode == 1
    assert "Install 'top' with: pip install dataplane-tools" in done.stderr
    assert "(pip install dataplane-tools)" in " ".join(clean.run("dataplane", "--help").stdout.split())


def test_only_the_command_that_is_named_is_imported(clean):
    assert clean.run("python", "-c", LOADED, "--help").stdout.splitlines()[-1] == "[]"
    assert clean.run("python", "-c", LOADED, "doctor", "--help").stdout.splitlines()[-1] == "[]"
    assert clean.run("python", "-c", LOADED, "conformance", "--help").stdout.splitlines()[-1] == "['dataplane_testkit']"
