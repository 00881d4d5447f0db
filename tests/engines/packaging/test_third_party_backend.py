"""A backend of somebody else: its wheel beside core's in a clean environment, found by its name."""

import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "third_party_sqlite"


@pytest.mark.timeout(600)
def test_its_own_test_file_passes_the_whole_kit(clean, forked, tmp_path):
    clean.install(EXAMPLE)
    core = forked.run("-c", "import dataplane_core; print(dataplane_core.__file__)").stdout
    assert Path(core.strip()).is_relative_to(clean.folder), "not that of the checkout"
    file = tmp_path / "test_conformance.py"
    file.write_text((EXAMPLE / "tests" / "test_conformance.py").read_text(encoding="utf-8"), encoding="utf-8")
    report = tmp_path / "report.json"
    words = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path, "--dataplane-json", report, file]
    done = forked.run("-m", "pytest", *words, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (result,) = json.loads(report.read_text(encoding="utf-8"))
    assert result["counts"]["fail"] == 0
    assert result["counts"]["pass"] >= 90
