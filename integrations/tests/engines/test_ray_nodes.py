"""Nodes without the backend: said with the pip command, or given the package by Ray's runtime_env."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from clean_environment import make_wheel

from dataplane_core.errors import ConfigError, UnknownBackendError
from dataplane_integrations.errors import PlacementError
from dataplane_integrations.ray import backend_runtime_env, check_backend_on_nodes, require_backend_on_nodes

GOOD = "from dataplane_noop import NoopBackend as Elsewhere\n"
ENTRY_POINT = "[dataplane.backends]\nelsewhere = elsewhere_backend:Elsewhere\n"


def _wheel(folder, source, version="1.2"):
    """A distribution with a backend, as a wheel."""
    folder.mkdir(exist_ok=True)
    return make_wheel(folder, "dataplane-elsewhere", {"elsewhere_backend.py": source}, version, ENTRY_POINT)


def _unpack(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return str(folder)


@pytest.fixture
def wheel(local_ray, tmp_path, monkeypatch):
    """A backend that this process has and the nodes of the running Ray have not."""
    made = _wheel(tmp_path, GOOD)
    monkeypatch.syspath_prepend(_unpack(made, tmp_path / "installed_here"))
    return made


def test_a_backend_that_the_nodes_have_is_reported_with_its_version(local_ray):
    [report] = require_backend_on_nodes("tq_simple", timeout_s=150)
    assert report.problem is None
    assert report.command is None
    assert report.version
    assert report.address == local_ray.nodes()[0]["NodeManagerAddress"]


def test_a_node_without_the_package_says_so_with_the_command(wheel):
    with pytest.raises(PlacementError, match="cannot run on 1 of 1 nodes") as caught:
        require_backend_on_nodes("elsewhere", timeout_s=150)
    message = str(caught.value)
    assert "no distribution there registers it; found: noop" in message
    assert "Run there: pip install dataplane-elsewhere==1.2" in message
    assert "backend_runtime_env" in message


#: A driver that hands Ray a wheel with its job; the node of the running Ray serves it too.
DRIVER = """
import sys
sys.path.insert(0, sys.argv[2])
import ray
from dataplane_integrations.ray import backend_runtime_env, require_backend_on_nodes
env = backend_runtime_env("elsewhere", packages=[sys.argv[3]])
ray.init(address=sys.argv[1], runtime_env=env, log_to_driver=False, logging_level="ERROR")
sys.path.pop(0)
print(require_backend_on_nodes("elsewhere", timeout_s=150)[0].version)
"""


def test_a_node_without_the_package_gets_it(local_ray, wheel, tmp_path):
    script = tmp_path / "driver" / "main.py"
    script.parent.mkdir()
    script.write_text(DRIVER)
    address = local_ray.get_runtime_context().gcs_address
    command = [sys.executable, str(script), address, str(tmp_path / "installed_here"), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=script.parent)
    assert (done.returncode, done.stdout) == (0, "1.2\n"), done.stderr


@pytest.mark.parametrize(
    ("source", "version", "problem"),
    [
        ("raise ImportError('libibverbs.so.1: cannot open')\n", "1.2", "ImportError: libibverbs.so.1: cannot open"),
        (GOOD, "1.1", "it has dataplane-elsewhere 1.1, this process 1.2."),
        (None, "", "RuntimeEnvSetupError"),
    ],
    ids=["an import that fails", "another version", "an environment that cannot be made"],
)
def test_what_is_wrong_on_a_node_is_told(wheel, tmp_path, source, version, problem):
    env = {"py_modules": ["gcs://_ray_pkg_0123456789abcdef.zip"]}
    if source:
        env = {"env_vars": {"PYTHONPATH": _unpack(_wheel(tmp_path / "there", source, version), tmp_path / "installed")}}
    [report] = check_backend_on_nodes("elsewhere", runtime_env=env, timeout_s=150)
    assert problem in (report.problem or "")


def test_a_node_that_does_not_answer_is_told(local_ray, tmp_path, monkeypatch):
    may_answer = str(tmp_path / "may answer")

    def answers_late(*_):
        while not os.path.exists(may_answer):
            time.sleep(0.05)

    monkeypatch.setattr("dataplane_integrations.ray.nodes._probe", lambda: answers_late)
    [report] = check_backend_on_nodes("tq_simple", timeout_s=0.0)
    Path(may_answer).touch()
    assert report.problem == "it did not answer within 0 s."


def test_the_runtime_env_names_this_processs_version_or_what_is_given(wheel):
    assert backend_runtime_env("elsewhere", env_vars={"A": "b"}) == {
        "pip": ["dataplane-elsewhere==1.2"],
        "env_vars": {"A": "b"},
    }
    assert backend_runtime_env("elsewhere", packages=["x>=1", "y.whl"]) == {"pip": ["x>=1"], "py_modules": ["y.whl"]}
    with pytest.raises(ConfigError, match="packages is empty"):
        backend_runtime_env("elsewhere", packages=[])
    with pytest.raises(UnknownBackendError, match="nowhere"):
        backend_runtime_env("nowhere")
