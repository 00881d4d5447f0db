"""The registry against really installed distributions: wheels made here, installed by pip, found in a fresh process."""

import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

GOOD = """
from dataplane_core import Backend

class Mine(Backend):
    def register_partition(self, request): ...
    def describe_partition(self, request): ...
    def put_samples(self, request): ...
    def get_samples(self, request): ...
    def clear_samples(self, request): ...
"""

PROBE = """
import json, sys
from dataplane_core import registry
name = sys.argv[1]
try:
    registry.connect({"backend": name})
    reply = {"error": None}
except Exception as error:
    reply = {"error": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__}
reply["found"] = [(r.name, r.distribution) for r in registry.find_plugins()]
reply["modules"] = sorted(m for m in sys.modules if m.startswith("plug_"))
print(json.dumps(reply))
"""


class Site:
    """A folder that pip installs wheels into, and a fresh interpreter that sees it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = root / "site"

    def install(self, distribution: str, source: str, entry: str = "mine") -> None:
        module = "plug_" + distribution.replace("-", "_")
        wheel = self.root / f"{distribution.replace('-', '_')}-1.0-py3-none-any.whl"
        info = f"{distribution.replace('-', '_')}-1.0.dist-info"
        files = {
            f"{module}.py": textwrap.dedent(source),
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[dataplane.backends]\n{entry} = {module}:Mine\n",
        }
        files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(self.target)]
        subprocess.run([*pip, str(wheel)], check=True, timeout=120, stdin=subprocess.DEVNULL)

    def connect(self, name: str) -> dict:
        code = f"import sys; sys.path.insert(0, {str(self.target)!r})\n{PROBE}"
        done = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_an_installed_backend_connects_by_name_and_no_other_is_imported(site):
    site.install("acme-store", GOOD)
    site.install("acme-other", GOOD, entry="other")
    reply = site.connect("mine")
    assert reply["error"] is None
    assert ["mine", "acme-store"] in reply["found"]
    assert ["other", "acme-other"] in reply["found"]
    assert reply["modules"] == ["plug_acme_store"]


def test_two_distributions_that_claim_one_name_are_both_named(site):
    site.install("acme-store", GOOD)
    site.install("rival-store", GOOD)
    reply = site.connect("mine")
    assert reply["error"] == "DuplicatePluginError"
    assert "acme-store" in reply["text"]
    assert "rival-store" in reply["text"]
    assert reply["modules"] == []


def test_a_missing_shared_library_is_named_and_the_cause_kept(site):
    site.install("acme-store", 'import ctypes\nctypes.CDLL("libacme_fabric.so.7")\n')
    reply = site.connect("mine")
    assert (reply["error"], reply["cause"]) == ("PluginImportError", "OSError")
    assert "libacme_fabric.so.7: cannot open shared object file" in reply["text"]
    assert "acme-store 1.0" in reply["text"]
    assert "pip install" not in reply["text"]


def test_a_misspelt_hook_is_refused_with_the_right_name(site):
    site.install("acme-store", GOOD.replace("def put_samples", "def put_sample"))
    reply = site.connect("mine")
    assert reply["error"] == "PluginSignatureError"
    assert "does not implement 'put_samples'" in reply["text"]
    assert "'put_sample'" in reply["text"]


def test_a_misspelt_extra_hook_is_refused_too(site):
    site.install("acme-store", GOOD + "    def list_sample(self, request): ...\n")
    reply = site.connect("mine")
    assert reply["error"] == "PluginSignatureError"
    assert "'list_sample'" in reply["text"]
    assert "'list_samples'" in reply["text"]


@pytest.mark.parametrize(
    ("signature", "complaint"),
    [
        ("def get_samples(self, request, verbose=False): ...", "argument 'verbose' has a default"),
        ("def get_samples(self, request=None): ...", "argument 'request' has a default"),
        ("def get_samples(self, *args): ...", "takes '*args'"),
        ("def get_samples(self, *, request): ...", "argument 'request' is keyword-only"),
        ("def get_samples(self, req): ...", "takes (self, req)"),
        ("async def get_samples(self, request): ...", "is async"),
    ],
)
def test_a_hook_with_another_signature_is_refused_naming_hook_and_argument(site, signature, complaint):
    site.install("acme-store", GOOD.replace("def get_samples(self, request): ...", signature))
    reply = site.connect("mine")
    assert reply["error"] == "PluginSignatureError"
    assert "backend 'mine', hook 'get_samples'" in reply["text"]
    assert complaint in reply["text"]


def test_a_plugin_for_a_newer_contract_is_refused_with_the_upgrade_command(site):
    site.install("acme-store", GOOD + "    contract_version = 99\n")
    reply = site.connect("mine")
    assert reply["error"] == "PluginSignatureError"
    assert "contract version 99" in reply["text"]
    assert "pip install --upgrade dataplane-core" in reply["text"]


def test_an_entry_point_that_is_no_backend_is_refused(site):
    site.install("acme-store", "Mine = dict\n")
    reply = site.connect("mine")
    assert reply["error"] == "PluginSignatureError"
    assert "Expected a subclass of dataplane_core.Backend" in reply["text"]


def test_an_unknown_name_lists_what_is_found_and_the_nearest(site):
    site.install("acme-store", GOOD)
    reply = site.connect("mime")
    assert reply["error"] == "UnknownBackendError"
    assert "Did you mean 'mine'?" in reply["text"]
    assert "noop" in reply["text"]


def test_a_known_backend_that_is_not_installed_is_told_with_its_pip_command(site):
    reply = site.connect("tq_mooncak")
    assert reply["error"] == "UnknownBackendError"
    assert "pip install dataplane-mooncake" in reply["text"]
