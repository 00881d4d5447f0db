"""The wheels of all packages: what they contain, and that pip installs them from a folder by name."""

import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    "core",
    "testkit",
    "tools",
    "integrations",
    "compat",
    *(f"plugins/{path.name}" for path in sorted((ROOT / "plugins").iterdir())),
]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    projects = [str(ROOT / package) for package in PACKAGES]
    subprocess.run([*pip, "-w", str(folder), *projects], check=True, timeout=300, stdin=subprocess.DEVNULL)
    return folder


def test_each_has_license_readme_types_and_bounds(wheels):
    found = sorted(wheels.glob("*.whl"))
    assert len(found) == len(PACKAGES)
    for path in found:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            (license_file,) = (name for name in names if name.endswith("/licenses/LICENSE"))
            head = message_from_string(archive.read(metadata).decode())
            assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
        assert head["License-Expression"] == "Apache-2.0"
        assert "Typing :: Typed" in head.get_all("Classifier")
        assert len(head.get_payload()) > 500  # the README
        assert any(name.endswith("/py.typed") for name in names)
        assert not [name for name in names if "/tests/" in name or name.endswith(".pyc")]
        ours = [each for each in head.get_all("Requires-Dist") if each.startswith("dataplane-")]
        assert all("<0.2,>=0.1" in each for each in ours), ours
        assert ours or head["Name"] == "dataplane-core"


def test_pip_installs_core_and_a_backend_by_name_from_a_folder(wheels, clean):
    pip = [sys.executable, "-m", "pip", "--python", str(clean.python)]
    names = ["dataplane-core", "dataplane-mooncake"]
    install = [*pip, "install", "-q", "--no-index", "--find-links", str(wheels), *names]
    subprocess.run(install, check=True, timeout=170, stdin=subprocess.DEVNULL, cwd=clean.folder)
    check = subprocess.run(
        [*pip, "check"], capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL, cwd=clean.folder
    )
    assert "dataplane" not in check.stdout, check.stdout
    assert clean.run("dataplane", "--version").stdout == "dataplane-core 0.1.0\n"
    assert clean.run("python", "-m", "dataplane_core", "backends").stdout.count("dataplane-mooncake") == 1
