"""In a clean environment with core and the kit: what `dataplane new-plugin` writes, and commands of other packages."""

import json

import pytest
from tiers import in_long

JOB = """
import torch
from dataplane_core import connect

with connect({"backend": "acme_store"}) as client:
    client.register_partition("train", ["x"], 2, ["trainer"])
    client.put_samples(["a", "b"], "train", {"x": torch.tensor([1.0, 2.0])})
    meta = client.claim_meta("train", "trainer", ["x"], 2)
    print(type(client._connection.backend).__name__, meta.sample_ids, client.get_data(meta)["x"].tolist())
"""
TASTE = "order_asked_for or hundreds_of_rows or objects_come_back or overlap or never_waits or what_comes_back"
#: A store of files differs in its engine. The whole kit over a store with a log is run on the SQLite example.
OF_THE_ENGINE = "log or smoke"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "log", "select", "least"),
    [
        ("acme_store", [], ["-k", TASTE], 8),
        ("acme_files", ["--log"], ["-k", OF_THE_ENGINE], 5),
        *in_long(("whole_files", ["--log"], [], 90)),
    ],
)
def test_it_installs_connects_by_name_and_passes_the_kit(clean, forked, tmp_path, name, log, select, least):
    done = clean.run("dataplane", "new-plugin", name, *log)
    assert done.returncode == 0, done.stderr
    project = clean.folder / f"dataplane-{name.replace('_', '-')}"
    clean.install(project)
    if not log:
        assert forked.run("-c", JOB).stdout.strip() == "AcmeStore ['a', 'b'] [1.0, 2.0]"
    report = tmp_path / "report.json"
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", project, "-c", project / "pyproject.toml", project / "tests"]
    done = forked.run("-m", "pytest", *words, "--dataplane-json", report, *select, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (result,) = json.loads(report.read_text(encoding="utf-8"))
    assert result["counts"]["fail"] == 0
    assert result["counts"]["pass"] >= least


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
    assert "Install 'top' in a checkout of dataplane: pip install ./observe ./tools" in done.stderr
    assert "(pip install ./observe ./tools)" in " ".join(clean.run("dataplane", "--help").stdout.split())


@pytest.mark.parametrize(("command", "loaded"), [([], []), (["doctor"], []), (["conformance"], ["dataplane_testkit"])])
def test_only_the_command_that_is_named_is_imported(clean, command, loaded):
    assert clean.run("python", "-c", LOADED, *command, "--help").stdout.splitlines()[-1] == str(loaded)
