"""The registry against really installed distributions: wheels made here, installed by pip, found in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clean_environment import make_wheel

GOOD = """
from dataplane_core import Backend

class Mine(Backend):
    def register_partition(self, request): ...
    def describe_partition(self, request): ...
    def put_samples(self, request): ...
    def get_samples(self, request): ...
    def clear_samples(self, request): ...
"""
NO_LIBRARY = 'import ctypes\nctypes.CDLL("libacme_fabric.so.7")\n'


def taking(hook):
    return GOOD.replace("def get_samples(self, request): ...", hook)


#: Distribution -> the name of its backend, and its module.
DISTRIBUTIONS = {
    "acme-store": ("mine", GOOD),
    "acme-other": ("other", GOOD),
    "acme-twice": ("twice", GOOD),
    "rival-twice": ("twice", GOOD),
    "acme-library": ("no_library", NO_LIBRARY),
    "acme-misspelt": ("misspelt", GOOD.replace("def put_samples", "def put_sample")),
    "acme-extra": ("misspelt_extra", GOOD + "    def list_sample(self, request): ...\n"),
    "acme-newer": ("newer", GOOD + "    contract_version = 99\n"),
    "acme-none": ("no_backend", "Mine = dict\n"),
    "acme-default": ("default", taking("def get_samples(self, request, verbose=False): ...")),
    "acme-request-default": ("request_default", taking("def get_samples(self, request=None): ...")),
    "acme-star": ("star", taking("def get_samples(self, *args): ...")),
    "acme-keyword": ("keyword", taking("def get_samples(self, *, request): ...")),
    "acme-other-name": ("other_name", taking("def get_samples(self, req): ...")),
    "acme-coroutine": ("coroutine", taking("async def get_samples(self, request): ...")),
}
#: The name that is asked for -> the error, and what its text names. The first one imports nothing.
REFUSED = {
    "twice": ("DuplicatePluginError", ["acme-twice", "rival-twice"]),
    "no_library": ("PluginImportError", ["libacme_fabric.so.7: cannot open shared object file", "acme-library 1.0"]),
    "misspelt": ("PluginSignatureError", ["does not implement 'put_samples'", "'put_sample'"]),
    "misspelt_extra": ("PluginSignatureError", ["'list_sample'", "'list_samples'"]),
    "newer": ("PluginSignatureError", ["contract version 99", "pip install --upgrade dataplane-core"]),
    "no_backend": ("PluginSignatureError", ["Expected a subclass of dataplane_core.Backend"]),
    "default": ("PluginSignatureError", ["hook 'get_samples'", "verbose="]),
    "request_default": ("PluginSignatureError", ["hook 'get_samples'", "request="]),
    "star": ("PluginSignatureError", ["hook 'get_samples'", "*args"]),
    "keyword": ("PluginSignatureError", ["hook 'get_samples'", "*, request"]),
    "other_name": ("PluginSignatureError", ["hook 'get_samples'", "takes (self, req)"]),
    "coroutine": ("PluginSignatureError", ["hook 'get_samples'", "is async"]),
    "mime": ("UnknownBackendError", ["Did you mean 'mine'?", "noop"]),
    "redis_stor": ("UnknownBackendError", ["Did you mean 'redis_store'?"]),
}

PROBE = """
import json, sys
from dataplane_core.connecting import connect
from dataplane_core.entry_points import find_plugins
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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which pip has installed all the distributions of this module."""
    root = tmp_path_factory.mktemp("plugins")
    wheels = []
    for name, (backend, source) in DISTRIBUTIONS.items():
        module = f"plug_{name.replace('-', '_')}"
        entry = f"[dataplane.backends]\n{backend} = {module}:Mine\n"
        wheels.append(make_wheel(root, name, {f"{module}.py": source}, entry_points=entry))
    target = root / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, *map(str, wheels)], check=True, timeout=120, stdin=subprocess.DEVNULL)
    return target


def test_an_installed_backend_connects_by_name_and_one_that_is_none_is_refused_by_what_it_lacks(site):
    """One after the other, in one fresh process."""
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{PROBE}"
    words = [sys.executable, "-c", code, "twice", "mine", *list(REFUSED)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    replies = json.loads(done.stdout.splitlines()[-1])
    for name, (error, words) in REFUSED.items():
        assert replies[name]["error"] == error, name
        assert [word for word in words if word not in replies[name]["text"]] == [], replies[name]["text"]
    assert replies["no_library"]["cause"] == "OSError"
    assert "pip install" not in replies["no_library"]["text"]
    assert replies["twice"]["modules"] == []
    assert replies["mine"]["error"] is None
    assert {("mine", "acme-store"), ("other", "acme-other")} <= set(map(tuple, replies["mine"]["found"]))
    assert replies["mine"]["modules"] == ["plug_acme_store"], "no other is imported"


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
