"""A clean environment: a virtual environment of its own, with wheels built here and nothing of the checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


def make_wheel(folder, name, files, version="1.0", entry_points=""):
    """Writes a wheel with these files, which are executable, and returns its path."""
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in files.items():
            entry = zipfile.ZipInfo(place)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
    return path


class CleanEnvironment:
    """A virtual environment that shares third-party packages with this one, and no package of this project."""

    def __init__(self, folder):
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=120)
        self.bin = folder / "venv" / "bin"
        self.python = self.bin / "python"
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            # editable installs are files of these names too
            if "dataplane" not in entry.name and not entry.name.endswith((".pth", ".egg-link")):
                (site / entry.name).symlink_to(entry)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_"))}
        self.env["PATH"] = f"{self.bin}{os.pathsep}{self.env['PATH']}"

    def install(self, *projects):
        """Builds a wheel of each project and installs it."""
        wheels = self.folder / "wheels"
        pip = [sys.executable, "-m", "pip"]
        offline = ["-q", "--no-deps", "--no-index"]
        build = [*pip, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), *map(str, projects)]
        before = set(wheels.glob("*.whl"))
        subprocess.run(build, check=True, timeout=170, stdin=subprocess.DEVNULL, cwd=self.folder)
        made = sorted(set(wheels.glob("*.whl")) - before)
        assert len(made) == len(projects)
        install = [*pip, "--python", str(self.python), "install", *offline, *map(str, made)]
        subprocess.run(install, check=True, timeout=170, stdin=subprocess.DEVNULL, cwd=self.folder)

    def run(self, *words):
        """Runs a program of the environment, outside the checkout, to its end."""
        words = [str(self.bin / words[0]), *map(str, words[1:])]
        where = {"cwd": self.folder, "env": self.env, "stdin": subprocess.DEVNULL}
        return subprocess.run(words, capture_output=True, text=True, timeout=170, **where)


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    """A clean environment with dataplane-core and the kit in it."""
    environment = CleanEnvironment(tmp_path_factory.mktemp("clean"))
    environment.install(ROOT / "core", ROOT / "testkit")
    return environment


@pytest.fixture(scope="session")
def forked(clean, warm_python):
    """Runs Python programs of the clean environment, outside the checkout, as `python` does those of this one."""
    with warm_python("clean-python", str(clean.python), clean.env) as python:
        where = {"cwd": clean.folder, "env": clean.env, "stdin": subprocess.DEVNULL}
        yield SimpleNamespace(run=partial(python.run, **where))
