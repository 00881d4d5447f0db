"""The site that `make docs` built has every public name in its reference, and every link leads somewhere.

`make docs` runs these tests. With `make test-long` they build a site of their own.
"""

import ast
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _exported(module):
    """Its ``__all__``, if it has one, from the source: importing would change this process's settings."""
    package, *parts = module.split(".")
    folder = ROOT / package.removeprefix("dataplane_") / "src" / package
    file = folder.joinpath(*parts).with_suffix(".py")
    source = (file if file.exists() else file.with_suffix("") / "__init__.py").read_text(encoding="utf-8")
    found = re.findall(r"^__all__(?:: list\[str\])? = (\[.*?\])$", source, re.DOTALL | re.MULTILINE)
    return ast.literal_eval(found[0]) if found else []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if "DATAPLANE_SITE" in os.environ:
        return Path(os.environ["DATAPLANE_SITE"])
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_the_reference_has_every_public_name(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    modules = [page.stem for page in (site / "reference").glob("*.html")]
    assert {"dataplane_core", "dataplane_core.client", "dataplane_testkit", "dataplane_integrations"} <= {*modules}
    public = [f"{name}.{each}" for name in modules for each in _exported(name)]
    assert len(public) > 250
    assert [name for name in public if name not in documented and name not in modules] == []  # a module has a page


def test_no_page_loads_anything_from_another_host(site):
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//", re.IGNORECASE)
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    assert [page.name for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []


def test_every_link_between_pages_is_one_of_the_site(site):
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links begin at the root of the site
            continue
        for target in re.findall(r"<(?:a|img)\b[^>]*(?:href|src)=\"([^\"#:]+)[\"#]", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(site)} links {target}"


def test_the_reference_of_the_clients_has_their_methods_with_their_arguments(site):
    page = (site / "reference" / "dataplane_core.client.html").read_text(encoding="utf-8")
    for client in ("DataPlaneClient", "AsyncDataPlaneClient"):
        for method in ("put_samples", "claim_meta", "ack", "describe", "close"):
            assert f'id="dataplane_core.client.{client}.{method}"' in page
    assert "_in_thread" not in page
    assert "sample_ids" in page.partition('id="dataplane_core.client.AsyncDataPlaneClient.put_samples"')[2][:6000]
