"""The wheels of all packages: what they contain, and that pip installs them from a folder by name."""

import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from clean_environment import CleanEnvironment, make_wheel

from dataplane_mooncake.machine import ACCEPTED, DISTRIBUTIONS

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = [
    "core",
    "observe",
    "testkit",
    "tools",
    "integrations",
    "compat",
    *(f"plugins/{path.parent.name}" for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))),
]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    projects = [str(ROOT / package) for package in PACKAGES]
    subprocess.run([*pip, "-w", str(folder), *projects], check=True, timeout=300, stdin=subprocess.DEVNULL)
    return folder


def test_each_has_license_readme_types_and_bounds(wheels):
    paths = sorted(wheels.glob("*.whl"))
    assert len(paths) == len(PACKAGES)
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            (license_file,) = (name for name in names if name.endswith("/licenses/LICENSE"))
            head = message_from_string(archive.read(metadata).decode())
            assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
        assert head["License-Expression"] == "Apache-2.0"
        assert len(head.get_payload()) > 500  # the README
        if head["Name"] != "dataplane-mooncake":  # it has no modules
            assert "Typing :: Typed" in head.get_all("Classifier")
            assert any(name.endswith("/py.typed") for name in names)
        tests = [name for name in names if "/tests/" in name and "/template" not in name]  # a new plugin has some
        assert not [*tests, *(name for name in names if name.endswith(".pyc"))]
        ours = [package for package in head.get_all("Requires-Dist") if package.startswith("dataplane-")]
        assert all("<0.2,>=0.1" in package for package in ours), ours
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
    assert clean.run("python", "-m", "dataplane_core", "doctor", "--list").stdout.count("(dataplane-mooncake-") == 1


# --- the wheels of Mooncake -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mooncakes(tmp_path_factory):
    """A folder with a stand-in for each wheel of Mooncake: the module and the master, which do nothing."""
    folder = tmp_path_factory.mktemp("mooncakes")
    files = {"mooncake/__init__.py": "", "mooncake/store.py": "", "mooncake/mooncake_master": "#!/bin/sh\n"}
    for name in DISTRIBUTIONS:
        make_wheel(folder, name, files, ACCEPTED[-1])
    return folder


@pytest.fixture
def pip(wheels, mooncakes, tmp_path):
    """Runs pip, with all these wheels at hand, in an environment without Mooncake: ``pip.environment``."""
    environment = CleanEnvironment(tmp_path)
    for path in (environment.folder / "venv" / "lib").glob("python*/site-packages/*mooncake*"):
        path.unlink()

    def run(*words):
        found = (
            ["--no-index", "--find-links", str(wheels), "--find-links", str(mooncakes)] if "install" in words else []
        )
        command = [sys.executable, "-m", "pip", "--python", str(environment.python), *words, *found]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL)
        return done.stdout

    run.environment = environment
    return run


def doctor(environment):
    return environment.run("dataplane", "doctor", "tq_mooncake").stdout


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_backend_runs_with_each_wheel_of_mooncake_and_asks_for_none(pip, name):
    pip("install", name)
    pip("install", "dataplane-core", "dataplane-mooncake-backend")
    assert f"Mooncake is installed once: {name} {ACCEPTED[-1]}." in doctor(pip.environment)
    assert "dataplane" not in pip("check")


def test_the_doctors_advice_repairs_a_wheel_for_cuda_with_another_over_it(pip):
    pip("install", "mooncake-transfer-engine", "dataplane-core", "dataplane-mooncake")
    said = doctor(pip.environment)
    assert "2 distributions install the module mooncake" in said
    for words in re.findall(r"pip ((?:uninstall|install) [^&\n]+)", said):
        pip(*words.split())
    assert f"Mooncake is installed once: mooncake-transfer-engine {ACCEPTED[-1]}." in doctor(pip.environment)
    assert "dataplane" not in pip("check")
