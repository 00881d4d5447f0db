"""The registry against really installed distributions: wheels made here, installed by pip, found in a fresh process."""

import json
import os
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

BROKEN = {
    # entry name: (distribution, source)
    "twice": [("acme-twice", GOOD), ("rival-twice", GOOD)],
    "no_library": [("acme-library", 'import ctypes\nctypes.CDLL("libacme_fabric.so.7")\n')],
    "misspelt": [("acme-misspelt", GOOD.replace("def put_samples", "def put_sample"))],
    "misspelt_extra": [("acme-extra", GOOD + "    def list_sample(self, request): ...\n")],
    "newer": [("acme-newer", GOOD + "    contract_version = 99\n")],
    "no_backend": [("acme-none", "Mine = dict\n")],
}
SIGNATURES = {
    "default": ("def get_samples(self, request, verbose=False): ...", "argument 'verbose' has a default"),
    "request_default": ("def get_samples(self, request=None): ...", "argument 'request' has a default"),
    "star": ("def get_samples(self, *args): ...", "takes '*args'"),
    "keyword": ("def get_samples(self, *, request): ...", "argument 'request' is keyword-only"),
    "other_name": ("def get_samples(self, req): ...", "takes (self, req)"),
    "coroutine": ("async def get_samples(self, request): ...", "is async"),
}

PROBE = """
import json, sys
from dataplane_core.connecting import connect, find_plugins
replies = {}
for name in sys.argv[1:]:
    try:
        connect({"backend": name})
        replies[name] = {"error": None}
    except Exception as error:
        replies[name] = {"error": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__}
    replies[name]["modules"] = sorted(m for m in sys.modules if m.startswith("plug_"))
    replies[name]["found"] = [(r.name, r.distribution) for r in find_plugins()]
print(json.dumps(replies))
"""


def wheel(folder: Path, distribution: str, source: str, entry: str) -> Path:
    """A wheel with one module and one entry point."""
    stem = distribution.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    files = {
        f"plug_{stem}.py": textwrap.dedent(source),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[dataplane.backends]\n{entry} = plug_{stem}:Mine\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which pip has installed all the distributions of this module."""
    root = tmp_path_factory.mktemp("plugins")
    wheels = [wheel(root, "acme-store", GOOD, "mine"), wheel(root, "acme-other", GOOD, "other")]
    wheels += [wheel(root, dist, source, entry) for entry, dists in BROKEN.items() for dist, source in dists]
    for entry, (signature, _) in SIGNATURES.items():
        source = GOOD.replace("def get_samples(self, request): ...", signature)
        wheels.append(wheel(root, f"acme-signature-{entry.replace('_', '-')}", source, f"signature_{entry}"))
    target = root / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, *map(str, wheels)], check=True, timeout=120, stdin=subprocess.DEVNULL)
    return target


def connect(site: Path, *names: str) -> dict:
    """Connects by name, one after the other, in one fresh process."""
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{PROBE}"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def replies(site):
    names = ["twice", "mine", *BROKEN, *(f"signature_{entry}" for entry in SIGNATURES), "mime", "redis_stor"]
    return connect(site, *dict.fromkeys(names))  # the first two import nothing, and the backend that is named


def test_an_installed_backend_connects_by_name_and_no_other_is_imported(replies):
    reply = replies["mine"]
    assert reply["error"] is None
    assert ["mine", "acme-store"] in reply["found"]
    assert ["other", "acme-other"] in reply["found"]
    assert reply["modules"] == ["plug_acme_store"]


def test_two_distributions_that_claim_one_name_are_both_named(replies):
    reply = replies["twice"]
    assert reply["error"] == "DuplicatePluginError"
    assert "acme-twice" in reply["text"]
    assert "rival-twice" in reply["text"]
    assert reply["modules"] == []


def test_a_missing_shared_library_is_named_and_the_cause_kept(replies):
    reply = replies["no_library"]
    assert (reply["error"], reply["cause"]) == ("PluginImportError", "OSError")
    assert "libacme_fabric.so.7: cannot open shared object file" in reply["text"]
    assert "acme-library 1.0" in reply["text"]
    assert "pip install" not in reply["text"]


def test_the_doctor_names_the_library_that_a_backend_lacks_and_what_brings_it(site):
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dataplane")), "doctor", "no_library", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 1, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["distributions"] == ["acme-library 1.0"]
    (finding,) = report["findings"]
    assert "libacme_fabric.so.7: cannot open shared object file" in finding["what"]
    assert "apt-file search libacme_fabric.so.7" in finding["hint"]


def test_a_misspelt_hook_is_refused_with_the_right_name(replies):
    reply = replies["misspelt"]
    assert reply["error"] == "PluginSignatureError"
    assert "does not implement 'put_samples'" in reply["text"]
    assert "'put_sample'" in reply["text"]


def test_a_misspelt_extra_hook_is_refused_too(replies):
    reply = replies["misspelt_extra"]
    assert reply["error"] == "PluginSignatureError"
    assert "'list_sample'" in reply["text"]
    assert "'list_samples'" in reply["text"]


@pytest.mark.parametrize("entry", SIGNATURES)
def test_a_hook_with_another_signature_is_refused_naming_hook_and_argument(replies, entry):
    reply = replies[f"signature_{entry}"]
    assert reply["error"] == "PluginSignatureError"
    assert f"backend 'signature_{entry}', hook 'get_samples'" in reply["text"]
    assert SIGNATURES[entry][1] in reply["text"]


def test_a_plugin_for_a_newer_contract_is_refused_with_the_upgrade_command(replies):
    reply = replies["newer"]
    assert reply["error"] == "PluginSignatureError"
    assert "contract version 99" in reply["text"]
    assert "pip install --upgrade dataplane-core" in reply["text"]


def test_an_entry_point_that_is_no_backend_is_refused(replies):
    reply = replies["no_backend"]
    assert reply["error"] == "PluginSignatureError"
    assert "Expected a subclass of dataplane_core.Backend" in reply["text"]


def test_an_unknown_name_lists_what_is_found_and_the_nearest(replies):
    reply = replies["mime"]
    assert reply["error"] == "UnknownBackendError"
    assert "Did you mean 'mine'?" in reply["text"]
    assert "noop" in reply["text"]


def test_a_near_miss_of_a_known_backend_is_told_with_its_name(replies):
    reply = replies["redis_stor"]
    assert reply["error"] == "UnknownBackendError"
    assert "Did you mean 'redis_store'?" in reply["text"]
